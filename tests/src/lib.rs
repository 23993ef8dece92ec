//! What the suites share.

pub mod check;
pub mod churn;
pub mod fixture;
pub mod oracle;
pub mod snap;
