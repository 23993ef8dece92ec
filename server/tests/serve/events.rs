//! Server-sent events, and what the chunks of a streamed reply add up to.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Error, ErrorKind, Result};

use serde_json::Value;

use crate::client::{Connection, Head, Rest, error_object};

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Its kind, if one was given.
    pub(crate) kind: Option<String>,
    pub(crate) data: String,
}

/// Takes bytes apart into events. Anything that the wire does not allow is an error.
#[derive(Default)]
pub(crate) struct EventParser {
    line: Vec<u8>,
    kind: Option<String>,
    data: Option<String>,
    /// Comments seen so far.
    pub(crate) comments: usize,
}

/// A streamed answer that is being read.
pub(crate) struct Stream {
    pub(crate) connection: Connection,
    pub(crate) head: Head,
    rest: Rest,
    parser: EventParser,
    ready: VecDeque<Event>,
    so_far: Streamed,
}

/// What a whole stream said.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    pub(crate) choices: BTreeMap<u64, Choice>,
    pub(crate) usage: Option<Value>,
    pub(crate) seed: Option<Value>,
    /// The error event, if the stream died.
    pub(crate) error: Option<Value>,
    /// Whether `[DONE]` came.
    pub(crate) done: bool,
    /// The chunks, in order.
    pub(crate) chunks: Vec<Value>,
}

/// One choice of a reply, streamed or whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) reasoning: Option<String>,
    pub(crate) finish_reason: Option<String>,
    pub(crate) token_sha: Option<String>,
    /// What logprobs said of each token, in order.
    pub(crate) logprobs: Vec<Value>,
}

impl EventParser {
    /// Takes bytes, however they were cut; the events that are now complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line =
                String::from_utf8(std::mem::take(&mut self.line)).map_err(|_| bad("a split character"))?;
            if let Some(data) = line.strip_prefix("data: ") {
                let whole = self.data.is_none();
                whole.then(|| self.data = Some(data.into())).ok_or_else(|| bad("data of two lines"))?;
            } else if let Some(kind) = line.strip_prefix("event: ") {
                self.kind = Some(kind.into());
            } else if line.starts_with(':') {
                self.comments += 1;
            } else if line.is_empty() {
                match self.data.take() {
                    Some(data) => events.push(Event { kind: self.kind.take(), data }),
                    None if self.kind.is_some() => return Err(bad("an event without data")),
                    None => {}
                }
            } else {
                return Err(bad(&format!("the line {line:?}")));
            }
        }
        Ok(events)
    }

    /// Whether nothing is left over.
    pub(crate) fn is_empty(&self) -> bool {
        self.line.is_empty() && self.kind.is_none() && self.data.is_none()
    }
}

impl Stream {
    /// Reads the head of a streamed answer, which must be a 200.
    #[track_caller]
    pub(crate) fn new(connection: Connection) -> Stream {
        Stream::try_new(connection).expect("a stream begins")
    }

    #[track_caller]
    pub(crate) fn try_new(mut connection: Connection) -> Result<Stream> {
        let (head, rest) = connection.head()?;
        if head.status != 200 {
            return Err(Error::other(format!("no stream but status {}", head.status)));
        }
        assert_eq!(
            head.get("content-type").map(|kind| kind.split(';').next().unwrap()),
            Some("text/event-stream")
        );
        let (parser, ready, so_far) = Default::default();
        Ok(Stream { connection, head, rest, parser, ready, so_far })
    }

    /// Takes the next event in; whether there was one.
    pub(crate) fn take_one(&mut self) -> Result<bool> {
        let event = self.next()?;
        event.iter().try_for_each(|event| self.so_far.take(event)).map_err(|what| bad(&what))?;
        Ok(event.is_some())
    }

    /// The next event; nothing at the end of the stream.
    fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            match self.connection.part(&mut self.rest)? {
                Some(part) => self.ready.extend(self.parser.feed(&part)?),
                None if self.parser.is_empty() => return Ok(None),
                None => return Err(bad("half an event at its end")),
            }
        }
    }

    /// Comments seen so far.
    pub(crate) fn comments(&self) -> usize {
        self.parser.comments
    }

    /// Reads `count` chunks.
    #[track_caller]
    pub(crate) fn read(&mut self, count: usize) {
        for _ in 0..count {
            assert!(self.take_one().expect("the stream goes on"), "the stream is over");
            assert!(!self.so_far.done && self.so_far.error.is_none(), "{:?}", self.so_far.error);
        }
    }

    /// Reads to the end.
    #[track_caller]
    pub(crate) fn whole(mut self) -> Streamed {
        self.rest_of().expect("the stream is sound to its end")
    }

    /// Reads to the end, without giving the connection up; all that the stream has said.
    pub(crate) fn rest_of(&mut self) -> Result<Streamed> {
        while self.take_one()? {}
        Ok(std::mem::take(&mut self.so_far))
    }
}

impl Streamed {
    fn take(&mut self, event: &Event) -> std::result::Result<(), String> {
        if self.done || self.error.is_some() {
            return Err(format!("something after its end: {event:?}"));
        }
        match (event.kind.as_deref(), event.data.as_str()) {
            (None, "[DONE]") => self.done = true,
            (None, data) => {
                let chunk: Value =
                    serde_json::from_str(data).map_err(|error| format!("{error} in {data}"))?;
                self.add(&chunk)?;
                self.chunks.push(chunk);
            }
            (Some("error"), data) => {
                let body = serde_json::from_str(data).map_err(|error| format!("{error} in {data}"))?;
                self.error = Some(error_object(&body));
            }
            (Some(kind), _) => return Err(format!("an event of kind {kind}")),
        }
        Ok(())
    }

    fn add(&mut self, chunk: &Value) -> std::result::Result<(), String> {
        if !chunk["usage"].is_null() {
            if self.usage.is_some() || chunk["choices"] != Value::Array(Vec::new()) {
                return Err(format!("usage twice, or beside choices: {chunk}"));
            }
            self.usage = Some(chunk["usage"].clone());
        } else if self.usage.is_some() {
            return Err(format!("a chunk after usage: {chunk}"));
        }
        if !chunk["seed"].is_null() {
            self.seed = Some(chunk["seed"].clone());
        }
        for part in chunk["choices"].as_array().ok_or_else(|| format!("no choices in {chunk}"))? {
            let index = part["index"].as_u64().ok_or_else(|| format!("a choice without index in {chunk}"))?;
            let new = !self.choices.contains_key(&index);
            let choice = self.choices.entry(index).or_default();
            if choice.finish_reason.is_some() {
                return Err(format!("more of a finished choice: {chunk}"));
            }
            let is_chat = part.get("delta").is_some();
            if is_chat && new && part["delta"]["role"] != "assistant" {
                return Err(format!("a choice that does not begin with its role: {chunk}"));
            }
            if is_chat && !new && part["delta"].get("role").is_some() {
                return Err(format!("a role again: {chunk}"));
            }
            choice.text += part["delta"]["content"].as_str().or(part["text"].as_str()).unwrap_or_default();
            if let Some(reasoning) = part["delta"]["reasoning_content"].as_str() {
                if !choice.text.is_empty() {
                    return Err(format!("reasoning after the content has begun: {chunk}"));
                }
                *choice.reasoning.get_or_insert_default() += reasoning;
            }
            choice.logprobs.extend(logprobs(&part["logprobs"]));
            choice.finish_reason = part["finish_reason"].as_str().map(str::to_owned);
            choice.token_sha = part["token_sha"].as_str().map(str::to_owned);
            if choice.finish_reason.is_some() != choice.token_sha.is_some() {
                return Err(format!("a finish reason without token_sha, or the reverse: {chunk}"));
            }
        }
        Ok(())
    }

    /// Requires a stream that ended as a good one does: every choice finished, `[DONE]`, no error.
    #[track_caller]
    pub(crate) fn good(self) -> Streamed {
        assert!(self.error.is_none(), "{:?}", self.error);
        assert!(self.done, "the stream ended without [DONE]: {:?}", self.chunks.last());
        assert!(!self.choices.is_empty());
        for choice in self.choices.values() {
            assert!(choice.finish_reason.is_some(), "{choice:?}");
        }
        self
    }

    /// Requires a stream that died: an error event, no `[DONE]`, nothing that claims to have finished.
    #[track_caller]
    pub(crate) fn dead(&self) -> &Value {
        assert!(!self.done);
        for choice in self.choices.values() {
            assert_eq!((&choice.finish_reason, &choice.token_sha), (&None, &None));
        }
        self.error.as_ref().unwrap_or_else(|| panic!("no error event, last {:?}", self.chunks.last()))
    }
}

impl Choice {
    /// Of a whole reply.
    #[track_caller]
    pub(crate) fn of(value: &Value) -> Choice {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Choice {
            text: text(&value["message"]["content"]).or(text(&value["text"])).expect("a choice has a text"),
            reasoning: text(&value["message"]["reasoning_content"]),
            finish_reason: text(&value["finish_reason"]),
            token_sha: text(&value["token_sha"]),
            logprobs: logprobs(&value["logprobs"]),
        }
    }
}

/// One value for each token, of either wire's form.
fn logprobs(value: &Value) -> Vec<Value> {
    if let Some(content) = value["content"].as_array() {
        return content.clone();
    }
    let list = |name: &str| value[name].as_array().cloned().unwrap_or_default();
    let (tokens, offsets) = (list("tokens"), list("text_offset"));
    let (own, top) = (list("token_logprobs"), list("top_logprobs"));
    let token = |at: usize| {
        Value::Array(vec![
            tokens[at].clone(),
            own.get(at).cloned().unwrap_or_default(),
            top.get(at).cloned().unwrap_or_default(),
            offsets.get(at).cloned().unwrap_or_default(),
        ])
    };
    (0..tokens.len()).map(token).collect()
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("the stream has {what}"))
}
