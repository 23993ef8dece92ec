//! An engine with lanes of any context, and clocks around its rounds.

use std::time::Instant;

use crossbeam_channel::Receiver;
use graph::{Arena, Device, Emission, Entry, Exec, Recording};
use kernels::table::{Kind, PAGE, PromptRow, Row, Sampling};
use planner::{RequestId, SlotId};

use super::bytes::{RoundBytes, expected_distinct};
use super::kernels::{KernelRow, KernelTable, bytes_of, is_kind, kinds, of_kind};
use super::moves::Seen;
use super::report::{Bandwidth, PromptLine, RoundLine};
use super::{BenchOptions, SEATING, WARM, bandwidth};
use crate::bundle::Bundle;
use crate::config::ModelConfig;
use crate::engine::{Engine, Event, Metered};
use crate::error::Error;
use crate::lanes::Lanes;
use crate::model::{Group, Picks, RoundShape};
use crate::request::Submission;
use crate::runner::StagedTable;
use crate::weights::{self, StoredAs};

/// Graphs that are captured to see what one takes.
const CAPTURES: usize = 8;
/// Times that a measurement is repeated; its median counts.
pub(super) const TAKES: usize = 5;
/// Most nodes of a graph of repeated launches.
const MOST_NODES: usize = 4096;

/// An engine under measurement.
pub(super) struct Rig<'o> {
    engine: Engine,
    options: &'o BenchOptions,
    full_layers: usize,
    next: u64,
}

/// Lanes that decode, and keep their seats.
pub(super) struct Crowd {
    requests: Vec<RequestId>,
    /// Where their events go: a request whose caller is gone is called off.
    _told: Vec<Receiver<Event>>,
    slots: Vec<SlotId>,
}

/// A run of rounds in the engine's loop.
pub(super) struct Played {
    /// The median time from one round's outcomes to the next one's.
    pub(super) round: f64,
    /// The median of the host's own time.
    pub(super) host: f64,
}

impl<'o> Rig<'o> {
    pub(super) fn new(
        engine: Engine,
        options: &'o BenchOptions,
        full_layers: usize,
    ) -> Result<Rig<'o>, Error> {
        let rig = Rig { engine, options, full_layers, next: 0 };
        // Pages hold made values: any context looks at numbers.
        let pages = rig.lanes().pool.arena.clone();
        if pages.bytes() > 0 {
            let mut emission = Emission::new();
            let (to, bytes) = (pages.base(), pages.bytes());
            weights::fill(&mut emission, options.element, to, bytes, 7, 1.0)?;
            let stream = &rig.engine.runner().stream;
            stream.run(emission, std::slice::from_ref(&pages))?;
            stream.synchronize()?;
        }
        Ok(rig)
    }

    /// What memory delivers.
    pub(super) fn bandwidth(&self) -> Result<Bandwidth, Error> {
        bandwidth::measure(self.engine.runner())
    }

    /// Seats lanes that decode and have long to go.
    pub(super) fn seat(&mut self, rows: usize) -> Result<Crowd, Error> {
        let mut crowd = Crowd { requests: Vec::new(), _told: Vec::new(), slots: Vec::new() };
        for _ in 0..rows {
            let id = self.token();
            let tokens = self.options.steps();
            let submission =
                Submission { max_tokens: Some(tokens as u32), ignore_eos: true, ..Submission::new(vec![id]) };
            self.submit(submission, &mut crowd);
        }
        let decoding = |engine: &Engine| engine.state().lanes().filter(|lane| lane.told() > 0).count();
        self.engine.set_graphs(false);
        for _ in 0..SEATING * rows {
            if decoding(&self.engine) == rows {
                break;
            }
            self.engine.metered_turn()?;
        }
        self.whole(&crowd)?;
        let seated = decoding(&self.engine);
        if seated < rows {
            return Err(Error::Setting(format!(
                "{seated} of {rows} lanes found pages for {} positions; raise --memory or leave it out",
                self.options.steps()
            )));
        }
        // The last table that is staged is one of all lanes.
        self.play(false, 1)?;
        self.whole(&crowd)?;
        crowd.slots = self.engine.state().lanes().map(|lane| lane.slot()).collect();
        Ok(crowd)
    }

    /// Takes the lanes off their seats.
    pub(super) fn leave(&mut self, crowd: Crowd) -> Result<(), Error> {
        crowd.requests.iter().for_each(|&request| self.engine.cancel(request));
        self.finish()
    }

    /// Measures decode rounds of a crowd that sees `context` positions.
    pub(super) fn round(
        &mut self,
        crowd: &Crowd,
        context: usize,
        bandwidth: &Bandwidth,
    ) -> Result<RoundLine, Error> {
        let rows = crowd.slots.len();
        self.pretend(&crowd.slots, context)?;
        let eager = self.play(false, self.options.rounds.min(64))?;
        self.pretend(&crowd.slots, context)?;
        let graph = self.play(true, self.options.rounds)?;
        self.whole(crowd)?;

        self.pretend(&crowd.slots, context)?;
        let distinct = self.distinct(rows)?;
        self.pretend(&crowd.slots, context)?;
        let runner = self.engine.runner();
        let groups = [Group { lanes: self.lanes(), rows }];
        let shape = decode(&groups);
        let free = runner.device.free_bytes();
        let execs = (0..CAPTURES).map(|_| runner.capture(&shape)).collect::<graph::Result<Vec<Exec>>>()?;
        let graph_bytes = free.saturating_sub(runner.device.free_bytes()) / CAPTURES;
        let made = |part: fn(&Exec) -> f64| 1e3 * median(execs.iter().map(part).collect());
        let (capture_ms, instantiate_ms, upload_ms) = (
            made(|exec| exec.times().capture.as_secs_f64()),
            made(|exec| exec.times().instantiate.as_secs_f64()),
            made(|exec| exec.times().upload.as_secs_f64()),
        );
        let exec = &execs[0];
        self.replays(exec, 2)?;
        let launch_us = 1e6 * self.launches(exec)?;
        self.pretend(&crowd.slots, context)?;
        let takes = (0..TAKES).map(|_| self.replays(exec, (self.options.rounds / TAKES).max(1)));
        let device = median(takes.collect::<Result<Vec<f64>, Error>>()?);

        self.pretend(&crowd.slots, context)?;
        let fixed = self.outside_layers(&runner.emission(&shape)?)?;
        let (config, layers) = (&runner.model.config, self.layers());
        let (element, stored) = (runner.model.element, StoredAs::of(&runner.model.weights));
        let bytes = RoundBytes::new(config, runner.model.share, element, stored, rows, context + 1, distinct);
        Ok(RoundLine {
            rows,
            context,
            graph_ms: 1e3 * graph.round,
            eager_ms: 1e3 * eager.round,
            device_ms: 1e3 * device,
            host_us: 1e6 * graph.host,
            eager_host_us: 1e6 * eager.host,
            nodes: exec.nodes(),
            distinct,
            expected: expected_distinct(config, rows),
            floor_ms: 1e3 * bytes.total() / bandwidth.per_second,
            bytes,
            of_first: 1.0,
            capture_ms,
            instantiate_ms,
            upload_ms,
            launch_us,
            graph_bytes,
            fixed_ms: 1e3 * (fixed[0] + fixed[1]),
            full_ms: 1e3 * scaled(device, fixed[0] + fixed[1], layers),
            layers,
        })
    }

    /// Measures a prompt from its arrival to its first token; the second time counts.
    pub(super) fn prompt(&mut self) -> Result<PromptLine, Error> {
        let (tokens, piece_rows) = (self.options.prompt, self.options.piece_rows as usize);
        let mut seconds = 0.0;
        for _ in 0..2 {
            let prompt = (0..tokens).map(|_| self.token()).collect();
            let submission = Submission { max_tokens: Some(1), ..Submission::new(prompt) };
            let mut crowd = Crowd { requests: Vec::new(), _told: Vec::new(), slots: Vec::new() };
            let start = Instant::now();
            self.submit(submission, &mut crowd);
            self.finish()?;
            seconds = start.elapsed().as_secs_f64();
            self.whole(&crowd)?;
        }
        let rows = piece_rows.min(tokens);
        self.stage_prompt(rows, 0)?;
        let groups = [Group { lanes: self.lanes(), rows }];
        let emission = self.engine.runner().emission(&last_piece(&groups))?;
        self.engine.runner().run_eager(&last_piece(&groups))?;
        let [before, after] = self.outside_layers(&emission)?;
        let fixed = before * tokens.div_ceil(piece_rows) as f64 + after;
        let layers = self.layers();
        Ok(PromptLine {
            tokens,
            piece_rows,
            seconds,
            fixed_seconds: fixed,
            full_seconds: scaled(seconds, fixed, layers),
            layers,
        })
    }

    /// The kernels of a decode round.
    pub(super) fn decode_kernels(&mut self, crowd: &Crowd, context: usize) -> Result<KernelTable, Error> {
        let rows = crowd.slots.len();
        let groups = [Group { lanes: self.lanes(), rows }];
        let seen =
            Seen { config: self.config(), lanes: rows, visible: context + 1, distinct: 0, prompt: false };
        let table =
            KernelTable { kind: "decode", rows, context, distinct: 0, kernels: Vec::new(), device_ms: 0.0 };
        self.kernels(table, &decode(&groups), &seen, || self.pretend(&crowd.slots, context))
    }

    /// The kernels of a prompt's last piece, in the middle of whose positions it lies.
    pub(super) fn prompt_kernels(&mut self) -> Result<KernelTable, Error> {
        let rows = (self.options.piece_rows as usize).min(self.options.prompt);
        let context = (self.options.prompt - rows) / 2 / PAGE * PAGE;
        self.stage_prompt(rows, context)?;
        let groups = [Group { lanes: self.lanes(), rows }];
        let visible = context + rows;
        let seen = Seen { config: self.config(), lanes: 1, visible, distinct: 0, prompt: true };
        let table =
            KernelTable { kind: "prompt", rows, context, distinct: 0, kernels: Vec::new(), device_ms: 0.0 };
        self.kernels(table, &last_piece(&groups), &seen, || {
            self.pretend(&[SlotId { slab: 0, index: 0 }], context)
        })
    }

    /// Measures each kind of kernel of a round whose table is staged. `pretend` puts the lanes back where they were.
    fn kernels(
        &self,
        mut table: KernelTable,
        shape: &RoundShape<'_>,
        seen: &Seen<'_>,
        pretend: impl Fn() -> Result<(), Error>,
    ) -> Result<KernelTable, Error> {
        let runner = self.engine.runner();
        let fresh = || -> Result<(), Error> {
            pretend()?;
            runner.run_eager(shape)?;
            Ok(runner.stream.synchronize()?)
        };
        fresh()?;
        table.distinct = count_distinct(&self.chosen(table.rows)?);
        let seen = Seen { distinct: table.distinct, ..*seen };
        let emission = runner.emission(shape)?;
        // Lanes stand still: what is left out must not be missed at the next position.
        let still = emission.pick(|_, entry| !is_kind(entry, "advance"));
        let whole = self.repeated(&still)?;
        for name in kinds(&emission) {
            // A kernel reads what the last round left, not what the repetitions of another one did.
            fresh()?;
            let list = of_kind(&emission, name);
            let launches = list.len();
            let seconds = self.repeated(&list)? / launches as f64;
            fresh()?;
            // On the host device a launch has nothing to overlap with, and one that misses its input is a fault.
            let in_place = match (name, &runner.device) {
                ("advance", _) | (_, Device::Host(_)) => seconds * launches as f64,
                _ => whole - self.repeated(&still.pick(|_, entry| !is_kind(entry, name)))?,
            };
            table.kernels.push(KernelRow {
                name,
                launches,
                seconds,
                in_place: in_place / launches as f64,
                bytes: bytes_of(&list, runner.model.element, &seen) / launches as f64,
            });
        }
        let exec = runner.capture(shape)?;
        let mut takes = Vec::new();
        for _ in 0..TAKES {
            pretend()?;
            takes.push(self.replays(&exec, if seen.prompt { 1 } else { 4 })?);
        }
        table.device_ms = 1e3 * median(takes);
        fresh()?;
        Ok(table)
    }

    /// Seconds of a list of launches, repeated in one graph for long enough to be measured.
    fn repeated(&self, list: &Emission) -> Result<f64, Error> {
        let once = self.record(list, 1, &[])?;
        self.replays(&once, 1)?;
        let seconds = self.replays(&once, 1)?;
        let enough = match self.engine.runner().device {
            Device::Host(_) => 0.001,
            Device::Cuda(_) => 0.010,
        };
        let most = (MOST_NODES / list.len()).max(1);
        let times = ((enough / seconds.max(1e-9)).ceil() as usize).clamp(1, most);
        let exec = self.record(list, times, &[])?;
        self.replays(&exec, 1)?;
        let takes = (0..TAKES).map(|_| self.replays(&exec, 1)).collect::<Result<Vec<f64>, Error>>()?;
        Ok(median(takes) / times as f64)
    }

    /// Seconds of what an emission does before its layers, and after them.
    fn outside_layers(&self, emission: &Emission) -> Result<[f64; 2], Error> {
        let named = |entry: &Entry, wanted: &str| matches!(entry, Entry::Launch { kernel, .. } if kernel.name.starts_with(wanted));
        let entries = emission.entries();
        let first = entries.iter().position(|entry| named(entry, "embed"));
        let mut sums = ["experts_down", "experts_sum"].into_iter();
        let last = sums.find_map(|sum| entries.iter().rposition(|entry| named(entry, sum)));
        let (first, last) = first.zip(last).expect("a round embeds its rows, and has a layer at least");
        let before = self.repeated(&emission.pick(|at, _| at <= first))?;
        let after = self.repeated(&emission.pick(|at, _| at > last))?;
        Ok([before, after])
    }

    /// Runs rounds in the engine's loop, two under way.
    fn play(&mut self, graph: bool, rounds: usize) -> Result<Played, Error> {
        self.engine.set_graphs(graph);
        let mut warm = 0;
        while warm < WARM {
            warm += usize::from(self.step()?.is_some());
        }
        let (mut times, mut hosts) = (Vec::new(), Vec::new());
        let mut last = Instant::now();
        while times.len() < rounds {
            let Some(metered) = self.step()? else { continue };
            let now = Instant::now();
            times.push((now - last).as_secs_f64());
            hosts.push(metered.host.as_secs_f64());
            last = now;
        }
        self.engine.land()?;
        Ok(Played { round: median(times), host: median(hosts) })
    }

    /// One turn of lanes that must have something to do.
    fn step(&mut self) -> Result<Option<Metered>, Error> {
        let metered = self.engine.metered_turn()?;
        match metered.is_none() && self.engine.is_idle() {
            true => Err(Error::Setting(
                "all lanes ended before they were measured: are the logits finite?".into(),
            )),
            false => Ok(metered),
        }
    }

    /// Experts of a layer that some row of a decode round chooses, counted in each layer; their mean.
    fn distinct(&self, rows: usize) -> Result<f64, Error> {
        let runner = self.engine.runner();
        let groups = [Group { lanes: self.lanes(), rows }];
        let emission = runner.emission(&decode(&groups))?;
        let (mut from, mut counts) = (0, Vec::new());
        for (at, entry) in emission.entries().iter().enumerate() {
            if matches!(entry, Entry::Launch { kernel, .. } if kernel.name == "route") {
                runner.stream.run(emission.slice(from..at + 1), &[])?;
                counts.push(count_distinct(&self.chosen(rows)?) as f64);
                from = at + 1;
            }
        }
        runner.stream.run(emission.slice(from..emission.len()), &[])?;
        runner.stream.synchronize()?;
        Ok(counts.iter().sum::<f64>() / counts.len() as f64)
    }

    /// The experts that the last layer's router chose, after running everything queued.
    fn chosen(&self, rows: usize) -> Result<Vec<u32>, Error> {
        let runner = self.engine.runner();
        runner.stream.synchronize()?;
        let count = rows * runner.model.config.num_experts_per_tok;
        Ok(runner.scratch.arena.read(runner.scratch.buffers.experts, count)?)
    }

    /// Makes lanes look as if they had `context` positions, each in pages of its own as far as there are enough.
    fn pretend(&self, slots: &[SlotId], context: usize) -> Result<(), Error> {
        let lanes = self.lanes();
        let per_lane = lanes.layout.pages_per_lane;
        for slot in slots {
            let slot = slot.index as usize;
            let page = |page: usize| ((slot * per_lane + page) % lanes.pool.pages.max(1)) as u32;
            let pages: Vec<u32> = (0..per_lane).map(page).collect();
            let bundle = Bundle { lanes, slot, pages: &pages, length: context };
            bundle.pretend(&self.engine.runner().stream)?;
        }
        Ok(())
    }

    /// Stages a piece of a prompt for the first slot, which is made to have `context` positions.
    fn stage_prompt(&mut self, rows: usize, context: usize) -> Result<(), Error> {
        let slot = SlotId { slab: 0, index: 0 };
        self.engine.runner().clear_slot(self.lanes(), 0)?;
        self.pretend(&[slot], context)?;
        let count = rows as u32;
        let table: Vec<Row> = (0..count).map(|place| Row { slot: 0, place, first: 0, count }).collect();
        let prompt: Vec<PromptRow> = (0..rows)
            .map(|place| PromptRow { id: self.token(), axes: [(context + place) as i32; 3] })
            .collect();
        let sampling = vec![Sampling::default(); rows];
        let staged = StagedTable { rows: &table, sampling: &sampling, prompt: &prompt, edits: &[] };
        Ok(self.engine.runner_mut().stage(staged)?)
    }

    fn submit(&mut self, submission: Submission, crowd: &mut Crowd) {
        let (sender, events) = crossbeam_channel::unbounded();
        let request = RequestId(self.next);
        self.engine.submit(request, submission, sender);
        crowd.requests.push(request);
        crowd._told.push(events);
    }

    /// Runs until nobody waits or runs.
    fn finish(&mut self) -> Result<(), Error> {
        while !self.engine.is_idle() {
            self.engine.metered_turn()?;
        }
        Ok(())
    }

    /// Requires that no request of a crowd was refused or failed.
    fn whole(&self, crowd: &Crowd) -> Result<(), Error> {
        for event in crowd._told.iter().flat_map(Receiver::try_iter) {
            match event {
                Event::Refused(why) | Event::Failed(why) => return Err(Error::Setting(why)),
                _ => {}
            }
        }
        Ok(())
    }

    /// A graph of a list of launches, several times over.
    fn record(&self, list: &Emission, times: usize, more: &[Arena]) -> Result<Exec, Error> {
        let runner = self.engine.runner();
        let mut emission = Emission::new();
        (0..times).for_each(|_| emission.append(list));
        let recording = Recording::begin(&runner.stream, "a bench")?;
        runner.stream.run(emission, &[])?;
        let own = runner.weights.arenas().chain([runner.scratch.arena.clone()]);
        let keeps = own.chain(self.lanes().arenas()).chain(more.iter().cloned());
        Ok(recording.finish(keeps.collect())?)
    }

    /// Seconds of a replay, of so many one after another.
    fn replays(&self, exec: &Exec, times: usize) -> Result<f64, Error> {
        let stream = &self.engine.runner().stream;
        stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..times {
            stream.replay(exec)?;
        }
        stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / times as f64)
    }

    /// Seconds that handing one replay to the driver takes.
    fn launches(&self, exec: &Exec) -> Result<f64, Error> {
        let stream = &self.engine.runner().stream;
        let mut times = Vec::new();
        for _ in 0..TAKES {
            stream.synchronize()?;
            let start = Instant::now();
            stream.replay(exec)?;
            times.push(start.elapsed().as_secs_f64());
        }
        stream.synchronize()?;
        Ok(median(times))
    }

    /// An id that looks random.
    fn token(&mut self) -> u32 {
        self.next += 1;
        let part = 0.5 + 0.5 * f64::from(kernels::random::uniform(5, self.next));
        (part * self.config().text_ids() as f64) as u32
    }

    fn config(&self) -> &ModelConfig {
        &self.engine.runner().model.config
    }

    fn lanes(&self) -> &Lanes {
        &self.engine.slabs()[0]
    }

    fn layers(&self) -> [usize; 2] {
        [self.config().num_hidden_layers, self.full_layers]
    }
}

fn decode<'a>(groups: &'a [Group<'a>]) -> RoundShape<'a> {
    RoundShape { kind: Kind::Decode, groups, picks: Picks::All }
}

fn last_piece<'a>(groups: &'a [Group<'a>]) -> RoundShape<'a> {
    RoundShape { kind: Kind::Prompt, groups, picks: Picks::Last }
}

/// A time whose part in layers is scaled from those measured to all: exactly itself where all were measured.
fn scaled(time: f64, fixed: f64, [some, all]: [usize; 2]) -> f64 {
    let of_layers = time - fixed.min(time);
    time + of_layers * (all as f64 - some as f64) / some as f64
}

fn count_distinct(ids: &[u32]) -> usize {
    ids.iter().collect::<std::collections::HashSet<_>>().len()
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::scaled;

    #[test]
    fn a_model_measured_whole_has_exactly_the_measured_time() {
        for step in 1..10_000 {
            let time = f64::from(step) * 1.7e-5;
            assert_eq!(scaled(time, time / 3.0, [8, 8]), time);
            assert_eq!(scaled(time, 0.0171, [48, 48]), time, "and a fixed part apart from it");
        }
    }

    #[test]
    fn layers_are_scaled_and_what_is_fixed_is_not() {
        assert_eq!(scaled(5.0, 1.0, [4, 12]), 13.0);
        assert_eq!(scaled(5.0, 6.0, [4, 12]), 5.0, "a fixed part that was measured longer is the whole");
    }
}
