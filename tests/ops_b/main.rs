//! The kernels of sparse attention and of the mixture of experts against naive float64 formulas, at their
//! edges, between guard bands, and as the laws want them: a row alone or among many, a piece whole or split.

mod attend;
mod bench;
mod experts;
mod heads;
mod index;
mod layer;
mod naive;
mod router;
