//! Can this request's whole life fit? Refuse it at the door, let it wait, or admit it, with the number that decided.
//!
//! A request is admitted only if the pages of its whole life, `ceil((prompt + max_tokens) / 64)`, fit beside
//! what all admitted lanes may still need: every admitted request can finish even if nothing else is freed.
//!
//! The queue is first come, first served, across all cache classes: a head that must wait is not overtaken,
//! even by a smaller request or one of another class that would fit. That costs some use of the pools
//! and buys a bound: a request waits for those before it and for nobody else.

use crate::ids::{ClassId, LaneId, RequestId};
use crate::limits::{Limits, pages_for};
use crate::request::Request;
use crate::round::Admit;
use crate::state::State;
use std::fmt;

/// Why a request can never run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It has no prompt.
    EmptyPrompt,
    /// It may make no token.
    NoTokens,
    /// It may use more positions than a context has.
    Context {
        /// Prompt rows.
        prompt: u32,
        /// Tokens it may make.
        max_tokens: u32,
        /// Positions of a context.
        context: u32,
    },
    /// It takes no row in a decode round, or more than one has.
    Window {
        /// Rows it takes.
        window: u32,
        /// Rows of the widest decode round.
        round_rows: u32,
    },
    /// It names a cache class of which there is no slab.
    Class {
        /// The class.
        class: ClassId,
    },
    /// It may need more pages than the pool of its class has.
    Pages {
        /// Pages of its whole life.
        need: u32,
        /// Pages of the pool.
        pool: u32,
        /// Its class.
        class: ClassId,
    },
    /// Another request of the same number waits or lives.
    Taken {
        /// The number.
        request: RequestId,
    },
}

/// Why the head of the queue waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Every slot of its class is taken.
    Slots {
        /// Its class.
        class: ClassId,
        /// How many slots there are.
        slots: u32,
    },
    /// The pages of its whole life do not fit beside those of the admitted lanes.
    Pages {
        /// Pages of its whole life.
        need: u32,
        /// Pages promised to nobody.
        unreserved: u32,
    },
}

/// The refusals that need no look at other requests.
pub(crate) fn refuse(request: &Request, limits: &Limits) -> Option<Refusal> {
    let Request { prompt, max_tokens, class, window, .. } = *request;
    if prompt == 0 {
        return Some(Refusal::EmptyPrompt);
    }
    if max_tokens == 0 {
        return Some(Refusal::NoTokens);
    }
    if request.positions() > limits.context as u64 {
        return Some(Refusal::Context { prompt, max_tokens, context: limits.context });
    }
    if window == 0 || window > limits.round_rows {
        return Some(Refusal::Window { window, round_rows: limits.round_rows });
    }
    let Some(&pool) = limits.pages.get(class.0 as usize) else {
        return Some(Refusal::Class { class });
    };
    let need = whole_life(request);
    (need > pool).then_some(Refusal::Pages { need, pool, class })
}

/// Pages that the whole life of a request that was not refused may need.
pub(crate) fn whole_life(request: &Request) -> u32 {
    pages_for(request.prompt + request.max_tokens)
}

/// The head of the queue with a seat, or the reason why it waits; nothing if nobody waits.
pub(crate) fn admit(state: &State) -> Option<Result<Admit, Wait>> {
    let request = state.queue.front()?;
    let class = request.class;
    let Some(slot) = state.vacant_slot(class) else {
        let slots = state.slabs.iter().filter(|slab| slab.class == class).map(|slab| slab.slots as u32).sum();
        return Some(Err(Wait::Slots { class, slots }));
    };
    let need = whole_life(request);
    let unreserved = state.pools[class.0 as usize].unreserved();
    if need > unreserved {
        return Some(Err(Wait::Pages { need, unreserved }));
    }
    Some(Ok(Admit { request: request.id, lane: LaneId(state.next_lane), slot }))
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyPrompt => write!(f, "the prompt has 0 tokens; send at least 1"),
            Self::NoTokens => write!(f, "max_tokens is 0; ask for at least 1"),
            Self::Context { prompt, max_tokens, context } => write!(
                f,
                "prompt {prompt} and max_tokens {max_tokens} need {} positions; the context has {context}",
                *prompt as u64 + *max_tokens as u64
            ),
            Self::Window { window, round_rows } => {
                write!(f, "a window of {window} rows; a round has 1 to {round_rows}")
            }
            Self::Class { class } => {
                write!(f, "{class} has no slab; use one that the engine was started with")
            }
            Self::Pages { need, pool, class } => {
                write!(
                    f,
                    "needs {need} pages; the pool of {class} has {pool}: ask for less (--max-tokens), or give it more (--memory)"
                )
            }
            Self::Taken { request } => {
                write!(f, "another request is {request}; wait for its end or take a new number")
            }
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slots { class, slots } => write!(f, "all {slots} slots of {class} are taken"),
            Self::Pages { need, unreserved } => write!(f, "needs {need} pages, {unreserved} unreserved"),
        }
    }
}
