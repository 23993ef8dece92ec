//! What each command does, from its arguments to its output.

mod bench;
mod check;
mod convert;
mod demo;
mod generate;
mod kernels;
mod logits;
mod serve;

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use runtime::engine::{self, EngineOptions, OpenEngine};
use runtime::error::Error;
use runtime::open::{Opened, Progress};
use runtime::ranks::Rank;

pub(crate) use bench::bench;
pub(crate) use check::check;
pub(crate) use convert::convert;
pub(crate) use demo::demo;
pub(crate) use generate::generate;
pub(crate) use kernels::build as build_kernels;
pub(crate) use logits::logits;
pub(crate) use serve::serve;

use crate::args::{Chosen, InspectArgs, PlanArgs};
use crate::failure::Failure;
use crate::loading::Loading;
use crate::output::{Output, note};

/// `roundhouse inspect`: the model folder in a few lines.
pub(crate) fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let options = EngineOptions::default();
    let form = options.form(&args.model).map_err(engine_failure)?;
    let opened = Opened::new(&args.model, form).map_err(engine_failure)?;
    let plan = engine::memory_plan(&opened, &options).map_err(engine_failure)?;
    let unused: String = opened.unused().iter().map(|part| format!("{part}\n")).collect();
    let Opened { checkpoint, tokenizer, chat, .. } = opened;
    let mut out = Output::stdout();
    out.print(&format!(
        "{checkpoint}{unused}{plan}tokenizer  {} tokens, {} of them special, last id {}\nchat       {}\n",
        tokenizer.vocab_size(),
        tokenizer.special_ids().len(),
        tokenizer.last_text_id(),
        chat.path().display()
    ));
    out.finish()
}

/// `roundhouse plan`: a scene and what the planner decides in it.
pub(crate) fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let name = args.scene.display();
    let mut scene = String::new();
    let read = match args.scene.as_os_str() == "-" {
        true => io::stdin().read_to_string(&mut scene).map(drop),
        false => fs::read_to_string(&args.scene).map(|text| scene = text),
    };
    read.map_err(|error| {
        Failure::Input(format!("cannot read {name}: {error}; give a scene, or - for stdin"))
    })?;
    let played = planner::scene::run(&scene).map_err(|error| Failure::Input(format!("{name}: {error}")))?;
    let mut out = Output::stdout();
    out.print(&played);
    out.finish()
}

/// Opens a model to run requests, or this rank's share of it.
fn open(
    model: &Path,
    options: &EngineOptions,
    chosen: &Chosen,
    rank: Option<Box<Rank>>,
) -> Result<OpenEngine, Failure> {
    note(chosen.opening(model));
    match rank {
        Some(rank) => engine::open_rank(model, options, *rank, &mut told()),
        None => engine::open(model, options, &mut told()),
    }
    .map_err(engine_failure)
}

/// Notes the steps of opening a model.
fn told() -> impl FnMut(Progress) {
    let mut loading = Loading::on_stderr();
    move |progress| {
        if let Some(line) = loading.line(&progress) {
            note(line);
        }
    }
}

pub(crate) fn engine_failure(error: Error) -> Failure {
    if error.is_device() { Failure::Device(error.to_string()) } else { Failure::input(error) }
}
