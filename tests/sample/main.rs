//! Sampling against naive f64 formulas, at its edges, as draws over many seeds, between guard bands, and a
//! row alone against the same row among others.

mod counts;
mod desk;
mod draws;
mod edges;
mod engine;
mod faults;
mod formula;
mod logprobs;
mod naive;
mod options;
mod rows;
