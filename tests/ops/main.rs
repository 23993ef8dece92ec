//! The kernels on the host device. `tests/gpu` runs the same tests with CUDA beside it.

#[path = "mod.rs"]
mod ops;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use ops::On;

fn main() -> ExitCode {
    let tests = ops::all().filter(|(_, test)| test.on != On::Mirror);
    let trial = |(module, test): (&str, &ops::Test)| {
        let run = test.run;
        Trial::test(format!("{module}::{}", test.name), move || {
            run();
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.map(trial).collect()).exit_code()
}
