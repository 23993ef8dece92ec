//! Who comes, when, and with what.

use runtime::chat::ChatRequest;
use runtime::request::{Media, Submission};
use runtime::sampling::SamplingOptions;
use serde_json::json;

use super::picture;
use crate::prompts::picture_part;

/// One request of the demo.
pub(super) struct Part {
    pub(super) name: &'static str,
    prompt: &'static str,
    /// It enters when so many tokens were made in sum.
    pub(super) enters: u32,
    thinking: bool,
    /// It brings the picture of the demo.
    pub(super) sees: bool,
    /// Drawn at [`TEMPERATURE`] with this seed; greedy if none.
    seed: Option<u64>,
    /// It is called off after so many tokens.
    pub(super) called_off_after: Option<u32>,
}

/// Of the part that is drawn: the demo model is so sure of itself that 1 changes little.
const TEMPERATURE: f32 = 2.5;

const STORY: &str = "Tell me a short story about Mia the fox and the lamp.";

const PLAIN: Part = Part {
    name: "",
    prompt: "",
    enters: 0,
    thinking: false,
    sees: false,
    seed: None,
    called_off_after: None,
};

/// The requests, in the order in which they come.
pub(super) const CAST: &[Part] = &[
    Part { name: "story", prompt: STORY, ..PLAIN },
    Part { name: "sum", prompt: "What is 27 + 58?", enters: 4, ..PLAIN },
    Part { name: "count", prompt: "Count from 5 to 40.", enters: 8, called_off_after: Some(24), ..PLAIN },
    Part { name: "spell", prompt: "Spell garden backwards.", enters: 20, ..PLAIN },
    Part {
        name: "class",
        prompt: "Write a Python class Book with the fields title, year and price.",
        enters: 36,
        ..PLAIN
    },
    Part { name: "picture", prompt: picture::QUESTION, enters: 36, sees: true, ..PLAIN },
    Part { name: "think", prompt: "What is 46 + 37?", enters: 60, thinking: true, ..PLAIN },
    Part { name: "drawn", prompt: STORY, enters: 60, seed: Some(7), ..PLAIN },
    Part { name: "repeat", prompt: "Repeat this list: lamp, owl, river.", enters: 100, ..PLAIN },
];

impl Part {
    pub(super) fn chat(&self) -> ChatRequest {
        let mut chat = ChatRequest::user(self.prompt);
        if self.sees {
            chat.messages[0]["content"] = json!([picture_part(), {"type": "text", "text": self.prompt}]);
        }
        ChatRequest { enable_thinking: Some(self.thinking), ..chat }
    }

    pub(super) fn submission(&self, prompt: Vec<u32>, media: Vec<Media>) -> Submission {
        let temperature = if self.seed.is_some() { TEMPERATURE } else { 0.0 };
        Submission {
            max_tokens: Some(120),
            media,
            sampling: SamplingOptions { temperature, seed: self.seed, ..SamplingOptions::default() },
            ..Submission::new(prompt)
        }
    }

    /// The prompt, and what is special about the request.
    pub(super) fn asks(&self) -> String {
        let mut asks = self.prompt.to_string();
        if self.thinking {
            asks += " (thinking)";
        }
        if self.sees {
            asks += " (the one below)";
        }
        if let Some(seed) = self.seed {
            asks += &format!(" (temperature {TEMPERATURE}, seed {seed})");
        }
        if let Some(tokens) = self.called_off_after {
            asks += &format!(" (to be called off after {tokens} tokens)");
        }
        asks
    }
}
