//! `roundhouse logits`: one tensor with a row per position.

use std::fs;

use runtime::engine::Vision;
use runtime::probe::{LogitsOptions, LogitsRequest, Prepared};
use runtime::request::Media;
use safetensors::tensor::{Dtype, TensorView};

use super::{engine_failure, told};
use crate::args::{Chosen, LogitsArgs};
use crate::failure::Failure;
use crate::output::note;
use crate::pictures::{Looked, Placed, Refused};
use crate::prompts::images;

/// Computes the logits, and writes the file.
pub(crate) fn logits(args: &LogitsArgs) -> Result<(), Failure> {
    let looked = images(&args.image).map_err(Failure::Input)?;
    let chosen = args.run.choose()?;
    note(chosen.opening(&args.model));
    let Chosen { place, element, load, table, .. } = chosen;
    let vision = if looked.is_empty() { Vision::Off } else { Vision::Auto };
    let context = args.context.context;
    let options = LogitsOptions { place, element, load, table, vision, context, ..LogitsOptions::default() };
    let mut told = told();
    let prepared = Prepared::open(&args.model, &options, &mut told).map_err(engine_failure)?;
    let (ids, media) = see(&args.ids.0, looked, &prepared).map_err(Failure::input)?;
    let request = LogitsRequest {
        ids,
        media,
        pieces: args.pieces.as_ref().map(|pieces| pieces.0.clone()),
        decode_from: args.decode_from,
    };
    let logits = prepared.logits(&request, &mut told).map_err(engine_failure)?;

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

/// Puts pictures in the places of their placeholders, and decodes them.
fn see(ids: &[u32], looked: Vec<Looked>, prepared: &Prepared) -> Result<(Vec<u32>, Vec<Media>), Refused> {
    let Some(first) = looked.first() else { return Ok((ids.to_vec(), Vec::new())) };
    let sight = prepared.sight().ok_or_else(|| Refused::blind(first.place()))?;
    let planned = looked.into_iter().map(|looked| looked.plan(&sight)).collect::<Result<_, _>>()?;
    Placed::new(ids, planned, &sight, prepared.tokenizer(), prepared.context(), 0)
        .map_err(|why| Refused::new("--ids", why))?
        .decode(&sight)
}
