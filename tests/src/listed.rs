//! Tests as lists, so that more than one program can run them: on the host, and with CUDA beside it.

/// Where a test makes sense.
#[derive(Clone, Copy, PartialEq)]
pub enum On {
    /// On the host, and with a mirror.
    Any,
    /// On the host alone: it launches nothing that CUDA runs, or wants the host's very bits.
    Host,
    /// With a mirror alone: sizes that are too large for a test of the host.
    Mirror,
}

/// One test.
pub struct Test {
    /// The function's name.
    pub name: &'static str,
    /// Where it makes sense.
    pub on: On,
    /// The test.
    pub run: fn(),
}

/// The tests of a module, by where they make sense.
#[macro_export]
macro_rules! tests {
    ($($on:ident: $($name:ident),+;)+) => {
        pub(crate) const TESTS: &[$crate::listed::Test] = &[$($($crate::tests!(@ $on $name)),+),+];
    };
    (@ any $name:ident) => { $crate::tests!(= Any $name) };
    (@ host $name:ident) => { $crate::tests!(= Host $name) };
    (@ mirror $name:ident) => { $crate::tests!(= Mirror $name) };
    (= $on:ident $name:ident) => {
        $crate::listed::Test { name: stringify!($name), on: $crate::listed::On::$on, run: $name }
    };
}

/// Runs on the host what makes sense there, as a test program.
pub fn run_on_host<'a>(all: impl Iterator<Item = (&'a str, &'static Test)>) -> std::process::ExitCode {
    let tests = all.filter(|(_, test)| test.on != On::Mirror).map(|(module, test)| {
        let run = test.run;
        libtest_mimic::Trial::test(format!("{module}::{}", test.name), move || {
            run();
            Ok(())
        })
    });
    libtest_mimic::run(&libtest_mimic::Arguments::from_args(), tests.collect()).exit_code()
}
