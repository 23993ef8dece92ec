//! Checkpoint to device memory: which tensors make up each weight, and where each weight lies.
//!
//! A device weight is a run of checkpoint tensors one after another (projections that read the same input
//! are stacked), as elements of the model's type or as codes and scales, and matrices put into the order that the
//! device's kernels read. The layout is made first, so that the memory plan is known before any weight is read. The
//! n-gram tables may live elsewhere than the other weights.

mod extract;
mod load;
mod made;
mod read;
mod stored;
mod table;
mod tower;
mod tree;

use graph::{Arena, Ptr, Region, Span};
use kernels::numerics::ElementType;
use kernels::weight::{Format, Matrix, Order};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::{Experts, HyperConnection, Layout, Moe, Ple, Spec, TokenMixer};
use crate::config::ModelConfig;
use crate::error::Error;
use crate::share::Share;
use extract::Extract;
use load::Pace;
pub(crate) use made::Made;
pub use made::fill;
use read::format_of;
pub(crate) use read::{floats, global, known_scales};
pub use stored::StoredAs;
pub use table::TablePlace;
use table::TablePlan;
pub use tower::{AffineWeights, BlockWeights, NormWeights, TowerWeights};
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
    /// Which part of the model they are.
    pub share: Share,
    /// Whether those of the vision tower are among them. They are never shared out.
    pub vision: bool,
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
    /// The form of a whole model, without its vision tower, with the n-gram tables among the other weights.
    pub fn new(element: ElementType, order: Order) -> WeightForm {
        WeightForm {
            element,
            order,
            table: TablePlace::Device,
            dense: DenseForm::Stored,
            share: Share::WHOLE,
            vision: false,
        }
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
    config: ModelConfig,
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
    Elements(Vec<Extract>),
    /// Tensors one after another, which are matrices one after another: elements, or codes and scales, in the device's
    /// order.
    Matrices { extracts: Vec<Extract>, matrix: Matrix, count: usize },
    /// Tensors one after another, converted to f32.
    Wide(Vec<Extract>),
    /// Bytes that come from the settings.
    Bytes(Vec<u8>),
}

impl WeightPlan {
    /// Lays out the weights of `checkpoint` in this form.
    ///
    /// # Errors
    /// The n-gram tables cannot be used as they lie in the files, and are to be; a size does not go with a format in
    /// the device's order; a scale of a whole table cannot be read; a vision tower is wanted and there is none.
    pub fn new(checkpoint: &Checkpoint, form: WeightForm) -> Result<WeightPlan, Error> {
        let (region, sources, tables) = (Region::new(), Vec::new(), Vec::new());
        let config = form.share.of(&checkpoint.config)?;
        let mut build = Builder { checkpoint, config: &config, region, sources, tables, form };
        let weights = build.weights()?;
        let Builder { region, sources, tables, .. } = build;
        fits(&sources, form.order)?;
        weights.layers.iter().try_for_each(|layer| has_kernels(&layer.moe, form.order))?;
        if form.table == TablePlace::Mapped {
            tables.iter().try_for_each(|table| table.mappable(checkpoint, form.element))?;
        }
        Ok(WeightPlan { config, weights, region, sources, tables, form, pace: Pace::FULL })
    }

    /// The settings of the part of the model that the weights are of.
    pub fn config(&self) -> &ModelConfig {
        &self.config
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
            Fill::Matrices { extracts, matrix, .. } => {
                matrix.format != Format::Plain && format_of(&extracts[0].spec) == Format::Plain
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

/// Rows of a tile that share a scale in fp8.
const SHARED_ROWS: usize = 8;

/// That every matrix can lie in this order.
fn fits(sources: &[Source], order: Order) -> Result<(), Error> {
    for source in sources {
        let Fill::Matrices { extracts, matrix, .. } = &source.fill else { continue };
        let spec = &extracts[0].spec;
        let apart = || extracts.iter().find(|extract| !extract.rows.start.is_multiple_of(SHARED_ROWS));
        let shared = match (matrix.format, order) {
            (Format::Fp8, Order::Tiles) => apart().map_or(Ok(()), |extract| {
                let first = extract.rows.start;
                Err(format!(
                    "rows from {first} on, not a multiple of the {SHARED_ROWS} that share a scale of fp8"
                ))
            }),
            _ => Ok(()),
        };
        matrix.check(order).and(shared).map_err(|problem| {
            let host = if order == Order::Tiles { "--device host, or " } else { "" };
            Error::Setting(format!(
                "{} as {}: {problem}; use {host}another format for it (in bf16 all sizes go)",
                spec.name,
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
    /// The settings of the part that is laid out.
    config: &'c ModelConfig,
    region: Region,
    sources: Vec<Source>,
    tables: Vec<TablePlan>,
    form: WeightForm,
}

impl Builder<'_> {
    /// Tensors one after another. They have one inner width, so they are made alike.
    fn stack(&mut self, extracts: Vec<Extract>) -> Span {
        let elements: usize = extracts.iter().map(Extract::elements).sum();
        let span = self.region.add(extracts[0].spec.name.clone(), elements * self.form.element.bytes());
        let made = Made::of(&extracts[0].spec);
        self.sources.push(Source { span, fill: Fill::Elements(extracts), made });
        span
    }

    /// This rank's rows of a tensor, which it has of all of so many equal runs of them.
    fn rows_of_runs(&self, spec: &Spec, runs: usize) -> Vec<Extract> {
        let all = Extract::from(spec).rows.len();
        self.rows_of_segments(spec, &vec![all / runs; runs])
    }

    /// This rank's rows of a tensor, which it has of every one of segments of so many rows.
    fn rows_of_segments(&self, spec: &Spec, segments: &[usize]) -> Vec<Extract> {
        if self.form.share == Share::WHOLE {
            return vec![Extract::from(spec)];
        }
        let starts = segments.iter().scan(0, |next, rows| {
            let first = *next;
            *next += rows;
            Some((first, *rows))
        });
        let part = |(first, rows)| {
            let part = self.form.share.part(rows);
            Extract::rows(spec, first + part.start..first + part.end)
        };
        starts.map(part).collect()
    }

    /// This rank's columns of a tensor.
    fn columns_of(&self, spec: &Spec) -> Extract {
        let width = Extract::from(spec).width();
        Extract::columns(spec, self.form.share.part(width))
    }

    /// A matrix whose sum is cut, as far as this rank has it: of `columns` columns.
    fn cut(&self, matrix: Matrix) -> Matrix {
        match self.form.share.cuts() {
            1 => matrix.from_column(self.form.share.rank() * matrix.columns),
            _ => matrix.cut(),
        }
    }

    /// Queries, keys and values of a recurrent layer, in channels of its convolution.
    fn channels(&self, spec: &Spec) -> Vec<Extract> {
        let c = &self.checkpoint.config;
        let (keys, values) = (c.linear_key_width(), c.linear_value_width());
        self.rows_of_segments(spec, &[keys, keys, values])
    }

    fn plain_gain(&mut self, spec: &Spec) -> Span {
        let span = self.one(spec);
        self.sources.last_mut().expect("just added").made = Made::PLAIN_GAIN;
        span
    }

    /// `count` matrices of the same form, of all the tensors one after another, which are held alike.
    fn matrices(&mut self, extracts: Vec<Extract>, matrix: Matrix, count: usize) -> Span {
        let bytes = matrix.bytes(count, self.form.order, self.form.element.bytes());
        let span = self.region.add(extracts[0].spec.name.clone(), bytes);
        let made = Made::matrix(extracts[0].width());
        self.sources.push(Source { span, fill: Fill::Matrices { extracts, matrix, count }, made });
        span
    }

    /// A matrix of tensors that lie on top of each other and are held as this one is.
    fn matrix(&mut self, extracts: Vec<Extract>, form: impl FnOnce(Matrix) -> Matrix) -> Span {
        let outputs = extracts.iter().map(|extract| extract.rows.len()).sum();
        let first = &extracts[0];
        let matrix = Matrix::plain(outputs, first.columns.len()).stored(format_of(&first.spec));
        self.matrices(extracts, form(matrix), 1)
    }

    /// The same of whole tensors.
    fn whole(&mut self, specs: &[&Spec], form: impl FnOnce(Matrix) -> Matrix) -> Span {
        self.matrix(specs.iter().map(|spec| Extract::from(*spec)).collect(), form)
    }

    /// The format of a dense projection in memory.
    fn dense(&self, spec: &Spec) -> Format {
        match (format_of(spec), self.form.dense) {
            (Format::Plain, DenseForm::Fp8) => Format::Fp8,
            (stored, _) => stored,
        }
    }

    /// A dense projection.
    fn piece(&mut self, extracts: Vec<Extract>, form: impl Fn(Matrix) -> Matrix) -> Piece<Span> {
        let format = self.dense(&extracts[0].spec);
        let outputs = extracts.iter().map(|extract| extract.rows.len()).sum();
        Piece { at: self.matrix(extracts, |matrix| form(matrix).stored(format)), outputs, format }
    }

    /// Dense projections that lie on top of each other: those that are held alike and can share tiles together.
    fn pieces(&mut self, extracts: Vec<Extract>) -> Vec<Piece<Span>> {
        let whole = |extract: &Extract| {
            self.dense(&extract.spec) != Format::Fp8 || extract.rows.len().is_multiple_of(SHARED_ROWS)
        };
        let together = |a: &Extract, b: &Extract| self.dense(&a.spec) == self.dense(&b.spec) && whole(a);
        let runs: Vec<Vec<Extract>> = extracts.chunk_by(together).map(<[_]>::to_vec).collect();
        runs.into_iter().map(|run| self.piece(run, |matrix| matrix)).collect()
    }

    fn one(&mut self, spec: &Spec) -> Span {
        self.stack(vec![Extract::from(spec)])
    }

    fn wide(&mut self, extracts: Vec<Extract>, made: Made) -> Span {
        let elements = extracts.iter().map(Extract::elements).sum();
        let span = self.region.array::<f32>(extracts[0].spec.name.clone(), elements);
        self.sources.push(Source { span, fill: Fill::Wide(extracts), made });
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
            layers: layout.layers.iter().map(|layer| self.layer(layer)).collect::<Result<_, _>>()?,
            mixer: HyperWeights {
                gain: self.one(&mixer.hc_norm),
                down: self.whole(&[&mixer.mix_down], |matrix| matrix),
                up: self.whole(&[&mixer.mix_up], |matrix| matrix.grouped(streams)),
                injects: false,
            },
            head: self.piece(self.rows_of_runs(&layout.lm_head, 1), |matrix| matrix),
            tower: self.tower_wanted()?,
        })
    }

    /// The vision tower, if it is to be there.
    fn tower_wanted(&mut self) -> Result<Option<TowerWeights<Span>>, Error> {
        let checkpoint = self.checkpoint;
        match (self.form.vision, &checkpoint.layout.vision, &checkpoint.config.vision) {
            (false, ..) => Ok(None),
            (true, Some(layout), Some(config)) => Ok(Some(self.tower(layout, config))),
            (true, ..) => Err(Error::Setting(
                "the model has no vision tower: its config.json lacks vision_config; leave --vision out"
                    .into(),
            )),
        }
    }

    fn layer(&mut self, layer: &crate::checkpoint::layout::Layer) -> Result<LayerWeights<Span>, Error> {
        let c = self.config;
        let (inner, hidden, experts) = (c.moe_intermediate_size, c.hidden_size, c.num_experts);
        let routed = match &layer.moe.experts {
            Experts::Fused { gate_up, .. } => format_of(gate_up),
            Experts::Split(each) => format_of(&each[0].gate),
        };
        let shared = self.dense(&layer.moe.shared.gate_proj);
        let gate_up = Matrix::plain(2 * inner, hidden).grouped(2).stored(routed);
        let down = self.cut(Matrix::plain(hidden, inner)).stored(routed);
        let Moe { shared: shared_expert, experts: routed_experts } = &layer.moe;
        Ok(LayerWeights {
            ngram: layer.ple.as_ref().map(|ple| self.ngram(ple)).transpose()?,
            attn: self.hyper(&layer.attn_hyper_connection),
            mixer: match &layer.mixer {
                TokenMixer::Linear(w) => MixerWeights::Recurrent(RecurrentWeights {
                    input: self.pieces(
                        [
                            self.channels(&w.in_proj_qkv),
                            self.rows_of_runs(&w.in_proj_z, 1),
                            self.rows_of_runs(&w.in_proj_b, 1),
                            self.rows_of_runs(&w.in_proj_a, 1),
                        ]
                        .concat(),
                    ),
                    conv: self.stack(self.channels(&w.conv1d)),
                    a_log: self.wide(self.rows_of_runs(&w.a_log, 1), Made::A_LOG),
                    dt_bias: self.wide(self.rows_of_runs(&w.dt_bias, 1), Made::DT_BIAS),
                    norm: self.plain_gain(&w.norm),
                    output: self.output(&w.out_proj),
                }),
                TokenMixer::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: self.pieces(
                        [
                            self.rows_of_runs(&w.q_proj, 1),
                            self.rows_of_runs(&w.k_proj, 1),
                            self.rows_of_runs(&w.v_proj, 1),
                            vec![Extract::from(&w.index_qk_proj)],
                        ]
                        .concat(),
                    ),
                    q_gain: self.one(&w.q_norm),
                    k_gain: self.one(&w.k_norm),
                    index_q_gain: self.one(&w.index_q_norm),
                    index_k_gain: self.one(&w.index_k_norm),
                    output: self.output(&w.o_proj),
                }),
            },
            mlp: self.hyper(&layer.mlp_hyper_connection),
            moe: MoeWeights {
                router: self.whole(&[&shared_expert.router, &shared_expert.gate], |matrix| matrix),
                routed,
                shared,
                gate_up: {
                    let extracts = match routed_experts {
                        Experts::Fused { gate_up, .. } => self.rows_of_runs(gate_up, 2 * experts),
                        Experts::Split(each) => {
                            let rows = each.iter().flat_map(|expert| [&expert.gate, &expert.up]);
                            rows.flat_map(|spec| self.rows_of_runs(spec, 1)).collect()
                        }
                    };
                    self.matrices(extracts, gate_up, experts)
                },
                down: {
                    let extracts = match routed_experts {
                        Experts::Fused { down, .. } => vec![self.columns_of(down)],
                        Experts::Split(each) => {
                            each.iter().map(|expert| self.columns_of(&expert.down)).collect()
                        }
                    };
                    self.matrices(extracts, down, experts)
                },
                shared_gate_up: {
                    let rows = [&shared_expert.gate_proj, &shared_expert.up_proj];
                    let extracts = rows.into_iter().flat_map(|spec| self.rows_of_runs(spec, 1)).collect();
                    self.matrix(extracts, |matrix| matrix.grouped(2).stored(shared))
                },
                shared_down: self.output(&shared_expert.down_proj).at,
            },
        })
    }

    /// A dense projection whose sum is cut.
    fn output(&mut self, spec: &Spec) -> Piece<Span> {
        let (format, extract) = (self.dense(spec), self.columns_of(spec));
        let cut = self.cut(Matrix::plain(extract.rows.len(), extract.columns.len()));
        let outputs = extract.rows.len();
        Piece { at: self.matrices(vec![extract], cut.stored(format), 1), outputs, format }
    }

    fn hyper(&mut self, w: &HyperConnection) -> HyperWeights<Span> {
        let streams = self.config.hc_count;
        HyperWeights {
            gain: self.one(&w.hc_norm),
            down: self.whole(&[&w.mix_down, &w.block_inject], |matrix| matrix),
            up: self.whole(&[&w.mix_up], |matrix| matrix.grouped(streams)),
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
            key_value: self.whole(&[&ple.dense.key_proj, &ple.dense.value_proj], |matrix| matrix),
            key_gain: self.one(&ple.dense.norm_key),
            query_gain: self.one(&ple.dense.norm_query),
            conv_gain: self.one(&ple.dense.norm_conv),
            conv: self.one(&ple.dense.conv1d),
        })
    }
}
