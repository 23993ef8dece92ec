//! Checkpoint to device memory: which tensors make up each weight, and where each weight lies.
//!
//! A device weight is a run of checkpoint tensors one after another (projections that read the same input
//! are stacked), as elements of the model's type or as codes and scales, and matrices put into the order that the
//! device's kernels read. The layout is made first, so that the memory plan is known before any weight is read. The
//! n-gram tables may live elsewhere than the other weights.

mod load;
mod made;
mod read;
mod stored;
mod table;

use graph::{Arena, Ptr, Region, Span};
use kernels::numerics::ElementType;
use kernels::weight::{Format, Matrix, Order};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::{Experts, HyperConnection, Layout, Ple, Spec, TokenMixer};
use crate::config::ModelConfig;
use crate::error::Error;
use load::Pace;
pub(crate) use made::Made;
pub use made::fill;
use read::format_of;
pub(crate) use read::{global, known_scales};
pub use stored::StoredAs;
pub use table::TablePlace;
use table::TablePlan;

/// All weights of the text model, by address.
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

/// What weights are in memory: what a model is run as, and what its device reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightForm {
    /// The element type that the model runs with.
    pub element: ElementType,
    /// The order in which the device's kernels read matrices.
    pub order: Order,
    /// Where the n-gram tables live.
    pub table: TablePlace,
    /// What becomes of dense projections.
    pub dense: DenseForm,
}

/// What becomes of projections outside the routed experts, and of the head, while they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DenseForm {
    /// They stay as they are stored.
    #[default]
    Stored,
    /// Those stored in plain floats are quantised to fp8, each tensor in blocks of its own.
    Fp8,
}

impl WeightForm {
    /// The form with the n-gram tables among the other weights.
    pub fn new(element: ElementType, order: Order) -> WeightForm {
        WeightForm { element, order, table: TablePlace::Device, dense: DenseForm::Stored }
    }
}

/// The memory of a model's weights.
#[derive(Clone)]
pub struct WeightMemory {
    /// All but the n-gram tables that live elsewhere.
    pub arena: Arena,
    /// Those tables.
    pub tables: Vec<Arena>,
}

impl WeightMemory {
    /// The arenas, which launches point into.
    pub fn arenas(&self) -> impl Iterator<Item = Arena> {
        std::iter::once(&self.arena).chain(&self.tables).cloned()
    }

    /// Size of all of it in bytes.
    pub fn bytes(&self) -> usize {
        self.arenas().map(|arena| arena.bytes()).sum()
    }

    /// A number that the weights of no other load have: what is written at load never changes after it.
    pub fn epoch(&self) -> u64 {
        self.arena.epoch()
    }
}

/// The weights of a model in memory.
pub struct Loaded {
    /// The memory.
    pub memory: WeightMemory,
    /// Where each weight lies in it.
    pub weights: Weights,
}

/// How the weights of a checkpoint will lie in memory.
pub struct WeightPlan {
    weights: Weights<Span>,
    region: Region,
    sources: Vec<Source>,
    tables: Vec<TablePlan>,
    form: WeightForm,
    pace: Pace,
}

/// What fills one span.
struct Source {
    span: Span,
    fill: Fill,
    /// What it is made as if nothing is read.
    made: Made,
}

enum Fill {
    /// Tensors one after another, converted to elements.
    Elements(Vec<Spec>),
    /// Tensors one after another, which are matrices one after another: elements, or codes and scales, in the device's
    /// order.
    Matrices { specs: Vec<Spec>, matrix: Matrix, count: usize },
    /// Tensors one after another, converted to f32.
    Wide(Vec<Spec>),
    /// Bytes that come from the settings.
    Bytes(Vec<u8>),
}

impl WeightPlan {
    /// Lays out the weights of `checkpoint` in this form.
    ///
    /// # Errors
    /// The n-gram tables cannot be used as they lie in the files, and are to be; a size does not go with a format in
    /// the device's order; a scale of a whole table cannot be read.
    pub fn new(checkpoint: &Checkpoint, form: WeightForm) -> Result<WeightPlan, Error> {
        let (region, sources, tables) = (Region::new(), Vec::new(), Vec::new());
        let mut build = Builder { checkpoint, region, sources, tables, form };
        let weights = build.weights()?;
        let Builder { region, sources, tables, .. } = build;
        fits(&sources, form.order)?;
        weights.layers.iter().try_for_each(|layer| has_kernels(&layer.moe, form.order))?;
        if form.table == TablePlace::Mapped {
            tables.iter().try_for_each(|table| table.mappable(checkpoint, form.element))?;
        }
        Ok(WeightPlan { weights, region, sources, tables, form, pace: Pace::FULL })
    }

    /// The form of the weights.
    pub fn form(&self) -> WeightForm {
        self.form
    }

    /// How the weights are held, in short.
    pub fn stored(&self) -> StoredAs {
        StoredAs::of(&self.weights)
    }

    /// Whether matrices are quantised while they are loaded.
    pub fn quantises(&self) -> bool {
        self.sources.iter().any(|source| match &source.fill {
            Fill::Matrices { specs, matrix, .. } => {
                matrix.format != Format::Plain && format_of(&specs[0]) == Format::Plain
            }
            _ => false,
        })
    }

    /// Size of all weights but the n-gram tables, in bytes.
    pub fn bytes(&self) -> usize {
        let inside = self.tables.iter().filter_map(|table| table.span);
        self.region.bytes() - inside.map(|span| span.bytes).sum::<usize>()
    }

    /// Size of the n-gram tables in bytes.
    pub fn table_bytes(&self) -> usize {
        self.tables.iter().map(|table| table.bytes).sum()
    }

    fn loaded(self, arena: Arena, tables: Vec<Arena>) -> Loaded {
        let weights = self.weights.map(&mut |span| span.at(arena.base()));
        Loaded { memory: WeightMemory { arena, tables }, weights }
    }
}

/// That every matrix can lie in this order.
fn fits(sources: &[Source], order: Order) -> Result<(), Error> {
    for source in sources {
        let Fill::Matrices { specs, matrix, .. } = &source.fill else { continue };
        matrix.check(order).map_err(|problem| {
            let host = if order == Order::Tiles { "--device host, or " } else { "" };
            Error::Setting(format!(
                "{} as {}: {problem}; use {host}another format for it (in bf16 all sizes go)",
                specs[0].name,
                matrix.format.name()
            ))
        })?;
    }
    Ok(())
}

/// That the device has kernels for experts that are stored like these.
fn has_kernels<T>(moe: &MoeWeights<T>, order: Order) -> Result<(), Error> {
    match order == Order::Rows || kernels::experts::has_twins(moe.routed, moe.shared) {
        true => Ok(()),
        false => Err(Error::Setting(format!(
            "experts stored as {} beside a shared expert stored as {} have no CUDA kernels; those in plain floats or fp8 \
             go with a shared expert in either, those in nvfp4 with any; use --device host",
            moe.routed.name(),
            moe.shared.name()
        ))),
    }
}

struct Builder<'c> {
    checkpoint: &'c Checkpoint,
    region: Region,
    sources: Vec<Source>,
    tables: Vec<TablePlan>,
    form: WeightForm,
}

impl Builder<'_> {
    /// Tensors one after another. They have one inner width, so they are made alike.
    fn stack<'a>(&mut self, specs: impl IntoIterator<Item = &'a Spec>) -> Span {
        let specs: Vec<Spec> = specs.into_iter().cloned().collect();
        let elements: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
        let span = self.region.add(specs[0].name.clone(), elements * self.form.element.bytes());
        let made = Made::of(&specs[0]);
        self.sources.push(Source { span, fill: Fill::Elements(specs), made });
        span
    }

    fn plain_gain(&mut self, spec: &Spec) -> Span {
        let span = self.one(spec);
        self.sources.last_mut().expect("just added").made = Made::PLAIN_GAIN;
        span
    }

    /// `count` matrices of the same form, of all the tensors one after another, which are held alike.
    fn matrices<'a>(
        &mut self,
        specs: impl IntoIterator<Item = &'a Spec>,
        matrix: Matrix,
        count: usize,
    ) -> Span {
        let specs: Vec<Spec> = specs.into_iter().cloned().collect();
        let bytes = matrix.bytes(count, self.form.order, self.form.element.bytes());
        let span = self.region.add(specs[0].name.clone(), bytes);
        let made = Made::matrix(matrix.columns);
        self.sources.push(Source { span, fill: Fill::Matrices { specs, matrix, count }, made });
        span
    }

    /// A matrix of tensors that lie on top of each other and are held as this one is.
    fn matrix(&mut self, specs: &[&Spec], form: impl FnOnce(Matrix) -> Matrix) -> Span {
        let outputs = specs.iter().map(|spec| spec.shape[0]).sum();
        let matrix = Matrix::plain(outputs, specs[0].shape[1]).stored(format_of(specs[0]));
        self.matrices(specs.iter().copied(), form(matrix), 1)
    }

    /// The format of a dense projection in memory.
    fn dense(&self, spec: &Spec) -> Format {
        match (format_of(spec), self.form.dense) {
            (Format::Plain, DenseForm::Fp8) => Format::Fp8,
            (stored, _) => stored,
        }
    }

    /// A dense projection.
    fn piece(&mut self, spec: &Spec, form: impl Fn(Matrix) -> Matrix) -> Piece<Span> {
        let format = self.dense(spec);
        let at = self.matrix(&[spec], |matrix| form(matrix).stored(format));
        Piece { at, outputs: spec.shape[0], format }
    }

    /// Dense projections that lie on top of each other: those that are held alike and can share tiles together.
    fn pieces(&mut self, specs: &[&Spec]) -> Vec<Piece<Span>> {
        // A scale of fp8 serves eight rows of a tile.
        let whole = |spec: &Spec| self.dense(spec) != Format::Fp8 || spec.shape[0].is_multiple_of(8);
        let together = |a: &&Spec, b: &&Spec| self.dense(a) == self.dense(b) && whole(a);
        let runs: Vec<&[&Spec]> = specs.chunk_by(together).collect();
        let piece = |run: &[&Spec]| {
            let (outputs, format) = (run.iter().map(|spec| spec.shape[0]).sum(), self.dense(run[0]));
            Piece { at: self.matrix(run, |matrix| matrix.stored(format)), outputs, format }
        };
        runs.into_iter().map(piece).collect()
    }

    fn one(&mut self, spec: &Spec) -> Span {
        self.stack([spec])
    }

    fn wide(&mut self, spec: &Spec, made: Made) -> Span {
        let span = self.region.array::<f32>(spec.name.clone(), spec.shape.iter().product());
        self.sources.push(Source { span, fill: Fill::Wide(vec![spec.clone()]), made });
        span
    }

    fn constant<T: bytemuck::Pod>(&mut self, label: &str, values: &[T]) -> Span {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let span = self.region.add(label, bytes.len());
        self.sources.push(Source { span, fill: Fill::Bytes(bytes.to_vec()), made: Made::NOTHING });
        span
    }

    fn weights(&mut self) -> Result<Weights<Span>, Error> {
        let checkpoint = self.checkpoint;
        let layout: &Layout = &checkpoint.layout;
        let rotary = &checkpoint.config.rotary;
        let frequencies = kernels::rope::frequencies(rotary.theta as f32, rotary.width);
        let (mixer, config) = (&layout.final_mixer, &checkpoint.config);
        let streams = config.hc_count;
        Ok(Weights {
            embed: self.one(&layout.embed_tokens),
            frequencies: self.constant("rotary frequencies", &frequencies),
            layers: layout.layers.iter().map(|layer| self.layer(layer, config)).collect::<Result<_, _>>()?,
            mixer: HyperWeights {
                gain: self.one(&mixer.hc_norm),
                down: self.matrix(&[&mixer.mix_down], |matrix| matrix),
                up: self.matrix(&[&mixer.mix_up], |matrix| matrix.grouped(streams)),
                injects: false,
            },
            head: self.piece(&layout.lm_head, |matrix| matrix),
        })
    }

    fn layer(
        &mut self,
        layer: &crate::checkpoint::layout::Layer,
        c: &ModelConfig,
    ) -> Result<LayerWeights<Span>, Error> {
        let (inner, hidden, experts) = (c.moe_intermediate_size, c.hidden_size, c.num_experts);
        let routed = match &layer.moe.experts {
            Experts::Fused { gate_up, .. } => format_of(gate_up),
            Experts::Split(each) => format_of(&each[0].gate),
        };
        let shared = self.dense(&layer.moe.shared.gate_proj);
        let gate_up = Matrix::plain(2 * inner, hidden).grouped(2).stored(routed);
        let down = Matrix::plain(hidden, inner).cut().stored(routed);
        Ok(LayerWeights {
            ngram: layer.ple.as_ref().map(|ple| self.ngram(ple)).transpose()?,
            attn: self.hyper(&layer.attn_hyper_connection, c),
            mixer: match &layer.mixer {
                TokenMixer::Linear(w) => MixerWeights::Recurrent(RecurrentWeights {
                    input: self.pieces(&[&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a]),
                    conv: self.one(&w.conv1d),
                    a_log: self.wide(&w.a_log, Made::A_LOG),
                    dt_bias: self.wide(&w.dt_bias, Made::DT_BIAS),
                    norm: self.plain_gain(&w.norm),
                    output: self.piece(&w.out_proj, Matrix::cut),
                }),
                TokenMixer::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: self.pieces(&[&w.q_proj, &w.k_proj, &w.v_proj, &w.index_qk_proj]),
                    q_gain: self.one(&w.q_norm),
                    k_gain: self.one(&w.k_norm),
                    index_q_gain: self.one(&w.index_q_norm),
                    index_k_gain: self.one(&w.index_k_norm),
                    output: self.piece(&w.o_proj, Matrix::cut),
                }),
            },
            mlp: self.hyper(&layer.mlp_hyper_connection, c),
            moe: MoeWeights {
                router: self.matrix(&[&layer.moe.shared.router, &layer.moe.shared.gate], |matrix| matrix),
                routed,
                shared,
                gate_up: match &layer.moe.experts {
                    Experts::Fused { gate_up: tensor, .. } => self.matrices([tensor], gate_up, experts),
                    Experts::Split(each) => {
                        self.matrices(each.iter().flat_map(|e| [&e.gate, &e.up]), gate_up, experts)
                    }
                },
                down: match &layer.moe.experts {
                    Experts::Fused { down: tensor, .. } => self.matrices([tensor], down, experts),
                    Experts::Split(each) => self.matrices(each.iter().map(|e| &e.down), down, experts),
                },
                shared_gate_up: self
                    .matrix(&[&layer.moe.shared.gate_proj, &layer.moe.shared.up_proj], |matrix| {
                        matrix.grouped(2).stored(shared)
                    }),
                shared_down: self
                    .matrix(&[&layer.moe.shared.down_proj], |matrix| matrix.cut().stored(shared)),
            },
        })
    }

    fn hyper(&mut self, w: &HyperConnection, c: &ModelConfig) -> HyperWeights<Span> {
        HyperWeights {
            gain: self.one(&w.hc_norm),
            down: self.matrix(&[&w.mix_down, &w.block_inject], |matrix| matrix),
            up: self.matrix(&[&w.mix_up], |matrix| matrix.grouped(c.hc_count)),
            injects: true,
        }
    }

    /// Makes room for the addresses of a table's shards, and for the table if it lives with the weights.
    fn table(&mut self, ple: &Ple) -> Result<(Span, Option<Span>), Error> {
        let shards = ple.shards.len();
        let addresses = self.region.array::<Ptr<u8>>("n-gram shards", shards);
        let scaled = format_of(&ple.shards[0]) == Format::Nvfp4;
        let scales = scaled.then(|| self.region.array::<Ptr<u8>>("n-gram scales", shards));
        let mut table = TablePlan::new(ple, self.form.element, addresses, scales);
        if self.form.table == TablePlace::Device {
            table.span = Some(self.region.add(ple.shards[0].name.clone(), table.bytes));
        }
        self.tables.push(table);
        Ok((addresses, scales))
    }

    fn ngram(&mut self, ple: &Ple) -> Result<NgramWeights<Span>, Error> {
        let (shards, scales) = self.table(ple)?;
        let table = &ple.shards[0];
        Ok(NgramWeights {
            multipliers: self.constant("n-gram multipliers", &ple.hash.multipliers),
            primes: self.constant("n-gram primes", &ple.hash.primes),
            offsets: self.constant("n-gram offsets", &ple.hash.offsets),
            format: format_of(table),
            shards,
            scales,
            global: match self.checkpoint.is_empty() {
                true => Made::of(table).unit(format_of(table)),
                false => global(self.checkpoint, table)?,
            },
            table_rows: ple.shards.len() * ple.shard_rows,
            shard_rows: ple.shard_rows,
            key_value: self.matrix(&[&ple.dense.key_proj, &ple.dense.value_proj], |matrix| matrix),
            key_gain: self.one(&ple.dense.norm_key),
            query_gain: self.one(&ple.dense.norm_query),
            conv_gain: self.one(&ple.dense.norm_conv),
            conv: self.one(&ple.dense.conv1d),
        })
    }
}

impl<T> Piece<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Piece<U> {
        Piece { at: f(self.at), outputs: self.outputs, format: self.format }
    }
}

fn map_all<T, U>(pieces: Vec<Piece<T>>, f: &mut impl FnMut(T) -> U) -> Vec<Piece<U>> {
    pieces.into_iter().map(|piece| piece.map(f)).collect()
}

impl<T> Weights<T> {
    /// The same tree over other leaves.
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Weights<U> {
        Weights {
            embed: f(self.embed),
            frequencies: f(self.frequencies),
            layers: self.layers.into_iter().map(|layer| layer.map(f)).collect(),
            mixer: self.mixer.map(f),
            head: self.head.map(f),
        }
    }
}

impl<T> LayerWeights<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> LayerWeights<U> {
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
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> HyperWeights<U> {
        HyperWeights { gain: f(self.gain), down: f(self.down), up: f(self.up), injects: self.injects }
    }
}
