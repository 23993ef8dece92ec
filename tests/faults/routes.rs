//! What either device is told of a round is a function of the round's key: random schedules over memory that
//! is addresses alone, at the size of a server, with no device and nothing run.
//!
//! A route is taken from the entries of an emission without its digest: for the host the kernel and its element,
//! for CUDA source, symbol, threads and shared memory of the twin; for both grid, argument bytes, copies, fills.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use graph::communicator::Collective;
use graph::host::HostOptions;
use graph::{Communicator, Device, Digest, Emission, Entry, Grid, Key};
use kernels::numerics::ElementType;
use kernels::table::Kind;
use kernels::weight::Order;
use planner::{
    ClassId, Effect, Effects, LaneOutcome, Limits, Outcome, Reason, Request, RequestId, Slab, State,
    plan_round, settle,
};
use runtime::checkpoint::Checkpoint;
use runtime::lanes::{LaneLayout, Lanes, PagePool};
use runtime::model::{Group, Picks, RoundShape};
use runtime::receipts::Random;
use runtime::scratch::RoundLimits;
use runtime::share::Share;
use runtime::weights::{WeightForm, WeightPlan};
use tests::fixture::{Fixture, Size, repository};

use crate::keys::{FAULTS, Round, unsound};

/// Contexts of the cache classes, and pages of their pools.
const CLASSES: [(usize, u32); 3] = [(262_144, 40_000), (32_768, 5_000), (8_192, 300)];
/// Rows of a decode round at most.
const ROUND_ROWS: u32 = 5;
/// Moments at which a request may arrive and a round is planned.
const MOMENTS: u32 = 3000;

#[derive(Clone, Copy, Debug)]
enum Route {
    Host,
    Cuda,
}

/// One thing that a device is told.
#[derive(PartialEq, Eq, Hash)]
enum Told {
    Host {
        kernel: &'static str,
        element: &'static str,
        grid: [u32; 3],
        args: Vec<u8>,
    },
    Cuda {
        source: &'static str,
        symbol: &'static str,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        args: Vec<u8>,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        bytes: usize,
        value: u8,
    },
    Collective {
        communicator: u64,
        what: Collective,
        at: u64,
        bytes: usize,
    },
}

/// What a device on this route is told of an emission.
fn told(route: Route, emission: &Emission) -> Vec<Told> {
    let entry = |entry: &Entry| match *entry {
        Entry::Launch { kernel, grid: Grid(grid), block } => {
            let args = emission.block(kernel, block).to_vec();
            match route {
                Route::Host => Told::Host { kernel: kernel.name, element: kernel.element, grid, args },
                Route::Cuda => {
                    let twin = kernel.twin.unwrap_or_else(|| panic!("{kernel:?} has no twin"));
                    let (source, symbol) = (twin.source.name, twin.symbol);
                    Told::Cuda { source, symbol, grid, block: twin.block, shared: twin.shared_bytes, args }
                }
            }
        }
        Entry::Copy { to, from, bytes } => Told::Copy { to: to.address(), from: from.address(), bytes },
        Entry::Fill { to, bytes, value } => Told::Fill { to: to.address(), bytes, value },
        Entry::Collective { communicator, what, at, bytes } => {
            let communicator = emission.communicator(communicator).epoch();
            Told::Collective { communicator, what, at: at.address(), bytes }
        }
    };
    emission.entries().iter().map(entry).collect()
}

/// A hash of it that has nothing to do with emission digests.
fn hash(told: &[Told]) -> Digest {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, told).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    Digest(half(0) << 64 | half(1))
}

/// A server whose memory is addresses alone.
struct World {
    fixture: Fixture,
    checkpoint: Checkpoint,
    element: ElementType,
    classes: Vec<(Arc<LaneLayout>, PagePool)>,
    slabs: Vec<Lanes>,
    random: Random,
    seen: Vec<Seen>,
    finished: u32,
    cancelled: u32,
}

/// A round that was emitted.
struct Seen {
    what: String,
    key: Key,
    emission: Emission,
}

impl World {
    fn new(dir: &str, element: ElementType) -> World {
        let options = HostOptions { memory_bytes: 1 << 50, virtual_arenas: true, ..HostOptions::default() };
        let device = Device::host(options);
        let dir = repository(dir);
        let size = Size { slots: 1, context: 64, rows: 160 };
        let mut fixture = Fixture::virtual_on(&device, &dir, element, size);
        let limits = fixture.runner.scratch.limits;
        let limits = RoundLimits { decode_rows: ROUND_ROWS as usize, context: CLASSES[0].0, ..limits };
        fixture.runner.reserve(limits).expect("addresses are plenty");
        let config = &fixture.runner.model.config;
        let class = |&(context, pages): &(usize, u32)| {
            let layout = Arc::new(LaneLayout::new(config, element, context));
            let pool = PagePool::new(&device, &layout, pages as usize).expect("addresses are plenty");
            (layout, pool)
        };
        let classes = CLASSES.iter().map(class).collect();
        let checkpoint = Checkpoint::open(&dir).expect("a checkpoint");
        let random = Random::new(11);
        let (slabs, seen) = (Vec::new(), Vec::new());
        World { fixture, checkpoint, element, classes, slabs, random, seen, finished: 0, cancelled: 0 }
    }

    /// A slab of so many slots, numbered after those there are.
    fn slab(&mut self, class: u8, slots: u16) -> Slab {
        let (layout, pool) = self.classes[usize::from(class)].clone();
        let (device, number) = (&self.fixture.runner.device, self.slabs.len() as u32);
        let lanes = Lanes::new(device, number, layout, slots.into(), pool).expect("addresses are plenty");
        self.slabs.push(lanes);
        Slab { class: ClassId(class), slots }
    }

    /// Requests of all lengths and classes arrive, run, are called off and end, over slabs that grow.
    fn play(mut self) -> Vec<Seen> {
        let slabs: Vec<Slab> = (0..3).map(|class| self.slab(class, 2)).collect();
        let limits = Limits {
            context: CLASSES[0].0 as u32,
            piece_rows: 64,
            round_rows: ROUND_ROWS,
            decode_share: 2,
            queue: 100,
            audit: 0,
            graphs: true,
            pages: CLASSES.iter().map(|class| class.1).collect(),
        };
        let mut state = State::new(limits, &slabs).expect("limits that work");
        for moment in 0..MOMENTS {
            if self.random.below(4) == 0 || state.is_idle() {
                let class = ClassId(self.random.below(3) as u8);
                let longest = [1, 5, 70, 150][self.random.below(4) as usize];
                let (prompt, most) = (1 + self.random.below(longest), 1 + self.random.below(40));
                self.hear(
                    state.arrive(Request { class, ..Request::text(RequestId(moment.into()), prompt, most) }),
                );
            }
            if self.random.below(12) == 0 {
                let id = RequestId(moment.saturating_sub(self.random.below(40)).into());
                self.hear(state.cancel(id));
            }
            if moment % 200 == 199 && self.slabs.len() < 6 {
                let class = self.random.below(3) as u8;
                let slab = self.slab(class, 2);
                state.grow(slab).expect("growth that works");
            }
            match moment {
                300 => self.larger_buffers(),
                700 => self.load_again(),
                // Of a rank whose weights these could be: nothing of it runs.
                1500 => self.fixture.runner.model.share = Share::new(0, 2).expect("a rank of two"),
                2000 | 2500 => {
                    let [communicator, _] = Communicator::pair(Duration::ZERO);
                    self.fixture.runner.model.communicator = Some(communicator);
                }
                _ => {}
            }
            let Some(round) = plan_round(&state) else { continue };
            state.book(&round);
            self.emit(&round);
            let accepted = std::iter::repeat_n(1, round.samples().into()).collect();
            let answer = LaneOutcome { accepted, ended: None };
            let outcome = Outcome { lanes: round.lanes.iter().map(|_| answer.clone()).collect() };
            self.hear(settle(&mut state, &round, &outcome));
        }
        assert!(self.finished > 40 && self.cancelled > 10, "{} and {}", self.finished, self.cancelled);
        self.seen
    }

    fn hear(&mut self, effects: Effects) {
        for effect in effects {
            match effect {
                Effect::Finished { reason: Reason::Cancelled, .. } => self.cancelled += 1,
                Effect::Finished { .. } => self.finished += 1,
                _ => {}
            }
        }
    }

    /// Emits a round as planned; and where it has several slabs in another order, which no planner asks for.
    fn emit(&mut self, round: &planner::Round) {
        let (kind, picks) = match round.kind {
            planner::Kind::Prompt { last: true, .. } => (Kind::Prompt, Picks::Last),
            planner::Kind::Prompt { last: false, .. } => (Kind::Prompt, Picks::None),
            planner::Kind::Decode => (Kind::Decode, Picks::All),
        };
        let group = |group: &planner::Group| Group {
            lanes: &self.slabs[usize::from(group.slab)],
            rows: group.rows as usize,
        };
        let mut groups: Vec<Group<'_>> = round.groups.iter().map(group).collect();
        for turned in [false, true] {
            if turned && groups.len() == 1 {
                break;
            }
            let shape = RoundShape { kind, groups: &groups, picks };
            let runner = &self.fixture.runner;
            self.seen.push(Seen {
                what: format!("{round}{}", if turned { ", its slabs turned" } else { "" }),
                key: runner.key(&shape),
                emission: runner.emission(&shape).expect("legal launches"),
            });
            groups.rotate_left(1);
        }
    }

    fn larger_buffers(&mut self) {
        let runner = &mut self.fixture.runner;
        let limits = runner.scratch.limits;
        runner.reserve(RoundLimits { rows: limits.rows + 64, ..limits }).expect("addresses are plenty");
    }

    fn load_again(&mut self) {
        let runner = &mut self.fixture.runner;
        let form = WeightForm::new(self.element, Order::Rows);
        let plan = WeightPlan::new(&self.checkpoint, form).expect("a plan");
        let loaded = plan.allocate(&self.checkpoint, &runner.device).expect("addresses are plenty");
        (runner.weights, runner.model.weights) = (loaded.memory, loaded.weights);
    }
}

#[test]
fn equal_keys_tell_a_device_the_same_on_both_routes() {
    for (dir, element, routes) in [
        ("tests/oracle/checkpoints/base_bf16", ElementType::Bf16, &[Route::Host, Route::Cuda][..]),
        ("tests/oracle/checkpoints/ratio2_oddheads", ElementType::Bf16, &[Route::Host, Route::Cuda]),
        ("tests/oracle/checkpoints/base_bf16", ElementType::F32, &[Route::Host]),
    ] {
        let seen = World::new(dir, element).play();
        for route in routes {
            let on_route = |seen: &Seen| Round {
                what: format!("{route:?}: {}", seen.what),
                key: seen.key.clone(),
                emission: hash(&told(*route, &seen.emission)),
            };
            let rounds: Vec<Round> = seen.iter().map(on_route).collect();
            if let Some([a, b]) = unsound(&rounds, |_| ()) {
                panic!("equal keys ({}) tell a device different things:\n{}\n{}", a.key, a.what, b.what);
            }
            for (field, fault) in FAULTS {
                let found = unsound(&rounds, fault);
                assert!(found.is_some(), "{route:?} of {dir}: nothing needs {field} in the key");
            }
            // The audit compares digests: they say the same as the lists that they stand for.
            let mut digests = HashMap::new();
            let mut lists = HashMap::new();
            for (seen, round) in seen.iter().zip(&rounds) {
                let digest = seen.emission.digest();
                assert_eq!(
                    *digests.entry(digest).or_insert(round.emission),
                    round.emission,
                    "{}",
                    round.what
                );
                assert_eq!(*lists.entry(round.emission).or_insert(digest), digest, "{}", round.what);
            }
        }
        // Keys came again: from other lanes, in other orders, at other lengths.
        let keys: HashSet<&Key> = seen.iter().map(|seen| &seen.key).collect();
        assert!(keys.len() > 100 && seen.len() > 4 * keys.len(), "{} of {} rounds", keys.len(), seen.len());
        let slabs = seen.iter().map(|seen| seen.key.buffers.len()).max();
        assert!(slabs >= Some(3), "{slabs:?} slabs in a round");
    }
}
