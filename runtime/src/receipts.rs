//! Receipts: runs that prove an equality, with digests that a person can compare.
//!
//! A [`Schedule`] of requests is played twice on an engine, with one thing changed; every logit, id and byte of lane
//! state must be the same. A schedule that fails is shrunk and printed as a planner scene.

mod schedule;

use std::fmt;
use std::path::Path;

use graph::{Digester, Exchange};
use kernels::numerics::ElementType;

pub use schedule::{Life, Planned, Random, Schedule, Trail, play};

use crate::engine::{Class, Engine, EngineOptions, RoundCounts, open, open_rank};
use crate::error::Error;
use crate::open::{Load, Progress};
use crate::place::Place;
use crate::ranks::Rank;
use crate::weights::TablePlace;

/// What to prove, and over how much.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// The device.
    pub place: Place,
    /// Element type.
    pub element: ElementType,
    /// Where the weights come from.
    pub load: Load,
    /// Where the n-gram tables live.
    pub table: TablePlace,
    /// What carries the gathers of two ranks.
    pub exchange: Exchange,
    /// Random schedules per equality.
    pub cases: u32,
    /// Seed of the schedules.
    pub seed: u64,
}

/// The result of one equality.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// The equality.
    pub name: &'static str,
    /// Whether it held.
    pub passed: bool,
    /// Schedules played.
    pub cases: u32,
    /// Ids made on either side.
    pub ids: u64,
    /// Digests of everything seen on either side.
    pub digests: [graph::Digest; 2],
    /// How the rounds of either side were executed.
    pub rounds: [RoundCounts; 2],
    /// The smallest failing schedule, and what differed.
    pub failure: Option<String>,
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.digests;
        let (sign, verdict) = if self.passed { ("=", "ok") } else { ("!", "FAILED") };
        let Receipt { name, cases, ids, .. } = self;
        writeln!(f, "{name:<18} {verdict}: {a:.12} {sign} {b:.12}, {cases} schedules, {ids} ids")?;
        let [a, b] = &self.rounds;
        write!(f, "{:<18} rounds: {a} | {b}", "")?;
        match &self.failure {
            None => Ok(()),
            Some(failure) => write!(f, "\n{failure}"),
        }
    }
}

/// Proves graph = eager, crowded = alone and run = run for a model, over random schedules; and with a rank that leads
/// another, two ranks = one: then it opens the whole model too.
///
/// # Errors
/// The model cannot be opened, the device failed, or the other rank did.
pub fn check(dir: &Path, options: &CheckOptions, rank: Option<Rank>) -> Result<Vec<Receipt>, Error> {
    if let (Load::Dummy { .. }, Some(rank)) = (options.load, &rank) {
        let why = "each rank makes the same half, so that two of them have another model than one has";
        let error = Error::Setting(format!("--tp 2 with --load dummy: {why}; convert makes a folder of it"));
        rank.peer.part(Some(&error.to_string()));
        return Err(error);
    }
    let mut stand = Stand::open(dir, options, rank)?;
    let names = [
        ("graph = eager", Stand::graph_eager as Compare),
        ("crowded = alone", Stand::crowd_alone),
        ("run = run", Stand::run_run),
    ];
    let two = stand.alone.is_some().then_some(("two ranks = one", Stand::two_one as Compare));
    let receipts: Result<_, Error> =
        names.into_iter().chain(two).map(|(name, compare)| stand.receipt(name, options, compare)).collect();
    stand.engine.part(receipts.as_ref().err().map(Error::to_string).as_deref());
    stand.engine.close();
    receipts
}

/// Proves graph = eager alone: what the demo shows.
///
/// # Errors
/// As [`check`].
pub fn graph_equals_eager(dir: &Path, options: &CheckOptions) -> Result<Receipt, Error> {
    Stand::open(dir, options, None)?.receipt("graph = eager", options, Stand::graph_eager)
}

/// What receipts are made with: one engine, since a large model fits a device once.
struct Stand {
    engine: Engine,
    /// An engine with the whole model, if the other one is a rank.
    alone: Option<Engine>,
    vocab: u32,
}

type Compare = fn(&mut Stand, &Schedule) -> Result<[Trail; 2], Error>;

impl Stand {
    fn open(dir: &Path, options: &CheckOptions, rank: Option<Rank>) -> Result<Stand, Error> {
        let (options, mut told) = (engine_options(options), |_: Progress| {});
        let (engine, alone) = match rank {
            None => (open(dir, &options, &mut told)?.engine, None),
            Some(rank) => {
                let pair = open_rank(dir, &options, rank, &mut told)?.engine;
                (pair, Some(open(dir, &options, &mut told)?.engine))
            }
        };
        let vocab = engine.runner().model.config.text_ids() as u32;
        Ok(Stand { engine, alone, vocab })
    }

    /// Both ranks against the whole model. Each holds a part of the state, so that it is not compared.
    fn two_one(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let alone = self.alone.as_mut().expect("there is a whole model");
        let mut trails = [play(&mut self.engine, schedule)?, play(alone, schedule)?];
        trails.iter_mut().for_each(Trail::forget_state);
        Ok(trails)
    }

    fn graph_eager(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let graph = play(&mut self.engine, schedule)?;
        self.engine.set_graphs(false);
        let eager = play(&mut self.engine, schedule);
        self.engine.set_graphs(true);
        let eager = eager?;
        // Of two sides with graphs the receipt would say nothing.
        assert_eq!(eager.rounds.captured + eager.rounds.replayed, 0, "graphs are off: {}", eager.rounds);
        Ok([graph, eager])
    }

    fn run_run(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        Ok([play(&mut self.engine, schedule)?, play(&mut self.engine, schedule)?])
    }

    /// Each request among the others against the request alone. A request that is called off sees how far it
    /// came by then, which the others decide, so only the common part of it is compared.
    fn crowd_alone(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let mut crowd = play(&mut self.engine, schedule)?;
        let mut alone = Trail::default();
        for (index, planned) in schedule.requests.iter().enumerate() {
            let single = Planned { arrive: 0, cancel: None, ..planned.clone() };
            let trail = play(&mut self.engine, &Schedule { requests: vec![single] })?;
            alone.rounds.add(&trail.rounds);
            let mut life = trail.lives.into_iter().next().unwrap_or_default();
            if planned.cancel.is_some() {
                crowd.lives[index].keep_common(&mut life);
            }
            alone.lives.push(life);
        }
        Ok([crowd, alone])
    }

    fn receipt(
        &mut self,
        name: &'static str,
        options: &CheckOptions,
        compare: Compare,
    ) -> Result<Receipt, Error> {
        let mut random = Random::new(options.seed);
        let (mut digests, mut rounds, mut ids) =
            ([Digester::new(), Digester::new()], [RoundCounts::default(), RoundCounts::default()], 0);
        let mut failure = None;
        let mut cases = 0;
        // A receipt over nothing proves nothing: some rounds must be replays, with lanes beside each other.
        while failure.is_none() && (cases < options.cases || (rounds[0].replayed == 0 && cases < 100)) {
            let schedule = Schedule::random(&mut random, self.vocab, 6, 160, 12);
            let trails = compare(self, &schedule)?;
            cases += 1;
            ids += trails[0].lives.iter().map(|life| life.ids.len() as u64).sum::<u64>();
            for ((digest, rounds), trail) in digests.iter_mut().zip(&mut rounds).zip(&trails) {
                digest.digest(trail.digest());
                rounds.add(&trail.rounds);
            }
            if trails[0].lives != trails[1].lives {
                let smallest = schedule.shrink(|smaller| {
                    compare(self, smaller).is_ok_and(|trails| trails[0].lives != trails[1].lives)
                });
                let [a, b] = compare(self, &smallest)?;
                failure = Some(format!("{}{smallest}", a.difference(&b)));
            }
        }
        let digests = digests.map(|digest| digest.finish());
        if failure.is_none() && rounds[0].replayed == 0 {
            failure = Some(format!("no round of {cases} schedules was a replay: nothing was compared"));
        }
        Ok(Receipt { name, passed: failure.is_none(), cases, ids, digests, rounds, failure })
    }
}

/// Engine settings for receipts: no overlap, so that what a round left can be looked at.
pub fn engine_options(options: &CheckOptions) -> EngineOptions {
    EngineOptions {
        place: options.place,
        element: options.element,
        load: options.load,
        table: options.table,
        exchange: options.exchange,
        classes: vec![Class { context: 0, lanes: 8, pages: 0 }],
        slab_lanes: 8,
        piece_rows: 128,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}
