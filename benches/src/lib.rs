//! What the benches share: figures that are measured and printed one way, a crowd of requests on an engine,
//! and the floor under a figure.
//!
//! Each bench asserts the answer of what it times, so that `cargo test --release -p benches --benches` is a
//! test of it; `benches/run` measures everything and prints one table.

mod crowd;
mod floor;
mod meter;

use std::path::PathBuf;

use kernels::numerics::ElementType;
use runtime::engine::{Class, EngineOptions};
use tests::fixture::repository;

pub use crowd::{Crowd, prompt};
pub use floor::{read_bytes_per_second, round_bytes};
pub use meter::{Figure, Meter, Unit, measuring, note, spent_on};

/// The model that the project comes with.
pub fn tiny() -> PathBuf {
    repository("models/tiny")
}

/// A model so small that what surrounds its kernels shows.
pub fn small() -> PathBuf {
    repository("tests/oracle/checkpoints/base_bf16")
}

/// An engine in bf16 with so many lanes of so many positions; all else as in service.
pub fn options(lanes: u16, context: u32) -> EngineOptions {
    EngineOptions {
        element: ElementType::Bf16,
        classes: vec![Class { context, lanes, pages: 0 }],
        slab_lanes: 16,
        ..EngineOptions::default()
    }
}
