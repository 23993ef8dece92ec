//! The tiny model on both sides of 2,051 visible positions, where its selection becomes sparse.

use kernels::numerics::ElementType;
use runtime::model::Picks;
use tests::fixture::{Fixture, Size, repository};

use crate::{assert_same_state, bits};

/// A prompt of 2,048 ids, then decode rounds across the edge: graph and eager, and the chosen blocks.
#[test]
fn graph_and_eager_agree_across_the_sparse_edge() {
    let size = Size { slots: 2, context: 2112, rows: 512 };
    let mut fixture = Fixture::open(&repository("models/tiny"), ElementType::Bf16, size);
    let prompt: Vec<u32> =
        (0..2048u32).map(|i| i.wrapping_mul(2_654_435_761) >> 21).map(|id| id % 2000).collect();
    let (mut eager, mut replayed) = (fixture.lane(0), fixture.lane(1));
    for lane in [&mut eager, &mut replayed] {
        for piece in prompt.chunks(512) {
            let emission = fixture.prompt_emission(lane, piece, Picks::Last);
            fixture.runner.stream.run(emission, &[]).expect("queued");
            fixture.runner.stream.synchronize().expect("ran");
        }
    }
    let exec = fixture.capture_decode(1);
    let mut chosen = Vec::new();
    for _ in 0..8 {
        fixture.decode(&mut [&mut eager], None);
        let expected = fixture.runner.logits(1).expect("read");
        fixture.decode(&mut [&mut replayed], Some(&exec));
        assert_eq!(bits(&fixture.runner.logits(1).expect("read")), bits(&expected));
        let blocks =
            fixture.runner.scratch.arena.read(fixture.runner.scratch.buffers.chosen, 512).expect("read");
        assert!(blocks.is_sorted(), "blocks ascend");
        chosen.push((eager.length, *blocks.last().expect("512 blocks")));
    }
    assert_same_state("graph against eager", &fixture, &eager, &replayed);
    // Up to 2,051 visible positions the 512 complete blocks are all chosen; from 2,052 on one stays out.
    assert_eq!(chosen[..3], [(2049, 511), (2050, 511), (2051, 511)]);
    assert!(chosen[3..].iter().all(|(_, last)| *last <= 513), "{chosen:?}");
}
