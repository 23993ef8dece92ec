//! Checkpoint to device memory: which tensors make up each weight, and the loading of them.
//!
//! A device weight is a run of checkpoint tensors one after another (projections that read the same input
//! are stacked), converted to the model's element type, and matrices put into the order that the device's
//! kernels read. The layout is made first, so that the memory plan is known before any weight is read; every
//! byte is then read once. The n-gram tables may live elsewhere than the other weights.

mod made;
mod table;

use graph::{Arena, Device, Emission, Ptr, Region, Span, Stream};
use half::bf16;
use kernels::launch;
use kernels::numerics::{Element, ElementType};
use kernels::tiles;
use kernels::weight::{Matrix, Order};

use crate::checkpoint::layout::{Experts, HyperConnection, Layout, Ple, Spec, TokenMixer};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::config::ModelConfig;
use crate::error::Error;
use made::Made;
pub use made::fill;
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
    pub head: T,
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
    pub input: T,
    /// `[conv width, taps]`
    pub conv: T,
    /// `[value heads]` f32
    pub a_log: T,
    /// `[value heads]` f32
    pub dt_bias: T,
    /// `[value head width]`
    pub norm: T,
    /// `[hidden, value width]`
    pub output: T,
}

/// Sparse attention.
#[derive(Clone, Debug)]
pub struct SparseWeights<T> {
    /// Rows (query, gate) per head, k, v, index queries, index key:
    /// `[2 * attention width + 2 * kv width + index width, hidden]`
    pub input: T,
    /// `[head width]`
    pub q_gain: T,
    /// `[head width]`
    pub k_gain: T,
    /// `[index head width]`
    pub index_q_gain: T,
    /// `[index head width]`
    pub index_k_gain: T,
    /// `[hidden, attention width]`
    pub output: T,
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct MoeWeights<T> {
    /// Router rows, then the shared expert's gate: `[experts + 1, hidden]`
    pub router: T,
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
    /// The address of each shard of the table, `[shard_rows, embedding width / heads]`.
    pub shards: T,
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
}

impl WeightForm {
    /// The form with the n-gram tables among the other weights.
    pub fn new(element: ElementType, order: Order) -> WeightForm {
        WeightForm { element, order, table: TablePlace::Device }
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
    Elements(Vec<String>),
    /// Tensors one after another, which are matrices one after another, converted to elements and put into the
    /// device's order.
    Matrices { names: Vec<String>, matrix: Matrix, count: usize },
    /// Tensors one after another, converted to f32.
    Wide(Vec<String>),
    /// Bytes that come from the settings.
    Bytes(Vec<u8>),
}

impl WeightPlan {
    /// Lays out the weights of `checkpoint` in this form.
    ///
    /// # Errors
    /// The n-gram tables cannot be used as they lie in the files, and are to be.
    pub fn new(checkpoint: &Checkpoint, form: WeightForm) -> Result<WeightPlan, Error> {
        let (region, sources, tables) = (Region::new(), Vec::new(), Vec::new());
        let mut build = Builder { region, sources, tables, form };
        let weights = build.weights(checkpoint);
        let Builder { region, sources, tables, .. } = build;
        if form.table == TablePlace::Mapped {
            tables.iter().try_for_each(|table| table.mappable(checkpoint, form.element))?;
        }
        Ok(WeightPlan { weights, region, sources, tables, form })
    }

    /// The form of the weights.
    pub fn form(&self) -> WeightForm {
        self.form
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

    /// Size in bytes of what is needed beside the weights while they are read: the rows of a matrix on their way
    /// into the device's order.
    pub fn staging_bytes(&self) -> usize {
        if self.form.order == Order::Rows {
            return 0;
        }
        let runs = self.sources.iter().filter_map(|source| match &source.fill {
            Fill::Matrices { matrix, .. } => {
                Some(matrix.groups * matrix.run(PACKED_ELEMENTS) * matrix.columns)
            }
            _ => None,
        });
        runs.max().unwrap_or(0) * self.form.element.bytes()
    }

    /// Allocates the memory and reads every weight into it. `progress` is told the bytes read so far, of
    /// all that will be read.
    pub fn load(
        self,
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loaded, Error> {
        assert_eq!(self.form.order, Order::of(device), "a plan for another kind of device");
        // What is most likely to be refused comes before the long reading.
        let on_files = self.form.table == TablePlace::Mapped;
        let (mapped, copied) = self.tables.split_at(if on_files { self.tables.len() } else { 0 });
        let maps = mapped.iter().map(|table| table.map(checkpoint, device));
        let maps = maps.collect::<Result<Vec<_>, Error>>()?;
        let arena = device.arena("weights", self.region.bytes())?;
        let staging = match self.staging_bytes() {
            0 => None,
            bytes => Some((device.arena("weights on their way", bytes)?, device.stream())),
        };
        let names = self.sources.iter().flat_map(|source| source.fill.names());
        let names = names.chain(copied.iter().flat_map(|table| &table.shards));
        let total = names.filter_map(|name| checkpoint.entry(name)).map(|entry| entry.bytes()).sum();
        let mut done = 0;
        let mut told = |bytes| {
            done += bytes;
            progress(done, total);
        };
        for source in &self.sources {
            let to = source.span.at::<u8>(arena.base());
            let element = match source.fill {
                Fill::Wide(_) => ElementType::F32,
                _ => self.form.element,
            };
            let mut tensors = TensorReader::new(checkpoint, source.fill.names(), element);
            match (&source.fill, &staging) {
                (Fill::Bytes(bytes), _) => arena.write(to, bytes)?,
                (Fill::Matrices { matrix, count, .. }, Some((staging, stream))) => {
                    let mut packing = Packing { staging, stream, arena: &arena, to, element };
                    for _ in 0..*count {
                        packing.matrix(matrix, &mut tensors, &mut told)?;
                    }
                }
                _ => tensors.copy(&arena, to, source.span.bytes, &mut told)?,
            }
        }
        let mut tables = Vec::new();
        for (table, shards) in mapped.iter().zip(maps) {
            table.tell(&arena, &shards.iter().map(Arena::base).collect::<Vec<_>>())?;
            tables.extend(shards);
        }
        for table in copied {
            let (room, to) = table.room(&arena, device)?;
            let mut tensors = TensorReader::new(checkpoint, &table.shards, self.form.element);
            tensors.copy(&room, to, table.bytes, &mut told)?;
            table.tell_from(&arena, to)?;
            tables.extend(table.span.is_none().then_some(room));
        }
        Ok(self.loaded(arena, tables))
    }

    fn loaded(self, arena: Arena, tables: Vec<Arena>) -> Loaded {
        let weights = self.weights.map(&mut |span| span.at(arena.base()));
        Loaded { memory: WeightMemory { arena, tables }, weights }
    }
}

impl Fill {
    /// The tensors of it.
    fn names(&self) -> &[String] {
        match self {
            Fill::Elements(names) | Fill::Wide(names) | Fill::Matrices { names, .. } => names,
            Fill::Bytes(_) => &[],
        }
    }
}

/// Bytes read from a file at a time.
const READ_BYTES: usize = 4 << 20;

/// Elements of a matrix that are packed at a time, unless its rows cannot be told apart.
const PACKED_ELEMENTS: usize = 16 << 20;

/// Matrices on their way into the device's order.
struct Packing<'a> {
    staging: &'a Arena,
    stream: &'a Stream,
    arena: &'a Arena,
    to: Ptr<u8>,
    element: ElementType,
}

impl Packing<'_> {
    fn matrix(
        &mut self,
        matrix: &Matrix,
        tensors: &mut TensorReader<'_>,
        told: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let run = matrix.run(PACKED_ELEMENTS);
        let mut rows =
            vec![0; matrix.groups * run.min(matrix.outputs) * matrix.columns * self.element.bytes()];
        for from in (0..matrix.outputs).step_by(run) {
            let part = Matrix { outputs: run.min(matrix.outputs - from), ..*matrix };
            let rows = &mut rows[..part.elements(Order::Rows) * self.element.bytes()];
            tensors.read(rows, told)?;
            self.staging.write(self.staging.base(), rows)?;
            let mut emission = Emission::new();
            let place = |order, base| tiles::Place::new(&part, 1, order, self.element.bytes(), base);
            let (from, to) = (place(Order::Rows, self.staging.base()), place(Order::Tiles, self.to));
            let args = tiles::Args::new(&part, 1, from, to);
            launch!(emission, self.element, tiles::Pack, &args)?;
            self.stream.run(emission, &[self.staging.clone(), self.arena.clone()])?;
            self.stream.synchronize()?;
            self.to = self.to.byte_add(part.elements(Order::Tiles) * self.element.bytes());
        }
        Ok(())
    }
}

/// Reads tensors one after another, converted to one element type.
struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    names: std::slice::Iter<'a, String>,
    element: ElementType,
    /// The tensor being read and the bytes of it that were.
    current: Option<(&'a str, u64)>,
}

impl<'a> TensorReader<'a> {
    fn new(checkpoint: &'a Checkpoint, names: &'a [String], element: ElementType) -> TensorReader<'a> {
        TensorReader { checkpoint, names: names.iter(), element, current: None }
    }

    /// Copies the next `bytes` bytes of elements to `to` in `arena`.
    fn copy(
        &mut self,
        arena: &Arena,
        to: Ptr<u8>,
        bytes: usize,
        told: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let mut buffer = vec![0; bytes.min(READ_BYTES)];
        for from in (0..bytes).step_by(READ_BYTES) {
            let run = &mut buffer[..READ_BYTES.min(bytes - from)];
            self.read(run, told)?;
            arena.write(to.byte_add(from), run)?;
        }
        Ok(())
    }

    /// Reads the next elements, as many as `into` holds.
    fn read(&mut self, mut into: &mut [u8], told: &mut dyn FnMut(u64)) -> Result<(), Error> {
        while !into.is_empty() {
            let (name, from) = match self.current.take() {
                Some(current) => current,
                None => (self.names.next().expect("a weight is as large as its tensors").as_str(), 0),
            };
            let entry = self.checkpoint.entry(name).expect("the layout's tensors are in the checkpoint");
            let stored = match entry.dtype {
                Dtype::BF16 => 2,
                Dtype::F32 => 4,
                other => unreachable!("the layout permits no {other:?} weight"),
            };
            let left = ((entry.bytes() - from) as usize).min(READ_BYTES) / stored;
            let count = left.min(into.len() / self.element.bytes());
            let (now, later) = into.split_at_mut(count * self.element.bytes());
            match (entry.dtype, self.element) {
                (Dtype::BF16, ElementType::Bf16) | (Dtype::F32, ElementType::F32) => {
                    self.checkpoint.read_range(name, from, now)?;
                }
                (dtype, _) => {
                    let mut raw = vec![0; count * stored];
                    self.checkpoint.read_range(name, from, &mut raw)?;
                    convert(dtype, &raw, now);
                }
            }
            let read = (count * stored) as u64;
            told(read);
            self.current = Some((name, from + read)).filter(|(_, at)| *at < entry.bytes());
            into = later;
        }
        Ok(())
    }
}

/// Widens stored bf16, or narrows stored f32.
fn convert(stored: Dtype, from: &[u8], to: &mut [u8]) {
    if stored == Dtype::BF16 {
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            *to = bf16::from_le_bytes(*from).widen().to_le_bytes();
        }
    } else {
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            *to = bf16::narrow(f32::from_le_bytes(*from)).to_le_bytes();
        }
    }
}

struct Builder {
    region: Region,
    sources: Vec<Source>,
    tables: Vec<TablePlan>,
    form: WeightForm,
}

impl Builder {
    /// Tensors one after another. They have one inner width, so they are made alike.
    fn stack<'a>(&mut self, specs: impl IntoIterator<Item = &'a Spec>) -> Span {
        let (mut names, mut elements, mut made) = (Vec::new(), 0, None);
        for spec in specs {
            elements += spec.shape.iter().product::<usize>();
            names.push(spec.name.clone());
            made.get_or_insert(Made::of(spec));
        }
        let span = self.region.add(names[0].clone(), elements * self.form.element.bytes());
        let made = made.expect("a stack has tensors");
        self.sources.push(Source { span, fill: Fill::Elements(names), made });
        span
    }

    fn plain_gain(&mut self, spec: &Spec) -> Span {
        let span = self.one(spec);
        self.sources.last_mut().expect("just added").made = Made::PLAIN_GAIN;
        span
    }

    /// `count` matrices of the same form, of all the tensors one after another.
    fn matrices<'a>(
        &mut self,
        specs: impl IntoIterator<Item = &'a Spec>,
        matrix: Matrix,
        count: usize,
    ) -> Span {
        let names: Vec<String> = specs.into_iter().map(|spec| spec.name.clone()).collect();
        let bytes = count * matrix.elements(self.form.order) * self.form.element.bytes();
        let span = self.region.add(names[0].clone(), bytes);
        let made = Made::matrix(matrix.columns);
        self.sources.push(Source { span, fill: Fill::Matrices { names, matrix, count }, made });
        span
    }

    /// A matrix of tensors that lie on top of each other.
    fn matrix(&mut self, specs: &[&Spec], form: impl FnOnce(Matrix) -> Matrix) -> Span {
        let outputs = specs.iter().map(|spec| spec.shape[0]).sum();
        self.matrices(specs.iter().copied(), form(Matrix::plain(outputs, specs[0].shape[1])), 1)
    }

    fn one(&mut self, spec: &Spec) -> Span {
        self.stack([spec])
    }

    fn wide(&mut self, spec: &Spec, made: Made) -> Span {
        let span = self.region.array::<f32>(spec.name.clone(), spec.shape.iter().product());
        self.sources.push(Source { span, fill: Fill::Wide(vec![spec.name.clone()]), made });
        span
    }

    fn constant<T: bytemuck::Pod>(&mut self, label: &str, values: &[T]) -> Span {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let span = self.region.add(label, bytes.len());
        self.sources.push(Source { span, fill: Fill::Bytes(bytes.to_vec()), made: Made::NOTHING });
        span
    }

    fn weights(&mut self, checkpoint: &Checkpoint) -> Weights<Span> {
        let layout: &Layout = &checkpoint.layout;
        let rotary = &checkpoint.config.rotary;
        let frequencies = kernels::rope::frequencies(rotary.theta as f32, rotary.width);
        let (mixer, config) = (&layout.final_mixer, &checkpoint.config);
        let streams = config.hc_count;
        Weights {
            embed: self.one(&layout.embed_tokens),
            frequencies: self.constant("rotary frequencies", &frequencies),
            layers: layout.layers.iter().map(|layer| self.layer(layer, config)).collect(),
            mixer: HyperWeights {
                gain: self.one(&mixer.hc_norm),
                down: self.matrix(&[&mixer.mix_down], |matrix| matrix),
                up: self.matrix(&[&mixer.mix_up], |matrix| matrix.grouped(streams)),
                injects: false,
            },
            head: self.matrix(&[&layout.lm_head], |matrix| matrix),
        }
    }

    fn layer(&mut self, layer: &crate::checkpoint::layout::Layer, c: &ModelConfig) -> LayerWeights<Span> {
        let (inner, hidden, experts) = (c.moe_intermediate_size, c.hidden_size, c.num_experts);
        let gate_up = Matrix::plain(2 * inner, hidden).grouped(2);
        let down = Matrix::plain(hidden, inner).cut();
        LayerWeights {
            ngram: layer.ple.as_ref().map(|ple| self.ngram(ple)),
            attn: self.hyper(&layer.attn_hyper_connection, c),
            mixer: match &layer.mixer {
                TokenMixer::Linear(w) => MixerWeights::Recurrent(RecurrentWeights {
                    input: self
                        .matrix(&[&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a], |matrix| matrix),
                    conv: self.one(&w.conv1d),
                    a_log: self.wide(&w.a_log, Made::A_LOG),
                    dt_bias: self.wide(&w.dt_bias, Made::DT_BIAS),
                    norm: self.plain_gain(&w.norm),
                    output: self.matrix(&[&w.out_proj], Matrix::cut),
                }),
                TokenMixer::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: self.matrix(&[&w.q_proj, &w.k_proj, &w.v_proj, &w.index_qk_proj], |matrix| matrix),
                    q_gain: self.one(&w.q_norm),
                    k_gain: self.one(&w.k_norm),
                    index_q_gain: self.one(&w.index_q_norm),
                    index_k_gain: self.one(&w.index_k_norm),
                    output: self.matrix(&[&w.o_proj], Matrix::cut),
                }),
            },
            mlp: self.hyper(&layer.mlp_hyper_connection, c),
            moe: MoeWeights {
                router: self.matrix(&[&layer.moe.shared.router, &layer.moe.shared.gate], |matrix| matrix),
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
                        matrix.grouped(2)
                    }),
                shared_down: self.matrix(&[&layer.moe.shared.down_proj], Matrix::cut),
            },
        }
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
    fn table(&mut self, ple: &Ple) -> Span {
        let elements: usize = ple.shards.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
        let shards: Vec<String> = ple.shards.iter().map(|spec| spec.name.clone()).collect();
        let bytes = elements * self.form.element.bytes();
        let addresses = self.region.array::<Ptr<u8>>("n-gram shards", shards.len());
        let inside = self.form.table == TablePlace::Device;
        let span = inside.then(|| self.region.add(shards[0].clone(), bytes));
        self.tables.push(TablePlan { addresses, span, shards, bytes, made: Made::of(&ple.shards[0]) });
        addresses
    }

    fn ngram(&mut self, ple: &Ple) -> NgramWeights<Span> {
        NgramWeights {
            multipliers: self.constant("n-gram multipliers", &ple.hash.multipliers),
            primes: self.constant("n-gram primes", &ple.hash.primes),
            offsets: self.constant("n-gram offsets", &ple.hash.offsets),
            shards: self.table(ple),
            table_rows: ple.shards.len() * ple.shard_rows,
            shard_rows: ple.shard_rows,
            key_value: self.matrix(&[&ple.dense.key_proj, &ple.dense.value_proj], |matrix| matrix),
            key_gain: self.one(&ple.dense.norm_key),
            query_gain: self.one(&ple.dense.norm_query),
            conv_gain: self.one(&ple.dense.norm_conv),
            conv: self.one(&ple.dense.conv1d),
        }
    }
}

impl<T> Weights<T> {
    /// The same tree over other leaves.
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Weights<U> {
        Weights {
            embed: f(self.embed),
            frequencies: f(self.frequencies),
            layers: self.layers.into_iter().map(|layer| layer.map(f)).collect(),
            mixer: self.mixer.map(f),
            head: f(self.head),
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
                shards: f(n.shards),
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
                    input: f(w.input),
                    conv: f(w.conv),
                    a_log: f(w.a_log),
                    dt_bias: f(w.dt_bias),
                    norm: f(w.norm),
                    output: f(w.output),
                }),
                MixerWeights::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: f(w.input),
                    q_gain: f(w.q_gain),
                    k_gain: f(w.k_gain),
                    index_q_gain: f(w.index_q_gain),
                    index_k_gain: f(w.index_k_gain),
                    output: f(w.output),
                }),
            },
            mlp: self.mlp.map(f),
            moe: MoeWeights {
                router: f(self.moe.router),
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
