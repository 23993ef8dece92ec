//! The CUDA device, on a machine that has one. Elsewhere every test is listed as ignored, with what is
//! missing; those about compiling need NVRTC alone, and those about what is missing need it to be missing.

mod capture;
mod code;
mod faults;
mod luck;
mod memory;
mod model;
#[path = "../ops/mod.rs"]
mod ops;
mod pair;
mod ranks;
mod rig;
#[path = "../sample/mod.rs"]
mod sample;
mod service;
mod streams;
mod tools;
mod tower;

use std::process::ExitCode;
use std::sync::Once;

use graph::cuda::code as compiler;
use graph::{CudaOptions, Device, Error};
use kernels::source;
use libtest_mimic::{Arguments, Completion, Trial};
use tests::listed::{On, Test};

/// What a test needs.
#[derive(Clone, Copy)]
enum Needs {
    Device,
    TwoDevices,
    Compiler,
    NoDriver,
    NoCompiler,
}

/// A group of tests: what they are about, what they need, and each with its name.
type Group = (&'static str, Needs, &'static [(&'static str, fn())]);

const GROUPS: [Group; 15] = [
    ("memory", Needs::Device, memory::TESTS),
    ("streams", Needs::Device, streams::TESTS),
    ("capture", Needs::Device, capture::TESTS),
    ("model", Needs::Device, model::TESTS),
    ("service", Needs::Device, service::TESTS),
    ("tools", Needs::Device, tools::TESTS),
    ("tower", Needs::Device, tower::TESTS),
    ("faults", Needs::Device, faults::TESTS),
    ("luck", Needs::Device, luck::TESTS),
    ("ranks", Needs::TwoDevices, ranks::TESTS),
    ("pair", Needs::TwoDevices, pair::TESTS),
    ("code", Needs::Compiler, code::TESTS),
    ("missing", Needs::NoDriver, faults::WITHOUT_DRIVER),
    ("missing", Needs::NoDriver, luck::WITHOUT_DRIVER),
    ("missing", Needs::NoCompiler, code::WITHOUT_COMPILER),
];

fn main() -> ExitCode {
    if let Some(outcome) = faults::child().or_else(ranks::child) {
        return outcome;
    }
    let mut args = Arguments::from_args();
    // One at a time: they measure free memory, and share the device's one context.
    args.test_threads.get_or_insert(1);
    for error in [Device::cuda_count().err(), compiler::version().err()].into_iter().flatten() {
        eprintln!("{error}");
    }
    let tests = GROUPS.iter().flat_map(|&(group, needs, tests)| {
        let lacks = needs.lacks();
        tests.iter().map(move |&(name, test)| trial(format!("{group}::{name}"), lacks.clone(), test))
    });
    let lacks = Needs::Device.lacks();
    let mirrored = |suite: &'static str, all: Vec<(&'static str, &'static Test)>| {
        let lacks = lacks.clone();
        all.into_iter().filter(|(_, test)| test.on != On::Host).map(move |(module, test)| {
            let run = test.run;
            trial(format!("{suite}::{module}::{}", test.name), lacks.clone(), move || {
                mirror();
                run();
            })
        })
    };
    let mirrored = mirrored("ops", ops::all().collect()).chain(mirrored("sample", sample::all().collect()));
    libtest_mimic::run(&args, tests.chain(mirrored).collect()).exit_code()
}

fn trial(name: String, lacks: Option<String>, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || match lacks {
        Some(lacks) => Ok(Completion::ignored_with(lacks)),
        None => {
            test();
            Ok(Completion::Completed)
        }
    })
}

/// Has CUDA run what the scenes of kernels run.
fn mirror() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let options = CudaOptions { poison: true, ..CudaOptions::default() };
        let device = Device::cuda_with(options).expect("a device");
        device.prepare(source::ALL).expect("the kernels compile");
        tests::mirror::everywhere(device);
    });
}

impl Needs {
    /// What is missing for such a test, if something is.
    fn lacks(self) -> Option<String> {
        match self {
            Needs::Device => match Device::cuda_count() {
                Ok(0) => Some("the CUDA driver has no device".into()),
                Ok(_) => compiler::version().err().map(brief),
                Err(error) => Some(brief(error)),
            },
            Needs::TwoDevices => Needs::Device.lacks().or_else(ranks::lacks),
            Needs::Compiler => compiler::version().err().map(brief),
            Needs::NoDriver => match Device::cuda_count() {
                Err(Error::Missing { .. }) => None,
                _ => Some("there is a CUDA driver".into()),
            },
            Needs::NoCompiler => compiler::version().is_ok().then(|| "there is NVRTC".into()),
        }
    }
}

/// An error without its reasons, which are said once for all tests.
fn brief(error: Error) -> String {
    match error {
        Error::Missing { what, .. } => format!("{what} is not usable"),
        error => error.to_string(),
    }
}
