//! Every kernel against a naive formula in f64, at its edges, between guard bands; a row alone against the same
//! row among others; a piece whole against the piece split; and values outside a domain.

mod advance;
mod attend;
mod conv;
mod delta;
mod embed;
mod experts;
mod formula;
mod gate;
mod heads;
mod hyper;
mod index;
mod layer;
mod linear;
mod ngram;
mod numerics;
mod random;
mod read;
mod residual;
mod router;
mod rows;
mod tiles;
