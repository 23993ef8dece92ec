//! `roundhouse serve` from outside: a real server of the demo model, over sockets that hide nothing.
//!
//! Tests that measure time or load run alone; the others share the machine.

mod bodies;
mod client;
mod cost;
mod cross;
mod events;
mod exposition;
mod failure;
mod fields;
mod giants;
mod gone;
mod hostile;
mod idle;
mod life;
mod limits;
mod metrics;
mod mutants;
mod pictures;
mod prompts;
mod queue;
mod ranks;
mod reader;
mod replies;
mod routes;
mod sampling;
mod server;
mod settings;
mod soak;

use std::process::ExitCode;
use std::sync::{PoisonError, RwLock};

use libtest_mimic::{Arguments, Completion, Trial};

/// A test, and whether it needs the machine for itself.
#[derive(Clone, Copy)]
pub(crate) struct Test {
    name: &'static str,
    alone: bool,
    run: fn(),
}

/// Lists the tests of a module: those that share the machine, then those that need it alone.
macro_rules! tests {
    ($($shared:ident),* $(,)? ; $($alone:ident),* $(,)?) => {
        pub(crate) const TESTS: &[crate::Test] = &[
            $(crate::Test { name: stringify!($shared), alone: false, run: $shared },)*
            $(crate::Test { name: stringify!($alone), alone: true, run: $alone },)*
        ];
    };
}
pub(crate) use tests;

const MODULES: [(&str, &[Test]); 22] = [
    ("reader", reader::TESTS),
    ("routes", routes::TESTS),
    ("fields", fields::TESTS),
    ("limits", limits::TESTS),
    ("giants", giants::TESTS),
    ("replies", replies::TESTS),
    ("sampling", sampling::TESTS),
    ("cross", cross::TESTS),
    ("pictures", pictures::TESTS),
    ("bodies", bodies::TESTS),
    ("hostile", hostile::TESTS),
    ("idle", idle::TESTS),
    ("mutants", mutants::TESTS),
    ("metrics", metrics::TESTS),
    ("settings", settings::TESTS),
    ("life", life::TESTS),
    ("failure", failure::TESTS),
    ("gone", gone::TESTS),
    ("queue", queue::TESTS),
    ("ranks", ranks::TESTS),
    ("cost", cost::TESTS),
    ("soak", soak::TESTS),
];

fn main() -> ExitCode {
    if let Some(ended) = failure::child() {
        return ended;
    }
    let mut args = Arguments::from_args();
    // They wait more than they compute.
    args.test_threads.get_or_insert(4);
    let trial = |module: &str, test: Test| {
        let lacks = if module == "ranks" { ranks::lacks() } else { None };
        Trial::ignorable_test(format!("{module}::{}", test.name), move || match lacks {
            Some(lacks) => Ok(Completion::ignored_with(lacks)),
            None => {
                run(test);
                Ok(Completion::Completed)
            }
        })
    };
    let trials =
        MODULES.iter().flat_map(|(module, tests)| tests.iter().map(move |test| trial(module, *test)));
    libtest_mimic::run(&args, trials.collect()).exit_code()
}

fn run(test: Test) {
    static MACHINE: RwLock<()> = RwLock::new(());
    // A test that failed has left nothing behind.
    if test.alone {
        let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
        (test.run)();
    } else {
        let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
        (test.run)();
    }
}
