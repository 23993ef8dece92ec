//! The replies that one request asked for: each a lane of its own, all of them followed together.
//!
//! Events come from the engine's thread over one bounded channel. A client that reads too slowly fills it; then the
//! engine finds nobody to tell, and the lanes are free.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::http::StatusCode;
use runtime::engine::{Event, Finished, Gone, Hold, Reason, Sink, Token};
use tokio::sync::mpsc;

use super::asked::{Asked, ReplyForm};
use super::errors::ApiError;
use super::state::{App, Model, Seat};
use super::thinking::{Split, Thinking};

/// Events of one reply that may wait for the client.
const BACKLOG: usize = 4096;
/// Events that are taken at once.
const AT_ONCE: usize = 64;

/// The replies to one request. Dropping it calls off what is not finished.
pub(crate) struct Choices {
    app: Arc<App>,
    arrived: Instant,
    events: mpsc::Receiver<(usize, Event)>,
    holds: Vec<Option<Hold>>,
    lanes: Vec<Choice>,
    taken: Vec<(usize, Event)>,
}

/// One reply so far.
struct Choice {
    thinking: Thinking,
    ids: Vec<u32>,
    reasoning_tokens: u32,
    told: Instant,
}

/// What one event added to one reply.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) index: usize,
    pub(crate) split: Split,
    /// The token, if one was made.
    pub(crate) token: Option<Token>,
    pub(crate) end: Option<End>,
}

/// How a reply ended.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) finish_reason: &'static str,
    pub(crate) token_sha: String,
    /// Whether it had reasoning, be it empty.
    pub(crate) reasoned: bool,
    pub(crate) completion_tokens: u32,
    pub(crate) reasoning_tokens: u32,
}

/// Why the replies end without a finish.
#[derive(Debug)]
pub(crate) enum Trouble {
    Full,
    Refused(String),
    Failed(String),
    /// The channel was full: the client reads too slowly.
    Slow,
    /// The server stops.
    Stopping,
}

impl Choices {
    /// Hands every reply to the engine. There is a seat for each.
    pub(crate) fn submit(
        app: &Arc<App>,
        model: &Model,
        asked: &Asked,
        seats: Vec<Seat>,
    ) -> Result<Choices, ApiError> {
        let (sender, events) = mpsc::channel(BACKLOG * asked.replies());
        let mut holds = Vec::new();
        for (index, seat) in seats.into_iter().enumerate() {
            let (sender, mut seat) = (sender.clone(), Some(seat));
            let sink = Sink::new(move |event| {
                // The seat is free before the client can know that the reply is over, and ask again.
                if event.is_last() {
                    drop(seat.take());
                }
                sender.try_send((index, event)).map_err(|_| Gone)
            });
            let hold = model.handle.submit_to(asked.submission(index, app, model), sink);
            holds.push(Some(hold.map_err(|error| ApiError::failed("engine_ended", error.to_string()))?));
        }
        let prompts = asked.prompts.iter().map(|prompt| prompt.ids.len() as u64);
        app.metrics.prompt_tokens.inc_by(prompts.sum());
        let lane = |index: usize| Choice {
            thinking: match asked.prompts[index / asked.n].reply {
                ReplyForm::Plain => Thinking::none(),
                ReplyForm::Thinking { opened } => Thinking::new(opened),
            },
            ids: Vec::new(),
            reasoning_tokens: 0,
            told: asked.arrived,
        };
        let lanes = (0..asked.replies()).map(lane).collect();
        Ok(Choices { app: app.clone(), arrived: asked.arrived, events, holds, lanes, taken: Vec::new() })
    }

    /// The next steps that are there, in order; empty when every reply has ended.
    pub(crate) async fn next(&mut self) -> Result<Vec<Step>, Trouble> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// See [`Choices::next`].
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Step>, Trouble>> {
        if self.is_over() {
            return Poll::Ready(Ok(Vec::new()));
        }
        let mut taken = std::mem::take(&mut self.taken);
        let polled = self.events.poll_recv_many(context, &mut taken, AT_ONCE);
        let steps = polled.map(|count| match count {
            0 => Err(Trouble::Slow),
            _ => taken.drain(..).map(|(index, event)| self.take(index, event)).collect(),
        });
        self.taken = taken;
        steps
    }

    /// Whether every reply has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.holds.iter().all(Option::is_none)
    }

    fn take(&mut self, index: usize, event: Event) -> Result<Step, Trouble> {
        match event {
            Event::Token(token) => Ok(self.token(index, token)),
            Event::Finished(finished) => self.finish(index, &finished),
            Event::Refused(why) => Err(Trouble::Refused(why)),
            Event::Full { .. } => Err(Trouble::Full),
            Event::Failed(why) => Err(Trouble::Failed(why)),
        }
    }

    fn token(&mut self, index: usize, token: Token) -> Step {
        let lane = &mut self.lanes[index];
        let (now, metrics) = (Instant::now(), &self.app.metrics);
        let since = (now - lane.told).as_secs_f64();
        if lane.ids.is_empty() { &metrics.first_token } else { &metrics.inter_token }.observe(since);
        metrics.completion_tokens.inc();
        lane.told = now;
        lane.ids.push(token.id);
        let before = lane.thinking.is_thinking();
        let split = lane.thinking.push(&token.text);
        lane.reasoning_tokens += u32::from(before || lane.thinking.is_thinking());
        Step { index, split, token: Some(token), end: None }
    }

    fn finish(&mut self, index: usize, finished: &Finished) -> Result<Step, Trouble> {
        let finish_reason = match finished.reason {
            Reason::Stop => "stop",
            Reason::Length => "length",
            // Nobody else calls replies off while they are followed.
            Reason::Cancelled => return Err(Trouble::Slow),
        };
        let lane = &mut self.lanes[index];
        // A token that found the channel full is lost, and so is the reply.
        if finished.completion_tokens as usize != lane.ids.len() {
            return Err(Trouble::Slow);
        }
        let mut split = lane.thinking.push(&finished.text);
        let rest = lane.thinking.finish();
        split.reasoning += &rest.reasoning;
        split.content += &rest.content;
        let end = End {
            finish_reason,
            token_sha: runtime::sha::token_sha(&lane.ids),
            reasoned: lane.thinking.is_opened(),
            completion_tokens: finished.completion_tokens,
            reasoning_tokens: lane.reasoning_tokens,
        };
        self.holds[index] = None;
        if self.is_over() {
            self.app.metrics.duration.observe(self.arrived.elapsed().as_secs_f64());
        }
        Ok(Step { index, split, token: None, end: Some(end) })
    }
}

impl Drop for Choices {
    fn drop(&mut self) {
        let open = self.holds.iter().flatten().count();
        self.app.metrics.cancelled.inc_by(open as u64);
    }
}

impl Trouble {
    /// What the client is told.
    pub(crate) fn told(self, app: &App) -> ApiError {
        match self {
            Trouble::Full => app.full(),
            Trouble::Refused(why) => ApiError::refused(StatusCode::BAD_REQUEST, "refused", why),
            Trouble::Failed(why) => ApiError::failed("engine_failed", why),
            Trouble::Slow => {
                ApiError::failed("slow_reader", "the reply was read too slowly and was called off")
            }
            Trouble::Stopping => {
                ApiError::unavailable("stopping", "the server stopped before the reply was complete")
                    .closing()
            }
        }
    }
}
