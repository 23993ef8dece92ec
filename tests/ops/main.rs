//! Every kernel against a naive formula in f64, between guard bands, and a row alone against the same row
//! among others.

mod conv;
mod delta;
mod gate;
mod ngram;
