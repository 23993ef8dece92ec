//! Requests for replies, from body to answer: a seat, reading, the lanes, and a stream or a whole.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::Value;

use super::asked::Asked;
use super::choices::Choices;
use super::errors::ApiError;
use super::fields::Ignored;
use super::sse::Stream;
use super::state::{App, Model};
use super::trouble::Trouble;
use super::wire::{Form, Whole, Wire};
use super::{chat, completions, pictures, tokens};

/// Names fields that were accepted without effect.
const IGNORED: &str = "x-roundhouse-ignored";

/// Bodies above this size are read one at a time.
const LARGE_BYTES: usize = 256 << 10;

/// POST `/v1/chat/completions`.
pub(crate) async fn chat(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    answer(app, Wire::Chat, body).await
}

/// POST `/v1/completions`.
pub(crate) async fn completions(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    answer(app, Wire::Completions, body).await
}

/// POST `/tokenize`.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let (value, ignored) = read(app, body, tokens::tokenize).await?;
    Ok(whole(&value, &ignored))
}

/// POST `/detokenize`.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let (value, ignored) = read(app, body, tokens::detokenize).await?;
    Ok(whole(&value, &ignored))
}

/// Whoever finds no seat is told so before anything of the request is read.
async fn answer(app: Arc<App>, wire: Wire, body: Bytes) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = app.model()?;
    let mut seats = app.seats(1)?;
    let reader = if wire == Wire::Chat { chat::read } else { completions::read };
    let mut asked = read(app.clone(), body, reader).await?;
    let (replies, most) = (asked.replies(), app.most_replies());
    if replies > most {
        return Err(ApiError::field(
            "n",
            format!("{replies} replies are asked for; {most} may run or wait at once"),
        ));
    }
    seats.extend(app.seats(replies - 1)?);
    pictures::decode(&app, model, &mut asked).await?;
    let choices = Choices::submit(&app, model, &asked, seats, arrived)?;
    match asked.stream {
        true => Ok(streamed(&app, model, wire, &asked, choices)),
        false => collected(&app, model, wire, &asked, choices).await,
    }
}

/// Reads a body on a thread where that may take its time; large ones one after the other.
async fn read<T: Send + 'static>(
    app: Arc<App>,
    body: Bytes,
    reader: impl FnOnce(&[u8], &App, &Model) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turns = app.clone();
    let large = body.len() > LARGE_BYTES;
    let _turn = if large { turns.large_reader.acquire().await.ok() } else { None };
    let read = tokio::task::spawn_blocking(move || reader(&body, &app, app.model()?));
    read.await.map_err(|_| ApiError::failed("internal", "reading the request met a fault of our own"))?
}

fn streamed(app: &Arc<App>, model: &Model, wire: Wire, asked: &Asked, choices: Choices) -> Response {
    let (form, tokenizer) = (form(app, wire, asked), model.tokenizer.clone());
    let stream = Stream::new(app, choices, form, asked.include_usage, tokenizer, app.begin());
    let mut headers = headers(&asked.ignored, "text/event-stream");
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    (headers, Body::new(stream)).into_response()
}

/// The answer is written where that may take its time.
async fn collected(
    app: &Arc<App>,
    model: &Model,
    wire: Wire,
    asked: &Asked,
    choices: Choices,
) -> Result<Response, ApiError> {
    let wholes = collect(choices, asked).await.map_err(|trouble| trouble.told(app))?;
    let (form, tokenizer) = (form(app, wire, asked), model.tokenizer.clone());
    let written = tokio::task::spawn_blocking(move || form.whole(&wholes, &tokenizer)).await;
    let body =
        written.map_err(|_| ApiError::failed("internal", "writing the reply met a fault of our own"))?;
    Ok((headers(&asked.ignored, "application/json"), body).into_response())
}

fn form(app: &App, wire: Wire, asked: &Asked) -> Form {
    Form {
        wire,
        id: new_id(wire),
        created: now(),
        model: app.settings.served_name.clone(),
        seed: asked.seed,
        logprobs: asked.logprobs.is_some(),
        prompt_tokens: asked.prompts.iter().map(|prompt| prompt.ids.len() as u32).sum(),
    }
}

/// Follows all replies to their end.
pub(crate) async fn collect(mut choices: Choices, asked: &Asked) -> Result<Vec<Whole>, Trouble> {
    let mut ended: Vec<Option<Whole>> = (0..asked.replies()).map(|_| None).collect();
    let mut texts = vec![(String::new(), String::new(), Vec::new()); asked.replies()];
    while !choices.is_over() {
        for step in choices.next().await? {
            let (reasoning, content, tokens) = &mut texts[step.index];
            reasoning.push_str(&step.split.reasoning);
            content.push_str(&step.split.content);
            tokens.extend(step.token.filter(|_| asked.logprobs.is_some()));
            if let Some(end) = step.end {
                let (reasoning, content, tokens) = std::mem::take(&mut texts[step.index]);
                ended[step.index] = Some(Whole { reasoning, content, tokens, end });
            }
        }
    }
    Ok(ended.into_iter().flatten().collect())
}

/// A JSON answer, with the names of what it did not heed.
fn whole(value: &Value, ignored: &Ignored) -> Response {
    (headers(ignored, "application/json"), value.to_string()).into_response()
}

fn headers(ignored: &Ignored, kind: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if let Some(names) = ignored.list().and_then(|names| names.parse().ok()) {
        headers.insert(IGNORED, names);
    }
    headers
}

fn new_id(wire: Wire) -> String {
    format!("{}{:016x}", wire.prefix(), RandomState::new().hash_one(0))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
