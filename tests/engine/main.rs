//! The engine: many lanes in overlapped rounds, replayed from graphs, equal to eager byte for byte.

mod dummy;
mod features;
mod memory;
mod pictures;
mod schedules;
mod service;

use runtime::engine::{Engine, EngineOptions, open};
use tests::engine::tight;
use tests::fixture::repository;

/// A small model whose selection is sparse from 20 visible positions on.
fn small(options: EngineOptions) -> Engine {
    let dir = repository("tests/oracle/checkpoints/base_bf16");
    open(&dir, &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).engine
}
