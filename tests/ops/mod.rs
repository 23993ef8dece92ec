//! Every kernel against a naive formula in f64, at its edges, between guard bands; a row alone against the same
//! row among others; a piece whole against the piece split; and values outside a domain.

use tests::listed::Test;

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
mod mirror;
mod ngram;
mod numerics;
mod quantised;
mod random;
mod read;
mod residual;
mod router;
mod rows;
mod tiles;
mod weave;

/// All tests, each with its module.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static Test)> {
    let modules: [(&str, &[Test]); 24] = [
        ("advance", advance::TESTS),
        ("attend", attend::TESTS),
        ("conv", conv::TESTS),
        ("delta", delta::TESTS),
        ("embed", embed::TESTS),
        ("experts", experts::TESTS),
        ("gate", gate::TESTS),
        ("heads", heads::TESTS),
        ("hyper", hyper::TESTS),
        ("index", index::TESTS),
        ("linear", linear::TESTS),
        ("mirror", mirror::TESTS),
        ("ngram::conv", ngram::conv::TESTS),
        ("ngram::feature", ngram::feature::TESTS),
        ("ngram::hash", ngram::hash::TESTS),
        ("numerics", numerics::TESTS),
        ("quantised", quantised::TESTS),
        ("random", random::TESTS),
        ("read", read::TESTS),
        ("residual", residual::TESTS),
        ("router", router::TESTS),
        ("rows", rows::TESTS),
        ("tiles", tiles::TESTS),
        ("weave", weave::TESTS),
    ];
    modules.into_iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)))
}
