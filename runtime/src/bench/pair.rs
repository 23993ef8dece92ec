//! Two ranks against one: the same lanes, with real prompts, decode in the engine's loop on both, one after the other.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use graph::GatherTimes;
use planner::RequestId;
use serde_json::{Value, json};

use super::bandwidth;
use super::bytes::{RoundBytes, expected_distinct};
use super::report::{Bandwidth, Line};
use super::rig::{Played, median};
use super::{BenchOptions, WARM};
use crate::engine::{Engine, EngineOptions, open, open_rank};
use crate::error::Error;
use crate::model::Model;
use crate::open::Progress;
use crate::ranks::Rank;
use crate::request::Submission;
use crate::sampling::SamplingOptions;
use crate::weights::StoredAs;

/// Decode rounds on two ranks and on one.
#[derive(Clone, Copy, Debug)]
pub struct PairLine {
    /// Rows, one of each lane.
    pub rows: usize,
    /// Tokens of each prompt.
    pub context: usize,
    /// Two ranks.
    pub two: Rounds,
    /// One rank.
    pub one: Rounds,
}

/// A prompt from its arrival to its first token, on two ranks and on one.
#[derive(Clone, Copy, Debug)]
pub struct PairPrompt {
    /// Its tokens.
    pub tokens: usize,
    /// Seconds on two ranks.
    pub two: f64,
    /// Seconds on one.
    pub one: f64,
}

impl PairPrompt {
    pub(super) fn to_json(self) -> Value {
        let PairPrompt { tokens, two, one } = self;
        json!({ "line": "pair prompt", "tokens": tokens, "two_seconds": two, "one_seconds": one, "gain": one / two })
    }
}

impl fmt::Display for PairPrompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PairPrompt { tokens, two, one } = *self;
        let [on_two, on_one] = [two, one].map(|seconds| tokens as f64 / seconds);
        write!(
            f,
            "prompt     {tokens} tokens: two {two:.3} s, {on_two:.0} tok/s; one {one:.3} s, {on_one:.0} tok/s; "
        )?;
        write!(f, "two against one {:.2}", one / two)
    }
}

/// Rounds in the engine's loop; medians.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// A round, replayed.
    pub graph_ms: f64,
    /// A round, launch by launch.
    pub eager_ms: f64,
    /// The host's time for a replayed round, without waiting.
    pub host_us: f64,
    /// Graphs that were captured while these were measured.
    pub captures: u64,
    /// The bytes that a rank must move at least, if experts are chosen by even chance, over the bandwidth of the leader's device.
    pub floor_ms: f64,
}

impl PairLine {
    pub(super) const HEADING: &'static str = "decode rounds of two ranks and of one, after real prompts; ms are medians of a round in the engine's loop\n rows  context  two: graph     eager   floor  host us  captures   one: graph     eager   floor  host us  captures  two against one";

    /// How many times as fast two ranks are.
    pub fn gain(&self) -> f64 {
        self.one.graph_ms / self.two.graph_ms
    }

    pub(super) fn to_json(self) -> Value {
        let of = |rounds: Rounds| {
            json!({
                "graph_ms": rounds.graph_ms, "eager_ms": rounds.eager_ms, "host_us": rounds.host_us,
                "captures": rounds.captures, "floor_ms": rounds.floor_ms,
            })
        };
        json!({
            "line": "pair", "rows": self.rows, "context": self.context, "two": of(self.two), "one": of(self.one),
            "gain": self.gain(),
        })
    }
}

impl fmt::Display for PairLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:5} {:8} ", self.rows, self.context)?;
        for Rounds { graph_ms, eager_ms, host_us, captures, floor_ms } in [self.two, self.one] {
            write!(f, "{graph_ms:11.4} {eager_ms:9.4} {floor_ms:7.3} {host_us:8.1} {captures:9}  ")?;
        }
        write!(f, "{:15.2}", self.gain())
    }
}

/// A gather of two ranks.
#[derive(Clone, Copy, Debug)]
pub struct GatherLine(pub GatherTimes);

impl GatherLine {
    pub(super) fn to_json(self) -> Value {
        let GatherTimes { bytes, exchange, eager, graph } = self.0;
        json!({
            "line": "gather", "bytes": bytes, "exchange": exchange.to_string(), "eager_us": eager, "graph_us": graph,
        })
    }
}

impl fmt::Display for GatherLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GatherTimes { bytes, exchange, eager, graph } = self.0;
        let exchange = exchange.to_string();
        write!(
            f,
            "gather     {bytes:7} bytes of each rank by {exchange:4}: {graph:6.2} us in a graph, {eager:6.2} us eager"
        )
    }
}

/// Measures a model with the rank that follows, and then alone: its memory is free again by then.
///
/// # Errors
/// As [`super::run`]; or the other rank is gone.
pub fn run_pair(
    dir: &Path,
    options: &BenchOptions,
    rank: Rank,
    progress: &mut dyn FnMut(Progress),
    told: &mut dyn FnMut(Line),
) -> Result<(), Error> {
    let engine_options = super::settings(dir, options)?;
    let mut engine = open_rank(dir, &engine_options, rank, progress)?.engine;
    let gathers = engine.measure_gathers();
    let measured = gathers.and_then(|gathers| {
        gathers.into_iter().for_each(|times| told(Line::Gather(GatherLine(times))));
        // Of one device for both: their floors can be compared.
        let bandwidth = bandwidth::measure(engine.runner())?;
        Ok((all(&mut engine, options, &bandwidth)?, bandwidth))
    });
    engine.part(measured.as_ref().err().map(Error::to_string).as_deref());
    engine.close();
    let ((two, prompt_of_two), bandwidth) = measured?;

    let mut alone = open(dir, &engine_options, progress)?.engine;
    let (one, prompt_of_one) = all(&mut alone, options, &bandwidth)?;
    told(Line::Heading(PairLine::HEADING));
    let shapes =
        options.rows.iter().flat_map(|&rows| options.contexts.iter().map(move |&context| (rows, context)));
    for (((rows, context), two), one) in shapes.zip(two).zip(one) {
        told(Line::Pair(PairLine { rows, context, two, one }));
    }
    if let (Some(two), Some(one)) = (prompt_of_two, prompt_of_one) {
        told(Line::PairPrompt(PairPrompt { tokens: options.prompt, two, one }));
    }
    Ok(())
}

/// Positions that a lane runs through after its prompt, at most.
pub(super) fn steps(options: &BenchOptions) -> usize {
    let lanes = options.rows.iter().max().unwrap_or(&0);
    // While the prompts of later lanes are read, earlier ones decode.
    let seating = lanes * (options.contexts.iter().max().unwrap_or(&0) / options.piece_rows as usize + 2);
    options.rounds
        + options.rounds.min(64)
        + 2 * WARM
        + 8
        + seating * EngineOptions::default().decode_share as usize
}

/// Every number of lanes at every context, in this order; and the prompt, if there is one.
fn all(
    engine: &mut Engine,
    options: &BenchOptions,
    bandwidth: &Bandwidth,
) -> Result<(Vec<Rounds>, Option<f64>), Error> {
    let (mut all, mut next) = (Vec::new(), 0);
    for &rows in &options.rows {
        for &context in &options.contexts {
            all.push(measure(engine, options, (rows, context), bandwidth, &mut next)?);
        }
    }
    let prompt = (options.prompt > 0).then(|| prompt(engine, options.prompt, &mut next)).transpose()?;
    Ok((all, prompt))
}

/// Bytes of a decode round on this rank.
fn bytes(engine: &Engine, rows: usize, context: usize) -> f64 {
    let Model { config, share, element, weights, .. } = &engine.runner().model;
    let distinct = expected_distinct(config, rows);
    RoundBytes::new(config, *share, *element, StoredAs::of(weights), rows, context + 1, distinct).total()
}

/// Seconds of a prompt to its first token; the second time counts.
fn prompt(engine: &mut Engine, tokens: usize, next: &mut u64) -> Result<f64, Error> {
    let mut seconds = 0.0;
    for _ in 0..2 {
        let (sender, _events) = crossbeam_channel::unbounded();
        let submission = made(engine, tokens, 1, next);
        let start = Instant::now();
        engine.submit(RequestId(*next), submission, sender);
        finish(engine)?;
        seconds = start.elapsed().as_secs_f64();
    }
    Ok(seconds)
}

/// A request of random ids.
fn made(engine: &Engine, tokens: usize, most: usize, next: &mut u64) -> Submission {
    let vocab = engine.runner().model.config.text_ids() as f64;
    let mut id = || {
        *next += 1;
        ((0.5 + 0.5 * f64::from(kernels::random::uniform(5, *next))) * vocab) as u32
    };
    let prompt = (0..tokens).map(|_| id()).collect();
    Submission {
        max_tokens: Some(most as u32),
        ignore_eos: true,
        sampling: SamplingOptions { seed: Some(*next), ..SamplingOptions::default() },
        ..Submission::new(prompt)
    }
}

/// Turns until nobody waits or runs.
fn finish(engine: &mut Engine) -> Result<(), Error> {
    while !engine.is_idle() {
        engine.metered_turn()?;
    }
    Ok(())
}

/// Lanes with prompts of so many ids, which decode while it is measured, and then leave.
fn measure(
    engine: &mut Engine,
    options: &BenchOptions,
    (rows, context): (usize, usize),
    bandwidth: &Bandwidth,
    next: &mut u64,
) -> Result<Rounds, Error> {
    let (sender, events) = crossbeam_channel::unbounded();
    let mut requests = Vec::new();
    for _ in 0..rows {
        let submission = made(engine, context, steps(options), next);
        let request = RequestId(*next);
        engine.submit(request, submission, sender.clone());
        requests.push(request);
    }
    while engine.state().lanes().filter(|lane| lane.told() > 0).count() < rows {
        engine.metered_turn()?;
        if engine.is_idle() {
            break;
        }
    }
    let before = engine.stats().bank.captured;
    let eager = play(engine, false, options.rounds.min(64))?;
    let graph = play(engine, true, options.rounds)?;
    let captures = engine.stats().bank.captured - before;
    requests.into_iter().for_each(|request| engine.cancel(request));
    finish(engine)?;
    drop(events);
    Ok(Rounds {
        graph_ms: 1e3 * graph.round,
        eager_ms: 1e3 * eager.round,
        host_us: 1e6 * graph.host,
        captures,
        floor_ms: 1e3 * bytes(engine, rows, context) / bandwidth.per_second,
    })
}

/// Rounds in the engine's loop, two under way.
fn play(engine: &mut Engine, graph: bool, rounds: usize) -> Result<Played, Error> {
    engine.set_graphs(graph);
    let (mut times, mut hosts, mut last) = (Vec::new(), Vec::new(), Instant::now());
    while times.len() < WARM + rounds {
        let Some(metered) = engine.metered_turn()? else {
            if engine.is_idle() {
                return Err(Error::Setting(
                    "all lanes ended before they were measured: are the logits finite?".into(),
                ));
            }
            continue;
        };
        let now = Instant::now();
        times.push((now - last).as_secs_f64());
        hosts.push(metered.host.as_secs_f64());
        last = now;
    }
    Ok(Played { round: median(times.split_off(WARM)), host: median(hosts.split_off(WARM)) })
}
