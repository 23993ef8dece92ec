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
        assert!(blocks.is_sorted_by(|a, b| a < b), "blocks ascend: {blocks:?}");
        chosen.push((eager.length, blocks));
    }
    assert_same_state("graph against eager", &fixture, &eager, &replayed);
    // Up to 2,051 visible positions the 512 complete blocks are all chosen; from 2,052 on some stay out.
    for (visible, blocks) in chosen {
        let complete = visible as u32 / 4;
        let left_out = (0..complete).filter(|block| !blocks.contains(block)).count();
        assert_eq!((blocks.len(), left_out), (512, complete as usize - 512), "{visible} visible positions");
        assert!(blocks.iter().all(|block| *block < complete), "{visible} visible positions");
    }
}
