//! The model's settings: `config.json` and `generation_config.json`, read once, checked, and from then on only fields.

mod generation;
mod quantisation;
mod section;
mod text;
mod vision;

use std::fs;
use std::path::Path;

use kernels::hash::{NgramHash, NgramShape};

use crate::error::{ConfigError, LoadError};
use section::Section;

pub use generation::GenerationConfig;
pub use quantisation::{Claim, Covers, Family};
pub use vision::{MediaTokens, VisionConfig};

/// Everything `config.json` decides about a `qwen4_exp` model.
///
/// Every key of the file was used, compared with the only supported value, or found on a list of keys that do not
/// matter for inference; anything else is an error that names it. Sizes are positive and products of a few of them fit
/// in 64 bits. Layers count from zero.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// How the weights are meant to be stored; single tensors may differ.
    pub dtype: StorageDtype,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of one residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// What mixes tokens in each layer.
    pub layers: Vec<LayerKind>,
    /// Positions the model was trained for.
    pub max_position_embeddings: usize,
    /// Added under the root of every RMS norm.
    pub rms_norm_eps: f32,

    /// Query heads of sparse attention.
    pub num_attention_heads: usize,
    /// Key and value heads of sparse attention; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of each of them.
    pub head_dim: usize,
    /// Rotary embedding of sparse attention and of its indexer.
    pub rotary: Rotary,

    /// Query heads of the indexer; it has one key head.
    pub indexer_n_heads: usize,
    /// Width of an indexer head, at least the rotary width.
    pub indexer_head_dim: usize,
    /// Tokens chosen from complete blocks.
    pub indexer_budget: usize,
    /// Tokens in a block; divides the budget, and 64.
    pub indexer_compress_ratio: usize,

    /// Query and key heads of linear attention.
    pub linear_num_key_heads: usize,
    /// Value heads of linear attention; a multiple of the key heads.
    pub linear_num_value_heads: usize,
    /// Width of a query or key head of linear attention.
    pub linear_key_head_dim: usize,
    /// Width of a value head of linear attention.
    pub linear_value_head_dim: usize,
    /// Taps of the causal convolution in linear attention.
    pub linear_conv_kernel_dim: usize,
    /// Activation of linear attention's output gate.
    pub output_gate: OutputGate,

    /// Routed experts of each layer.
    pub num_experts: usize,
    /// Experts that a token uses.
    pub num_experts_per_tok: usize,
    /// Inner width of a routed expert.
    pub moe_intermediate_size: usize,
    /// Inner width of the shared expert.
    pub shared_expert_intermediate_size: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one.
    pub norm_topk_prob: bool,

    /// Residual streams, at least two.
    pub hc_count: usize,
    /// Rank of the stream mixers.
    pub hc_lowrank: usize,

    /// Dimensions shared by all n-gram embeddings; present exactly if `ple` has entries.
    pub ngram: Option<NgramConfig>,
    /// The n-gram embeddings, in layer order.
    pub ple: Vec<PleConfig>,

    /// The id that cuts a sequence for the n-gram hash. It is not the list of ids that end a reply.
    pub boundary: u32,
    /// The id that begins a text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Draft layers, none or one.
    pub mtp_num_hidden_layers: usize,
    /// The vision tower, where the model has one.
    pub vision: Option<VisionConfig>,
    /// What the settings say about quantised weights. How a weight is read is decided by the files; this is compared.
    pub quantisation: Vec<Claim>,
}

/// How a checkpoint means to store its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageDtype {
    /// bfloat16.
    Bf16,
    /// 32-bit floats.
    F32,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated delta-net.
    LinearAttention,
    /// Attention over blocks that an indexer selects.
    SparseAttention,
}

/// Activation of the output gate of linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// The rotary embedding: how wide, how fast, and which position axis turns which pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rotary {
    /// Leading elements of a head that turn; even.
    pub width: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Frequencies for time, height and width; they sum to half of `width`.
    pub sections: [usize; 3],
}

/// An axis of a three-part position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Time, or the plain token position.
    Time,
    /// Row in a picture.
    Height,
    /// Column in a picture.
    Width,
}

impl Rotary {
    /// The axis whose position turns frequency `i`, `i < width / 2`.
    pub fn axis(&self, i: usize) -> Axis {
        match i % 3 {
            1 if i < 3 * self.sections[1] => Axis::Height,
            2 if i < 3 * self.sections[2] => Axis::Width,
            _ => Axis::Time,
        }
    }
}

/// Dimensions shared by all n-gram embeddings of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NgramConfig {
    /// Width of all heads together.
    pub embed_dim: usize,
    /// Taps of the short convolution; its dilation is `ngram_size`.
    pub conv_kernel_size: usize,
    /// Longest n-gram, in tokens.
    pub ngram_size: usize,
    /// Heads for each n-gram length from two up.
    pub heads_per_ngram: usize,
    /// No head has fewer rows than this.
    pub vocab_size_base: u64,
    /// Rows of the whole table are padded to a multiple of this.
    pub divisible_by: u64,
    /// Pieces in which the table is stored.
    pub split_parts: usize,
    /// Seed of the hash.
    pub seed: u64,
}

impl NgramConfig {
    /// Table rows that one token reads.
    pub fn heads(&self) -> usize {
        (self.ngram_size - 1) * self.heads_per_ngram
    }

    /// Width of a table row.
    pub fn head_width(&self) -> usize {
        self.embed_dim / self.heads()
    }
}

/// Where an n-gram embedding sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PleConfig {
    /// Its layer, a linear-attention one, counted from zero.
    pub layer: usize,
    /// Its number among the n-gram embeddings, which fixes its hash.
    pub ordinal: usize,
}

impl ModelConfig {
    /// Reads and checks `config.json` of a model folder, and `hf_quant_config.json` where there is one.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let mut config =
            Self::from_json(&read_text(&path)?).map_err(|problem| LoadError::Config { path, problem })?;
        let path = dir.join(quantisation::FILE);
        if path.exists() {
            let claim = quantisation::from_file(&read_text(&path)?);
            config.quantisation.push(claim.map_err(|problem| LoadError::Config { path, problem })?);
        }
        Ok(config)
    }

    /// Ids that are text wherever they stand: those before the first that stands for a picture, or beside one.
    pub fn text_ids(&self) -> usize {
        let tokens = self.vision.as_ref().map(|vision| vision.tokens);
        let ids = tokens.map(|MediaTokens { image, video, start, end }| [image, video, start, end]);
        let first = ids.into_iter().flatten().min();
        first.map_or(self.vocab_size, |first| (first as usize).min(self.vocab_size))
    }

    /// Checks the text of a `config.json`.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let file = section::parse(json)?;
        let mut top = Section::new("", &file);
        top.only_text("model_type", &["qwen4_exp"])?;
        top.only("tie_word_embeddings", false)?;
        top.only("language_model_only", false)?;
        top.only_list("architectures", &["Qwen4ExpForConditionalGeneration"])?;
        let dtype = section::dtype(&mut top)?;
        let mut config = text::read(top.need_section("text_config")?, dtype)?;
        config.vision = vision::read(&mut top, &config)?;
        config.quantisation.extend(quantisation::read(&mut top)?);
        top.finish(&["transformers_version"])?;
        Ok(config)
    }

    /// The settings of a model of the first `layers` layers, with n-gram tables of at most `table_rows` rows for each
    /// head, and without a draft layer and a vision tower.
    ///
    /// # Panics
    /// When there are not so many layers.
    pub fn first_layers(mut self, layers: usize, table_rows: u64) -> ModelConfig {
        assert!(
            (1..=self.num_hidden_layers).contains(&layers),
            "{layers} of {} layers",
            self.num_hidden_layers
        );
        self.num_hidden_layers = layers;
        self.layers.truncate(layers);
        self.ple.retain(|ple| ple.layer < layers);
        self.ngram = self.ngram.filter(|_| !self.ple.is_empty()).map(|ngram| NgramConfig {
            vocab_size_base: ngram.vocab_size_base.min(table_rows),
            // The table is stored nowhere, so in no pieces.
            split_parts: 1,
            ..ngram
        });
        self.mtp_num_hidden_layers = 0;
        self.vision = None;
        self
    }

    /// Width of all residual streams side by side.
    pub fn streams_width(&self) -> usize {
        self.hc_count * self.hidden_size
    }

    /// Width of all query heads of sparse attention; the projection is twice as wide, for the gate.
    pub fn attention_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads, or of all value heads, of sparse attention.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Width of the indexer's projection: its query heads, then its key.
    pub fn index_width(&self) -> usize {
        (self.indexer_n_heads + 1) * self.indexer_head_dim
    }

    /// Width of all key heads of linear attention.
    pub fn linear_key_width(&self) -> usize {
        self.linear_num_key_heads * self.linear_key_head_dim
    }

    /// Width of all value heads of linear attention.
    pub fn linear_value_width(&self) -> usize {
        self.linear_num_value_heads * self.linear_value_head_dim
    }

    /// Channels of the convolution in linear attention: queries, keys, values.
    pub fn linear_conv_width(&self) -> usize {
        2 * self.linear_key_width() + self.linear_value_width()
    }

    /// The hash of an n-gram embedding of this model, or nothing where the model has none.
    pub fn ngram_hash(&self, ple: PleConfig) -> Option<NgramHash> {
        let ngram = self.ngram?;
        let shape = NgramShape {
            vocab_size: self.vocab_size as u32,
            boundary: self.boundary,
            ngram_size: ngram.ngram_size,
            heads_per_ngram: ngram.heads_per_ngram,
            vocab_base: ngram.vocab_size_base,
            divisible_by: ngram.divisible_by,
            seed: ngram.seed,
        };
        Some(NgramHash::new(&shape, ple.ordinal))
    }
}

pub(crate) fn read_text(path: &Path) -> Result<String, LoadError> {
    fs::read_to_string(path).map_err(|source| LoadError::Io { doing: "read", path: path.into(), source })
}
