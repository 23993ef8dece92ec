//! Tensors of the language model's layers.

use kernels::hash::NgramHash;

use super::experts::Experts;
use super::{Part, Scope, Spec, tensors};
use crate::config::{LayerKind, ModelConfig};

/// A decoder layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The n-gram embedding that is added before the layer, where it has one.
    pub ple: Option<Ple>,
    /// Streams around the token mixer.
    pub attn_hyper_connection: HyperConnection,
    /// What mixes tokens.
    pub mixer: TokenMixer,
    /// Streams around the experts.
    pub mlp_hyper_connection: HyperConnection,
    /// Mixture of experts.
    pub moe: Moe,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone)]
pub enum TokenMixer {
    /// Gated delta-net.
    Linear(LinearAttention),
    /// Attention over selected blocks.
    Sparse(SparseAttention),
}

/// Mixture of experts.
#[derive(Debug, Clone)]
pub struct Moe {
    /// Router and shared expert.
    pub shared: SharedExpert,
    /// Routed experts.
    pub experts: Experts,
}

/// An n-gram embedding.
#[derive(Debug, Clone)]
pub struct Ple {
    /// Projections, norms and convolution.
    pub dense: PleDense,
    /// The stored constants of its hash.
    pub buffers: HashBuffers,
    /// The table, in equal pieces: row `r` is row `r % shard_rows` of piece `r / shard_rows`.
    pub shards: Vec<Spec>,
    /// Rows of a piece.
    pub shard_rows: usize,
    /// Which rows a token reads.
    pub hash: NgramHash,
}

tensors! {
    /// Mixes the streams into the input of a sub-layer and injects its output again.
    HyperConnection {
        /// `[streams * hidden]`
        hc_norm,
        /// `[rank, streams * hidden]`
        mix_down,
        /// `[streams * hidden, rank]`
        mix_up,
        /// `[streams, streams * hidden]`
        block_inject,
    }
}

tensors! {
    /// Mixes the streams into one row at the end.
    FinalMixer {
        /// `[streams * hidden]`
        hc_norm,
        /// `[rank, streams * hidden]`
        mix_down,
        /// `[streams * hidden, rank]`
        mix_up,
        /// Unused: there is nothing to inject into at the end.
        block_inject,
    }
}

tensors! {
    /// Gated delta-net.
    LinearAttention {
        /// Queries, keys, values: `[2 * key width + value width, hidden]`
        in_proj_qkv,
        /// Output gate: `[value width, hidden]`
        in_proj_z,
        /// Write strength: `[value heads, hidden]`
        in_proj_b,
        /// Decay: `[value heads, hidden]`
        in_proj_a,
        /// `[2 * key width + value width, 1, taps]`
        conv1d,
        /// `[value heads]`
        a_log,
        /// `[value heads]`
        dt_bias,
        /// `[value head width]`, not zero-centred
        norm,
        /// `[hidden, value width]`
        out_proj,
    }
}

tensors! {
    /// Attention over blocks that an indexer selects.
    SparseAttention {
        /// Query and gate of each head in turn: `[2 * attention width, hidden]`
        q_proj,
        /// `[kv width, hidden]`
        k_proj,
        /// `[kv width, hidden]`
        v_proj,
        /// `[hidden, attention width]`
        o_proj,
        /// `[head width]`
        q_norm,
        /// `[head width]`
        k_norm,
        /// Index queries, then the index key: `[index width, hidden]`
        index_qk_proj,
        /// `[index head width]`
        index_q_norm,
        /// `[index head width]`
        index_k_norm,
    }
}

tensors! {
    /// Router and shared expert.
    SharedExpert {
        /// Router: `[experts, hidden]`
        router,
        /// `[width, hidden]`
        gate_proj,
        /// `[width, hidden]`
        up_proj,
        /// `[hidden, width]`
        down_proj,
        /// Gate of the shared expert: `[1, hidden]`
        gate,
    }
}

tensors! {
    /// The dense weights of an n-gram embedding.
    PleDense {
        /// `[streams * hidden, embedding width]`
        key_proj,
        /// `[hidden, embedding width]`
        value_proj,
        /// `[streams * hidden]`
        norm_key,
        /// `[streams * hidden]`
        norm_query,
        /// `[streams * hidden]`
        norm_conv,
        /// `[streams * hidden, 1, taps]`
        conv1d,
    }
}

tensors! {
    /// The stored constants of an n-gram hash.
    HashBuffers {
        /// `[n-gram length]`
        layer_multipliers,
        /// `[heads]`
        vocab_sizes,
        /// `[heads]`
        offsets,
    }
}

impl Layer {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig, layer: usize) -> Self {
        let ple = c.ple.iter().find(|ple| ple.layer == layer);
        Self {
            ple: ple.and_then(|ple| Ple::new(&at.within("ple."), c, c.ngram_hash(*ple)?)),
            attn_hyper_connection: HyperConnection::new(&at.within("attn_hyper_connection."), c),
            mixer: match c.layers[layer] {
                LayerKind::LinearAttention => {
                    TokenMixer::Linear(LinearAttention::new(&at.within("linear_attn."), c))
                }
                LayerKind::SparseAttention => {
                    TokenMixer::Sparse(SparseAttention::new(&at.within("self_attn."), c))
                }
            },
            mlp_hyper_connection: HyperConnection::new(&at.within("mlp_hyper_connection."), c),
            moe: Moe::new(&at.within("mlp."), c),
        }
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        if let Some(ple) = &self.ple {
            ple.dense.gather(specs);
            ple.buffers.gather(specs);
            ple.gather_table(specs);
        }
        self.attn_hyper_connection.gather(specs);
        match &self.mixer {
            TokenMixer::Linear(linear) => linear.gather(specs),
            TokenMixer::Sparse(sparse) => sparse.gather(specs),
        }
        self.mlp_hyper_connection.gather(specs);
        self.moe.gather(specs);
    }
}

impl HyperConnection {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let streams = c.streams_width();
        Self {
            hc_norm: at.weight("hc_norm.weight", &[streams]),
            mix_down: at.weight("input_mix_weight_down.weight", &[c.hc_lowrank, streams]),
            mix_up: at.weight("input_mix_weight_up.weight", &[streams, c.hc_lowrank]),
            block_inject: at.weight("block_inject_weight.weight", &[c.hc_count, streams]),
        }
    }
}

impl FinalMixer {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let HyperConnection { hc_norm, mix_down, mix_up, block_inject } = HyperConnection::new(at, c);
        let block_inject = Spec { required: false, part: Part::Idle, ..block_inject };
        Self { hc_norm, mix_down, mix_up, block_inject }
    }
}

impl LinearAttention {
    fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let [hidden, heads] = [c.hidden_size, c.linear_num_value_heads];
        let [conv, value] = [c.linear_conv_width(), c.linear_value_width()];
        Self {
            in_proj_qkv: at.projection("in_proj_qkv", &[conv, hidden]),
            in_proj_z: at.projection("in_proj_z", &[value, hidden]),
            in_proj_b: at.projection("in_proj_b", &[heads, hidden]),
            in_proj_a: at.projection("in_proj_a", &[heads, hidden]),
            conv1d: at.weight("conv1d.weight", &[conv, 1, c.linear_conv_kernel_dim]),
            a_log: at.weight("A_log", &[heads]),
            dt_bias: at.weight("dt_bias", &[heads]),
            norm: at.weight("norm.weight", &[c.linear_value_head_dim]),
            out_proj: at.projection("out_proj", &[hidden, value]),
        }
    }
}

impl SparseAttention {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let [hidden, attention, kv] = [c.hidden_size, c.attention_width(), c.kv_width()];
        Self {
            q_proj: at.projection("q_proj", &[2 * attention, hidden]),
            k_proj: at.projection("k_proj", &[kv, hidden]),
            v_proj: at.projection("v_proj", &[kv, hidden]),
            o_proj: at.projection("o_proj", &[hidden, attention]),
            q_norm: at.weight("q_norm.weight", &[c.head_dim]),
            k_norm: at.weight("k_norm.weight", &[c.head_dim]),
            index_qk_proj: at.projection("indexer.index_qk_proj", &[c.index_width(), hidden]),
            index_q_norm: at.weight("indexer.q_layernorm.weight", &[c.indexer_head_dim]),
            index_k_norm: at.weight("indexer.k_layernorm.weight", &[c.indexer_head_dim]),
        }
    }
}

impl Moe {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let [hidden, width] = [c.hidden_size, c.shared_expert_intermediate_size];
        Self {
            shared: SharedExpert {
                router: at.weight("gate.weight", &[c.num_experts, hidden]),
                gate_proj: at.projection("shared_expert.gate_proj", &[width, hidden]),
                up_proj: at.projection("shared_expert.up_proj", &[width, hidden]),
                down_proj: at.projection("shared_expert.down_proj", &[hidden, width]),
                gate: at.weight("shared_expert_gate.weight", &[1, hidden]),
            },
            experts: Experts::new(&at.within("experts."), c),
        }
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        self.shared.gather(specs);
        self.experts.gather(specs);
    }
}

impl Ple {
    /// The table's pieces with their scales; a scale that all pieces share comes once.
    fn gather_table<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        for shard in &self.shards {
            specs.push(shard);
            specs.extend(shard.stored.own_scales());
        }
        specs.extend(self.shards.iter().find_map(|shard| shard.stored.shared_scale()));
    }

    fn new(at: &Scope<'_>, c: &ModelConfig, hash: NgramHash) -> Option<Self> {
        let ngram = c.ngram?;
        let [hidden, streams, heads] = [c.hidden_size, c.streams_width(), ngram.heads()];
        let table = at.within("ple_embedding.");
        let shard_rows = hash.rows_padded as usize / ngram.split_parts;
        let shards = table.within("ngram_embedding.").of(Part::Table);
        let shard = |piece: usize| shards.shard(&format!("shard_{piece}"), &[shard_rows, ngram.head_width()]);
        Some(Self {
            dense: PleDense {
                key_proj: at.weight("key_proj.weight", &[streams, ngram.embed_dim]),
                value_proj: at.weight("value_proj.weight", &[hidden, ngram.embed_dim]),
                norm_key: at.weight("norm_key.weight", &[streams]),
                norm_query: at.weight("norm_query.weight", &[streams]),
                norm_conv: at.weight("norm_conv.weight", &[streams]),
                conv1d: at.weight("conv1d.weight", &[streams, 1, ngram.conv_kernel_size]),
            },
            buffers: HashBuffers {
                layer_multipliers: table.constant("layer_multipliers", ngram.ngram_size),
                vocab_sizes: table.constant("ngram_heads_vocab_sizes", heads),
                offsets: table.constant("ngram_heads_offsets", heads),
            },
            shards: (0..ngram.split_parts).map(shard).collect(),
            shard_rows,
            hash,
        })
    }
}
