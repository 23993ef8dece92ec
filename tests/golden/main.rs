//! The text model against recorded values of another implementation, and against the tiny model's probes.

mod bf16;
mod decode;
mod inner;
mod loading;
mod logits;
mod pictures;
mod probes;
mod quantised;
mod state;
mod tower;

/// Largest difference of f32 logits, as a share of the largest expected one (the oracle's tolerance).
const LOGITS: f64 = 1e-4;
/// The same for values inside the model.
const INNER: f64 = 2e-4;
/// A choice whose margin is smaller than this may fall either way.
const LOGIT_MARGIN: f64 = 2e-3;
/// The same for the router.
const ROUTER_MARGIN: f64 = 2e-4;
/// The same for greedy runs through the block selection.
const SELECT_MARGIN: f64 = 2e-4;
/// The same for a single selection of blocks.
const BLOCK_MARGIN: f64 = 1e-5;

/// The size of a fixture for one lane and prompts of up to 320 ids in one round.
fn one_lane() -> tests::fixture::Size {
    tests::fixture::Size { slots: 1, context: 512, rows: 320 }
}
