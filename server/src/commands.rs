//! What each command does, from its arguments to its output.

mod generate;

use std::fs;

use kernels::numerics::ElementType;
use runtime::engine::{self, EngineOptions, OpenEngine};
use runtime::error::Error;
use runtime::open::{Opened, Progress};
use runtime::probe::{self, LogitsRequest};
use safetensors::tensor::{Dtype, TensorView};

pub(crate) use generate::generate;

use crate::args::{EngineArgs, InspectArgs, LogitsArgs};
use crate::failure::Failure;
use crate::loading::Loading;
use crate::output::{Output, note};

/// `roundhouse logits`: one tensor with a row per position.
pub(crate) fn logits(args: &LogitsArgs) -> Result<(), Failure> {
    let request = LogitsRequest {
        ids: args.ids.0.clone(),
        pieces: args.pieces.as_ref().map(|pieces| pieces.0.clone()),
        decode_from: args.decode_from,
    };
    note(args.run.opening(&args.model));
    let context = args.context.context;
    let logits = probe::logits(&args.model, args.run.dtype.element(), context, &request, &mut told())
        .map_err(engine_failure)?;

    let bytes: Vec<u8> = logits.data.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = TensorView::new(Dtype::F32, vec![logits.positions, logits.vocab], &bytes)
        .expect("there are positions x vocab values");
    let file = safetensors::serialize([("logits", tensor)], None).expect("one plain tensor can be written");
    fs::write(&args.out, file).map_err(|error| {
        Failure::Input(format!("cannot write {}: {error}; choose another --out", args.out.display()))
    })?;
    note(format_args!(
        "wrote the logits of {} positions over {} tokens to {}",
        logits.positions,
        logits.vocab,
        args.out.display()
    ));
    Ok(())
}

/// `roundhouse inspect`: the model folder in a few lines.
pub(crate) fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let opened = Opened::new(&args.model, ElementType::Bf16).map_err(engine_failure)?;
    let plan = engine::memory_plan(&opened, &EngineOptions::default()).map_err(engine_failure)?;
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

/// Opens a model to run requests.
fn open(model: &std::path::Path, engine: &EngineArgs) -> Result<OpenEngine, Failure> {
    note(engine.run.opening(model));
    engine::open(model, &engine.options(), &mut told()).map_err(engine_failure)
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

fn engine_failure(error: Error) -> Failure {
    if error.is_device() { Failure::Device(error.to_string()) } else { Failure::input(error) }
}
