//! The n-gram embedding: hash, gather, gate and convolution.

mod conv;
mod feature;
mod hash;
