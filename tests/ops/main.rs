//! Every kernel against a naive formula in f64, at its edges, between guard bands; a row alone against the same
//! row among others; a piece whole against the piece split; and values outside a domain.

mod attend;
mod conv;
mod delta;
mod experts;
mod formula;
mod gate;
mod heads;
mod index;
mod layer;
mod ngram;
mod router;
