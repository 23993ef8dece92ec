//! Every kernel against a naive formula in f64, at its edges, between guard bands; a row alone against the same
//! row among others; a piece whole against the piece split; and values outside a domain.

/// Where a test makes sense.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum On {
    /// On the host, and with a mirror.
    Any,
    /// On the host alone: it launches nothing that CUDA runs, or wants the host's very bits.
    Host,
    /// With a mirror alone: sizes that are too large for a test of the host.
    Mirror,
}

/// One test.
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) on: On,
    pub(crate) run: fn(),
}

/// The tests of a module, by where they make sense.
macro_rules! tests {
    ($($on:ident: $($name:ident),+;)+) => {
        pub(crate) const TESTS: &[$crate::ops::Test] = &[$($(tests!(@ $on $name)),+),+];
    };
    (@ any $name:ident) => { tests!(= Any $name) };
    (@ host $name:ident) => { tests!(= Host $name) };
    (@ mirror $name:ident) => { tests!(= Mirror $name) };
    (= $on:ident $name:ident) => {
        $crate::ops::Test { name: stringify!($name), on: $crate::ops::On::$on, run: $name }
    };
}

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
mod random;
mod read;
mod residual;
mod router;
mod rows;
mod tiles;

/// All tests, each with its module.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static Test)> {
    let modules: [(&str, &[Test]); 22] = [
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
        ("random", random::TESTS),
        ("read", read::TESTS),
        ("residual", residual::TESTS),
        ("router", router::TESTS),
        ("rows", rows::TESTS),
        ("tiles", tiles::TESTS),
    ];
    modules.into_iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)))
}
