//! Planted faults: each guard is taken away in turn, and something that the other suites check must then go
//! wrong. Beside each fault its twin, with the guard in place, where nothing does.

mod engine;
mod fences;
mod keys;
mod lanes;
mod luck;
mod routes;
mod state;

use kernels::numerics::ElementType;
use runtime::engine::{Class, Engine, EngineOptions, open};
use tests::fixture::{Fixture, Size, repository};

const CHECKPOINT: &str = "tests/oracle/checkpoints/base_bf16";
const VOCAB: u32 = 1009;

/// A small model whose selection is sparse from 20 visible positions on, with slots for a few lanes.
fn fixture(slots: usize) -> Fixture {
    let size = Size { slots, context: 256, rows: 160 };
    Fixture::open(&repository(CHECKPOINT), ElementType::Bf16, size)
}

/// An engine of the same model: two cache classes, slabs of three lanes that grow, short pieces.
fn engine(options: EngineOptions) -> Engine {
    open(&repository(CHECKPOINT), &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}

fn options() -> EngineOptions {
    EngineOptions {
        classes: vec![
            Class { context: 512, lanes: 8, pages: 14 },
            Class { context: 256, lanes: 4, pages: 7 },
        ],
        slab_lanes: 3,
        piece_rows: 64,
        decode_share: 2,
        depth: 1,
        poison: true,
        ..EngineOptions::default()
    }
}

/// Ids of a fixed seed.
fn ids(count: usize, seed: u32) -> Vec<u32> {
    let id = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 8) % 1000;
    (1..=count as u32).map(id).collect()
}
