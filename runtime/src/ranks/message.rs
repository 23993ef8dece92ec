//! What ranks say to each other, by the names that stand on the wire.

use serde::{Deserialize, Serialize};

use super::form::SubmissionForm;
use super::hello::Hello;
use crate::request::Submission;

/// A message of the control link.
///
/// The set may grow in a newer minor version. A field that is added later has a default, so that an older message
/// still parses, and an older reader ignores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Who speaks, and what must agree; the first message of either side.
    Hello(Hello),
    /// The other side's hello was compared and is right.
    Welcome,
    /// What the leader decided and the follower does too, in this order.
    Command(Command),
    /// The follower's word on a turn: it has planned the same round, and runs it.
    Done {
        /// The turn.
        number: u64,
        /// Digest of the follower's round, in hex.
        round: String,
    },
    /// Whether something that one rank alone may fail at succeeded here; both ranks say so, and neither keeps it before
    /// it has heard the other.
    Answer {
        /// Counts such things.
        question: u64,
        /// Whether it did.
        yes: bool,
        /// What it is: both must mean the same. Empty if the sender does not say.
        #[serde(default)]
        what: String,
    },
    /// A number that each rank has its own of, and of which both take the smallest.
    Number {
        /// Counts such things, with those of [`Message::Answer`].
        question: u64,
        /// The sender's.
        number: u64,
        /// As in [`Message::Answer`].
        #[serde(default)]
        what: String,
    },
    /// The sender broke and serves no more.
    Failed {
        /// What broke.
        why: String,
    },
    /// The sender ends in good order, or refuses the other side.
    Bye {
        /// Why.
        why: String,
    },
    /// The leader waits at this port of its address for the connection of the collectives.
    Meet {
        /// The port.
        port: u16,
    },
    /// The sender is alive. Links send and swallow these themselves.
    Beat,
}

/// What the leader decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// A request enters the queue.
    Submit {
        /// The request.
        id: u64,
        /// What was asked. A request without a seed has one drawn by the leader before it is sent: two ranks would
        /// draw two.
        #[serde(with = "SubmissionForm")]
        submission: Submission,
    },
    /// A request's caller has gone.
    Cancel {
        /// The request.
        id: u64,
    },
    /// Decode rounds are replayed, or not, from the next one on.
    Graphs {
        /// Whether they are.
        on: bool,
    },
    /// Collectives are measured, on both ranks at once.
    Measure,
    /// There is nothing left to do.
    End {
        /// Digest of all outcomes, in hex.
        settled: String,
    },
    /// A round is run.
    Turn {
        /// Counts turns.
        number: u64,
        /// Digest of the leader's round, in hex.
        round: String,
        /// What the leader's bank decided.
        how: How,
        /// Digest of all outcomes that were settled before, in hex.
        #[serde(default)]
        settled: String,
    },
}

/// How a round is run, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// From its graph.
    Replay,
    /// Recorded, then from its graph.
    Capture,
    /// Launch by launch, and why.
    Eager(String),
}

impl Message {
    /// The message's name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "Hello",
            Self::Welcome => "Welcome",
            Self::Command(Command::Submit { .. }) => "Submit",
            Self::Command(Command::Cancel { .. }) => "Cancel",
            Self::Command(Command::Graphs { .. }) => "Graphs",
            Self::Command(Command::Measure) => "Measure",
            Self::Command(Command::End { .. }) => "End",
            Self::Command(Command::Turn { .. }) => "Turn",
            Self::Done { .. } => "Done",
            Self::Answer { .. } => "Answer",
            Self::Number { .. } => "Number",
            Self::Failed { .. } => "Failed",
            Self::Bye { .. } => "Bye",
            Self::Meet { .. } => "Meet",
            Self::Beat => "Beat",
        }
    }
}
