//! The reply at the start: a short greedy one through all that other replies pass, before anyone is served.

use std::sync::Arc;
use std::time::Instant;

use runtime::chat::ChatRequest;
use runtime::request::Submission;

use super::asked::{Asked, Prompt, ReplyForm};
use super::chat::{encode, render};
use super::choices::Choices;
use super::errors::ApiError;
use super::fields::Ignored;
use super::replies::collect;
use super::state::{App, Model};
use crate::failure::Failure;
use crate::output::note;
use crate::pictures::Placed;

const PROMPT: &str = "Hello";
const TOKENS: u32 = 8;

/// Makes the reply, looks at it, and says its digest.
pub(crate) async fn reply(app: &Arc<App>) -> Result<(), Failure> {
    let model = app.loaded().expect("the model is there before its first reply");
    let failed = |why: String| Failure::Check(format!("the reply at the start failed: {why}"));
    let told = |error: ApiError| failed(error.message);
    let asked = asked(model).map_err(told)?;
    let seats = app.seats(asked.replies()).map_err(told)?;
    let choices = Choices::submit(app, model, &asked, seats, Instant::now()).map_err(told)?;
    let whole = collect(choices, &asked).await.map_err(|trouble| told(trouble.told(app)))?.remove(0);
    if whole.tokens.is_empty() {
        return Err(failed("it has no token".into()));
    }
    if let Some(token) = whole.tokens.iter().find(|token| !token.logprob.is_finite()) {
        let why = format!(
            "token {} has the log probability {}; the weights or the device are damaged",
            token.id, token.logprob
        );
        return Err(failed(why));
    }
    let sha = whole.end.token_sha;
    note(format_args!("first reply {:?}, {} tokens, token_sha {sha}", whole.content, whole.tokens.len()));
    match &app.settings.sanity_sha {
        Some(wanted) if *wanted != sha => Err(failed(format!(
            "its token_sha is {sha} and must be {wanted} (--sanity-sha); the model is another one, or damaged"
        ))),
        _ => Ok(()),
    }
}

fn asked(model: &Model) -> Result<Asked, ApiError> {
    let chat = ChatRequest { enable_thinking: Some(false), ..ChatRequest::user(PROMPT) };
    let mut ids = encode(&render(&chat, model)?, "messages", model)?;
    ids.truncate(model.context - 1);
    Ok(Asked {
        prompts: vec![Prompt::new(Placed::text(ids), ReplyForm::Plain, "messages", model)?],
        submission: Submission { max_tokens: Some(TOKENS), ..Submission::new(Vec::new()) },
        n: 1,
        seed: 0,
        stream: false,
        include_usage: false,
        logprobs: Some(0),
        ignored: Ignored::default(),
        held: None,
    })
}
