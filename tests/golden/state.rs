//! The state of a lane after a prompt.

use graph::Ptr;
use kernels::numerics::ElementType;
use kernels::table::{Head, PAGE};
use runtime::lanes::LayerSpans;
use tests::fixture::{Fixture, Lane};
use tests::oracle::{Tensor, assert_close, cases};

use crate::{INNER, one_lane};

#[test]
fn every_part_of_the_state_agrees() {
    for case in cases("state") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
        let mut lane = fixture.lane(0);
        let ids = case.input_ids();
        fixture.prompt(&mut lane, &ids);
        let mut compared = 0;
        let mut compare = |name: String, got: Vec<f32>, expected: &[f64]| {
            assert_close(&format!("{} {name}", case.id()), &got, expected, INNER);
            compared += 1;
        };
        let layout = fixture.lanes.layout.clone();
        for (layer, spans) in layout.layers.iter().enumerate() {
            let name = |name: &str| format!("layer.{layer}.{name}");
            match *spans {
                LayerSpans::Recurrent { state, window } => {
                    let expected = case.tensor(&name("gdn_recurrent"));
                    compare(name("gdn_recurrent"), slot(&fixture, &lane, state), &expected.values);
                    // Recorded `[channels, 4]`, of which the first is never used; ours `[3, channels]`.
                    let expected = columns(case.tensor(&name("gdn_conv")), 1);
                    compare(name("gdn_conv"), slot(&fixture, &lane, window), &expected);
                }
                // Long prompts record the recurrent layers only.
                LayerSpans::Sparse { .. } if !case.tensors.contains_key(&name("keys")) => {}
                LayerSpans::Sparse { ring, page_offset } => {
                    let expected = case.tensor(&name("indexer_keys"));
                    let ring = slot(&fixture, &lane, ring);
                    let width = expected.shape[1];
                    let kept = ids.len().saturating_sub(PAGE)..ids.len();
                    let got = kept.clone().flat_map(|p| ring[p % PAGE * width..][..width].to_vec()).collect();
                    compare(name("indexer_keys"), got, &expected.values[kept.start * width..]);
                    for (part, name) in [name("keys"), name("values")].into_iter().enumerate() {
                        let expected = case.tensor(&name);
                        let [heads, positions, width] = expected.shape[..] else {
                            panic!("{name}: three axes")
                        };
                        let got = paged(&fixture, &lane, page_offset, part, heads * width);
                        let at = |head: usize, p: usize| got[(p * heads + head) * width..][..width].to_vec();
                        let got = (0..heads)
                            .flat_map(|head| (0..positions).flat_map(move |p| at(head, p)))
                            .collect();
                        compare(name, got, &expected.values);
                    }
                }
            }
            if let Some(window) = layout.ngram_windows[layer] {
                let expected = columns(case.tensor(&name("ple_conv")), 0);
                compare(name("ple_conv"), slot(&fixture, &lane, window), &expected);
                let head: Head = fixture.bundle(&lane).head(&fixture.runner.stream).expect("read");
                let context = case.indices(&name("ngram_context"));
                let got: Vec<i64> = (0..2).rev().map(|i| i64::from(head.previous_plus_one[i]) - 1).collect();
                assert_eq!(got, context, "{} {}", case.id(), name("ngram_context"));
            }
        }
        assert!(compared > 6, "{}: only {compared} parts", case.id());
    }
}

/// A part of the lane's slot.
fn slot(fixture: &Fixture, lane: &Lane, span: graph::Span) -> Vec<f32> {
    let at: Ptr<f32> = span.at(fixture.lanes.slab.slot(lane.slot));
    fixture.lanes.slab.arena().read(at, span.bytes / 4).expect("a part of the slot")
}

/// The keys (part 0) or values (part 1) of all positions, `[positions, row]`.
fn paged(fixture: &Fixture, lane: &Lane, page_offset: usize, part: usize, row: usize) -> Vec<f32> {
    let pages = lane.pages.iter().take(lane.length.div_ceil(PAGE));
    let mut all: Vec<f32> = pages
        .flat_map(|page| {
            let base = *page as usize * fixture.lanes.layout.page_bytes + page_offset;
            let at = fixture.lanes.pool.arena.base().byte_add(base).cast::<f32>().at(part * PAGE * row);
            fixture.lanes.pool.arena.read(at, PAGE * row).expect("a page")
        })
        .collect();
    all.truncate(lane.length * row);
    all
}

/// The columns of a matrix from `from` on, one after another.
fn columns(matrix: &Tensor, from: usize) -> Vec<f64> {
    let (rows, count) = (matrix.shape[0], matrix.shape[1]);
    (from..count).flat_map(|c| (0..rows).map(move |r| matrix.values[r * count + c])).collect()
}
