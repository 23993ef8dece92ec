//! A streamed reply: server-sent events, written as tokens come.
//!
//! All chunks of one reply begin with the same bytes, made once. What is there when the client can take more goes out
//! in one write.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use runtime::tokenizer::Tokenizer;
use serde::Serialize;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::choices::{Choices, Step, Trouble};
use super::errors::ApiError;
use super::state::{Active, App};
use super::wire::{Usage, Wire};

/// What a stream says beside the text of its replies.
pub(crate) struct Form {
    pub(crate) wire: Wire,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) seed: i128,
    pub(crate) replies: usize,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    pub(crate) prompt_tokens: u32,
}

/// The body of a streamed answer.
pub(crate) struct Stream {
    choices: Option<Choices>,
    writer: Writer,
    app: Arc<App>,
    /// When the server stops it.
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    quiet: Pin<Box<Sleep>>,
    /// How long it may be silent; zero is for ever.
    patience: Duration,
    said: Instant,
    _active: Active,
}

impl Stream {
    pub(crate) fn new(
        app: &Arc<App>,
        choices: Choices,
        form: Form,
        tokenizer: Arc<Tokenizer>,
        active: Active,
    ) -> Stream {
        Stream {
            choices: Some(choices),
            writer: Writer::new(form, tokenizer),
            cut: Box::pin(app.cut.clone().cancelled_owned()),
            quiet: Box::pin(tokio::time::sleep(app.settings.keep_alive)),
            patience: app.settings.keep_alive,
            said: Instant::now(),
            app: app.clone(),
            _active: active,
        }
    }

    /// Writes what there is.
    fn write(&mut self, context: &mut Context<'_>) {
        let Some(choices) = &mut self.choices else { return };
        let polled = match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(Trouble::Stopping)),
            Poll::Pending => choices.poll(context),
        };
        match polled {
            Poll::Pending => return,
            Poll::Ready(Ok(steps)) => {
                steps.into_iter().for_each(|step| self.writer.step(step));
                if !choices.is_over() {
                    return;
                }
                self.writer.done();
            }
            Poll::Ready(Err(trouble)) => self.writer.error(&trouble.told(&self.app)),
        }
        self.choices = None;
    }

    /// Writes a comment if nothing was said for long.
    fn keep_alive(&mut self, context: &mut Context<'_>) {
        while !self.patience.is_zero() && self.quiet.as_mut().poll(context).is_ready() {
            if self.said.elapsed() >= self.patience {
                self.writer.out.extend_from_slice(b": keep-alive\n\n");
                self.said = Instant::now();
            }
            let next = self.said + self.patience;
            self.quiet.as_mut().reset(next);
        }
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        // What was taken may have nothing to show: then there may be more, and if not, the waker is set.
        loop {
            let open = this.choices.is_some();
            let taken = this.writer.taken;
            this.write(context);
            if !this.writer.out.is_empty() {
                break;
            }
            if this.choices.is_none() && !open {
                return Poll::Ready(None);
            }
            if this.writer.taken == taken {
                this.keep_alive(context);
                if this.writer.out.is_empty() {
                    return Poll::Pending;
                }
                break;
            }
        }
        this.said = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(std::mem::take(&mut this.writer.out))))))
    }

    fn is_end_stream(&self) -> bool {
        self.choices.is_none() && self.writer.out.is_empty()
    }
}

/// Turns steps into events.
struct Writer {
    form: Form,
    tokenizer: Arc<Tokenizer>,
    /// What a chunk of each reply begins with.
    heads: Vec<Vec<u8>>,
    /// Characters of each reply's tokens so far, for logprobs.
    offsets: Vec<usize>,
    usage: Usage,
    out: Vec<u8>,
    /// Steps taken.
    taken: u64,
}

/// The part of a chunk before its choices.
#[derive(Serialize)]
struct Head<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
}

impl Writer {
    fn new(form: Form, tokenizer: Arc<Tokenizer>) -> Writer {
        let head = |index: usize| {
            let mut head = form.head();
            head.extend_from_slice(format!("\"choices\":[{{\"index\":{index},").as_bytes());
            head
        };
        let heads: Vec<Vec<u8>> = (0..form.replies).map(head).collect();
        let usage = Usage::of_prompts(form.prompt_tokens);
        let offsets = vec![0; form.replies];
        let mut writer = Writer { form, tokenizer, heads, offsets, usage, out: Vec::new(), taken: 0 };
        if writer.form.wire == Wire::Chat {
            for index in 0..writer.form.replies {
                let role =
                    br#""delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#;
                writer.out.extend_from_slice(&writer.heads[index]);
                writer.out.extend_from_slice(role);
                writer.out.extend_from_slice(b"\n\n");
            }
        }
        writer
    }

    fn step(&mut self, step: Step) {
        self.taken += 1;
        let Step { index, split, token, end } = step;
        let token = token.filter(|_| self.form.logprobs);
        let logprobs = token.map(|token| {
            let logprobs = self.form.wire.logprobs(&[token], &mut self.offsets[index], &self.tokenizer);
            logprobs.to_string()
        });
        let mut logprobs = logprobs.as_deref();
        if !split.reasoning.is_empty() {
            self.chunk(index, "reasoning_content", &split.reasoning, logprobs.take());
        }
        if !split.content.is_empty() || logprobs.is_some() {
            self.chunk(index, "content", &split.content, logprobs);
        }
        let Some(end) = end else { return };
        self.usage.add(&end);
        self.out.extend_from_slice(&self.heads[index]);
        let empty = match self.form.wire {
            Wire::Chat => r#""delta":{}"#,
            Wire::Completions => r#""text":"""#,
        };
        let last = format!(
            r#"{empty},"logprobs":null,"finish_reason":"{}","token_sha":"{}"}}],"seed":{}}}"#,
            end.finish_reason, end.token_sha, self.form.seed
        );
        self.out.extend_from_slice(last.as_bytes());
        self.out.extend_from_slice(b"\n\n");
    }

    /// One chunk with text for one field.
    fn chunk(&mut self, index: usize, field: &str, text: &str, logprobs: Option<&str>) {
        self.out.extend_from_slice(&self.heads[index]);
        match self.form.wire {
            Wire::Chat => {
                self.out.extend_from_slice(b"\"delta\":{\"");
                self.out.extend_from_slice(field.as_bytes());
                self.out.extend_from_slice(b"\":");
                json(&mut self.out, text);
                self.out.push(b'}');
            }
            Wire::Completions => {
                self.out.extend_from_slice(b"\"text\":");
                json(&mut self.out, text);
            }
        }
        self.out.extend_from_slice(b",\"logprobs\":");
        self.out.extend_from_slice(logprobs.unwrap_or("null").as_bytes());
        self.out.extend_from_slice(b",\"finish_reason\":null}]}\n\n");
    }

    /// All replies are complete.
    fn done(&mut self) {
        if self.form.include_usage {
            self.out.extend_from_slice(&self.form.head());
            self.out.extend_from_slice(b"\"choices\":[],\"usage\":");
            json(&mut self.out, &self.usage);
            self.out.extend_from_slice(b"}\n\n");
        }
        self.out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// The stream dies.
    fn error(&mut self, error: &ApiError) {
        self.out.extend_from_slice(b"event: error\ndata: ");
        self.out.extend_from_slice(error.to_json().as_bytes());
        self.out.extend_from_slice(b"\n\n");
    }
}

impl Form {
    /// `data: ` and a chunk up to its choices.
    fn head(&self) -> Vec<u8> {
        let object = self.wire.chunk_object();
        let mut head = b"data: ".to_vec();
        json(&mut head, &Head { id: &self.id, object, created: self.created, model: &self.model });
        head.pop();
        head.push(b',');
        head
    }
}

fn json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("memory takes every text");
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::choices::End;
    use super::super::thinking::Split;
    use super::*;

    fn writer(wire: Wire) -> Writer {
        let form = Form {
            wire,
            id: "x-1".into(),
            created: 7,
            model: "a \"model\"".into(),
            seed: -3,
            replies: 2,
            include_usage: true,
            logprobs: false,
            prompt_tokens: 4,
        };
        Writer::new(form, Arc::new(Tokenizer::blank(4)))
    }

    fn step(index: usize, reasoning: &str, content: &str, end: Option<End>) -> Step {
        let split = Split { reasoning: reasoning.into(), content: content.into() };
        Step { index, split, token: None, end }
    }

    fn end() -> End {
        let token_sha = "abc".into();
        End { finish_reason: "stop", token_sha, reasoned: true, completion_tokens: 2, reasoning_tokens: 1 }
    }

    fn events(out: &[u8]) -> Vec<Value> {
        let text = std::str::from_utf8(out).unwrap();
        let events = text.strip_suffix("\n\n").unwrap().split("\n\n");
        events.filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect()
    }

    #[test]
    fn chunks_are_events_of_openai_shape() {
        let mut writer = writer(Wire::Chat);
        writer.step(step(1, "r\n", "é\u{2028}", None));
        writer.step(step(1, "", "", None));
        writer.step(step(1, "", "tail", Some(end())));
        writer.done();
        let chunks = events(&writer.out);
        assert_eq!(chunks.len(), 7);
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(chunks[2]["model"], "a \"model\"");
        assert_eq!(chunks[2]["choices"][0]["delta"]["reasoning_content"], "r\n");
        assert_eq!(chunks[3]["choices"][0]["delta"]["content"], "é\u{2028}");
        assert_eq!(chunks[3]["choices"][0]["finish_reason"], Value::Null);
        assert_eq!(chunks[5]["choices"][0]["finish_reason"], "stop");
        assert_eq!(chunks[5]["choices"][0]["token_sha"], "abc");
        assert_eq!(chunks[5]["seed"], -3);
        assert_eq!(chunks[6]["usage"]["total_tokens"], 6);
        assert!(writer.out.ends_with(b"data: [DONE]\n\n"));
    }

    #[test]
    fn a_stream_that_dies_has_an_error_and_no_finish() {
        let mut writer = writer(Wire::Completions);
        writer.step(step(0, "", "a", None));
        writer.error(&ApiError::failed("engine_failed", "gone"));
        let text = String::from_utf8(writer.out).unwrap();
        let (_, error) = text.split_once("event: error\ndata: ").unwrap();
        assert!(error.starts_with("{\"error\":{\"message\":\"gone\"") && error.ends_with("}\n\n"), "{error}");
        assert!(!text.contains("[DONE]") && !text.contains("\"stop\""));
    }
}
