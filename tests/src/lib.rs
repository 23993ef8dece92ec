//! What the suites share.

pub mod check;
pub mod churn;
pub mod fixture;
pub mod luck;
pub mod oracle;
pub mod snap;
