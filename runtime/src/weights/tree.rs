//! The tree of weights: what a model has, over leaves that say where each lies.

use graph::Ptr;
use kernels::weight::Format;

use super::TowerWeights;

/// All weights of the model, by address.
#[derive(Clone, Debug)]
pub struct Weights<T = Ptr<u8>> {
    /// `[vocab, hidden]`
    pub embed: T,
    /// Inverse frequencies of the rotary table, f32.
    pub frequencies: T,
    /// The layers.
    pub layers: Vec<LayerWeights<T>>,
    /// The mixer before the head; its injection is unused.
    pub mixer: HyperWeights<T>,
    /// `[vocab, hidden]`
    pub head: Piece<T>,
    /// The vision tower, where it was wanted.
    pub tower: Option<TowerWeights<T>>,
}

/// A matrix, or consecutive rows of one that are stored alike.
#[derive(Clone, Debug)]
pub struct Piece<T> {
    /// Where it lies.
    pub at: T,
    /// Its rows.
    pub outputs: usize,
    /// How its numbers are stored.
    pub format: Format,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct LayerWeights<T> {
    /// The n-gram embedding in front of it.
    pub ngram: Option<NgramWeights<T>>,
    /// The hyper-connection of the mixer.
    pub attn: HyperWeights<T>,
    /// The mixer.
    pub mixer: MixerWeights<T>,
    /// The hyper-connection of the experts.
    pub mlp: HyperWeights<T>,
    /// The experts.
    pub moe: MoeWeights<T>,
}

/// A hyper-connection.
#[derive(Clone, Debug)]
pub struct HyperWeights<T> {
    /// `[streams * hidden]`, zero-centred
    pub gain: T,
    /// Rows of the mix, then those of the injection: `[rank + streams, streams * hidden]`
    pub down: T,
    /// `[streams * hidden, rank]`
    pub up: T,
    /// Whether there is an injection; none before the head.
    pub injects: bool,
}

/// What mixes tokens in a layer.
#[derive(Clone, Debug)]
pub enum MixerWeights<T> {
    /// A gated delta net.
    Recurrent(RecurrentWeights<T>),
    /// Sparse attention.
    Sparse(SparseWeights<T>),
}

/// A gated delta net.
#[derive(Clone, Debug)]
pub struct RecurrentWeights<T> {
    /// Rows q, k, v, z, b, a: `[conv width + value width + 2 * value heads, hidden]`
    pub input: Vec<Piece<T>>,
    /// `[conv width, taps]`
    pub conv: T,
    /// `[value heads]` f32
    pub a_log: T,
    /// `[value heads]` f32
    pub dt_bias: T,
    /// `[value head width]`
    pub norm: T,
    /// `[hidden, value width]`
    pub output: Piece<T>,
}

/// Sparse attention.
#[derive(Clone, Debug)]
pub struct SparseWeights<T> {
    /// Rows (query, gate) per head, k, v, index queries, index key:
    /// `[2 * attention width + 2 * kv width + index width, hidden]`
    pub input: Vec<Piece<T>>,
    /// `[head width]`
    pub q_gain: T,
    /// `[head width]`
    pub k_gain: T,
    /// `[index head width]`
    pub index_q_gain: T,
    /// `[index head width]`
    pub index_k_gain: T,
    /// `[hidden, attention width]`
    pub output: Piece<T>,
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct MoeWeights<T> {
    /// Router rows, then the shared expert's gate: `[experts + 1, hidden]`
    pub router: T,
    /// How the routed experts are stored.
    pub routed: Format,
    /// How the shared expert is stored.
    pub shared: Format,
    /// `[experts, 2 * width, hidden]`, gate rows first
    pub gate_up: T,
    /// `[experts, hidden, width]`
    pub down: T,
    /// `[2 * shared width, hidden]`, gate rows first
    pub shared_gate_up: T,
    /// `[hidden, shared width]`
    pub shared_down: T,
}

/// An n-gram embedding.
#[derive(Clone, Debug)]
pub struct NgramWeights<T> {
    /// Multipliers of the hash, i64.
    pub multipliers: T,
    /// Rows of each head's table, u64.
    pub primes: T,
    /// First row of each head's table, u64.
    pub offsets: T,
    /// How the table is stored.
    pub format: Format,
    /// The address of each shard of the table, `[shard_rows, embedding width / heads]`.
    pub shards: T,
    /// The address of each shard's scales, where they have any.
    pub scales: Option<T>,
    /// What all numbers of a quantised table are multiplied by.
    pub global: f32,
    /// Rows of the table.
    pub table_rows: usize,
    /// Rows of a shard.
    pub shard_rows: usize,
    /// Rows key, value: `[streams * hidden + hidden, embedding width]`
    pub key_value: T,
    /// `[streams * hidden]`
    pub key_gain: T,
    /// `[streams * hidden]`
    pub query_gain: T,
    /// `[streams * hidden]`
    pub conv_gain: T,
    /// `[streams * hidden, taps]`
    pub conv: T,
}

impl<T> Piece<T> {
    pub(super) fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Piece<U> {
        Piece { at: f(self.at), outputs: self.outputs, format: self.format }
    }
}

fn map_all<T, U>(pieces: Vec<Piece<T>>, f: &mut impl FnMut(T) -> U) -> Vec<Piece<U>> {
    pieces.into_iter().map(|piece| piece.map(f)).collect()
}

impl<T> Weights<T> {
    /// The same tree over other leaves.
    pub(super) fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Weights<U> {
        Weights {
            embed: f(self.embed),
            frequencies: f(self.frequencies),
            layers: self.layers.into_iter().map(|layer| layer.map(f)).collect(),
            mixer: self.mixer.map(f),
            head: self.head.map(f),
            tower: self.tower.map(|tower| tower.map(f)),
        }
    }
}

impl<T> LayerWeights<T> {
    pub(super) fn map<U>(self, f: &mut impl FnMut(T) -> U) -> LayerWeights<U> {
        LayerWeights {
            ngram: self.ngram.map(|n| NgramWeights {
                multipliers: f(n.multipliers),
                primes: f(n.primes),
                offsets: f(n.offsets),
                format: n.format,
                shards: f(n.shards),
                scales: n.scales.map(&mut *f),
                global: n.global,
                table_rows: n.table_rows,
                shard_rows: n.shard_rows,
                key_value: f(n.key_value),
                key_gain: f(n.key_gain),
                query_gain: f(n.query_gain),
                conv_gain: f(n.conv_gain),
                conv: f(n.conv),
            }),
            attn: self.attn.map(f),
            mixer: match self.mixer {
                MixerWeights::Recurrent(w) => MixerWeights::Recurrent(RecurrentWeights {
                    input: map_all(w.input, f),
                    conv: f(w.conv),
                    a_log: f(w.a_log),
                    dt_bias: f(w.dt_bias),
                    norm: f(w.norm),
                    output: w.output.map(f),
                }),
                MixerWeights::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: map_all(w.input, f),
                    q_gain: f(w.q_gain),
                    k_gain: f(w.k_gain),
                    index_q_gain: f(w.index_q_gain),
                    index_k_gain: f(w.index_k_gain),
                    output: w.output.map(f),
                }),
            },
            mlp: self.mlp.map(f),
            moe: MoeWeights {
                router: f(self.moe.router),
                routed: self.moe.routed,
                shared: self.moe.shared,
                gate_up: f(self.moe.gate_up),
                down: f(self.moe.down),
                shared_gate_up: f(self.moe.shared_gate_up),
                shared_down: f(self.moe.shared_down),
            },
        }
    }
}

impl<T> HyperWeights<T> {
    pub(super) fn map<U>(self, f: &mut impl FnMut(T) -> U) -> HyperWeights<U> {
        HyperWeights { gain: f(self.gain), down: f(self.down), up: f(self.up), injects: self.injects }
    }
}
