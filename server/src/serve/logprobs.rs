//! Log probabilities in OpenAI's two shapes, written straight from what the engine told.
//!
//! A token with twenty alternatives is some 200 bytes here and some 1500 in JSON, so nothing in between is kept.

use std::borrow::Cow;

use runtime::engine::Token;
use runtime::tokenizer::{Detokenizer, Tokenizer};
use serde::{Serialize, Serializer};

use super::wire::Wire;

/// A token and how likely it was.
#[derive(Clone, Debug)]
pub(crate) struct Scored {
    pub(crate) id: u32,
    pub(crate) logprob: f32,
    /// The likeliest ids with theirs.
    top: Vec<(u32, f32)>,
}

/// The `logprobs` of some tokens of a reply.
pub(crate) struct Logprobs<'a> {
    wire: Wire,
    tokens: &'a [Scored],
    /// Where each begins in the text; the chat wire does not say.
    offsets: Vec<usize>,
    tokenizer: &'a Tokenizer,
}

/// Counts the characters of a reply's tokens. A character counts when it is complete, as in the text.
pub(crate) struct Offsets {
    detokenizer: Detokenizer,
    characters: usize,
}

impl From<Token> for Scored {
    fn from(token: Token) -> Scored {
        Scored { id: token.id, logprob: token.logprob, top: token.top }
    }
}

impl Offsets {
    /// At the start of a reply.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Offsets {
        Offsets { detokenizer: tokenizer.detokenizer(true), characters: 0 }
    }

    /// Where the next token begins.
    fn next(&mut self, id: u32) -> usize {
        let begin = self.characters;
        self.characters += self.detokenizer.push(id).chars().count();
        begin
    }
}

impl<'a> Logprobs<'a> {
    /// Of the tokens that follow those that `offsets` has counted.
    pub(crate) fn new(
        wire: Wire,
        tokens: &'a [Scored],
        offsets: &mut Offsets,
        tokenizer: &'a Tokenizer,
    ) -> Logprobs<'a> {
        let offsets = match wire {
            Wire::Chat => Vec::new(),
            Wire::Completions => tokens.iter().map(|token| offsets.next(token.id)).collect(),
        };
        Logprobs { wire, tokens, offsets, tokenizer }
    }
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Logprobs { tokens, offsets, tokenizer, .. } = self;
        match self.wire {
            Wire::Chat => {
                let entry = |token| Entry::with_top(token, tokenizer);
                Content { content: Each(|| tokens.iter().map(entry)), refusal: () }.serialize(serializer)
            }
            Wire::Completions => Columns {
                tokens: Each(|| tokens.iter().map(|token| name(token.id, tokenizer))),
                token_logprobs: Each(|| tokens.iter().map(|token| number(token.logprob))),
                top_logprobs: Each(|| tokens.iter().map(|token| Names(token, tokenizer))),
                text_offset: offsets,
            }
            .serialize(serializer),
        }
    }
}

/// The chat wire's shape.
#[derive(Serialize)]
struct Content<C> {
    content: C,
    refusal: (),
}

#[derive(Serialize)]
struct Entry<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry<'a>>>,
}

impl<'a> Entry<'a> {
    fn new(id: u32, logprob: f32, tokenizer: &'a Tokenizer) -> Entry<'a> {
        let bytes = tokenizer.bytes(id);
        Entry { token: String::from_utf8_lossy(bytes), logprob: number(logprob), bytes, top_logprobs: None }
    }

    fn with_top(token: &Scored, tokenizer: &'a Tokenizer) -> Entry<'a> {
        let top = token.top.iter().map(|&(id, logprob)| Entry::new(id, logprob, tokenizer));
        Entry { top_logprobs: Some(top.collect()), ..Entry::new(token.id, token.logprob, tokenizer) }
    }
}

/// The completions wire's shape: a column for each thing that is said of a token.
#[derive(Serialize)]
struct Columns<'a, T, P, M> {
    tokens: T,
    token_logprobs: P,
    top_logprobs: M,
    text_offset: &'a [usize],
}

/// The likeliest tokens by name, the token itself among them.
struct Names<'a>(&'a Scored, &'a Tokenizer);

impl Serialize for Names<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Names(token, tokenizer) = self;
        let own = (token.id, token.logprob);
        // Several ids may have one name. The token's own number counts, then that of the likeliest.
        let mut names: Vec<(Cow<'_, str>, f32)> = Vec::with_capacity(token.top.len() + 1);
        for (id, logprob) in std::iter::once(own).chain(token.top.iter().copied()) {
            let name = name(id, tokenizer);
            if names.iter().all(|(other, _)| *other != name) {
                names.push((name, number(logprob)));
            }
        }
        serializer.collect_map(names)
    }
}

/// A list whose entries are made while they are written.
struct Each<F>(F);

impl<F, I> Serialize for Each<F>
where
    F: Fn() -> I,
    I: Iterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// A token as a name: its text, or its bytes if they are no text of their own.
fn name(id: u32, tokenizer: &Tokenizer) -> Cow<'_, str> {
    let bytes = tokenizer.bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")).into(),
    }
}

/// A log probability. JSON has no infinity; clients expect this number in its place.
fn number(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(wire: Wire, tokens: &[Scored]) -> String {
        let tokenizer = Tokenizer::blank(4);
        let logprobs = Logprobs::new(wire, tokens, &mut Offsets::new(&tokenizer), &tokenizer);
        serde_json::to_string(&logprobs).unwrap()
    }

    #[test]
    fn log_probabilities_keep_their_short_text() {
        assert_eq!(serde_json::to_string(&number(-0.1)).unwrap(), "-0.1");
        assert_eq!(serde_json::to_string(&number(f32::NEG_INFINITY)).unwrap(), "-9999.0");
        assert_eq!(serde_json::to_string(&number(f32::NAN)).unwrap(), "-9999.0");
    }

    #[test]
    fn both_shapes_are_openai_s() {
        let token = Scored { id: 1, logprob: -0.5, top: vec![(2, -0.25), (1, -0.5)] };
        assert_eq!(
            text(Wire::Chat, std::slice::from_ref(&token)),
            r#"{"content":[{"token":"","logprob":-0.5,"bytes":[],"top_logprobs":[{"token":"","logprob":-0.25,"bytes":[]},{"token":"","logprob":-0.5,"bytes":[]}]}],"refusal":null}"#
        );
        // Ids of one name are one entry, and the token's own number is kept.
        assert_eq!(
            text(Wire::Completions, &[token]),
            r#"{"tokens":[""],"token_logprobs":[-0.5],"top_logprobs":[{"":-0.5}],"text_offset":[0]}"#
        );
        assert_eq!(text(Wire::Chat, &[]), r#"{"content":[],"refusal":null}"#);
    }
}
