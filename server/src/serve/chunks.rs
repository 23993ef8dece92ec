//! The chunks of a streamed reply, as events. All chunks of one reply begin with the same bytes, made once.

use std::sync::Arc;

use runtime::tokenizer::Tokenizer;
use serde::Serialize;

use super::choices::Step;
use super::errors::ApiError;
use super::logprobs::{Logprobs, Offsets, Scored};
use super::wire::{Form, Usage, Wire};

/// Turns steps into events.
pub(crate) struct Writer {
    form: Form,
    tokenizer: Arc<Tokenizer>,
    /// What a chunk of each reply begins with.
    heads: Vec<Vec<u8>>,
    /// Where the next token of each reply begins, for logprobs.
    offsets: Vec<Offsets>,
    include_usage: bool,
    usage: Usage,
    /// What is written and not sent.
    pub(crate) out: Vec<u8>,
    /// Steps taken.
    pub(crate) taken: u64,
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
    /// Writes the first chunk of each reply.
    pub(crate) fn new(form: Form, replies: usize, include_usage: bool, tokenizer: Arc<Tokenizer>) -> Writer {
        let head = |index: usize| {
            let mut head = head(&form);
            head.extend_from_slice(format!("\"choices\":[{{\"index\":{index},").as_bytes());
            head
        };
        let heads: Vec<Vec<u8>> = (0..replies).map(head).collect();
        let usage = Usage::of_prompts(form.prompt_tokens);
        let offsets = (0..replies).map(|_| Offsets::new(&tokenizer)).collect();
        let mut out = Vec::new();
        if form.wire == Wire::Chat {
            for head in &heads {
                let role =
                    br#""delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#;
                out.extend_from_slice(head);
                out.extend_from_slice(role);
                out.extend_from_slice(b"\n\n");
            }
        }
        Writer { form, tokenizer, heads, offsets, include_usage, usage, out, taken: 0 }
    }

    /// Writes what a step added.
    pub(crate) fn step(&mut self, step: Step) {
        self.taken += 1;
        let Step { index, split, token, end } = step;
        let mut token = token.filter(|_| self.form.logprobs);
        if !split.reasoning.is_empty() {
            self.chunk(index, "reasoning_content", &split.reasoning, token.take());
        }
        if !split.content.is_empty() || token.is_some() {
            self.chunk(index, "content", &split.content, token);
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

    /// One chunk with text for one field, and the token that it tells of.
    fn chunk(&mut self, index: usize, field: &str, text: &str, token: Option<Scored>) {
        let tokens = token.as_slice();
        let offsets = &mut self.offsets[index];
        let logprobs =
            token.is_some().then(|| Logprobs::new(self.form.wire, tokens, offsets, &self.tokenizer));
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
        json(&mut self.out, &logprobs);
        self.out.extend_from_slice(b",\"finish_reason\":null}]}\n\n");
    }

    /// All replies are complete.
    pub(crate) fn done(&mut self) {
        if self.include_usage {
            self.out.extend_from_slice(&head(&self.form));
            self.out.extend_from_slice(b"\"choices\":[],\"usage\":");
            json(&mut self.out, &self.usage);
            self.out.extend_from_slice(b"}\n\n");
        }
        self.out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// The stream dies.
    pub(crate) fn error(&mut self, error: &ApiError) {
        self.out.extend_from_slice(b"event: error\ndata: ");
        self.out.extend_from_slice(error.to_json().as_bytes());
        self.out.extend_from_slice(b"\n\n");
    }
}

/// `data: ` and a chunk up to its choices.
fn head(form: &Form) -> Vec<u8> {
    let object = form.wire.chunk_object();
    let mut head = b"data: ".to_vec();
    json(&mut head, &Head { id: &form.id, object, created: form.created, model: &form.model });
    head.pop();
    head.push(b',');
    head
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
            logprobs: false,
            prompt_tokens: 4,
        };
        Writer::new(form, 2, true, Arc::new(Tokenizer::blank(4)))
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
