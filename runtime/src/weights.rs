//! Checkpoint to device memory: which tensors make up each weight, and the loading of them.
//!
//! A device weight is a run of checkpoint tensors one after another (projections that read the same input
//! are stacked), converted to the model's element type. The layout is made first, so that the memory plan
//! is known before any weight is read; every byte is then read once.

use graph::{Arena, Device, Ptr, Region, Span};
use half::bf16;
use kernels::numerics::{Element, ElementType};

use crate::checkpoint::layout::{Experts, HyperConnection, Layout, Ple, Spec, TokenMixer};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::Error;

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
    /// `[rank, streams * hidden]`
    pub down: T,
    /// `[streams * hidden, rank]`
    pub up: T,
    /// `[streams, streams * hidden]`; none before the head
    pub injection: Option<T>,
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
    /// `[rows, embedding width / heads]`
    pub table: T,
    /// Rows of the table.
    pub table_rows: usize,
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

/// The weights of a model in device memory.
pub struct Loaded {
    /// The memory.
    pub arena: Arena,
    /// Where each weight lies in it.
    pub weights: Weights,
}

/// How the weights of a checkpoint will lie in memory.
pub struct WeightPlan {
    weights: Weights<Span>,
    region: Region,
    sources: Vec<Source>,
    element: ElementType,
}

/// What fills one span.
struct Source {
    span: Span,
    fill: Fill,
}

enum Fill {
    /// Tensors one after another, converted to elements.
    Elements(Vec<String>),
    /// Tensors one after another, converted to f32.
    Wide(Vec<String>),
    /// Bytes that come from the settings.
    Bytes(Vec<u8>),
}

impl WeightPlan {
    /// Lays out the weights of `checkpoint` for a model run with `element`.
    pub fn new(checkpoint: &Checkpoint, element: ElementType) -> WeightPlan {
        let mut build = Builder { region: Region::new(), sources: Vec::new(), element };
        let weights = build.weights(checkpoint);
        WeightPlan { weights, region: build.region, sources: build.sources, element }
    }

    /// Size of all weights in bytes.
    pub fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Size of the n-gram tables in bytes; part of [`WeightPlan::bytes`].
    pub fn table_bytes(&self) -> usize {
        let tables = self.weights.layers.iter().filter_map(|layer| layer.ngram.as_ref());
        tables.map(|ngram| ngram.table.bytes).sum()
    }

    /// Allocates the memory and reads every weight into it. `progress` is told the bytes read so far, of
    /// all that will be read.
    pub fn load(
        self,
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loaded, Error> {
        let arena = device.arena("weights", self.region.bytes())?;
        let names = self.sources.iter().flat_map(|source| match &source.fill {
            Fill::Elements(names) | Fill::Wide(names) => names.as_slice(),
            Fill::Bytes(_) => &[],
        });
        let total = names.filter_map(|name| checkpoint.entry(name)).map(|entry| entry.bytes()).sum();
        let mut done = 0;
        for source in &self.sources {
            let to = source.span.at::<u8>(arena.base());
            match &source.fill {
                Fill::Bytes(bytes) => arena.write(to, bytes)?,
                Fill::Elements(names) | Fill::Wide(names) => {
                    let wide = matches!(source.fill, Fill::Wide(_)) || self.element == ElementType::F32;
                    let mut load = TensorLoad { checkpoint, arena: &arena, to, wide };
                    for name in names {
                        load.tensor(name, &mut |bytes| {
                            done += bytes;
                            progress(done, total);
                        })?;
                    }
                }
            }
        }
        let weights = self.weights.map(&mut |span| span.at(arena.base()));
        Ok(Loaded { arena, weights })
    }
}

/// Bytes read from a file at a time.
const READ_BYTES: usize = 4 << 20;

/// Reads tensors one after another to a moving address.
struct TensorLoad<'a> {
    checkpoint: &'a Checkpoint,
    arena: &'a Arena,
    to: Ptr<u8>,
    wide: bool,
}

impl TensorLoad<'_> {
    fn tensor(&mut self, name: &str, told: &mut dyn FnMut(u64)) -> Result<(), Error> {
        let entry = self.checkpoint.entry(name).expect("the layout's tensors are in the checkpoint");
        let (dtype, total) = (entry.dtype, entry.bytes());
        let mut buffer = vec![0u8; (total as usize).min(READ_BYTES)];
        let mut offset = 0;
        while offset < total {
            let run = &mut buffer[..((total - offset) as usize).min(READ_BYTES)];
            self.checkpoint.read_range(name, offset, run)?;
            self.store(dtype, run)?;
            offset += run.len() as u64;
            told(run.len() as u64);
        }
        Ok(())
    }

    fn store(&mut self, dtype: Dtype, run: &[u8]) -> Result<(), Error> {
        match (dtype, self.wide) {
            (Dtype::BF16, false) | (Dtype::F32, true) => self.put(run),
            (Dtype::BF16, true) => {
                let words = run.as_chunks().0.iter();
                let wide: Vec<f32> = words.map(|&word| bf16::from_le_bytes(word).widen()).collect();
                self.put(&wide)
            }
            (Dtype::F32, false) => {
                let words = run.as_chunks().0.iter();
                let narrow: Vec<bf16> = words.map(|&word| bf16::narrow(f32::from_le_bytes(word))).collect();
                self.put(&narrow)
            }
            (other, _) => unreachable!("the layout permits no {other:?} weight"),
        }
    }

    fn put<T: bytemuck::Pod>(&mut self, values: &[T]) -> Result<(), Error> {
        self.arena.write(self.to.cast(), values)?;
        self.to = self.to.byte_add(size_of_val(values));
        Ok(())
    }
}

struct Builder {
    region: Region,
    sources: Vec<Source>,
    element: ElementType,
}

impl Builder {
    fn stack<'a>(&mut self, specs: impl IntoIterator<Item = &'a Spec>) -> Span {
        let (mut names, mut elements) = (Vec::new(), 0);
        for spec in specs {
            elements += spec.shape.iter().product::<usize>();
            names.push(spec.name.clone());
        }
        let span = self.region.add(names[0].clone(), elements * self.element.bytes());
        self.sources.push(Source { span, fill: Fill::Elements(names) });
        span
    }

    fn one(&mut self, spec: &Spec) -> Span {
        self.stack([spec])
    }

    fn wide(&mut self, spec: &Spec) -> Span {
        let span = self.region.array::<f32>(spec.name.clone(), spec.shape.iter().product());
        self.sources.push(Source { span, fill: Fill::Wide(vec![spec.name.clone()]) });
        span
    }

    fn constant<T: bytemuck::Pod>(&mut self, label: &str, values: &[T]) -> Span {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let span = self.region.add(label, bytes.len());
        self.sources.push(Source { span, fill: Fill::Bytes(bytes.to_vec()) });
        span
    }

    fn weights(&mut self, checkpoint: &Checkpoint) -> Weights<Span> {
        let layout: &Layout = &checkpoint.layout;
        let rotary = &checkpoint.config.rotary;
        let frequencies = kernels::rope::frequencies(rotary.theta as f32, rotary.width);
        let mixer = &layout.final_mixer;
        Weights {
            embed: self.one(&layout.embed_tokens),
            frequencies: self.constant("rotary frequencies", &frequencies),
            layers: layout.layers.iter().map(|layer| self.layer(layer)).collect(),
            mixer: HyperWeights {
                gain: self.one(&mixer.hc_norm),
                down: self.one(&mixer.mix_down),
                up: self.one(&mixer.mix_up),
                injection: None,
            },
            head: self.one(&layout.lm_head),
        }
    }

    fn layer(&mut self, layer: &crate::checkpoint::layout::Layer) -> LayerWeights<Span> {
        LayerWeights {
            ngram: layer.ple.as_ref().map(|ple| self.ngram(ple)),
            attn: self.hyper(&layer.attn_hyper_connection),
            mixer: match &layer.mixer {
                TokenMixer::Linear(w) => MixerWeights::Recurrent(RecurrentWeights {
                    input: self.stack([&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a]),
                    conv: self.one(&w.conv1d),
                    a_log: self.wide(&w.a_log),
                    dt_bias: self.wide(&w.dt_bias),
                    norm: self.one(&w.norm),
                    output: self.one(&w.out_proj),
                }),
                TokenMixer::Sparse(w) => MixerWeights::Sparse(SparseWeights {
                    input: self.stack([&w.q_proj, &w.k_proj, &w.v_proj, &w.index_qk_proj]),
                    q_gain: self.one(&w.q_norm),
                    k_gain: self.one(&w.k_norm),
                    index_q_gain: self.one(&w.index_q_norm),
                    index_k_gain: self.one(&w.index_k_norm),
                    output: self.one(&w.o_proj),
                }),
            },
            mlp: self.hyper(&layer.mlp_hyper_connection),
            moe: MoeWeights {
                router: self.stack([&layer.moe.shared.router, &layer.moe.shared.gate]),
                gate_up: match &layer.moe.experts {
                    Experts::Fused { gate_up, .. } => self.one(gate_up),
                    Experts::Split(experts) => self.stack(experts.iter().flat_map(|e| [&e.gate, &e.up])),
                },
                down: match &layer.moe.experts {
                    Experts::Fused { down, .. } => self.one(down),
                    Experts::Split(experts) => self.stack(experts.iter().map(|e| &e.down)),
                },
                shared_gate_up: self.stack([&layer.moe.shared.gate_proj, &layer.moe.shared.up_proj]),
                shared_down: self.one(&layer.moe.shared.down_proj),
            },
        }
    }

    fn hyper(&mut self, w: &HyperConnection) -> HyperWeights<Span> {
        HyperWeights {
            gain: self.one(&w.hc_norm),
            down: self.one(&w.mix_down),
            up: self.one(&w.mix_up),
            injection: Some(self.one(&w.block_inject)),
        }
    }

    fn ngram(&mut self, ple: &Ple) -> NgramWeights<Span> {
        NgramWeights {
            multipliers: self.constant("n-gram multipliers", &ple.hash.multipliers),
            primes: self.constant("n-gram primes", &ple.hash.primes),
            offsets: self.constant("n-gram offsets", &ple.hash.offsets),
            table: self.stack(&ple.shards),
            table_rows: ple.shards.len() * ple.shard_rows,
            key_value: self.stack([&ple.dense.key_proj, &ple.dense.value_proj]),
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
                table: f(n.table),
                table_rows: n.table_rows,
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
        HyperWeights {
            gain: f(self.gain),
            down: f(self.down),
            up: f(self.up),
            injection: self.injection.map(f),
        }
    }
}
