//! The bodies of whole replies, in OpenAI's two shapes, and what chunks have in common with them.

use runtime::tokenizer::Tokenizer;
use serde::Serialize;

use super::choices::End;
use super::logprobs::{Logprobs, Offsets, Scored};

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
    /// Empty unless logprobs were asked for.
    pub(crate) tokens: Vec<Scored>,
    pub(crate) end: End,
}

/// A whole answer, but for its replies.
pub(crate) struct Form {
    pub(crate) wire: Wire,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) seed: i128,
    pub(crate) logprobs: bool,
    pub(crate) prompt_tokens: u32,
}

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    seed: i128,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: &'a str,
    token_sha: &'a str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
    reasoning_content: Option<&'a str>,
    refusal: (),
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

impl Form {
    /// The answer with these replies, as JSON. With logprobs this takes a while: some microseconds for each token.
    pub(crate) fn whole(&self, replies: &[Whole], tokenizer: &Tokenizer) -> Vec<u8> {
        let mut usage = Usage::of_prompts(self.prompt_tokens);
        replies.iter().for_each(|whole| usage.add(&whole.end));
        let choices = replies.iter().enumerate().map(|(index, whole)| self.choice(index, whole, tokenizer));
        let answer = Answer {
            id: &self.id,
            object: self.wire.object(),
            created: self.created,
            model: &self.model,
            choices: choices.collect(),
            usage,
            seed: self.seed,
        };
        serde_json::to_vec(&answer).expect("memory takes every text")
    }

    fn choice<'a>(&self, index: usize, whole: &'a Whole, tokenizer: &'a Tokenizer) -> Choice<'a> {
        let Whole { reasoning, content, tokens, end } = whole;
        let (message, text) = match self.wire {
            Wire::Chat => {
                let reasoning_content = end.reasoned.then_some(reasoning.as_str());
                (Some(Message { role: "assistant", content, reasoning_content, refusal: () }), None)
            }
            Wire::Completions => (None, Some(content.as_str())),
        };
        let logprobs = || Logprobs::new(self.wire, tokens, &mut Offsets::new(tokenizer), tokenizer);
        Choice {
            index,
            message,
            text,
            logprobs: self.logprobs.then(logprobs),
            finish_reason: end.finish_reason,
            token_sha: &end.token_sha,
        }
    }
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
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
