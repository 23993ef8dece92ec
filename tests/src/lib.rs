//! What the suites share.

pub mod snap;
