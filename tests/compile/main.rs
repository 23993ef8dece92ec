//! Every CUDA kernel of the project, compiled for every architecture without a GPU: what it takes of a
//! multiprocessor, whether a launch of it can be, and that it keeps its values in registers.
//!
//! The program ends with a table. `ratchet.txt` holds the local memory that kernels may use, as lines of
//! kernel, architecture and bytes per thread; a kernel that is not listed uses none. `UPDATE=1` writes it anew.

mod ratchet;
mod table;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::OnceLock;

use graph::cuda::EXCHANGE;
use graph::cuda::code::{self, Resources};
use graph::{Definition, Source, Twin};
use kernels::source::ALL;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use ratchet::Ratchet;

/// An architecture, and what a block of it may use.
struct Architecture {
    name: &'static str,
    /// Bytes of shared memory, static and dynamic, of a block that asked for as much.
    shared_bytes: u32,
}

const ARCHITECTURES: [Architecture; 4] = [
    Architecture { name: "sm_80", shared_bytes: 163 << 10 },
    Architecture { name: "sm_90a", shared_bytes: 227 << 10 },
    Architecture { name: "sm_100a", shared_bytes: 227 << 10 },
    Architecture { name: "sm_120a", shared_bytes: 99 << 10 },
];

/// Registers of a block, on every architecture.
const REGISTERS: u32 = 64 << 10;

/// One source for one architecture: compiled by whichever test asks first.
struct Unit {
    source: &'static Source,
    architecture: &'static Architecture,
    definitions: Vec<&'static Definition>,
    compiled: OnceLock<Result<Vec<Resources>, String>>,
}

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let lacks = code::version().err().map(|error| {
        eprintln!("{error}");
        "NVRTC (the CUDA run-time compiler) is not usable".into()
    });
    let units: &'static [Unit] = units().leak();
    let mut trials: Vec<Trial> =
        units.iter().map(|unit| trial(unit.name(), &lacks, || unit.check())).collect();
    trials.push(trial("ratchet".into(), &lacks, || check_ratchet(units)));
    let conclusion = libtest_mimic::run(&args, trials);
    if code::version().is_ok() {
        println!("{}", table::Table(units));
    }
    conclusion.exit_code()
}

/// A test that is ignored where the compiler is missing.
fn trial(
    name: String,
    lacks: &Option<String>,
    test: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    let lacks = lacks.clone();
    Trial::ignorable_test(name, move || match lacks {
        Some(lacks) => Ok(Completion::ignored_with(lacks)),
        None => test().map(|()| Completion::Completed),
    })
}

/// Every source that a twin is in, for every architecture.
fn units() -> Vec<Unit> {
    let sources = code::by_source(&[ALL, &[&EXCHANGE]].concat());
    let all = ARCHITECTURES.iter().flat_map(|architecture| {
        sources.iter().map(move |(source, definitions)| Unit {
            source,
            architecture,
            definitions: definitions.clone(),
            compiled: OnceLock::new(),
        })
    });
    all.collect()
}

fn twin(definition: &Definition) -> Twin {
    definition.twin.unwrap_or_else(|| panic!("{definition:?} is listed and has no twin"))
}

impl Unit {
    fn name(&self) -> String {
        format!("{}::{}", self.architecture.name, self.source.name)
    }

    /// The kernels, or why they do not compile.
    fn kernels(&self) -> Result<&[Resources], &str> {
        let compile = || {
            let code = code::compile(self.source, self.architecture.name, &self.definitions);
            code.map(|code| code.resources()).map_err(|error| error.to_string())
        };
        self.compiled.get_or_init(compile).as_deref().map_err(String::as_str)
    }

    /// The source compiles, its kernels are the twins of the project's operations, and each can be launched.
    fn check(&self) -> Result<(), Failed> {
        let kernels = self.kernels()?;
        let found: BTreeSet<&str> = kernels.iter().map(|kernel| kernel.symbol.as_str()).collect();
        let wanted: BTreeSet<&str> = self.definitions.iter().map(|d| twin(d).symbol).collect();
        if found != wanted {
            return Err(
                format!("{} holds the kernels {found:?} for the twins {wanted:?}", self.source.name).into()
            );
        }
        let problems: Vec<String> =
            self.definitions.iter().filter_map(|d| self.unlaunchable(&twin(d), kernels)).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n").into()) }
    }

    /// Why no block of this twin fits a multiprocessor, if so.
    fn unlaunchable(&self, twin: &Twin, kernels: &[Resources]) -> Option<String> {
        let kernel = kernels.iter().find(|kernel| kernel.symbol == twin.symbol)?;
        // Registers are given out to warps by eights.
        let registers = kernel.registers.next_multiple_of(8) * twin.block;
        let shared = kernel.shared_bytes + twin.shared_bytes;
        let limit = self.architecture.shared_bytes;
        if kernel.registers == 0 {
            Some(format!("the compiler's log says no registers of {}", twin.symbol))
        } else if registers > REGISTERS {
            Some(format!("a block of {} takes {registers} registers of {REGISTERS}", twin.symbol))
        } else if shared > limit {
            Some(format!("a block of {} takes {shared} bytes of shared memory of {limit}", twin.symbol))
        } else {
            None
        }
    }
}

/// Local memory is as recorded, no more and no less.
fn check_ratchet(units: &[Unit]) -> Result<(), Failed> {
    let mut used = Ratchet::default();
    for unit in units {
        unit.kernels()?.iter().for_each(|kernel| used.note(unit.architecture.name, kernel));
    }
    if std::env::var_os("UPDATE").is_some_and(|value| value == "1") {
        return Ok(used.write()?);
    }
    let differences = used.differences(&Ratchet::read()?);
    if differences.is_empty() { Ok(()) } else { Err(differences.join("\n").into()) }
}
