//! `vision_config`: the vision tower's settings, and the ids that stand for pictures in a prompt.

use super::ModelConfig;
use super::section::{self, Section};
use crate::error::ConfigError;

/// Everything `config.json` decides about the vision tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionConfig {
    /// Transformer blocks.
    pub depth: usize,
    /// Width of a patch row.
    pub hidden_size: usize,
    /// Attention heads; a head's width is a multiple of four, for the two-axis rotary embedding.
    pub num_heads: usize,
    /// Inner width of a block's MLP.
    pub intermediate_size: usize,
    /// Colour channels.
    pub in_channels: usize,
    /// Edge of a patch in pixels.
    pub patch_size: usize,
    /// Frames in a patch.
    pub temporal_patch_size: usize,
    /// Edge, in patches, of the square that becomes one row of the language model.
    pub spatial_merge_size: usize,
    /// Learned positions, a square number.
    pub num_position_embeddings: usize,
    /// Width of the language model.
    pub out_hidden_size: usize,
    /// Ids of pictures and videos in a prompt.
    pub tokens: MediaTokens,
}

/// The ids that carry pictures and videos in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediaTokens {
    /// Placeholder of a picture row.
    pub image: u32,
    /// Placeholder of a video row.
    pub video: u32,
    /// Stands before the placeholders.
    pub start: u32,
    /// Stands after the placeholders.
    pub end: u32,
}

impl VisionConfig {
    /// Width of the merger: the rows of one merged square side by side.
    pub fn merged_width(&self) -> usize {
        self.hidden_size * self.spatial_merge_size * self.spatial_merge_size
    }
}

/// Reads the section and the ids beside it, or nothing where the model has no tower.
pub(super) fn read(top: &mut Section<'_>, text: &ModelConfig) -> Result<Option<VisionConfig>, ConfigError> {
    let mut id = |key: &str| top.id(key, text.vocab_size);
    let ids = [
        ("image_token_id", id("image_token_id")?),
        ("video_token_id", id("video_token_id")?),
        ("vision_start_token_id", id("vision_start_token_id")?),
        ("vision_end_token_id", id("vision_end_token_id")?),
    ];
    let Some(mut c) = top.section("vision_config")? else { return Ok(None) };
    let need = |(key, id): (&str, Option<u32>)| id.ok_or_else(|| top.missing(key));
    let [image, video, start, end] = ids;
    let tokens =
        MediaTokens { image: need(image)?, video: need(video)?, start: need(start)?, end: need(end)? };

    c.only_text("model_type", &["qwen4_exp", "qwen4_exp_vision"])?;
    c.only_text("hidden_act", &["gelu_pytorch_tanh"])?;
    c.only("deepstack_visual_indexes", serde_json::Value::Array(Vec::new()))?;
    section::dtype(&mut c)?;
    let vision = VisionConfig {
        depth: c.size("depth", 1 << 10)?,
        hidden_size: c.size("hidden_size", 1 << 24)?,
        num_heads: c.size("num_heads", 1 << 16)?,
        intermediate_size: c.size("intermediate_size", 1 << 24)?,
        in_channels: c.size("in_channels", 64)?,
        patch_size: c.size("patch_size", 1 << 10)?,
        temporal_patch_size: c.size("temporal_patch_size", 64)?,
        spatial_merge_size: c.size("spatial_merge_size", 64)?,
        num_position_embeddings: c.size("num_position_embeddings", 1 << 24)?,
        out_hidden_size: c.size("out_hidden_size", 1 << 24)?,
        tokens,
    };
    c.finish(&["initializer_range", "transformers_version"])?;
    check(&vision, text.hidden_size)?;
    Ok(Some(vision))
}

fn check(c: &VisionConfig, text_width: usize) -> Result<(), ConfigError> {
    let rule = if !c.hidden_size.is_multiple_of(4 * c.num_heads) {
        format!("hidden_size {} must be num_heads {} times a multiple of four", c.hidden_size, c.num_heads)
    } else if c.num_position_embeddings.isqrt().pow(2) != c.num_position_embeddings {
        format!("num_position_embeddings {} must be a square", c.num_position_embeddings)
    } else if c.out_hidden_size != text_width {
        format!("out_hidden_size {} must equal text_config.hidden_size {text_width}", c.out_hidden_size)
    } else {
        return Ok(());
    };
    Err(ConfigError::Relation { rule: format!("vision_config: {rule}") })
}
