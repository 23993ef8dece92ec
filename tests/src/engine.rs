//! Settings of engines that tests look into.

use runtime::engine::{Class, EngineOptions};

/// Slabs of three lanes that grow, short pieces, no overlap, everything traced.
pub fn traced() -> EngineOptions {
    EngineOptions {
        slab_lanes: 3,
        piece_rows: 64,
        decode_share: 2,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}

/// The same with two cache classes of few pages.
pub fn tight() -> EngineOptions {
    let classes =
        vec![Class { context: 512, lanes: 8, pages: 14 }, Class { context: 256, lanes: 4, pages: 7 }];
    EngineOptions { classes, ..traced() }
}
