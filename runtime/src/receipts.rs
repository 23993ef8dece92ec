//! Receipts: runs that prove an equality, with digests that a person can compare.
//!
//! A [`Schedule`] of requests is played twice on an engine, with one thing changed; every logit, id and byte of lane
//! state must be the same. If the model sees, requests of every second schedule show pictures and clips. A schedule that fails is
//! shrunk and printed as a planner scene.

mod pictures;
mod schedule;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use graph::{Digester, Exchange};
use kernels::numerics::ElementType;

pub use schedule::{Life, Planned, Random, Schedule, Trail, play};

use crate::engine::{Class, Engine, EngineOptions, OpenEngine, RoundCounts, open, open_rank};
use crate::error::Error;
use crate::open::{Load, Progress};
use crate::pictures::Sight;
use crate::place::Place;
use crate::ranks::Rank;
use crate::weights::TablePlace;

/// Rows of a piece of a prompt.
const PIECE_ROWS: u32 = 128;

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
    /// Requests in them.
    pub requests: u64,
    /// Those of them that bear pictures or clips.
    pub pictured: u64,
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
        let Receipt { name, cases, requests, pictured, ids, .. } = self;
        write!(
            f,
            "{name:<18} {verdict}: {a:.12} {sign} {b:.12}, {cases} schedules of {requests} requests, "
        )?;
        writeln!(f, "{pictured} with pictures, {ids} ids")?;
        let [a, b] = &self.rounds;
        write!(f, "{:<18} rounds: {a} | {b}", "")?;
        match &self.failure {
            None => Ok(()),
            Some(failure) => write!(f, "\n{failure}"),
        }
    }
}

/// What a check has come to.
#[derive(Debug)]
pub enum Step<'a> {
    /// The model is being opened.
    Opening(Progress),
    /// The whole model is being opened beside a rank's half of it.
    Whole,
    /// Schedules of an equality have been played.
    Played {
        /// The equality.
        name: &'static str,
        /// So many.
        done: u32,
        /// Of so many, and more if these compare nothing.
        least: u32,
    },
    /// An equality has been decided.
    Decided(&'a Receipt),
}

/// Proves graph = eager, crowded = alone and run = run for a model, over random schedules; and with a rank that leads
/// another, two ranks = one: then it opens the whole model too. `told` hears of each step.
///
/// # Errors
/// The model cannot be opened, the device failed, or the other rank did.
pub fn check(
    dir: &Path,
    options: &CheckOptions,
    rank: Option<Rank>,
    told: &mut dyn FnMut(Step<'_>),
) -> Result<Vec<Receipt>, Error> {
    if let (Load::Dummy { .. }, Some(rank)) = (options.load, &rank) {
        let why = "each rank makes the same half, so that two of them have another model than one has";
        let error = Error::Setting(format!("--tp 2 with --load dummy: {why}; convert makes a folder of it"));
        rank.peer.part(Some(&error.to_string()));
        return Err(error);
    }
    let mut stand = Stand::open(dir, options, rank, told)?;
    let names = [
        ("graph = eager", Stand::graph_eager as Compare),
        ("crowded = alone", Stand::crowd_alone),
        ("run = run", Stand::run_run),
    ];
    let two = stand.alone.is_some().then_some(("two ranks = one", Stand::two_one as Compare));
    let receipt = |(name, compare)| {
        let schedules = stand.schedules(options.seed);
        let receipt = stand.receipt(name, options.cases, schedules, compare, told)?;
        told(Step::Decided(&receipt));
        Ok(receipt)
    };
    let receipts: Result<_, Error> = names.into_iter().chain(two).map(receipt).collect();
    stand.engine.part(receipts.as_ref().err().map(Error::to_string).as_deref());
    stand.engine.close();
    receipts
}

/// Proves graph = eager alone: what the demo shows.
///
/// # Errors
/// As [`check`].
pub fn graph_equals_eager(dir: &Path, options: &CheckOptions) -> Result<Receipt, Error> {
    let mut stand = Stand::open(dir, options, None, &mut |_| {})?;
    let schedules = stand.schedules(options.seed);
    stand.receipt("graph = eager", options.cases, schedules, Stand::graph_eager, &mut |_| {})
}

/// What receipts are made with: one engine, since a large model fits a device once.
struct Stand {
    engine: Engine,
    /// An engine with the whole model, if the other one is a rank.
    alone: Option<Engine>,
    vocab: u32,
    /// How the model sees, if pictures are taken.
    sight: Option<Arc<Sight>>,
}

type Compare = fn(&mut Stand, &Schedule) -> Result<[Trail; 2], Error>;

impl Stand {
    fn open(
        dir: &Path,
        options: &CheckOptions,
        rank: Option<Rank>,
        told: &mut dyn FnMut(Step<'_>),
    ) -> Result<Stand, Error> {
        let options = engine_options(options);
        let (OpenEngine { engine, sight, .. }, alone) = match rank {
            None => (open(dir, &options, &mut |progress| told(Step::Opening(progress)))?, None),
            Some(rank) => {
                let mut pair = open_rank(dir, &options, rank, &mut |progress| told(Step::Opening(progress)))?;
                told(Step::Whole);
                match open(dir, &options, &mut |progress| told(Step::Opening(progress))) {
                    Ok(alone) => (pair, Some(alone.engine)),
                    Err(error) => {
                        pair.engine.part(Some(&error.to_string()));
                        pair.engine.close();
                        return Err(error);
                    }
                }
            }
        };
        let vocab = engine.runner().model.config.text_ids() as u32;
        Ok(Stand { engine, alone, vocab, sight })
    }

    /// Schedules from a seed; if pictures are taken, every second one shows some.
    fn schedules(&self, seed: u64) -> impl Iterator<Item = Schedule> + use<> {
        // Two sources: showing pictures draws nothing from the one that texts come from.
        let (mut random, mut shown) = (Random::new(seed), Random::new(!seed));
        let (vocab, sight) = (self.vocab, self.sight.clone());
        (0u64..).map(move |case| {
            let mut schedule = Schedule::random(&mut random, vocab, 6, 160, 12);
            if let Some(sight) = sight.as_deref().filter(|_| case.is_multiple_of(2)) {
                schedule.show(&mut shown, sight, vocab, PIECE_ROWS);
            }
            schedule
        })
    }

    /// Both ranks against the whole model. Each holds a part of the state, so that it is not compared.
    fn two_one(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let alone = self.alone.as_mut().expect("there is a whole model");
        let mut trails = [fresh(&mut self.engine, schedule)?, fresh(alone, schedule)?];
        trails.iter_mut().for_each(Trail::forget_state);
        Ok(trails)
    }

    fn graph_eager(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let graph = fresh(&mut self.engine, schedule)?;
        self.engine.set_graphs(false);
        let eager = fresh(&mut self.engine, schedule);
        self.engine.set_graphs(true);
        let eager = eager?;
        // Of two sides with graphs the receipt would say nothing.
        assert_eq!(eager.rounds.captured + eager.rounds.replayed, 0, "graphs are off: {}", eager.rounds);
        Ok([graph, eager])
    }

    fn run_run(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        Ok([fresh(&mut self.engine, schedule)?, fresh(&mut self.engine, schedule)?])
    }

    /// Each request among the others against the request alone. A request that is called off sees how far it
    /// came by then, which the others decide, so only the common part of it is compared.
    fn crowd_alone(&mut self, schedule: &Schedule) -> Result<[Trail; 2], Error> {
        let mut crowd = fresh(&mut self.engine, schedule)?;
        let mut alone = Trail::default();
        for (index, planned) in schedule.requests.iter().enumerate() {
            let single = Planned { arrive: 0, cancel: None, ..planned.clone() };
            let trail = fresh(&mut self.engine, &Schedule { requests: vec![single] })?;
            alone.rounds.add(&trail.rounds);
            alone.each.extend(trail.each);
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
        least: u32,
        schedules: impl Iterator<Item = Schedule>,
        compare: Compare,
        told: &mut dyn FnMut(Step<'_>),
    ) -> Result<Receipt, Error> {
        let (mut digests, mut rounds) =
            ([Digester::new(), Digester::new()], [RoundCounts::default(), RoundCounts::default()]);
        let (mut failure, mut returns) = (None, 0);
        let (mut cases, mut requests, mut pictured, mut ids) = (0, 0, 0, 0);
        let sees = self.sight.is_some();
        told(Step::Played { name, done: 0, least });
        for schedule in schedules {
            // A receipt over nothing proves nothing: some rounds must be replays, with lanes beside each other, and if the
            // model sees, some of them right behind rounds of pictures.
            let shown = |replayed, returns| replayed > 0 && (returns > 0 || !sees);
            if failure.is_some() || (cases >= least && (shown(rounds[0].replayed, returns) || cases >= 100)) {
                break;
            }
            let trails = compare(self, &schedule)?;
            cases += 1;
            told(Step::Played { name, done: cases, least });
            requests += schedule.requests.len() as u64;
            pictured += schedule.requests.iter().filter(|planned| !planned.media.is_empty()).count() as u64;
            ids += trails[0].lives.iter().map(|life| life.ids.len() as u64).sum::<u64>();
            returns += trails[0].returns;
            for ((digest, rounds), trail) in digests.iter_mut().zip(&mut rounds).zip(&trails) {
                digest.digest(trail.digest());
                rounds.add(&trail.rounds);
            }
            if wrong(&schedule, &trails).is_some() {
                let smallest = schedule.shrink(|smaller| {
                    compare(self, smaller).is_ok_and(|trails| wrong(smaller, &trails).is_some())
                });
                let trails = compare(self, &smallest)?;
                let why = wrong(&smallest, &trails).unwrap_or_else(|| "it did not happen again\n".into());
                failure = Some(format!("{why}{smallest}"));
            }
        }
        let digests = digests.map(|digest| digest.finish());
        if failure.is_none() && rounds[0].replayed == 0 {
            failure = Some(format!("no round of {cases} schedules was a replay: nothing was compared"));
        }
        if failure.is_none() && sees && returns == 0 {
            failure = Some(format!(
                "no replay of {cases} schedules came behind a round of pictures: nothing was compared beside them"
            ));
        }
        let passed = failure.is_none();
        Ok(Receipt { name, passed, cases, requests, pictured, ids, digests, rounds, failure })
    }
}

/// Plays a schedule on an engine that has seen none of its pictures: each is encoded once in a play.
fn fresh(engine: &mut Engine, schedule: &Schedule) -> Result<Trail, Error> {
    engine.forget_pictures();
    play(engine, schedule)
}

/// What is wrong with two trails of a schedule that should be equal, if anything is.
fn wrong(schedule: &Schedule, [a, b]: &[Trail; 2]) -> Option<String> {
    let parted = (a.lives != b.lives).then(|| a.difference(b));
    parted.or_else(|| a.astray(schedule)).or_else(|| b.astray(schedule))
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
        piece_rows: PIECE_ROWS,
        depth: 1,
        trace: true,
        poison: true,
        ..EngineOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use vision::ContentKey;

    use super::*;
    use crate::request::Media;
    use crate::weights::DenseForm;

    const OPTIONS: CheckOptions = CheckOptions {
        place: Place::Host,
        element: ElementType::Bf16,
        load: Load::Checkpoint { dense: DenseForm::Stored },
        table: TablePlace::Device,
        exchange: Exchange::Auto,
        cases: 1,
        seed: 1,
    };

    /// A small model that sees.
    fn sees() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/oracle/checkpoints/base_bf16")
    }

    fn stand() -> Stand {
        Stand::open(&sees(), &OPTIONS, None, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
    }

    fn prove(
        stand: &mut Stand,
        name: &'static str,
        schedules: impl Iterator<Item = Schedule>,
        compare: Compare,
    ) -> Receipt {
        stand.receipt(name, 1, schedules, compare, &mut |_| {}).expect("it runs")
    }

    /// A receipt is told when it is decided, behind its schedules and ahead of those of the next.
    #[test]
    fn what_a_check_has_come_to_is_told_as_it_comes() {
        let mut told = Vec::new();
        let receipts = check(&sees(), &OPTIONS, None, &mut |step| {
            told.push(match step {
                Step::Opening(_) => "opening".to_string(),
                Step::Whole => panic!("there is one rank"),
                Step::Played { name, done, least } => format!("{name}: {done} of {least}"),
                Step::Decided(receipt) => receipt.to_string(),
            });
        });
        told.dedup();
        let mut due = vec!["opening".to_string()];
        for receipt in receipts.expect("it runs") {
            let Receipt { name, cases, .. } = receipt;
            due.extend((0..=cases).map(|done| format!("{name}: {done} of 1")));
            due.push(receipt.to_string());
        }
        assert_eq!(told, due);
    }

    /// Schedules of one request with text and two with pictures of one size.
    fn alike(stand: &Stand) -> impl Iterator<Item = Schedule> + use<> {
        let alike = |schedule: &Schedule| {
            let pictures: Vec<&Media> = schedule.requests.iter().flat_map(|one| &one.media).collect();
            let grids = |[a, b]: [&Media; 2]| a.patches.grid == b.patches.grid && a.key != b.key;
            let texts = schedule.requests.iter().filter(|planned| planned.media.is_empty());
            pictures.array_windows().any(|pair| grids(*pair)) && texts.count() > 0
        };
        stand.schedules(1).filter(alike).map(|mut schedule| {
            for planned in &mut schedule.requests {
                (planned.arrive, planned.cancel, planned.max_tokens) = (0, None, 20);
            }
            schedule
        })
    }

    /// Were the features of a picture found under another one's key, those who come later would get them in a crowd, and
    /// their own alone.
    #[test]
    fn features_of_another_picture_fail_a_receipt() {
        let mut stand = stand();
        let good = alike(&stand);
        let receipt = prove(&mut stand, "crowded = alone", good, Stand::crowd_alone);
        assert!(receipt.passed && receipt.pictured > 1, "{receipt}");
        let mixed = alike(&stand).map(|mut schedule| {
            let media = schedule.requests.iter_mut().flat_map(|planned| &mut planned.media);
            media.for_each(|media| media.key = ContentKey([7; 16]));
            schedule
        });
        let receipt = prove(&mut stand, "crowded = alone", mixed, Stand::crowd_alone);
        let failure = receipt.failure.as_deref().expect("it does not hold");
        // A piece within a prompt leaves no logits: there the state parts first.
        assert!(!receipt.passed && failure.contains("parts at length"), "{failure}");
        let pictures = failure.matches(" image # ").count();
        assert!(pictures == failure.matches("arrive ").count() && pictures < 3, "two are enough:\n{failure}");
        planner::scene::run(failure.split_once('\n').expect("lines").1).expect("a scene");
    }

    /// Of a model that sees a receipt asks for rounds of pictures, and that these are eager and all others are not.
    #[test]
    fn rounds_of_pictures_are_asked_for() {
        let mut stand = stand();
        let mut random = Random::new(1);
        let texts = (0..3).map(|_| Schedule::random(&mut random, stand.vocab, 6, 160, 12));
        let texts: Vec<Schedule> = texts.collect();
        let receipt = prove(&mut stand, "run = run", texts.into_iter(), Stand::run_run);
        let failure = receipt.failure.expect("no picture was shown");
        assert!(
            receipt.rounds[0].replayed > 0 && failure.contains("behind a round of pictures"),
            "{failure}"
        );

        let schedule = alike(&stand).next().expect("there are many");
        let mut trail = fresh(&mut stand.engine, &schedule).expect("it runs");
        assert_eq!((trail.astray(&schedule), trail.returns > 0), (None, true), "{}", trail.rounds);
        let at = |sees: bool| schedule.requests.iter().position(|one| one.media.is_empty() != sees);
        let [picture, text] = [true, false].map(|sees| at(sees).expect("there is one"));
        for (from, to) in [(picture, text), (text, picture)] {
            let was = trail.each[to].clone();
            trail.each[to] = trail.each[from].clone();
            let says = trail.astray(&schedule).expect("it has rounds of the other kind");
            assert!(says.starts_with(&format!("request R{to}, ")), "{says}");
            trail.each[to] = was;
        }
    }
}
