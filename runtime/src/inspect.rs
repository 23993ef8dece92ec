//! A model folder as text: its settings, and its tensors by part.

use std::fmt;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::{Experts, Part};
use crate::config::{LayerKind, ModelConfig, StorageDtype};
use crate::memory::Size;

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config)?;
        let stop: Vec<String> = self.generation.stop.iter().map(u32::to_string).collect();
        writeln!(f, "stop ids     {}", stop.join(" "))?;
        let fused =
            self.layout.layers.iter().filter(|layer| matches!(layer.moe.experts, Experts::Fused { .. }));
        let experts = match fused.count() {
            0 => "one by one",
            n if n == self.layout.layers.len() => "stacked",
            _ => "stacked in some layers",
        };
        writeln!(f, "tensors      {} in all, experts stored {experts}", self.len())?;
        writeln!(f, "formats      {}", self.layout.formats)?;
        const PARTS: [(Part, &str); 6] = [
            (Part::Text, "text model"),
            (Part::Table, "n-gram table"),
            (Part::Constants, "constants"),
            (Part::Draft, "draft layer"),
            (Part::Vision, "vision tower"),
            (Part::Idle, "idle"),
        ];
        for (part, label) in PARTS {
            let bytes = self.bytes(part) as usize;
            if bytes > 0 {
                writeln!(f, "  {label:<14} {:>10}", Size(bytes).to_string())?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = self;
        let count = |kind| c.layers.iter().filter(|layer| **layer == kind).count();
        let dtype = match c.dtype {
            StorageDtype::Bf16 => "bf16",
            StorageDtype::F32 => "f32",
        };
        writeln!(f, "model        qwen4_exp, stored as {dtype}")?;
        writeln!(f, "vocabulary   {}, boundary id {}", c.vocab_size, c.boundary)?;
        writeln!(f, "context      {} positions", c.max_position_embeddings)?;
        writeln!(f, "hidden       {} in {} streams, mixer rank {}", c.hidden_size, c.hc_count, c.hc_lowrank)?;
        let (linear, sparse) = (count(LayerKind::LinearAttention), count(LayerKind::SparseAttention));
        writeln!(f, "layers       {}: {linear} gated delta net, {sparse} sparse attention", c.layers.len())?;
        writeln!(
            f,
            "delta net    {} key heads of {}, {} value heads of {}, {} taps",
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
            c.linear_conv_kernel_dim
        )?;
        writeln!(
            f,
            "attention    {} query and {} key/value heads of {}, rotary width {} (theta {})",
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rotary.width, c.rotary.theta
        )?;
        writeln!(
            f,
            "indexer      {} heads of {}, blocks of {}, budget {} positions",
            c.indexer_n_heads, c.indexer_head_dim, c.indexer_compress_ratio, c.indexer_budget
        )?;
        writeln!(
            f,
            "experts      {} of width {}, {} chosen, shared expert of width {}",
            c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok, c.shared_expert_intermediate_size
        )?;
        if let Some(ngram) = c.ngram.filter(|_| !c.ple.is_empty()) {
            let layers: Vec<String> = c.ple.iter().map(|ple| ple.layer.to_string()).collect();
            writeln!(
                f,
                "n-gram       {} heads of {}, n-grams up to {}, in front of layer {}",
                ngram.heads(),
                ngram.head_width(),
                ngram.ngram_size,
                layers.join(" and ")
            )?;
        }
        if c.mtp_num_hidden_layers > 0 {
            writeln!(f, "draft        {} layer", c.mtp_num_hidden_layers)?;
        }
        Ok(())
    }
}
