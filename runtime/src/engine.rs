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
pub(crate) mod media;
mod metered;
mod options;
pub(crate) mod sight;
mod stage;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use graph::{Bank, BankCounts, Digest, Digester, Emission, GatherTimes, How, Pending, Stream};
use kernels::table::{Bias, Kind, Outcome, Sampling};
use planner::{
    Effect, Effects, Ended, LaneOutcome, RequestId, Round, State, Verdict, Wait, plan_round, settle,
};
use vision::{CacheCounts, ContentKey};

pub use event::{Event, Finished, Gone, Reason, RoundCounts, Sink, Token};
pub use handle::{EngineThread, Handle, Hold, Ticket};
#[doc(hidden)]
pub use media::PictureFault;
pub use metered::Metered;
pub use options::{Class, EngineOptions, OpenEngine, memory_plan, open, open_opened, open_rank};
pub use sight::Vision;

use crate::bundle::{Bundle, BundleDigest};
use crate::config::VisionConfig;
use crate::error::Error;
use crate::lanes::{LaneLayout, Lanes, PagePool};
use crate::model::{Group, Picks, PictureRows, RoundShape};
pub use crate::place::Place;
use crate::ranks::{self, Order, Peer};
use crate::reply::ReplyText;
use crate::request::{Media, Submission};
use crate::runner::Runner;
use crate::tokenizer::Tokenizer;
use eyes::{Eyes, Next, Ready};
use media::{Features, Shown};
use stage::Stage;

/// What the end of collectives may take.
const END: Duration = Duration::from_secs(5);

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

/// What a round left in one lane: for receipts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The request.
    pub request: RequestId,
    /// Positions after the round.
    pub length: u32,
    /// Digest of the lane's logits; none for a piece of a prompt that is not the last.
    pub logits: Option<Digest>,
    /// Digest of the lane's state, part by part.
    pub state: BundleDigest,
}

/// What an engine has done so far.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Rounds by how they were executed.
    pub rounds: RoundCounts,
    /// The bank's own counts.
    pub bank: BankCounts,
    /// Graphs in the bank, and their bytes.
    pub graphs: usize,
    /// See `graphs`.
    pub graph_bytes: usize,
    /// Ids made.
    pub tokens: u64,
    /// Lanes in use.
    pub lanes: usize,
    /// Requests that wait, those whose pictures are being encoded included.
    pub waiting: usize,
    /// Those alone.
    pub encoding: usize,
    /// Features of pictures: asked for, kept, let go.
    pub pictures: CacheCounts,
    /// Free and all pages, over all classes.
    pub pages_free: u32,
    /// See `pages_free`.
    pub pages_total: u32,
    /// Rounds whose graph was compared with what it would be now, and differed.
    pub audits_failed: u64,
    /// Slabs that more lanes would have needed and the device had no memory for.
    pub slabs_refused: u64,
    /// Why the engine has failed, if it has: every request is told the same.
    pub failed: Option<String>,
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

    /// What the pictures of a request mean for its rows; nothing if it has none.
    fn shown(&self, submission: &Submission) -> Result<Option<Shown>, Error> {
        let (sees, has) = (self.sees.as_ref(), self.runner.model.config.vision.as_ref());
        let most = self.eyes.as_ref().map(Eyes::most);
        let mut shown = Shown::of(&submission.prompt, &submission.media, sees, has, most)?;
        if let (Some(shown), Some(fault)) = (&mut shown, self.options.picture_fault) {
            shown.plant(fault);
        }
        Ok(shown)
    }

    /// Hands a request to the planner, here and on the other rank.
    fn arrive(&mut self, id: RequestId, told: Option<Submission>) -> Result<(), Error> {
        if let (Some(peer), Some(submission)) = (&self.peer, &told) {
            peer.submit(id, submission)?;
        }
        if let Some(live) = self.live.get(&id) {
            let effects = self.state.arrive(live.request);
            self.tell(effects);
        }
        Ok(())
    }

    /// Queues what fits between two rounds of what pictures need, and hands requests whose pictures are encoded to the
    /// planner. Whether anything was done.
    fn see(&mut self) -> Result<bool, Error> {
        let (mut rows, mut seen) = (0, false);
        loop {
            let Some(eyes) = self.eyes.as_mut().filter(|eyes| rows < eyes.stride()) else { return Ok(seen) };
            match eyes.next(&self.runner.device, &self.runner.stream)? {
                Next::Idle => return Ok(seen),
                Next::Queued(step) => rows += step,
                Next::Ready(ready) => self.send(ready)?,
                Next::Lacks(id, why) => self.end(id, Event::Failed(why)),
            }
            seen = true;
        }
    }

    /// Hands a request whose pictures are encoded to the planner, and all of it to the other rank.
    fn send(&mut self, ready: Ready) -> Result<(), Error> {
        let Ready { id, features, submission } = ready;
        let mut sent = Vec::new();
        if let (Some(peer), Some(submission)) = (&self.peer, &submission) {
            peer.submit(id, submission)?;
            for media in
                media::distinct(&submission.media).filter(|media| self.attached(&media.key).is_none())
            {
                let at = submission.media.iter().position(|other| other.key == media.key);
                sent.push(features[at.expect("one of them")].clone());
            }
        }
        if submission.is_some() && !self.has_room(id, true)? {
            return Ok(());
        }
        self.exchange(&sent, Emission::send)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.features(features);
        }
        self.arrive(id, None)
    }

    /// Takes the features of a request from the rank that encoded them.
    fn attach(&mut self, id: RequestId, media: &[Media]) -> Result<(), Error> {
        let Some(tower) = &self.sees else { return Ok(()) };
        let (mut all, mut come, mut here) = (HashMap::new(), Vec::new(), true);
        for media in media::distinct(media) {
            if let Some(features) = self.attached(&media.key) {
                all.insert(media.key, features.clone());
                continue;
            }
            let rows = media::rows_of(media, tower);
            match self.runner.device.arena("picture features", rows * self.row_bytes()) {
                Ok(arena) => {
                    let features = Arc::new(Features { arena, rows });
                    come.push(features.clone());
                    all.insert(media.key, features);
                }
                Err(graph::Error::OutOfMemory { .. }) => here = false,
                Err(error) => return Err(error.into()),
            }
        }
        if !self.has_room(id, here)? {
            return Ok(());
        }
        self.exchange(&come, Emission::receive)?;
        if let Some(live) = self.live.get_mut(&id) {
            live.features(media.iter().map(|media| all[&media.key].clone()).collect());
        }
        self.arrive(id, None)
    }

    /// The features of a picture that a request in the planner needs: both ranks have the same, since requests come
    /// and prompts end in the same order on both.
    fn attached(&self, key: &ContentKey) -> Option<&Arc<Features>> {
        self.live.values().find_map(|live| live.shown.as_ref()?.features_of(key))
    }

    /// Whether every rank has room for the features of a request; it ends if one has not.
    fn has_room(&mut self, id: RequestId, here: bool) -> Result<bool, Error> {
        let what = "room for the features of a picture";
        let there = agreed(&mut self.peer, &self.runner.stream, what)(here)?;
        if !there {
            let why = "one of the ranks has no memory for the features of a picture; try again later, or start with a \
                       smaller --memory";
            self.end(id, Event::Failed(why.into()));
        }
        Ok(there)
    }

    /// Sends features to the other rank, or receives them, in order with rounds.
    fn exchange(&self, features: &[Arc<Features>], way: Way) -> Result<(), Error> {
        let communicator = self.runner.model.communicator.as_ref().filter(|_| !features.is_empty());
        let Some(communicator) = communicator else { return Ok(()) };
        let mut emission = Emission::new();
        for Features { arena, rows } in features.iter().map(|features| &**features) {
            way(&mut emission, communicator, arena.base(), rows * self.row_bytes())?;
        }
        let rooms: Vec<_> = features.iter().map(|features| features.arena.clone()).collect();
        Ok(self.runner.stream.run(emission, &rooms)?)
    }

    /// Bytes of a row of features.
    fn row_bytes(&self) -> usize {
        self.runner.model.config.hidden_size * self.runner.model.element.bytes()
    }

    /// Calls a request off; nothing happens if it is over.
    pub fn cancel(&mut self, id: RequestId) {
        if self.eyes.as_mut().is_some_and(|eyes| eyes.cancel(id)) {
            // Neither the planner nor the other rank has heard of it.
            self.finish(id, Reason::Cancelled);
            return;
        }
        if let Some(Err(error)) = self.peer.as_ref().map(|peer| peer.cancel(id)) {
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
            return Ok(if seen { Turn::Queued } else { Turn::Idle });
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
    pub fn forget_pictures(&mut self) {
        if let Some(eyes) = &mut self.eyes {
            eyes.forget();
        }
    }

    /// Whether decode rounds are replayed, from the next round on.
    pub fn set_graphs(&mut self, on: bool) {
        if let Some(Err(error)) = self.peer.as_ref().map(|peer| peer.graphs(on)) {
            self.fail(&error);
        }
        self.state.set_graphs(on);
    }

    /// Measures gathers of two ranks on CUDA devices, by every means there is; of others there is nothing to measure.
    /// For benches, between rounds.
    ///
    /// # Errors
    /// The device failed, or the other rank is gone.
    pub fn measure_gathers(&self) -> Result<Vec<GatherTimes>, Error> {
        const BYTES: [usize; 5] = [5 << 10, 10 << 10, 20 << 10, 64 << 10, 512 << 10];
        let own =
            self.runner.model.communicator.as_ref().filter(|communicator| communicator.nccl().is_some());
        let Some(communicator) = own else { return Ok(Vec::new()) };
        if let Some(peer) = &self.peer {
            peer.measure()?;
        }
        Ok(communicator.measure(&self.runner.stream, &BYTES)?)
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let pools =
            (0..self.classes.len()).filter_map(|class| self.state.pool(planner::ClassId(class as u8)));
        let (free, total) = pools.fold((0, 0), |sum, pool| (sum.0 + pool.free, sum.1 + pool.total));
        let encoding = self.eyes.as_ref().map_or(0, Eyes::waiting);
        Stats {
            rounds: self.counts.clone(),
            bank: self.bank.counts(),
            graphs: self.bank.len(),
            graph_bytes: self.bank.bytes(),
            tokens: self.tokens,
            lanes: self.state.lanes().count(),
            waiting: self.state.waiting().len() + encoding,
            encoding,
            pictures: self.eyes.as_ref().map(Eyes::counts).unwrap_or_default(),
            pages_free: free,
            pages_total: total,
            audits_failed: self.audits_failed,
            slabs_refused: self.slabs_refused,
            failed: self.broken.clone(),
        }
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
                match self.runner.run(
                    &mut self.bank,
                    &shape,
                    agreed(&mut self.peer, &self.runner.stream, "a capture"),
                )? {
                    How::Replayed => Ran::Replayed,
                    How::Captured => Ran::Captured,
                    How::FirstSight => Ran::Eager("first sight"),
                    How::CaptureFailed => Ran::Eager("capture failed"),
                }
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
        count(&mut self.counts, how);
        Ok(Flying { round, how, read })
    }

    /// Which rows of a round take features, and the memory that these lie in.
    fn pictures(&self, round: &Round) -> (Vec<PictureRows>, Vec<graph::Arena>) {
        let planner::Kind::Prompt { .. } = round.kind else { return Default::default() };
        let lane = &round.lanes[0];
        let request = self.state.lane(lane.slot).map(|lane| lane.request().id);
        let shown = request.and_then(|id| self.live.get(&id)?.shown.as_ref());
        let piece = lane.before as usize..lane.after as usize;
        shown.map_or_else(Default::default, |shown| shown.rows(piece, self.row_bytes()))
    }

    /// Lets go of the features of a prompt that is through.
    fn prompted(&mut self, round: &Round) {
        for rows in &round.lanes {
            let request = self.state.lane(rows.slot).map(|lane| lane.request().id);
            if let Some(live) = request.and_then(|id| self.live.get_mut(&id)) {
                live.features(Vec::new());
            }
        }
    }

    /// What a round's outcomes mean for its lanes: accepted ids, and lanes that end with them.
    fn judge(&mut self, round: &Round, how: Ran, outcomes: &[Outcome]) -> planner::Outcome {
        let mut judged = planner::Outcome::default();
        for (at, rows) in round.lanes.iter().enumerate() {
            let mut lane = LaneOutcome::default();
            let request = self.state.lane(rows.slot).map(|lane| lane.request().id);
            if let Some(live) = request.and_then(|id| self.live.get_mut(&id)) {
                count(&mut live.rounds, how);
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

    /// That the other rank, if there is one, takes this turn too.
    fn in_step(&mut self, round: Option<&Round>) -> Result<(), Error> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        self.runner.stream.progress()?;
        let how = match round.map(|round| (round, round.verdict)) {
            None => ranks::How::Eager("no round".into()),
            Some((_, Verdict::Eager(reason))) => ranks::How::Eager(reason_text(reason).into()),
            Some((round, Verdict::Graph)) => {
                let groups = groups(round, &self.slabs);
                match self.bank.next(&self.runner.key(&shape(round, &groups))) {
                    How::Replayed => ranks::How::Replay,
                    How::Captured => ranks::How::Capture,
                    How::FirstSight => ranks::How::Eager("first sight".into()),
                    How::CaptureFailed => ranks::How::Eager("capture failed".into()),
                }
            }
        };
        peer.turn(round, how)
    }

    /// Follows the leader's orders until it ends.
    ///
    /// # Errors
    /// The leader is gone or has failed, the ranks are no longer in step, or the device failed. The leader was told.
    ///
    /// # Panics
    /// If there is no other rank, or this one leads.
    pub fn follow(mut self) -> Result<(), Error> {
        let followed = self.follow_orders();
        if let Err(error) = &followed {
            self.fail(error);
        }
        self.close();
        followed
    }

    fn follow_orders(&mut self) -> Result<(), Error> {
        loop {
            let peer = self.peer.as_mut().filter(|peer| !peer.leads()).expect("there is a leader");
            match peer.order()? {
                // The caller listens at the leader.
                Order::Submit(id, submission) => self.take(id, submission, Sink::new(|_| Ok(())))?,
                Order::Cancel(id) => self.cancel(id),
                Order::Graphs(on) => self.set_graphs(on),
                Order::Measure => drop(self.measure_gathers()?),
                Order::Turn => {
                    self.take_turn()?;
                    self.runner.stream.progress()?;
                }
                Order::End => return Ok(()),
            }
        }
    }

    /// Tells the other rank, if there is one, that this one ends: in good order, or why not.
    pub(crate) fn part(&mut self, failed: Option<&str>) {
        if let Some(peer) = self.peer.take() {
            peer.part(failed);
        }
        // Whoever still waits in a collective, here or there, waits in vain.
        if let (Some(communicator), Some(why)) = (&self.runner.model.communicator, failed) {
            communicator.stop(why);
        }
    }

    /// Lets go of the device, and ends collectives that have one for themselves: with the other rank, or, if something
    /// failed, by ending what waits for it.
    pub(crate) fn close(self) {
        let Engine { bank, peer, runner, classes, slabs, eyes, live, .. } = self;
        // The other rank waits for this one's end, and the end of collectives for that of graphs.
        drop((bank, peer));
        let own = runner.model.communicator.clone().filter(|communicator| communicator.nccl().is_some());
        if own.is_some_and(|communicator| communicator.close(END).is_err()) {
            // Something runs on that nothing has ended. Memory goes when that ends, or with the process.
            std::mem::forget((runner, classes, slabs, eyes, live));
        }
    }

    /// What the round left in each of its lanes. Only without overlap: nothing later may have run.
    fn trace(&self, round: &Round) -> Result<Vec<Trace>, Error> {
        let vocab = self.runner.model.config.vocab_size;
        let logits = match round.samples() {
            true => self.runner.logits(round.lanes.len())?,
            false => Vec::new(),
        };
        let trace = |(at, rows): (usize, &planner::LaneRows)| {
            let lane = self.state.lane(rows.slot)?;
            let pages: Vec<u32> = lane.pages().iter().map(|page| page.0).collect();
            let lanes = &self.slabs[rows.slot.slab as usize];
            let (slot, length) = (rows.slot.index as usize, rows.after as usize);
            let bundle = Bundle { lanes, slot, pages: &pages, length };
            let logits = logits.get(at * vocab..(at + 1) * vocab);
            let logits = logits.map(|logits| Digester::of(bytemuck::cast_slice(logits)));
            Some(bundle.digest(&self.runner.stream).map(|state| Trace {
                request: lane.request().id,
                length: rows.after,
                logits,
                state,
            }))
        };
        Ok(round.lanes.iter().enumerate().filter_map(trace).collect::<graph::Result<_>>()?)
    }
}

/// Which way features go between ranks.
type Way = fn(&mut Emission, &graph::Communicator, graph::Ptr<u8>, usize) -> graph::Result<()>;

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

fn count(counts: &mut RoundCounts, how: Ran) {
    match how {
        Ran::Replayed => counts.replayed += 1,
        Ran::Captured => counts.captured += 1,
        Ran::Eager(reason) => *counts.eager.entry(reason).or_default() += 1,
    }
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

/// Whether something that succeeded here or not did on every rank.
fn agreed<'a>(
    peer: &'a mut Option<Peer>,
    stream: &'a Stream,
    what: &'a str,
) -> impl FnOnce(bool) -> Result<bool, Error> + 'a {
    move |here| match peer {
        Some(peer) => {
            stream.progress()?;
            peer.agree(what, here)
        }
        None => Ok(here),
    }
}

/// Sends an event to a request whose caller may have gone; then there is nobody to tell.
fn tell(events: &mut Sink, event: Event) {
    let _ = events.tell(event);
}

/// Encodes a picture, and gives its features to the other rank.
fn first_picture(engine: &mut Engine) -> Result<graph::Arena, Error> {
    let arena = engine.runner.device.arena("first picture", engine.row_bytes())?;
    let stream = &engine.runner.stream;
    let way: Way = match (&mut engine.eyes, &engine.sees) {
        (Some(eyes), Some(config)) => {
            eyes.warm(&arena, config.spatial_merge_size as u32, stream)?;
            Emission::send
        }
        _ => Emission::receive,
    };
    engine.exchange(&[Arc::new(Features { arena: arena.clone(), rows: 1 })], way)?;
    Ok(arena)
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
