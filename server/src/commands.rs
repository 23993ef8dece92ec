//! What each command does, from its arguments to its output.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use runtime::chat::ChatTemplate;
use runtime::error::Error;
use runtime::session::{
    Finish, GenerateOptions, Generation, LogitsRequest, RoundCounts, Session, SessionOptions,
};
use runtime::sha::token_sha;
use runtime::tokenizer::Tokenizer;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};

use crate::args::{self, EngineOptions, GenerateArgs, InspectArgs, LogitsArgs};
use crate::failure::Failure;
use crate::loading::Loading;
use crate::output::{Output, note};
use crate::prompts;

/// `roundhouse generate`: answers each prompt in order.
pub(crate) fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let inputs = prompts::read(args)?;
    let mut session = open(&args.model, &args.engine)?;
    let prompts: Vec<Vec<u32>> =
        inputs.into_iter().map(|prompt| prompt.ids(&session)).collect::<Result<_, _>>()?;

    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        ..GenerateOptions::default()
    };
    let mut out = Output::stdout();
    let mut answers = Vec::new();
    for prompt in &prompts {
        if out.is_closed() {
            break;
        }
        let mut stream = session.tokenizer().detokenizer(true);
        let mut on_token = |id| {
            if !args.json {
                out.print(&stream.push(id));
            }
            if out.is_closed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let answer = session.generate(prompt, &options, &mut on_token).map_err(engine_failure)?;
        if args.json {
            answers.push(answer_json(prompt, &answer, session.tokenizer()));
        } else {
            out.print(&(stream.finish() + "\n"));
            note(answer_note(prompt, &answer));
        }
    }
    if args.json {
        let report = if prompts.len() == 1 { answers.remove(0) } else { Value::Array(answers) };
        out.print(&format!("{report}\n"));
    }
    out.finish()
}

/// `roundhouse logits`: one tensor with a row per position.
pub(crate) fn logits(args: &LogitsArgs) -> Result<(), Failure> {
    let mut session = open(&args.model, &args.engine)?;
    let request = LogitsRequest {
        ids: args.ids.0.clone(),
        pieces: args.pieces.as_ref().map(|pieces| pieces.0.clone()),
        decode_from: args.decode_from,
    };
    let logits = session.logits(&request).map_err(engine_failure)?;

    let bytes: Vec<u8> = logits.data.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = TensorView::new(Dtype::F32, vec![logits.positions, logits.vocab], &bytes)
        .expect("the session gives positions x vocab values");
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
    let model = runtime::session::describe(&args.model).map_err(engine_failure)?;
    let tokenizer = Tokenizer::open(&args.model).map_err(Failure::input)?;
    let chat = ChatTemplate::open(&args.model).map_err(Failure::input)?;
    let mut out = Output::stdout();
    out.print(&format!(
        "{}\ntokenizer  {} tokens, {} of them special, last id {}\nchat       {}\n",
        model.trim_end(),
        tokenizer.vocab_size(),
        tokenizer.special_ids().len(),
        tokenizer.last_text_id(),
        chat.path().display()
    ));
    out.finish()
}

fn open(model: &Path, engine: &EngineOptions) -> Result<Session, Failure> {
    let options = SessionOptions {
        dtype: match engine.dtype {
            args::Dtype::F32 => kernels::numerics::ElementType::F32,
            args::Dtype::Bf16 => kernels::numerics::ElementType::Bf16,
        },
        graphs: engine.graphs.is_on(),
        context: engine.context,
    };
    note(format_args!("loading {} on the {} device in {}", model.display(), engine.device, engine.dtype));
    let mut loading = Loading::on_stderr();
    let mut tell = |progress| {
        if let Some(line) = loading.line(&progress) {
            note(line);
        }
    };
    Session::open(model, &options, &mut tell).map_err(engine_failure)
}

fn engine_failure(error: Error) -> Failure {
    if error.is_device() { Failure::Device(error.to_string()) } else { Failure::input(error) }
}

fn answer_json(prompt: &[u32], answer: &Generation, tokenizer: &Tokenizer) -> Value {
    json!({
        "ids": answer.ids,
        "text": tokenizer.decode(&answer.ids, true),
        "finish_reason": finish_reason(&answer.finish),
        "token_sha": token_sha(&answer.ids),
        "usage": {
            "prompt_tokens": prompt.len(),
            "completion_tokens": answer.ids.len(),
            "total_tokens": prompt.len() + answer.ids.len(),
        },
        "rounds": rounds_json(&answer.rounds),
    })
}

fn rounds_json(rounds: &RoundCounts) -> Value {
    let eager: Map<String, Value> =
        rounds.eager.iter().map(|(reason, count)| (reason.to_string(), json!(count))).collect();
    json!({ "captured": rounds.captured, "replayed": rounds.replayed, "eager": eager })
}

fn answer_note(prompt: &[u32], answer: &Generation) -> String {
    format!(
        "{} after {} tokens, prompt of {}, token_sha {}, rounds {}",
        finish_reason(&answer.finish),
        answer.ids.len(),
        prompt.len(),
        token_sha(&answer.ids),
        rounds_json(&answer.rounds)
    )
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "cancelled",
    }
}
