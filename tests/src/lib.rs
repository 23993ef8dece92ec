//! What the suites share.

pub mod check;
pub mod churn;
pub mod differ;
pub mod engine;
pub mod fixture;
mod guarded;
pub mod listed;
pub mod luck;
pub mod mirror;
pub mod oracle;
pub mod process;
pub mod sight;
pub mod snap;
pub mod tower;
