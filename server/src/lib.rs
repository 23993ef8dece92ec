//! `server`: how people talk to the engine. The command line, and an OpenAI-compatible server ([`serve`]).
//!
//! [`main`] is the roundhouse binary: reads the command line, runs one command, says how it ended.
//!
//! Exit status: 0 good, 1 a check failed, 2 bad input or usage, 3 device.

mod args;
mod commands;
mod failure;
mod image_root;
mod loading;
mod output;
mod pictures;
mod prompts;
mod ranks;
pub mod serve;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use args::{Cli, Command, KUBERNETES, KernelsCommand, Variables, under_file};
pub use failure::Failure;
use output::note;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    // A variable whose name is not text cannot be a setting.
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
    };
    let variables = Variables::among(std::env::vars_os().filter_map(text));
    let line = match under_file(Cli::command()) {
        Ok(line) => line,
        Err(failure) => return report(&failure),
    };
    let read = line.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match read {
        Ok(cli) => cli,
        Err(usage) => return report_usage(&usage, &variables),
    };
    match run(cli.command, &variables) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure),
    }
}

fn report(failure: &Failure) -> ExitCode {
    note(format_args!("error: {failure}"));
    failure.exit_code()
}

fn run(command: Command, variables: &Variables) -> Result<(), Failure> {
    if !variables.unknown.is_empty() {
        let names = variables.unknown.join(", ");
        let advice = if variables.of_kubernetes { format!("; {KUBERNETES}") } else { String::new() };
        return Err(Failure::Input(format!(
            "the environment sets {names}, which no command reads; unset or correct it (--help lists the settings){advice}"
        )));
    }
    if let Some(args) = command.ranks() {
        ranks::prepare(args)?;
    }
    match command {
        Command::Generate(args) => commands::generate(&args),
        Command::Serve(args) => commands::serve(args),
        Command::Logits(args) => commands::logits(&args),
        Command::Inspect(args) => commands::inspect(&args),
        Command::Demo(args) => commands::demo(&args),
        Command::Check(args) => commands::check(&args),
        Command::Bench(args) => commands::bench(&args),
        Command::Convert(args) => commands::convert(&args),
        Command::Plan(args) => commands::plan(&args),
        Command::Kernels(KernelsCommand::Build(args)) => commands::build_kernels(&args),
    }
}

/// Prints what clap has to say (help and version are good ends), and which settings of the
/// environment it may have read, since its message names only the option.
fn report_usage(usage: &clap::Error, variables: &Variables) -> ExitCode {
    // A closed pipe changes nothing about how the command ends.
    let _ = usage.print();
    if usage.use_stderr() && !variables.known.is_empty() {
        note(format_args!("note: the environment sets {}", variables.known.join(", ")));
    }
    if usage.use_stderr() && variables.of_kubernetes {
        note(format_args!("note: {KUBERNETES}"));
    }
    ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(2))
}
