//! Every kernel against a naive formula in f64, at its edges, between guard bands; a row alone against the same
//! row among others; a piece whole against the piece split; and values outside a domain.

use tests::listed::Test;

mod advance;
mod affine;
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
mod layer_norm;
mod linear;
mod mirror;
mod ngram;
mod numerics;
mod patch;
mod pixels;
mod quantised;
mod random;
mod read;
mod residual;
mod router;
mod rows;
mod span;
mod tiles;
mod weave;

/// All tests, each with its module.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static Test)> {
    let modules: [(&str, &[Test]); 29] = [
        ("advance", advance::TESTS),
        ("affine", affine::TESTS),
        ("attend", attend::TESTS),
        ("conv", conv::TESTS),
        ("delta", delta::TESTS),
        ("embed", embed::TESTS),
        ("experts", experts::TESTS),
        ("gate", gate::TESTS),
        ("heads", heads::TESTS),
        ("hyper", hyper::TESTS),
        ("index", index::TESTS),
        ("layer_norm", layer_norm::TESTS),
        ("linear", linear::TESTS),
        ("mirror", mirror::TESTS),
        ("ngram::conv", ngram::conv::TESTS),
        ("ngram::feature", ngram::feature::TESTS),
        ("ngram::hash", ngram::hash::TESTS),
        ("numerics", numerics::TESTS),
        ("patch", patch::TESTS),
        ("pixels", pixels::TESTS),
        ("quantised", quantised::TESTS),
        ("random", random::TESTS),
        ("read", read::TESTS),
        ("residual", residual::TESTS),
        ("router", router::TESTS),
        ("rows", rows::TESTS),
        ("span", span::TESTS),
        ("tiles", tiles::TESTS),
        ("weave", weave::TESTS),
    ];
    modules.into_iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)))
}
