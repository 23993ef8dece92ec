//! What the suites share.

pub mod check;
pub mod fixture;
pub mod oracle;
pub mod snap;
