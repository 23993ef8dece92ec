//! The bodies of replies: OpenAI's shapes, whole and in chunks.

use runtime::engine::Token;
use runtime::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::choices::End;

/// Which of the two wires a reply is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Wire {
    Chat,
    Completions,
}

/// A reply that is complete.
pub(crate) struct Whole {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) tokens: Vec<Token>,
    pub(crate) end: End,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) total_tokens: u32,
    completion_tokens_details: Details,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Details {
    reasoning_tokens: u32,
}

impl Usage {
    pub(crate) fn of_prompts(prompt_tokens: u32) -> Usage {
        Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() }
    }

    /// Adds a reply that has ended.
    pub(crate) fn add(&mut self, end: &End) {
        self.completion_tokens += end.completion_tokens;
        self.total_tokens += end.completion_tokens;
        self.completion_tokens_details.reasoning_tokens += end.reasoning_tokens;
    }
}

impl Wire {
    /// What ids of replies begin with.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Wire::Chat => "chatcmpl-",
            Wire::Completions => "cmpl-",
        }
    }

    /// The name of a whole reply.
    pub(crate) fn object(self) -> &'static str {
        match self {
            Wire::Chat => "chat.completion",
            Wire::Completions => "text_completion",
        }
    }

    /// The name of a chunk.
    pub(crate) fn chunk_object(self) -> &'static str {
        match self {
            Wire::Chat => "chat.completion.chunk",
            Wire::Completions => "text_completion",
        }
    }

    /// One of the `choices` of a whole reply.
    pub(crate) fn choice(self, index: usize, whole: &Whole, logprobs: bool, tokenizer: &Tokenizer) -> Value {
        let Whole { reasoning, content, tokens, end } = whole;
        let logprobs = if logprobs { self.logprobs(tokens, &mut 0, tokenizer) } else { Value::Null };
        let mut choice = json!({
            "index": index,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "token_sha": end.token_sha,
        });
        match self {
            Wire::Chat => {
                let reasoning = end.reasoned.then_some(reasoning);
                choice["message"] = json!({
                    "role": "assistant", "content": content, "reasoning_content": reasoning, "refusal": null
                });
            }
            Wire::Completions => choice["text"] = content.as_str().into(),
        }
        choice
    }

    /// The `logprobs` of some tokens; `offset` is the place of the first in the text of all, in characters.
    pub(crate) fn logprobs(self, tokens: &[Token], offset: &mut usize, tokenizer: &Tokenizer) -> Value {
        match self {
            Wire::Chat => {
                let content: Vec<Value> = tokens.iter().map(|token| chat_logprob(token, tokenizer)).collect();
                json!({"content": content, "refusal": null})
            }
            Wire::Completions => {
                let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
                for token in tokens {
                    let text = name(token.id, tokenizer);
                    let mut top = Map::new();
                    for &(id, logprob) in &token.top {
                        top.insert(name(id, tokenizer), number(logprob));
                    }
                    top.insert(text.clone(), number(token.logprob));
                    offsets.push(*offset);
                    *offset += String::from_utf8_lossy(tokenizer.bytes(token.id)).chars().count();
                    texts.push(text);
                    logprobs.push(number(token.logprob));
                    tops.push(top);
                }
                json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
            }
        }
    }
}

fn chat_logprob(token: &Token, tokenizer: &Tokenizer) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.bytes(id);
        json!({"token": String::from_utf8_lossy(bytes), "logprob": number(logprob), "bytes": bytes})
    };
    let mut own = entry(token.id, token.logprob);
    own["top_logprobs"] = token.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
    own
}

/// A token as a name: its text, or its bytes if they are no text of their own.
fn name(id: u32, tokenizer: &Tokenizer) -> String {
    let bytes = tokenizer.bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
    }
}

/// A log probability. JSON has no infinity; clients expect this number in its place.
fn number(logprob: f32) -> Value {
    let held = if logprob.is_finite() { logprob } else { -9999.0 };
    // The shortest text of the f32, not the digits of the f64 beside it.
    held.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_keep_their_short_text() {
        assert_eq!(number(-0.1).to_string(), "-0.1");
        assert_eq!(number(f32::NEG_INFINITY).to_string(), "-9999.0");
    }

    #[test]
    fn usage_sums_replies() {
        let mut usage = Usage::of_prompts(5);
        for (completion_tokens, reasoning_tokens) in [(3, 1), (4, 0)] {
            let end = End {
                finish_reason: "stop",
                token_sha: String::new(),
                reasoned: false,
                completion_tokens,
                reasoning_tokens,
            };
            usage.add(&end);
        }
        let expected = json!({
            "prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12,
            "completion_tokens_details": {"reasoning_tokens": 1}
        });
        assert_eq!(serde_json::to_value(usage).unwrap(), expected);
    }
}
