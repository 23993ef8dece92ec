//! The engine: many lanes in overlapped rounds, replayed from graphs, equal to eager byte for byte.

mod dummy;
mod features;
mod memory;
mod pictures;
mod schedules;
mod service;

use kernels::numerics::ElementType;
use runtime::engine::{Class, Engine, EngineOptions, open};
use tests::fixture::repository;

/// A small model whose selection is sparse from 20 visible positions on.
fn small(options: EngineOptions) -> Engine {
    let dir = repository("tests/oracle/checkpoints/base_bf16");
    open(&dir, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}

/// Two cache classes, slabs of three lanes that grow, few pages, short pieces, no overlap, everything traced.
fn tight() -> EngineOptions {
    EngineOptions {
        element: ElementType::Bf16,
        classes: vec![
            Class { context: 512, lanes: 8, pages: 14 },
            Class { context: 256, lanes: 4, pages: 7 },
        ],
        slab_lanes: 3,
        piece_rows: 64,
        decode_share: 2,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}
