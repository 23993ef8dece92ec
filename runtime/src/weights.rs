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
mod tree;

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
pub(crate) use read::{floats, global, known_scales};
pub use stored::StoredAs;
pub use table::TablePlace;
use table::TablePlan;
pub use tree::{
    HyperWeights, LayerWeights, MixerWeights, MoeWeights, NgramWeights, Piece, RecurrentWeights,
    SparseWeights, Weights,
};

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
