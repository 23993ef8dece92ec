//! The replies that one request asked for: each a lane of its own, all of them followed together.
//!
//! Events come from the engine's thread over one bounded channel. A client that reads too slowly fills it; then the
//! engine finds nobody to tell, and the lanes are free.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use runtime::engine::{Event, Finished, Gone, Hold, Reason, Sink, Token};
use tokio::sync::mpsc;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::asked::{Asked, ReplyForm};
use super::errors::ApiError;
use super::logprobs::Scored;
use super::pictures::Held;
use super::state::{App, Model, Phase, Seat};
use super::thinking::{Split, Thinking};
use super::trouble::Trouble;
use crate::output::note;

/// Events of one reply that may wait for the client.
const BACKLOG: usize = 4096;
/// Events that are taken at once.
const AT_ONCE: usize = 64;

/// The replies to one request. Dropping it calls off what is not finished.
pub(crate) struct Choices {
    app: Arc<App>,
    arrived: Instant,
    events: mpsc::Receiver<(usize, Event)>,
    /// Whether an event found the channel full.
    overrun: Arc<AtomicBool>,
    /// When the server stops them.
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    lanes: Vec<Choice>,
    /// What went wrong, until it is told.
    trouble: Option<Trouble>,
    /// How those end that have no finish, in a word of the metrics.
    outcome: &'static str,
    taken: Vec<(usize, Event)>,
    _holds: Vec<Hold>,
    _pictures: Option<Held>,
}

/// One reply so far.
struct Choice {
    thinking: Thinking,
    ids: Vec<u32>,
    reasoning_tokens: u32,
    told: Instant,
    finished: bool,
}

/// What one event added to one reply.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) index: usize,
    pub(crate) split: Split,
    /// The token, if one was made.
    pub(crate) token: Option<Scored>,
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

impl Choices {
    /// Hands every reply to the engine. There is a seat for each. `arrived` is when the request did.
    pub(crate) fn submit(
        app: &Arc<App>,
        model: &Model,
        asked: &Asked,
        seats: Vec<Seat>,
        arrived: Instant,
    ) -> Result<Choices, ApiError> {
        let (sender, events) = mpsc::channel(BACKLOG * asked.replies());
        let overrun = Arc::new(AtomicBool::new(false));
        let mut holds = Vec::new();
        for (index, seat) in seats.into_iter().enumerate() {
            let (sender, overrun, mut seat) = (sender.clone(), overrun.clone(), Some(seat));
            let sink = Sink::new(move |event| {
                // The seat is free before the client can know that the reply is over, and ask again.
                if event.is_last() {
                    drop(seat.take());
                }
                sender.try_send((index, event)).map_err(|_| {
                    overrun.store(true, Ordering::Release);
                    Gone
                })
            });
            let hold = model.handle.submit_to(asked.submission(index, app, model), sink);
            holds.push(hold.map_err(|error| ApiError::failed("engine_ended", error.to_string()))?);
        }
        let prompts = asked.prompts.iter().map(|prompt| prompt.ids.len() as u64);
        app.metrics.prompt_tokens.inc_by(prompts.sum());
        let thinking = |index: usize| match asked.prompts[index / asked.n].reply {
            ReplyForm::Plain => Thinking::none(),
            ReplyForm::Thinking { opened } => Thinking::new(opened),
        };
        let thinking = (0..asked.replies()).map(thinking);
        let mut choices = Choices::new(app, events, overrun, thinking, arrived);
        choices._holds = holds;
        choices._pictures = asked.held.clone();
        Ok(choices)
    }

    /// Replies of which nobody has heard yet.
    fn new(
        app: &Arc<App>,
        events: mpsc::Receiver<(usize, Event)>,
        overrun: Arc<AtomicBool>,
        thinking: impl Iterator<Item = Thinking>,
        arrived: Instant,
    ) -> Choices {
        let lane = |thinking| Choice {
            thinking,
            ids: Vec::new(),
            reasoning_tokens: 0,
            told: arrived,
            finished: false,
        };
        Choices {
            app: app.clone(),
            arrived,
            events,
            overrun,
            cut: Box::pin(app.cut.clone().cancelled_owned()),
            lanes: thinking.map(lane).collect(),
            trouble: None,
            outcome: "cancelled",
            taken: Vec::new(),
            _holds: Vec::new(),
            _pictures: None,
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// The next steps that are there, in order; empty when every reply has ended.
    pub(crate) async fn next(&mut self) -> Result<Vec<Step>, Trouble> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// See [`Choices::next`]. Trouble comes after all that came with it.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Step>, Trouble>> {
        if self.is_over() {
            return Poll::Ready(Ok(Vec::new()));
        }
        if self.cut.as_mut().poll(context).is_ready() {
            // What the engine said last may wait behind a client that does not read.
            self.fail(match self.app.phase() {
                Phase::Failed(why) => Trouble::Failed(why),
                _ => Trouble::Stopping,
            });
        }
        if let Some(trouble) = self.trouble.take() {
            return Poll::Ready(Err(trouble));
        }
        let mut taken = std::mem::take(&mut self.taken);
        let polled = self.events.poll_recv_many(context, &mut taken, AT_ONCE);
        let steps = polled.map(|count| {
            if count == 0 {
                self.fail(self.lost());
            }
            taken.drain(..).filter_map(|(index, event)| self.take(index, event)).collect::<Vec<Step>>()
        });
        self.taken = taken;
        steps.map(|steps| match self.trouble.take_if(|_| steps.is_empty()) {
            Some(trouble) => Err(trouble),
            None => Ok(steps),
        })
    }

    /// Whether every reply has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.lanes.iter().all(|lane| lane.finished)
    }

    fn take(&mut self, index: usize, event: Event) -> Option<Step> {
        let trouble = match event {
            Event::Token(token) => return Some(self.token(index, token)),
            Event::Finished(finished) => match self.finish(index, &finished) {
                Ok(step) => return Some(step),
                Err(trouble) => trouble,
            },
            Event::Refused(why) => Trouble::Refused(why),
            Event::Full { .. } => Trouble::Full,
            Event::Failed(why) => Trouble::Failed(why),
        };
        self.fail(trouble);
        None
    }

    /// What does not finish now never will. The first reason counts.
    fn fail(&mut self, trouble: Trouble) {
        if self.trouble.is_some() {
            return;
        }
        if let Trouble::Failed(why) = &trouble {
            let open = self.lanes.iter().filter(|lane| !lane.finished).count();
            note(format_args!("a request failed with {open} of its replies open: {why}"));
        }
        self.outcome = trouble.outcome();
        self.trouble = Some(trouble);
    }

    /// Why no event will come any more.
    fn lost(&self) -> Trouble {
        match self.overrun.load(Ordering::Acquire) {
            true => Trouble::Slow,
            false => Trouble::Failed("the engine has ended".into()),
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
        Step { index, split, token: Some(token.into()), end: None }
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
        lane.finished = true;
        self.app.metrics.ended(finish_reason, 1);
        if self.is_over() {
            self.app.metrics.duration.observe(self.arrived.elapsed().as_secs_f64());
        }
        Ok(Step { index, split, token: None, end: Some(end) })
    }
}

impl Drop for Choices {
    fn drop(&mut self) {
        let open = self.lanes.iter().filter(|lane| !lane.finished).count();
        self.app.metrics.ended(self.outcome, open as u64);
    }
}

#[cfg(test)]
mod tests {
    use runtime::engine::RoundCounts;

    use super::super::settings::Settings;
    use super::*;

    struct Engine {
        app: Arc<App>,
        sender: Option<mpsc::Sender<(usize, Event)>>,
        overrun: Arc<AtomicBool>,
    }

    impl Engine {
        fn with(replies: usize) -> (Engine, Choices) {
            let app = Arc::new(App::new(Settings::default()));
            let (sender, events) = mpsc::channel(8);
            let overrun = Arc::new(AtomicBool::new(false));
            let thinking = (0..replies).map(|_| Thinking::none());
            let choices = Choices::new(&app, events, overrun.clone(), thinking, Instant::now());
            (Engine { app, sender: Some(sender), overrun }, choices)
        }

        fn tells(&self, index: usize, event: Event) {
            self.sender.as_ref().unwrap().try_send((index, event)).unwrap();
        }

        fn ended(&self, outcome: &str) -> u64 {
            self.app.metrics.replies.with_label_values(&[outcome]).get()
        }
    }

    fn poll(choices: &mut Choices) -> Result<Vec<Step>, Trouble> {
        match choices.poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(polled) => polled,
            Poll::Pending => panic!("there is something to take"),
        }
    }

    fn token(text: &str) -> Event {
        Event::Token(Token { id: 7, text: text.into(), logprob: -1.0, top: Vec::new() })
    }

    fn finished(reason: Reason, completion_tokens: u32) -> Event {
        let (text, rounds) = (String::new(), RoundCounts::default());
        Event::Finished(Finished { reason, text, prompt_tokens: 1, completion_tokens, rounds })
    }

    #[test]
    fn a_reply_that_ends_beside_one_that_fails_is_told_to_its_end() {
        let (engine, mut choices) = Engine::with(3);
        engine.tells(0, token("a"));
        engine.tells(1, Event::Failed("not finite".into()));
        engine.tells(0, finished(Reason::Stop, 1));
        let steps = poll(&mut choices).unwrap();
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[0].split.content, "a");
        assert_eq!(steps[1].end.as_ref().unwrap().finish_reason, "stop");
        assert!(matches!(poll(&mut choices), Err(Trouble::Failed(why)) if why == "not finite"));
        drop(choices);
        assert_eq!(["stop", "failed", "cancelled"].map(|outcome| engine.ended(outcome)), [1, 2, 0]);
    }

    #[test]
    fn an_engine_that_is_gone_is_no_slow_reader() {
        for (overrun, outcome) in [(false, "failed"), (true, "slow")] {
            let (mut engine, mut choices) = Engine::with(1);
            engine.tells(0, token("a"));
            engine.overrun.store(overrun, Ordering::Relaxed);
            engine.sender = None;
            assert_eq!(poll(&mut choices).unwrap().len(), 1);
            let trouble = poll(&mut choices).unwrap_err();
            assert_eq!(trouble.outcome(), outcome, "{trouble:?}");
            drop(choices);
            assert_eq!(engine.ended(outcome), 1);
        }
    }

    #[test]
    fn every_reply_ends_in_one_way() {
        let (engine, mut choices) = Engine::with(2);
        engine.tells(0, finished(Reason::Length, 0));
        poll(&mut choices).unwrap();
        drop(choices);
        assert_eq!(["length", "cancelled"].map(|outcome| engine.ended(outcome)), [1, 1]);

        let (engine, mut choices) = Engine::with(2);
        engine.tells(1, token("a"));
        engine.app.cut.cancel();
        assert!(matches!(poll(&mut choices), Err(Trouble::Stopping)));

        drop(choices);
        assert_eq!(engine.ended("stopped"), 2);

        // A server that is cut since its engine failed says so, though it has not heard it from the engine.
        let (engine, mut choices) = Engine::with(1);
        engine.app.enter(Phase::Failed("the engine is dead".into()));
        engine.app.cut.cancel();
        assert!(matches!(poll(&mut choices), Err(Trouble::Failed(why)) if why == "the engine is dead"));
    }
}
