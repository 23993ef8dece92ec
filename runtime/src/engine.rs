//! The engine: plan, book, stage, run, read, settle, tell, on one thread that owns the device.
//!
//! ```text
//! turn:   see ── plan_round(&state) ── book ── stage ── run (replay | capture | eager)
//!         then, for the round before:  read ── settle ── tell
//! ```
//! To see is to queue what fits between two rounds of the encoding of pictures; a request is planned once all of its own
//! are encoded.
//!
//! The next round is staged and queued before this one is read. What one round makes and the next needs is
//! resident on the device, so nothing waits for the host.

mod event;
mod eyes;
mod handle;
mod lockstep;
pub(crate) mod media;
mod metered;
mod options;
mod pictures;
pub(crate) mod sight;
mod stage;
mod stats;
mod trace;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use graph::{Bank, How, Pending};
use kernels::table::{Bias, Kind, Outcome, Sampling};
use planner::{
    Effect, Effects, Ended, LaneOutcome, RequestId, Round, State, Verdict, Wait, plan_round, settle,
};

pub use event::{Event, Finished, Gone, Reason, RoundCounts, Sink, Token};
pub use handle::{EngineThread, Handle, Hold, Ticket};
#[doc(hidden)]
pub use media::PictureFault;
pub use metered::Metered;
pub use options::{Class, EngineOptions, OpenEngine, memory_plan, open, open_opened, open_rank};
pub use sight::Vision;
pub use stats::Stats;
pub use trace::Trace;

use crate::config::VisionConfig;
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes, PagePool};
use crate::model::{Group, Picks, PictureRows, RoundShape};
pub use crate::place::Place;
use crate::ranks::Peer;
use crate::reply::ReplyText;
use crate::request::Submission;
use crate::runner::Runner;
use crate::tokenizer::Tokenizer;
use eyes::Eyes;
use lockstep::agreed;
use media::{Features, Shown};
use pictures::first_picture;
use stage::Stage;

/// The engine. One thread drives it, through [`Engine::turn`] or [`Engine::spawn`].
pub struct Engine {
    options: EngineOptions,
    state: State,
    runner: Runner,
    bank: Bank,
    /// Layout and pages of each cache class.
    classes: Vec<(Arc<LaneLayout>, PagePool)>,
    /// The slabs, by number.
    slabs: Vec<Lanes>,
    stage: Stage,
    tokenizer: Arc<Tokenizer>,
    stop_ids: Vec<u32>,
    live: HashMap<RequestId, Live>,
    flying: VecDeque<Flying>,
    counts: RoundCounts,
    tokens: u64,
    audits_failed: u64,
    slabs_refused: u64,
    /// Requests that nobody listens to any more: called off before the next round.
    gone: Vec<RequestId>,
    /// The other rank, if there is one.
    peer: Option<Peer>,
    /// The tower, if pictures are taken, here or by the rank that leads.
    sees: Option<VisionConfig>,
    /// What encodes them, on the rank that does.
    eyes: Option<Eyes>,
    /// Why nothing more can be asked of it.
    broken: Option<String>,
}

/// A request that waits or runs.
struct Live {
    prompt: Vec<u32>,
    sampling: Sampling,
    biases: Vec<Bias>,
    stop_ids: Vec<u32>,
    reply: ReplyText,
    /// Ids that were read and are not told yet.
    ready: VecDeque<Token>,
    completion_tokens: u32,
    rounds: RoundCounts,
    /// What its pictures mean for its rows, if it has any.
    shown: Option<Shown>,
    /// What the planner knows of it, or will.
    request: planner::Request,
    events: Sink,
}

/// A round that was run and not read.
struct Flying {
    round: Round,
    how: Ran,
    read: Option<Pending<Outcome>>,
}

/// How a round was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// Its graph was replayed.
    Replayed,
    /// It was captured, and then replayed.
    Captured,
    /// Launch by launch, and why.
    Eager(&'static str),
}

impl From<How> for Ran {
    fn from(how: How) -> Ran {
        match how {
            How::Replayed => Ran::Replayed,
            How::Captured => Ran::Captured,
            How::FirstSight => Ran::Eager("first sight"),
            How::CaptureFailed => Ran::Eager("capture failed"),
        }
    }
}

/// What a turn did.
pub enum Turn {
    /// There is nothing to do.
    Idle,
    /// A round was queued, or a part of an encoding; none was read.
    Queued,
    /// A round was read and settled.
    Settled(Box<Settled>),
}

/// A settled round.
pub struct Settled {
    /// The round.
    pub round: Round,
    /// How it was executed.
    pub how: Ran,
    /// What it picked, one per lane; empty for a piece of a prompt that is not the last.
    pub outcomes: Vec<Outcome>,
    /// With [`EngineOptions::trace`]: what it left in each lane.
    pub traces: Vec<Trace>,
}

impl Engine {
    /// Takes a request into the queue. What becomes of it is told through `events`.
    pub fn submit(&mut self, id: RequestId, submission: Submission, events: impl Into<Sink>) {
        if let Err(error) = self.take(id, submission, events.into()) {
            self.fail(&error);
        }
    }

    /// Checks a request, and hands it to the planner, and to the other rank, unless its pictures must be encoded first.
    fn take(&mut self, id: RequestId, mut submission: Submission, mut events: Sink) -> Result<(), Error> {
        if let Some(why) = &self.broken {
            tell(&mut events, Event::Failed(why.clone()));
            return Ok(());
        }
        if self.live.contains_key(&id) {
            tell(
                &mut events,
                Event::Refused(format!("request {} is under way already; give it another number", id.0)),
            );
            return Ok(());
        }
        let vocab = self.runner.model.config.vocab_size;
        let class = submission.class.0 as usize;
        let context = self.options.classes.get(class).map(|class| class.context);
        let checked = submission
            .check(vocab)
            .and_then(|()| context.ok_or_else(|| Error::Setting(format!("there is no cache class {class}"))));
        let checked = checked.and_then(|context| Ok((context, self.shown(&submission)?)));
        let (context, shown) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                tell(&mut events, Event::Refused(error.to_string()));
                return Ok(());
            }
        };
        let prompt = submission.prompt.len() as u32;
        let max_tokens = submission.max_tokens.unwrap_or_else(|| context.saturating_sub(prompt).max(1));
        if u64::from(prompt) + u64::from(max_tokens) > u64::from(context) {
            let why = format!(
                "a prompt of {prompt} ids and {max_tokens} new ones do not fit the context of {context}; \
                 shorten one or raise --context"
            );
            tell(&mut events, Event::Refused(why));
            return Ok(());
        }
        let mut request = planner::Request::text(id, prompt, max_tokens);
        (request.class, request.image_bearing) = (submission.class, shown.is_some());
        if let Some(eyes) = self.eyes.as_ref().filter(|_| shown.is_some()) {
            // Nothing is encoded for a request that cannot run.
            if let Some(why) = self.state.refuses(&request) {
                tell(&mut events, Event::Refused(why.to_string()));
                return Ok(());
            }
            let waiting = (self.state.waiting().len() + eyes.waiting()) as u32;
            if waiting >= self.options.queue {
                tell(&mut events, Event::Full { waiting });
                return Ok(());
            }
        }
        let media = std::mem::take(&mut submission.media);
        let leads = self.peer.as_ref().is_some_and(Peer::leads);
        let told = leads.then(|| {
            // Every rank draws from the same seed.
            submission.sampling.settle_seed();
            Submission { media: media.clone(), ..submission.clone() }
        });
        let own = if submission.ignore_eos { &[][..] } else { &self.stop_ids };
        let live = Live {
            sampling: submission.sampling.to_row(),
            biases: submission.sampling.biases(),
            stop_ids: own.iter().copied().chain(submission.stop_ids).collect(),
            reply: ReplyText::new(self.tokenizer.detokenizer(true), submission.stop),
            prompt: submission.prompt,
            ready: VecDeque::new(),
            completion_tokens: 0,
            rounds: RoundCounts::default(),
            shown,
            request,
            events,
        };
        self.live.insert(id, live);
        match &mut self.eyes {
            Some(eyes) if !media.is_empty() => {
                eyes.line_up(id, media, told);
                Ok(())
            }
            _ if !media.is_empty() => self.attach(id, &media),
            _ => self.arrive(id, told),
        }
    }

    /// Hands a request to the planner, here and on the other rank.
    fn arrive(&mut self, id: RequestId, told: Option<Submission>) -> Result<(), Error> {
        if let Some(submission) = &told {
            self.command(|peer| peer.submit(id, submission))?;
        }
        if let Some(live) = self.live.get(&id) {
            let effects = self.state.arrive(live.request);
            self.tell(effects);
        }
        Ok(())
    }

    /// Calls a request off; nothing happens if it is over.
    pub fn cancel(&mut self, id: RequestId) {
        if self.eyes.as_mut().is_some_and(|eyes| eyes.cancel(id)) {
            // Neither the planner nor the other rank has heard of it.
            self.finish(id, Reason::Cancelled);
            return;
        }
        if let Err(error) = self.command(|peer| peer.cancel(id)) {
            self.fail(&error);
        }
        let effects = self.state.cancel(id);
        self.tell(effects);
    }

    /// Queues the next round, if there is one, and reads the one before it.
    ///
    /// # Errors
    /// The device failed. Nothing more can be done with it: every request was told so, and later ones are too.
    pub fn turn(&mut self) -> Result<Turn, Error> {
        self.take_turn().inspect_err(|error| self.fail(error))
    }

    /// Tells every request, and the other rank, that nothing more will come.
    pub(crate) fn fail(&mut self, error: &Error) {
        let why = error.to_string();
        self.part(Some(&why));
        self.fail_all(&why);
        self.broken.get_or_insert(why);
    }

    fn take_turn(&mut self) -> Result<Turn, Error> {
        // Nobody listens any more: that is a cancel.
        for request in std::mem::take(&mut self.gone) {
            self.cancel(request);
        }
        // What is asked of a broken engine between its turns has nobody else to fail to.
        if let Some(why) = &self.broken {
            return Err(Error::Broken(why.clone()));
        }
        let seen = self.see()?;
        let next = self.stage_next()?;
        let follows = self.peer.as_ref().is_some_and(|peer| !peer.leads());
        if next.is_some() || !self.flying.is_empty() || follows {
            self.in_step(next.as_ref())?;
        }
        if let Some(round) = next {
            let flying = self.run(round)?;
            self.flying.push_back(flying);
            if self.flying.len() < self.options.depth {
                return Ok(Turn::Queued);
            }
        }
        let Some(mut flying) = self.flying.pop_front() else {
            if !seen {
                return Ok(Turn::Idle);
            }
            // With no round to wait for, all steps of an encoding would be queued ahead of whoever comes next.
            self.runner.stream.synchronize()?;
            return Ok(Turn::Queued);
        };
        let outcomes = flying.read.take().map_or(Ok(Vec::new()), |pending| self.runner.take(pending))?;
        let traces = if self.options.trace { self.trace(&flying.round)? } else { Vec::new() };
        let Flying { round, how, .. } = flying;
        self.settle(&round, how, &outcomes)?;
        Ok(Turn::Settled(Box::new(Settled { round, how, outcomes, traces })))
    }

    /// Plans, books and stages the next round: all that comes before its launches. For benches, which end
    /// the round with [`Engine::settle`]; everyone else takes a turn.
    ///
    /// # Errors
    /// The device failed.
    #[doc(hidden)]
    pub fn stage_next(&mut self) -> Result<Option<Round>, Error> {
        let Some(round) = plan_round(&self.state) else { return Ok(None) };
        self.state.book(&round);
        self.stage.round(&round, &self.state, &self.live, &self.slabs, &mut self.runner)?;
        Ok(Some(round))
    }

    /// Makes a round final that left these outcomes, and tells what follows from it.
    ///
    /// # Errors
    /// The device failed.
    #[doc(hidden)]
    pub fn settle(&mut self, round: &Round, how: Ran, outcomes: &[Outcome]) -> Result<(), Error> {
        let outcome = self.judge(round, how, outcomes);
        if let Some(peer) = &mut self.peer {
            peer.settled(outcomes);
        }
        if matches!(round.kind, planner::Kind::Prompt { last: true, .. }) {
            self.prompted(round);
        }
        let effects = settle(&mut self.state, round, &outcome);
        self.tell(effects);
        self.grow()
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        let waiting = self.eyes.as_ref().map_or(0, Eyes::waiting);
        self.state.is_idle() && self.flying.is_empty() && waiting == 0
    }

    /// What the planner knows, for logs and tests.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The graphs.
    pub fn bank(&self) -> &Bank {
        &self.bank
    }

    /// The slabs, by number.
    pub fn slabs(&self) -> &[Lanes] {
        &self.slabs
    }

    /// Staging and execution, for tests.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// The same, to plant faults in.
    #[doc(hidden)]
    pub fn runner_mut(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Lets go of the features of pictures that no request needs: a picture that comes again is encoded again.
    pub(crate) fn forget_pictures(&mut self) {
        if let Some(eyes) = &mut self.eyes {
            eyes.forget();
        }
    }

    /// Whether decode rounds are replayed, from the next round on.
    pub fn set_graphs(&mut self, on: bool) {
        if let Err(error) = self.command(|peer| peer.graphs(on)) {
            self.fail(&error);
        }
        self.state.set_graphs(on);
    }

    /// Tells every request that it will not be finished, and why.
    pub(crate) fn fail_all(&mut self, why: &str) {
        if let Some(eyes) = &mut self.eyes {
            eyes.clear();
        }
        for (_, mut live) in self.live.drain() {
            tell(&mut live.events, Event::Failed(why.to_owned()));
        }
    }

    /// Executes a booked and staged round.
    fn run(&mut self, round: Round) -> Result<Flying, Error> {
        let groups = groups(&round, &self.slabs);
        let shape = shape(&round, &groups);
        let how = match round.verdict {
            Verdict::Graph => {
                let agreed = agreed(&mut self.peer, &self.runner.stream, "a capture");
                self.runner.run(&mut self.bank, &shape, agreed)?.into()
            }
            Verdict::Eager(reason) => {
                if reason == planner::EagerReason::Audit {
                    let emitted = self.runner.emission(&shape)?.digest();
                    let agreed = agreed(&mut self.peer, &self.runner.stream, "an audit");
                    let equal = self.bank.audit(&self.runner.key(&shape), emitted, agreed)?;
                    self.audits_failed += u64::from(!equal);
                }
                match self.pictures(&round) {
                    (rows, _) if rows.is_empty() => self.runner.run_eager(&shape)?,
                    (rows, rooms) => self.runner.run_pictures(&shape, &rows, &rooms)?,
                }
                Ran::Eager(reason_text(reason))
            }
        };
        let read = match round.samples() {
            true => Some(self.runner.read_back(round.lanes.len())?),
            false => None,
        };
        self.counts.count(how);
        Ok(Flying { round, how, read })
    }

    /// What a round's outcomes mean for its lanes: accepted ids, and lanes that end with them.
    fn judge(&mut self, round: &Round, how: Ran, outcomes: &[Outcome]) -> planner::Outcome {
        let mut judged = planner::Outcome::default();
        for (at, rows) in round.lanes.iter().enumerate() {
            let mut lane = LaneOutcome::default();
            let request = self.state.lane(rows.slot).map(|lane| lane.request().id);
            if let Some(live) = request.and_then(|id| self.live.get_mut(&id)) {
                live.rounds.count(how);
                if let Some(outcome) = outcomes.get(at) {
                    lane = live.judge(outcome);
                }
            } else if let Some(outcome) = outcomes.get(at) {
                // The request is over; its row was already under way, and its outcome is dropped.
                lane.accepted.push(outcome.id);
            }
            judged.lanes.push(lane);
        }
        judged
    }

    /// Makes effects known: events to requests, and the end of their records.
    fn tell(&mut self, effects: Effects) {
        for effect in effects {
            match effect {
                Effect::Token { request, .. } => {
                    let Some(live) = self.live.get_mut(&request) else { continue };
                    let Some(token) = live.ready.pop_front() else { continue };
                    self.tokens += 1;
                    live.completion_tokens += 1;
                    if live.events.tell(Event::Token(token)).is_err() {
                        self.gone.push(request);
                    }
                }
                Effect::Finished { request, reason } => self.finish(
                    request,
                    match reason {
                        planner::Reason::Stop => Reason::Stop,
                        planner::Reason::Length => Reason::Length,
                        planner::Reason::Cancelled => Reason::Cancelled,
                    },
                ),
                Effect::Refused { request, why } => self.end(request, Event::Refused(why.to_string())),
                Effect::Full { request, waiting } => self.end(request, Event::Full { waiting }),
                Effect::Failed { request, round, position, .. } => {
                    let why = format!(
                        "the logits at position {position} were not finite in round {round}; \
                         the weights or the device are damaged"
                    );
                    self.end(request, Event::Failed(why));
                }
                Effect::Admitted { .. } | Effect::Freed { .. } => {}
            }
        }
    }

    fn finish(&mut self, request: RequestId, reason: Reason) {
        let Some(mut live) = self.live.remove(&request) else { return };
        let finished = Finished {
            reason,
            text: live.reply.finish(),
            prompt_tokens: live.prompt.len() as u32,
            completion_tokens: live.completion_tokens,
            rounds: live.rounds,
        };
        tell(&mut live.events, Event::Finished(finished));
    }

    fn end(&mut self, request: RequestId, event: Event) {
        if let Some(mut live) = self.live.remove(&request) {
            tell(&mut live.events, event);
        }
    }

    /// Adds a slab when requests wait for a slot and more lanes are allowed.
    fn grow(&mut self) -> Result<(), Error> {
        let Some(Wait::Slots { class, slots: have }) = self.state.wait() else { return Ok(()) };
        let most = u32::from(self.options.classes[class.0 as usize].lanes);
        if have >= most {
            return Ok(());
        }
        let slots = self.options.slab_lanes.min((most - have) as u16);
        let (layout, pool) = self.classes[class.0 as usize].clone();
        let number = self.slabs.len() as u32;
        let lanes = match Lanes::new(&self.runner.device, number, layout, slots.into(), pool) {
            Ok(lanes) => Some(lanes),
            Err(graph::Error::OutOfMemory { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let all = agreed(&mut self.peer, &self.runner.stream, "room for more lanes")(lanes.is_some())?;
        match lanes.filter(|_| all) {
            Some(lanes) => {
                self.slabs.push(lanes);
                self.state.grow(planner::Slab { class, slots }).map_err(|why| Error::Setting(why.to_string()))
            }
            // The lanes there are go on; what waits keeps waiting.
            None => {
                self.slabs_refused += 1;
                self.options.classes[class.0 as usize].lanes = have as u16;
                Ok(())
            }
        }
    }
}

impl Live {
    /// Takes the features of its pictures, or lets go of them.
    fn features(&mut self, features: Vec<Arc<Features>>) {
        if let Some(shown) = &mut self.shown {
            shown.features = features;
        }
    }

    /// What an outcome means for this request.
    fn judge(&mut self, outcome: &Outcome) -> LaneOutcome {
        let mut lane = LaneOutcome::default();
        if outcome.status != 0 {
            lane.ended = Some(Ended::Failed);
            return lane;
        }
        let piece = self.reply.push(outcome.id);
        if piece.stopped || self.stop_ids.contains(&outcome.id) {
            lane.ended = Some(Ended::Stop);
        }
        let tops = outcome.tops as usize;
        let top = outcome.top_ids.iter().copied().zip(outcome.top_logprobs).take(tops).collect();
        self.ready.push_back(Token { id: outcome.id, text: piece.text, logprob: outcome.logprob, top });
        lane.accepted.push(outcome.id);
        lane
    }
}

/// The round's rows by slab.
fn groups<'a>(round: &Round, slabs: &'a [Lanes]) -> Vec<Group<'a>> {
    let group =
        |group: &planner::Group| Group { lanes: &slabs[group.slab as usize], rows: group.rows as usize };
    round.groups.iter().map(group).collect()
}

/// All that the round's launches depend on.
fn shape<'a>(round: &Round, groups: &'a [Group<'a>]) -> RoundShape<'a> {
    let (kind, picks) = match round.kind {
        planner::Kind::Prompt { last: true, .. } => (Kind::Prompt, Picks::Last),
        planner::Kind::Prompt { last: false, .. } => (Kind::Prompt, Picks::None),
        planner::Kind::Decode => (Kind::Decode, Picks::All),
    };
    RoundShape { kind, groups, picks }
}

pub(crate) fn reason_text(reason: planner::EagerReason) -> &'static str {
    match reason {
        planner::EagerReason::PromptPass => "prompt pass",
        planner::EagerReason::ImageBearing => "image-bearing",
        planner::EagerReason::Pocketed => "pocketed",
        planner::EagerReason::GraphsOff => "graphs off",
        planner::EagerReason::Audit => "audit",
    }
}

/// Sends an event to a request whose caller may have gone; then there is nobody to tell.
fn tell(events: &mut Sink, event: Event) {
    let _ = events.tell(event);
}

/// Runs one round of each kind on the first slab of every cache class, and captures its rounds of 1, 2, ...
/// lanes, before any request is taken.
fn warm(engine: &mut Engine) -> Result<(), Error> {
    let picture = if engine.sees.is_some() { Some(first_picture(engine)?) } else { None };
    let (slabs, runner) = (&engine.slabs, &mut engine.runner);
    for lanes in slabs {
        runner.clear_slot(lanes, 0)?;
        for kind in [Kind::Prompt, Kind::Decode] {
            engine.stage.warm(lanes.number, kind, runner)?;
            let groups = [Group { lanes, rows: 1 }];
            let shape = RoundShape { kind, groups: &groups, picks: Picks::All };
            match picture.as_ref().filter(|_| kind == Kind::Prompt) {
                Some(room) => {
                    let rows = [PictureRows { row: 0, rows: 1, features: room.base() }];
                    runner.run_pictures(&shape, &rows, std::slice::from_ref(room))?;
                }
                None => runner.run_eager(&shape)?,
            }
        }
        runner.outcomes(1)?;
        runner.clear_slot(lanes, 0)?;
        let most = lanes.slab.slots().min(planner::GRAPH_ROWS as usize);
        for rows in (1..=most).rev().filter(|_| engine.options.graphs) {
            let groups = [Group { lanes, rows }];
            let shape = RoundShape { kind: Kind::Decode, groups: &groups, picks: Picks::All };
            // A key whose capture fails runs eagerly; the bank counts it.
            runner.prepare(
                &mut engine.bank,
                &shape,
                agreed(&mut engine.peer, &runner.stream, "a capture at start"),
            )?;
        }
    }
    runner.stream.synchronize()?;
    Ok(())
}
