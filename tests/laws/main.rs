//! The equalities of the design, at the level of the model: byte for byte.

mod bundle;
mod crowd;
mod edge;
mod pieces;
mod ranks;
mod replay;

use kernels::numerics::ElementType;
use tests::fixture::{Fixture, Lane, Size, repository};

const ELEMENTS: [ElementType; 2] = [ElementType::F32, ElementType::Bf16];

/// A small model whose selection is sparse from 20 visible positions on.
fn small(element: ElementType, slots: usize) -> Fixture {
    let size = Size { slots, context: 512, rows: 320 };
    Fixture::open(&repository("tests/oracle/checkpoints/base_bf16"), element, size)
}

/// Ids that do not repeat, none of them the boundary, except one in the middle.
fn ids(count: usize, seed: u32) -> Vec<u32> {
    let id = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8) % 1000;
    (0..count as u32).map(|i| if i == 29 { 1000 } else { id(i + 1) }).collect()
}

/// The bits of logits: equality of floats would let 0 and -0, or NaN, slip.
fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Asserts that two lanes hold the same state.
fn assert_same_state(what: &str, fixture: &Fixture, a: &Lane, b: &Lane) {
    let stream = &fixture.runner.stream;
    let a = fixture.bundle(a).digest(stream).expect("read");
    let b = fixture.bundle(b).digest(stream).expect("read");
    assert_eq!(a.length, b.length, "{what}");
    assert!(a == b, "{what}: the states differ in {:?}", a.differences(&b));
}
