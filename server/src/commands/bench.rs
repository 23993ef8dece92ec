//! `roundhouse bench`: what rounds, prompts and kernels take, against the bytes that they must move.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use runtime::bench::{self, BenchOptions, Line};

use super::{engine_failure, told};
use crate::args::{BenchArgs, Role};
use crate::failure::Failure;
use crate::output::{Output, note};
use crate::ranks::{self, Begun};

/// Measures, printing each result when it is known.
pub(crate) fn bench(args: &BenchArgs) -> Result<(), Failure> {
    let chosen = args.run.choose()?;
    let options = BenchOptions {
        place: chosen.place,
        element: chosen.element,
        load: chosen.load,
        table: chosen.table,
        exchange: args.ranks.exchange(),
        rows: args.rows.0.clone(),
        contexts: args.contexts.0.clone(),
        rounds: args.rounds as usize,
        prompt: args.prompt.0,
        piece_rows: args.piece.unwrap_or(chosen.place.piece_rows()),
        kernels: args.kernels,
        page_memory: args.memory.map(|size| size.0),
    };
    let rank = match args.ranks.role()? {
        Role::Alone => None,
        _ if args.kernels => {
            let why = "kernels are measured on one rank; leave one of them out";
            return Err(Failure::Input(format!("--kernels with --tp 2: {why}")));
        }
        _ => {
            let engine = bench::settings(&args.model, &options).map_err(engine_failure)?;
            match ranks::begin(&args.ranks, &args.model, &engine)? {
                Begun::Leads(rank) => rank,
                Begun::Followed => return Ok(()),
            }
        }
    };
    let unwritable = |path: &Path, error: std::io::Error| {
        Failure::Input(format!("cannot write {}: {error}; choose another --json", path.display()))
    };
    let mut json = match &args.json {
        Some(path) => Some((path, File::create(path).map_err(|error| unwritable(path, error))?)),
        None => None,
    };
    note(chosen.opening(&args.model));
    let mut out = Output::stdout();
    let mut written = Ok(());
    let mut tell = |line: Line| {
        out.print(&format!("{line}\n"));
        if let Some((path, file)) = &mut json {
            let lines: String = line.to_json().iter().map(|line| format!("{line}\n")).collect();
            let wrote = file.write_all(lines.as_bytes()).map_err(|error| unwritable(path, error));
            if written.is_ok() {
                written = wrote;
            }
        }
    };
    let measured = match rank {
        None => bench::run(&args.model, &options, &mut told(), &mut tell),
        Some(rank) => bench::run_pair(&args.model, &options, *rank, &mut told(), &mut tell),
    };
    measured.map_err(engine_failure)?;
    written?;
    out.finish()
}
