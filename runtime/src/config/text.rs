//! `text_config`: the language model's settings and the rules between them.

use super::quantisation;
use super::section::{self, Section};
use super::{LayerKind, ModelConfig, NgramConfig, OutputGate, PleConfig, Rotary, StorageDtype};
use crate::error::ConfigError;

/// Ceilings that no real model comes near; below them no product of sizes that this program forms overflows.
const MOST_WIDTH: u64 = 1 << 24;
const MOST_LAYERS: u64 = 1 << 10;
const MOST_FEW: u64 = 64;
const MOST_PARTS: u64 = 1 << 12;
const MOST_EXPERTS_OF_ALL_LAYERS: usize = 1 << 20;
const MOST_NGRAM_EMBEDDINGS: usize = 16;
const MOST_ROWS: u64 = 1 << 31;

/// Positions of a page, a prompt step and a scan chunk; index blocks must not straddle it.
const PAGE: usize = 64;

/// Keys that matter to training or to other programs only.
const INFORMATIVE: [&str; 7] = [
    "attention_dropout",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
];

/// Reads the section; `outer_dtype` is the storage type that the file names outside of it.
pub(super) fn read(
    mut c: Section<'_>,
    outer_dtype: Option<StorageDtype>,
) -> Result<ModelConfig, ConfigError> {
    c.only_text("model_type", &["qwen4_exp_text"])?;
    c.only_text("hidden_act", &["silu"])?;
    c.only("attention_bias", false)?;
    c.only("tie_word_embeddings", false)?;
    c.only("mamba_ssm_dtype", "float32")?;
    c.only("indexer_kv_heads", 1)?;
    c.only("mtp_use_dedicated_embeddings", false)?;
    let quantisation = [quantisation::table(&mut c)?, quantisation::read(&mut c)?];

    let vocab_size = c.size("vocab_size", MOST_WIDTH)?;
    let head_dim = c.size("head_dim", MOST_WIDTH)?;
    let layers = layers(&mut c)?;
    let rotary = rotary(&mut c, head_dim)?;
    let hidden_size = c.size("hidden_size", MOST_WIDTH)?;
    let (ple, ngram) = ngram(&mut c, hidden_size, &layers)?;
    let boundary = c.ids("eos_token_id", vocab_size)?;
    let gates = [("sigmoid", OutputGate::Sigmoid), ("silu", OutputGate::Silu)];
    let config = ModelConfig {
        dtype: section::dtype(&mut c)?.or(outer_dtype).ok_or_else(|| c.missing("dtype"))?,
        vocab_size,
        hidden_size,
        num_hidden_layers: layers.len(),
        layers,
        max_position_embeddings: c.size("max_position_embeddings", MOST_ROWS)?,
        rms_norm_eps: c.positive("rms_norm_eps")? as f32,
        num_attention_heads: c.size("num_attention_heads", MOST_WIDTH)?,
        num_key_value_heads: c.size("num_key_value_heads", MOST_WIDTH)?,
        head_dim,
        rotary,
        indexer_n_heads: c.size("indexer_n_heads", MOST_WIDTH)?,
        indexer_head_dim: c.size("indexer_head_dim", MOST_WIDTH)?,
        indexer_budget: c.size("indexer_budget", MOST_WIDTH)?,
        indexer_compress_ratio: c.size("indexer_compress_ratio", MOST_WIDTH)?,
        linear_num_key_heads: c.size("linear_num_key_heads", MOST_WIDTH)?,
        linear_num_value_heads: c.size("linear_num_value_heads", MOST_WIDTH)?,
        linear_key_head_dim: c.size("linear_key_head_dim", MOST_WIDTH)?,
        linear_value_head_dim: c.size("linear_value_head_dim", MOST_WIDTH)?,
        linear_conv_kernel_dim: c.size("linear_conv_kernel_dim", MOST_FEW)?,
        output_gate: c.one_of("output_gate_type", &gates)?.unwrap_or(OutputGate::Silu),
        num_experts: c.size("num_experts", MOST_PARTS)?,
        num_experts_per_tok: c.size("num_experts_per_tok", MOST_PARTS)?,
        moe_intermediate_size: c.size("moe_intermediate_size", MOST_WIDTH)?,
        shared_expert_intermediate_size: c.size("shared_expert_intermediate_size", MOST_WIDTH)?,
        norm_topk_prob: c.flag("norm_topk_prob")?.unwrap_or(true),
        hc_count: c.size("hc_count", MOST_FEW)?,
        hc_lowrank: c.size("hc_lowrank", MOST_WIDTH)?,
        ngram,
        ple,
        boundary: *boundary.first().ok_or_else(|| c.missing("eos_token_id"))?,
        bos_token_id: c.id("bos_token_id", vocab_size)?,
        mtp_num_hidden_layers: draft(&mut c, rotary.theta)?,
        vision: None,
        quantisation: quantisation.into_iter().flatten().collect(),
    };
    c.finish(&INFORMATIVE)?;
    check(&config)?;
    Ok(config)
}

fn layers(c: &mut Section<'_>) -> Result<Vec<LayerKind>, ConfigError> {
    let count = c.size("num_hidden_layers", MOST_LAYERS)?;
    let interval = c.whole("full_attention_interval", [1, MOST_LAYERS])?;
    let Some(types) = c.get("layer_types") else {
        let interval = interval.ok_or_else(|| c.missing("layer_types"))? as usize;
        let kind = |layer: usize| match (layer + 1) % interval {
            0 => LayerKind::SparseAttention,
            _ => LayerKind::LinearAttention,
        };
        return Ok((0..count).map(kind).collect());
    };
    let types = types.as_array().ok_or_else(|| c.wrong_type("layer_types", "a list", types))?;
    if types.len() != count {
        return broken(format!("layer_types has {} entries for num_hidden_layers {count}", types.len()));
    }
    let kind = |word: &serde_json::Value| match word.as_str() {
        Some("linear_attention") => Ok(LayerKind::LinearAttention),
        Some("full_attention" | "indexed_attention") => Ok(LayerKind::SparseAttention),
        _ => Err(c.unsupported(
            "layer_types",
            &word.to_string(),
            "linear_attention, full_attention and indexed_attention",
        )),
    };
    types.iter().map(kind).collect()
}

fn rotary(c: &mut Section<'_>, head_dim: usize) -> Result<Rotary, ConfigError> {
    let outer = c.number("partial_rotary_factor")?;
    let mut r = c.need_section("rope_parameters")?;
    r.only_text("rope_type", &["default"])?;
    r.only("mrope_interleaved", true)?;
    let theta = r.positive("rope_theta")?;
    let inner = r.number("partial_rotary_factor")?;
    if let (Some(outer), Some(inner)) = (outer, inner)
        && outer != inner
    {
        return broken(format!("partial_rotary_factor is {outer} and, in rope_parameters, {inner}"));
    }
    let factor = inner.or(outer).ok_or_else(|| r.missing("partial_rotary_factor"))?;
    let width = factor * head_dim as f64;
    if !(factor > 0.0 && factor <= 1.0 && width.fract() == 0.0 && (width as usize).is_multiple_of(2)) {
        return broken(format!(
            "partial_rotary_factor {factor} of head_dim {head_dim} is no even rotary width"
        ));
    }
    let sections =
        r.whole_list("mrope_section", [0, MOST_WIDTH])?.ok_or_else(|| r.missing("mrope_section"))?;
    let width = width as usize;
    let sections = match sections[..] {
        [t, h, w] if t + h + w == width / 2 => [t, h, w],
        _ => return broken(format!("mrope_section {sections:?} must be three sizes with sum {}", width / 2)),
    };
    r.finish(&[])?;
    Ok(Rotary { width, theta, sections })
}

fn ngram(
    c: &mut Section<'_>,
    hidden_size: usize,
    layers: &[LayerKind],
) -> Result<(Vec<PleConfig>, Option<NgramConfig>), ConfigError> {
    let mut ids = c.whole_list("ple_layer_ids", [1, layers.len() as u64])?.unwrap_or_default();
    ids.sort_unstable();
    if ids.len() > MOST_NGRAM_EMBEDDINGS {
        return broken(format!(
            "ple_layer_ids names {} layers, more than {MOST_NGRAM_EMBEDDINGS}",
            ids.len()
        ));
    }
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return broken(format!("ple_layer_ids names layer {} twice", pair[0]));
    }
    let linear = |id: &&usize| layers[**id - 1] != LayerKind::LinearAttention;
    if let Some(id) = ids.iter().find(linear) {
        return broken(format!(
            "ple_layer_ids names layer {id} (counted from one), which is no linear_attention layer"
        ));
    }
    let ple: Vec<PleConfig> =
        ids.iter().enumerate().map(|(ordinal, id)| PleConfig { layer: id - 1, ordinal }).collect();

    // Without an embedding its dimensions may be absent; those that are there are still checked.
    let mut size = |key: &str, least: u64, most: u64| match c.whole(key, [least, most])? {
        None if !ple.is_empty() => Err(c.missing(key)),
        value => Ok(value.unwrap_or(least)),
    };
    let ngram_size = size("ngram_size", 2, 8)? as usize;
    let heads_per_ngram = size("heads_per_ngram", 1, MOST_FEW)? as usize;
    let conv_kernel_size = size("ple_conv_kernel_size", 1, MOST_FEW)? as usize;
    let vocab_size_base = size("ngram_vocab_size_base", 1, MOST_ROWS)?;
    let divisible_by = size("make_ngram_vocab_size_divisible_by", 1, MOST_WIDTH)?;
    let split_parts = size("split_ngram_parts", 1, MOST_PARTS)? as usize;
    let embed_dim = c.whole("ple_embed_dim", [1, MOST_WIDTH])?.map_or(hidden_size, |dim| dim as usize);
    let seed = c.whole("seed", [0, i64::MAX as u64])?.unwrap_or(1234);
    if ple.is_empty() {
        return Ok((ple, None));
    }
    let ngram = NgramConfig {
        embed_dim,
        conv_kernel_size,
        ngram_size,
        heads_per_ngram,
        vocab_size_base,
        divisible_by,
        split_parts,
        seed,
    };
    divides("the n-gram heads", ngram.heads(), "ple_embed_dim", embed_dim)?;
    Ok((ple, Some(ngram)))
}

/// Draft layers. The nested `mtp` object says the same things again, so it has to agree.
fn draft(c: &mut Section<'_>, theta: f64) -> Result<usize, ConfigError> {
    let layers = c.whole("mtp_num_hidden_layers", [0, 1])?;
    let Some(mut mtp) = c.section("mtp")? else { return Ok(layers.unwrap_or(0) as usize) };
    let inner = mtp.whole("num_hidden_layers", [0, 1])?;
    if let (Some(outer), Some(inner)) = (layers, inner)
        && outer != inner
    {
        return broken(format!("mtp_num_hidden_layers is {outer} and mtp.num_hidden_layers is {inner}"));
    }
    mtp.only("hybrid", true)?;
    mtp.only_list("layer_types", &["full_attention", "indexed_attention"])?;
    if mtp.number("rope_theta")?.is_some_and(|inner| inner != theta) {
        return broken(format!("mtp.rope_theta differs from rope_parameters.rope_theta {theta}"));
    }
    if let Some(layer) = mtp.get("mtp_use_hidden_state_from_layer") {
        return Err(mtp.unsupported("mtp_use_hidden_state_from_layer", &layer.to_string(), "null"));
    }
    mtp.finish(&[])?;
    Ok(layers.or(inner).unwrap_or(0) as usize)
}

fn check(c: &ModelConfig) -> Result<(), ConfigError> {
    if c.hc_count < 2 {
        return broken(format!("hc_count is {}; the model needs at least two streams", c.hc_count));
    }
    if c.num_experts_per_tok > c.num_experts {
        return broken(format!(
            "num_experts_per_tok {} exceeds num_experts {}",
            c.num_experts_per_tok, c.num_experts
        ));
    }
    if c.num_hidden_layers * c.num_experts > MOST_EXPERTS_OF_ALL_LAYERS {
        return broken(format!(
            "num_hidden_layers {} times num_experts {} exceeds {MOST_EXPERTS_OF_ALL_LAYERS}",
            c.num_hidden_layers, c.num_experts
        ));
    }
    if c.rotary.width > c.indexer_head_dim {
        return broken(format!(
            "the rotary width {} exceeds indexer_head_dim {}",
            c.rotary.width, c.indexer_head_dim
        ));
    }
    divides("num_key_value_heads", c.num_key_value_heads, "num_attention_heads", c.num_attention_heads)?;
    divides(
        "linear_num_key_heads",
        c.linear_num_key_heads,
        "linear_num_value_heads",
        c.linear_num_value_heads,
    )?;
    divides("indexer_compress_ratio", c.indexer_compress_ratio, "indexer_budget", c.indexer_budget)?;
    divides("indexer_compress_ratio", c.indexer_compress_ratio, "the page of", PAGE)?;
    for &ple in &c.ple {
        if let (Some(hash), Some(ngram)) = (c.ngram_hash(ple), c.ngram) {
            let rows = format!("the n-gram rows of layer {},", ple.layer);
            divides("split_ngram_parts", ngram.split_parts, &rows, hash.rows_padded as usize)?;
        }
    }
    Ok(())
}

fn divides(part: &str, n: usize, whole: &str, of: usize) -> Result<(), ConfigError> {
    if of.is_multiple_of(n) { Ok(()) } else { broken(format!("{part} {n} must divide {whole} {of}")) }
}

fn broken<T>(rule: String) -> Result<T, ConfigError> {
    Err(ConfigError::Relation { rule })
}
