//! Sampling against naive f64 formulas, at its edges, as draws over many seeds, between guard bands, and a
//! row alone against the same row among others.

use tests::listed::Test;

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

/// All tests, each with its module.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static Test)> {
    let modules: [(&str, &[Test]); 9] = [
        ("counts", counts::TESTS),
        ("draws", draws::TESTS),
        ("edges", edges::TESTS),
        ("engine", engine::TESTS),
        ("faults", faults::TESTS),
        ("formula", formula::TESTS),
        ("logprobs", logprobs::TESTS),
        ("options", options::TESTS),
        ("rows", rows::TESTS),
    ];
    modules.into_iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)))
}
