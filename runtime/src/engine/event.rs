//! What a request is told.

use std::collections::BTreeMap;
use std::fmt;

use crossbeam_channel::Sender;

use super::Ran;

/// One thing that a request is told. The last one is `Finished`, `Refused`, `Full` or `Failed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// An id was made.
    Token(Token),
    /// The reply is complete.
    Finished(Finished),
    /// It can never run: the caller's fault. Says which number decided.
    Refused(String),
    /// Too many requests wait: try later.
    Full {
        /// Requests that wait: as many as may.
        waiting: u32,
    },
    /// It ended through a fault of ours. Ids told so far are right.
    Failed(String),
}

impl Event {
    /// Whether nothing follows it.
    pub fn is_last(&self) -> bool {
        !matches!(self, Event::Token(_))
    }
}

/// Where the events of one request go. The engine calls it on its own thread, so it must not wait; it is dropped when
/// the request is over.
pub struct Sink(Box<dyn FnMut(Event) -> Result<(), Gone> + Send>);

/// Nobody takes events any more: the request is called off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl Sink {
    /// A sink that hands events to `take`.
    pub fn new(take: impl FnMut(Event) -> Result<(), Gone> + Send + 'static) -> Sink {
        Sink(Box::new(take))
    }

    /// Hands over one event.
    pub(super) fn tell(&mut self, event: Event) -> Result<(), Gone> {
        (self.0)(event)
    }
}

impl From<Sender<Event>> for Sink {
    fn from(sender: Sender<Event>) -> Sink {
        Sink::new(move |event| sender.send(event).map_err(|_| Gone))
    }
}

/// An id of a reply.
#[derive(Clone, Debug)]
pub struct Token {
    /// The id.
    pub id: u32,
    /// Text that can be shown now. Characters that are not complete, and what may begin a stop text, come
    /// with a later id.
    pub text: String,
    /// Natural logarithm of its probability under the model.
    pub logprob: f32,
    /// The likeliest ids with theirs, as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// A complete reply.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Why it ended.
    pub reason: Reason,
    /// The end of the text that no id brought.
    pub text: String,
    /// Ids of the prompt.
    pub prompt_tokens: u32,
    /// Ids made, a stop id included.
    pub completion_tokens: u32,
    /// How the rounds with its rows were executed.
    pub rounds: RoundCounts,
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model picked a stop id, or a stop text was complete.
    Stop,
    /// The most ids asked for, or the end of the context.
    Length,
    /// The caller called it off.
    Cancelled,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Stop => "stop",
            Reason::Length => "length",
            Reason::Cancelled => "cancelled",
        })
    }
}

/// How rounds were executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoundCounts {
    /// Rounds that were captured, and then run.
    pub captured: u64,
    /// Rounds that were replays.
    pub replayed: u64,
    /// Rounds that ran eagerly, by reason.
    pub eager: BTreeMap<&'static str, u64>,
}

impl RoundCounts {
    /// Counts a round.
    pub(crate) fn count(&mut self, how: Ran) {
        match how {
            Ran::Replayed => self.replayed += 1,
            Ran::Captured => self.captured += 1,
            Ran::Eager(reason) => *self.eager.entry(reason).or_default() += 1,
        }
    }

    /// Adds other counts to these.
    pub fn add(&mut self, other: &RoundCounts) {
        self.captured += other.captured;
        self.replayed += other.replayed;
        for (reason, count) in &other.eager {
            *self.eager.entry(reason).or_default() += count;
        }
    }
}

impl fmt::Display for RoundCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "captured {}, replayed {}", self.captured, self.replayed)?;
        self.eager.iter().try_for_each(|(reason, count)| write!(f, ", eager {count} ({reason})"))
    }
}
