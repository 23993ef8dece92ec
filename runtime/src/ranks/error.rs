//! Why a control link could not be made, or works no more.

use std::fmt;
use std::time::Duration;

use super::hello::Difference;
use super::wire::WireError;

/// What went wrong on a control link. After [`Late`](LinkError::Late) and [`Oversized`](LinkError::Oversized) it
/// goes on; after anything else it is over.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkError {
    /// An address that cannot be used.
    Address {
        /// The address.
        address: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The leader's port is taken.
    InUse {
        /// The address.
        address: String,
    },
    /// The system has no thread or socket for a link.
    System {
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        detail: String,
    },
    /// The other rank did not appear in time.
    Nobody {
        /// Whether this side listened; else it called.
        listening: bool,
        /// Where.
        address: String,
        /// For how long.
        waited: Duration,
        /// What was tried in vain, and how the last attempt ended.
        tried: Option<(u64, String)>,
    },
    /// The other rank will not come.
    Vain {
        /// Why.
        why: String,
    },
    /// This side and the other do not fit together.
    Refused {
        /// The other side.
        peer: String,
        /// All that differs.
        differences: Vec<Difference>,
    },
    /// The other side refused this one.
    RefusedByPeer {
        /// The other side.
        peer: String,
        /// What it said.
        why: String,
    },
    /// Nothing came for too long, not even a heartbeat.
    Silent {
        /// The other side.
        peer: String,
        /// For how long.
        silence: Duration,
    },
    /// The connection ended.
    Gone {
        /// The other side.
        peer: String,
        /// How.
        detail: String,
    },
    /// The other side has failed, and said why.
    Failed {
        /// The other side.
        peer: String,
        /// What it said.
        why: String,
    },
    /// What came is not a message.
    Garbled {
        /// The other side.
        peer: String,
        /// What is wrong with it.
        problem: WireError,
    },
    /// The other side does not take what is sent.
    Stuck {
        /// The other side.
        peer: String,
        /// The message.
        message: &'static str,
        /// Its bytes.
        bytes: usize,
        /// For how long it was tried.
        waited: Duration,
    },
    /// No message came in time.
    Late {
        /// The other side.
        peer: String,
        /// For how long.
        waited: Duration,
    },
    /// A message that is too long to send; nothing of it was sent.
    Oversized {
        /// The message.
        message: &'static str,
        /// What is wrong with it.
        problem: WireError,
    },
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { address, detail } => write!(
                f,
                "the control link cannot use the address {address}: {detail}; give the leader's host and port, as in 10.0.0.1:7700"
            ),
            Self::Vain { why } => f.write_str(why),
            Self::Failed { peer, why } => {
                write!(f, "{peer} has failed, so this rank ends too; it says: {why}")
            }
            Self::InUse { address } => write!(
                f,
                "rank 0 cannot listen at {address}: the port is in use; end the process that has it (`ss -ltnp` names it) or give all ranks another port"
            ),
            Self::System { doing, detail } => write!(
                f,
                "{doing} for the control link failed: {detail}; the machine lacks threads, files or memory"
            ),
            Self::Nobody { listening: true, address, waited, tried } => {
                write!(f, "rank 0 listened at {address} for {} and rank 1 did not come", seconds(*waited))?;
                if let Some((times, last)) = tried {
                    write!(f, "; connections dropped: {times}, the last because {last}")?;
                }
                f.write_str(
                    "; start rank 1 with this address as its leader and check that its host can reach it",
                )
            }
            Self::Nobody { listening: false, address, waited, tried } => {
                write!(f, "rank 1 called {address} for {} and rank 0 did not answer", seconds(*waited))?;
                if let Some((times, last)) = tried {
                    write!(f, "; it tried {times} times, at last: {last}")?;
                }
                f.write_str("; start rank 0, and check that it listens at this address")
            }
            Self::Refused { peer, differences } => {
                write!(f, "{peer} does not fit: ")?;
                for (at, difference) in differences.iter().enumerate() {
                    write!(f, "{}{difference}", if at == 0 { "" } else { "; " })?;
                }
                f.write_str("; start all ranks from the same build with the same model and options")
            }
            Self::RefusedByPeer { peer, why } => write!(f, "{peer} refused this rank: {why}"),
            Self::Silent { peer, silence } => write!(
                f,
                "nothing came from {peer} for {}, not even a heartbeat: it is stopped, or its host or the network is down; restart all ranks",
                seconds(*silence)
            ),
            Self::Gone { peer, detail } => {
                write!(
                    f,
                    "the connection to {peer} ended: {detail}; see its log for why, and restart all ranks"
                )
            }
            Self::Garbled { peer, problem } => write!(
                f,
                "what came from {peer} is not a message: {problem}; check that the port is the leader's control port and that all ranks run the same build"
            ),
            Self::Stuck { peer, message, bytes, waited } => write!(
                f,
                "{peer} did not take a {message} of {bytes} bytes in {}: it is stopped or stuck; restart all ranks",
                seconds(*waited)
            ),
            Self::Late { peer, waited } => write!(
                f,
                "waited {} for a message from {peer}, which is alive and said nothing; it is busy or stuck: see its log",
                seconds(*waited)
            ),
            Self::Oversized { message, problem } => {
                write!(f, "a {message} cannot be sent: {problem}; ask for less in one request")
            }
        }
    }
}

impl std::error::Error for LinkError {}

fn seconds(time: Duration) -> String {
    format!("{} s", (time.as_secs_f64() * 10.0).round() / 10.0)
}
