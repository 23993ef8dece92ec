//! What was measured, as text for people and as JSON for programs.

use std::fmt;

use serde_json::{Value, json};

use super::bytes::RoundBytes;
use super::kernels::KernelTable;
use super::pair::{GatherLine, PairLine, PairPrompt};

/// One result.
#[derive(Clone, Debug)]
pub enum Line {
    /// The names of the columns that follow; no result.
    Heading(&'static str),
    /// What memory delivers.
    Bandwidth(Bandwidth),
    /// Decode rounds of one shape.
    Round(RoundLine),
    /// A gather of two ranks, by one of its means.
    Gather(GatherLine),
    /// Decode rounds of two ranks and of one.
    Pair(PairLine),
    /// A prompt on two ranks and on one.
    PairPrompt(PairPrompt),
    /// A prompt.
    Prompt(PromptLine),
    /// The kernels of one round.
    Kernels(KernelTable),
}

/// What memory delivers to a kernel that only reads.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// Bytes read at a time.
    pub bytes: usize,
    /// Bytes per second.
    pub per_second: f64,
}

/// Decode rounds of one shape. Times of rounds are medians.
#[derive(Clone, Debug)]
pub struct RoundLine {
    /// Rows, one of each lane.
    pub rows: usize,
    /// Positions that a row sees at the start; synthetic.
    pub context: usize,
    /// A round in the engine's loop, replayed.
    pub graph_ms: f64,
    /// A round in the engine's loop, launch by launch.
    pub eager_ms: f64,
    /// The same graph replayed back to back, with nothing of the engine in between.
    pub device_ms: f64,
    /// The host's time for a replayed round, without waiting.
    pub host_us: f64,
    /// The host's time for an eager round, without waiting.
    pub eager_host_us: f64,
    /// Nodes of the graph.
    pub nodes: usize,
    /// Distinct experts of a layer, counted.
    pub distinct: f64,
    /// The same by even chance.
    pub expected: f64,
    /// The byte model.
    pub bytes: RoundBytes,
    /// The bytes over the bandwidth.
    pub floor_ms: f64,
    /// `device_ms` of this context over that of the first.
    pub of_first: f64,
    /// Recording a graph, making it executable, bringing it to the device.
    pub capture_ms: f64,
    /// See `capture_ms`.
    pub instantiate_ms: f64,
    /// See `capture_ms`.
    pub upload_ms: f64,
    /// Handing one replay to the driver.
    pub launch_us: f64,
    /// Device memory that a graph takes.
    pub graph_bytes: usize,
    /// What of `device_ms` is before and after the layers.
    pub fixed_ms: f64,
    /// `device_ms` with the layers' part scaled to all layers.
    pub full_ms: f64,
    /// Layers measured, of all.
    pub layers: [usize; 2],
}

/// A prompt in pieces, from its arrival to its first token.
#[derive(Clone, Debug)]
pub struct PromptLine {
    /// Tokens.
    pub tokens: usize,
    /// Rows of a piece.
    pub piece_rows: usize,
    /// Seconds.
    pub seconds: f64,
    /// What of it is before and after the layers.
    pub fixed_seconds: f64,
    /// `seconds` with the layers' part scaled to all layers.
    pub full_seconds: f64,
    /// Layers measured, of all.
    pub layers: [usize; 2],
}

impl RoundLine {
    pub(super) const HEADING: &'static str = "decode rounds, synthetic context; ms are medians of a round; device: the graph back to back; idle: \
         the loop's time beyond that; full: layers scaled to all\n rows  context   graph ms   eager ms  device ms   idle  host us  eager us  nodes experts       GB   floor ms  of floor  x first    full ms  capture  instant   upload launch us graph KiB";

    /// The device's idle share of a round in the engine's loop.
    pub fn idle(&self) -> f64 {
        (1.0 - self.device_ms / self.graph_ms).max(0.0)
    }

    /// How much of the floor a round reaches: 1 is as fast as memory.
    pub fn of_floor(&self) -> f64 {
        self.floor_ms / self.device_ms
    }
}

impl Line {
    /// The result as one JSON object; none for a heading.
    pub fn to_json(&self) -> Vec<Value> {
        match self {
            Line::Heading(_) => Vec::new(),
            Line::Bandwidth(b) => {
                vec![json!({ "line": "bandwidth", "bytes": b.bytes, "bytes_per_second": b.per_second })]
            }
            Line::Round(r) => vec![json!({
                "line": "round", "rows": r.rows, "context": r.context, "synthetic": true, "graph_ms": r.graph_ms,
                "eager_ms": r.eager_ms, "device_ms": r.device_ms, "idle": r.idle(), "host_us": r.host_us,
                "eager_host_us": r.eager_host_us, "nodes": r.nodes, "distinct_experts": r.distinct,
                "expected_distinct_experts": r.expected, "bytes": r.bytes.total(), "bytes_dense": r.bytes.dense,
                "bytes_experts": r.bytes.experts, "bytes_head": r.bytes.head, "bytes_rows": r.bytes.rows,
                "bytes_state": r.bytes.state, "bytes_keys": r.bytes.keys, "bytes_index": r.bytes.index,
                "floor_ms": r.floor_ms, "of_floor": r.of_floor(), "of_first_context": r.of_first,
                "capture_ms": r.capture_ms, "instantiate_ms": r.instantiate_ms, "upload_ms": r.upload_ms,
                "launch_us": r.launch_us, "graph_bytes": r.graph_bytes, "fixed_ms": r.fixed_ms,
                "full_ms": r.full_ms, "layers": r.layers[0], "full_layers": r.layers[1],
            })],
            Line::Prompt(p) => vec![json!({
                "line": "prompt", "tokens": p.tokens, "piece_rows": p.piece_rows, "seconds": p.seconds,
                "tokens_per_second": p.tokens as f64 / p.seconds, "fixed_seconds": p.fixed_seconds,
                "full_seconds": p.full_seconds, "full_tokens_per_second": p.tokens as f64 / p.full_seconds,
                "layers": p.layers[0], "full_layers": p.layers[1],
            })],
            Line::Gather(gather) => vec![gather.to_json()],
            Line::Pair(pair) => vec![pair.to_json()],
            Line::PairPrompt(prompt) => vec![prompt.to_json()],
            Line::Kernels(table) => table.to_json(),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Heading(text) => f.write_str(text),
            Line::Bandwidth(b) => write!(
                f,
                "read       {:.3} TB/s, the best of a few grids over {:.2} GiB",
                b.per_second / 1e12,
                b.bytes as f64 / f64::from(1 << 30)
            ),
            Line::Round(r) => r.fmt(f),
            Line::Gather(gather) => gather.fmt(f),
            Line::Pair(pair) => pair.fmt(f),
            Line::PairPrompt(prompt) => prompt.fmt(f),
            Line::Prompt(p) => p.fmt(f),
            Line::Kernels(table) => table.fmt(f),
        }
    }
}

impl fmt::Display for RoundLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RoundLine { rows, context, graph_ms, eager_ms, device_ms, host_us, .. } = self;
        write!(f, "{rows:5} {context:8} {graph_ms:10.4} {eager_ms:10.4} {device_ms:10.4} ")?;
        write!(f, "{:5.1}% {host_us:8.1} {:9.1} ", 100.0 * self.idle(), self.eager_host_us)?;
        write!(f, "{:6} {:7.1} {:8.3} ", self.nodes, self.distinct, self.bytes.total() / 1e9)?;
        write!(f, "{:10.4} {:8.1}% {:8.3} ", self.floor_ms, 100.0 * self.of_floor(), self.of_first)?;
        write!(f, "{:10.4} {:8.2} {:8.2} ", self.full_ms, self.capture_ms, self.instantiate_ms)?;
        let kib = self.graph_bytes as f64 / 1024.0;
        write!(f, "{:8.2} {:9.2} {kib:9.0}", self.upload_ms, self.launch_us)
    }
}

impl fmt::Display for PromptLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PromptLine { tokens, piece_rows, seconds, fixed_seconds, full_seconds, layers: [some, all] } =
            self;
        let per_second = |seconds: &f64| *tokens as f64 / seconds;
        write!(
            f,
            "prompt     {tokens} tokens in pieces of {piece_rows}: {seconds:.3} s, {:.0} tok/s",
            per_second(seconds)
        )?;
        if some < all {
            write!(
                f,
                "; for {all} layers {:.0} tok/s: {fixed_seconds:.3} s as they are, the rest times {all}/{some}",
                per_second(full_seconds)
            )?;
        }
        Ok(())
    }
}
