//! The n-gram embedding: hash, gather, gate and convolution.

pub(crate) mod conv;
pub(crate) mod feature;
pub(crate) mod hash;
