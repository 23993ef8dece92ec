//! The byte model: what a decode round must move at least, whatever its kernels are.
//!
//! Weights are read once per round, those of an expert if a row chose it; recurrent state is read and written;
//! caches are read as far as the formula looks. Activations stay in caches and are not counted.

use kernels::numerics::ElementType;
use kernels::weight::{BLOCK, Format, GROUP};

use crate::config::{LayerKind, ModelConfig};
use crate::share::Share;
use crate::weights::StoredAs;

/// Bytes that a checkpoint takes for a number of a matrix, its share of scales included.
pub fn number_bytes(format: Format, element: ElementType) -> f64 {
    match format {
        Format::Plain => element.bytes() as f64,
        Format::Fp8 => 1.0 + 2.0 / (BLOCK * BLOCK) as f64,
        Format::Nvfp4 => 0.5 + 1.0 / GROUP as f64,
    }
}

/// Bytes of one decode round, part by part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundBytes {
    /// Weights of the layers that every row uses.
    pub dense: f64,
    /// Weights of the routed experts that some row chose.
    pub experts: f64,
    /// The last mixer and the head.
    pub head: f64,
    /// Rows of the embedding and of the n-gram tables.
    pub rows: f64,
    /// Recurrent states and windows, read and written.
    pub state: f64,
    /// Keys and values that are attended to, and those that are stored.
    pub keys: f64,
    /// Pooled index keys of all complete blocks.
    pub index: f64,
}

impl RoundBytes {
    /// A round of one row for each of `rows` lanes that see `visible` positions, their own included, on a rank with this
    /// share, whose settings are `c`. Of each layer's experts, `distinct` are chosen by some row.
    pub fn new(
        c: &ModelConfig,
        share: Share,
        element: ElementType,
        stored: StoredAs,
        rows: usize,
        visible: usize,
        distinct: f64,
    ) -> RoundBytes {
        let b = element.bytes() as f64;
        let of = |format| number_bytes(format, element);
        let kinds = |kind| c.layers.iter().filter(|layer| **layer == kind).count() as f64;
        let (recurrent, sparse) = (kinds(LayerKind::LinearAttention), kinds(LayerKind::SparseAttention));
        let layers = c.layers.len() as f64;
        let (lanes, hidden, streams) = (rows as f64, c.hidden_size as f64, c.streams_width() as f64);

        let mixer = streams + 2.0 * c.hc_lowrank as f64 * streams;
        let hyper = mixer + c.hc_count as f64 * streams;
        let heads = c.linear_num_value_heads as f64;
        let (conv, values) = (c.linear_conv_width() as f64, c.linear_value_width() as f64);
        let taps = c.linear_conv_kernel_dim as f64;
        let delta = of(stored.dense) * (conv + 2.0 * values + 2.0 * heads) * hidden
            + b * (conv * taps + c.linear_value_head_dim as f64);
        let attention = c.attention_width() as f64;
        let select =
            of(stored.dense) * (3.0 * attention + (2 * c.kv_width() + c.index_width()) as f64) * hidden
                + b * 2.0 * (c.head_dim + c.indexer_head_dim) as f64;
        let shared = b * (c.num_experts + 1) as f64 * hidden
            + of(stored.shared) * (3 * c.shared_expert_intermediate_size) as f64 * hidden;
        let ngram = c.ngram.map_or(0.0, |n| {
            let dense = (streams + hidden) * n.embed_dim as f64 + (3 + n.conv_kernel_size) as f64 * streams;
            dense * c.ple.len() as f64
        });
        let dense = layers * (b * 2.0 * hyper + shared)
            + recurrent * delta
            + sparse * select
            + b * ngram
            + 4.0 * recurrent * 2.0 * heads;
        let expert = 3.0 * c.moe_intermediate_size as f64 * hidden;

        let state = 4.0 * heads * (c.linear_key_head_dim * c.linear_value_head_dim) as f64;
        let window = b * (taps - 1.0) * conv;
        let ngram_window = c
            .ngram
            .map_or(0.0, |n| b * ((n.conv_kernel_size - 1) * n.ngram_size * c.ple.len()) as f64 * streams);
        let looked_up =
            b * hidden + of(stored.table) * c.ngram.map_or(0.0, |n| (n.embed_dim * c.ple.len()) as f64);
        let position = 2.0 * b * c.kv_width() as f64;
        RoundBytes {
            dense,
            experts: of(stored.experts) * layers * distinct * expert,
            head: b * mixer + of(stored.head) * share.part(c.vocab_size).len() as f64 * hidden,
            rows: lanes * looked_up,
            state: lanes * 2.0 * (recurrent * (state + window) + ngram_window),
            keys: lanes * sparse * position * (selected(c, visible) + 1) as f64,
            index: lanes * sparse * b * (visible / c.indexer_compress_ratio * c.indexer_head_dim) as f64,
        }
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.dense + self.experts + self.head + self.rows + self.state + self.keys + self.index
    }
}

/// Positions that a row attends to which sees `visible` ones.
pub fn selected(c: &ModelConfig, visible: usize) -> usize {
    let ratio = c.indexer_compress_ratio;
    (visible / ratio).min(c.indexer_budget / ratio) * ratio + visible % ratio
}

/// Experts of a layer that some of `rows` rows choose, if each chooses by even chance.
pub fn expected_distinct(c: &ModelConfig, rows: usize) -> f64 {
    let idle = 1.0 - c.num_experts_per_tok as f64 / c.num_experts as f64;
    c.num_experts as f64 * (1.0 - idle.powi(rows as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real() -> ModelConfig {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/real");
        ModelConfig::open(&dir).expect("the real shape's settings")
    }

    #[test]
    fn one_row_of_the_real_model_reads_thirteen_gigabytes() {
        let bytes =
            RoundBytes::new(&real(), Share::WHOLE, ElementType::Bf16, StoredAs::default(), 1, 1024, 10.0);
        // 10 experts of 3 x 640 x 2560 values in 48 layers.
        assert_eq!(bytes.experts, 2.0 * 48.0 * 10.0 * 4_915_200.0);
        // 248,320 rows of 2,560 values; the mixer's gain and two matrices of 320 x 10,240.
        assert_eq!(bytes.head, 2.0 * (635_699_200.0 + 10_240.0 + 6_553_600.0));
        // The published count of everything else has the last mixer in it, and its unused injection.
        let layers = 3_676_300_160.0 - 6_563_840.0;
        let rest = bytes.dense / 2.0 - layers;
        assert!((0.0..20_000.0).contains(&rest), "{rest} values too many");
        let weights = bytes.dense + bytes.experts + bytes.head;
        assert!((weights - 13.34e9).abs() < 0.01e9, "{weights}");
        // 36 layers of 48 x 128 x 128 f32 and of 3 columns of 10,240; 9 columns of 10,240; read and written.
        assert_eq!(bytes.state, 2.0 * (36.0 * (3_145_728.0 + 61_440.0) + 184_320.0));
        // 12 layers: 1,024 positions and one more of 2 x 512 values; 256 blocks of 128.
        assert_eq!(bytes.keys, 12.0 * 2048.0 * 1025.0);
        assert_eq!(bytes.index, 12.0 * 256.0 * 256.0);
        assert_eq!(bytes.rows, 2.0 * (2560.0 + 2560.0));
    }

    /// Published counts of one token's weights, in gigabytes.
    #[test]
    fn quantised_weights_are_fewer_bytes() {
        let total = |stored| {
            let bytes = RoundBytes::new(&real(), Share::WHOLE, ElementType::Bf16, stored, 1, 1024, 10.0);
            (bytes.dense + bytes.experts + bytes.head) / 1e9
        };
        let nvfp4 = StoredAs { experts: Format::Nvfp4, table: Format::Fp8, ..StoredAs::default() };
        let dense = StoredAs { dense: Format::Fp8, shared: Format::Fp8, head: Format::Fp8, ..nvfp4 };
        for (stored, want) in [
            (StoredAs { experts: Format::Fp8, ..StoredAs::default() }, 10.984),
            (nvfp4, 9.951),
            // Of projections, indexers, shared experts and the head, 7.151 in all, half, and a scale of a block.
            (dense, 9.951 - 7.151 / 2.0 * (1.0 - 2.0 / 16384.0)),
        ] {
            assert!((total(stored) - want).abs() < 0.002, "{}, not {want}", total(stored));
        }
        let rows = |table| {
            let stored = StoredAs { table, ..StoredAs::default() };
            RoundBytes::new(&real(), Share::WHOLE, ElementType::Bf16, stored, 3, 1024, 10.0).rows
        };
        assert_eq!(rows(Format::Nvfp4), 3.0 * (5120.0 + 16.0 * 90.0));
    }

    #[test]
    fn long_contexts_read_the_budget_and_all_index_keys() {
        let c = real();
        assert_eq!(
            [1, 3, 4, 2051, 2052, 65_536, 65_539].map(|n| selected(&c, n)),
            [1, 3, 4, 2051, 2048, 2048, 2051]
        );
        let bytes =
            RoundBytes::new(&c, Share::WHOLE, ElementType::Bf16, StoredAs::default(), 4, 65_536, 38.0);
        assert_eq!(bytes.keys, 4.0 * 12.0 * 2048.0 * 2049.0);
        assert_eq!(bytes.index, 4.0 * 12.0 * 16_384.0 * 256.0);
    }

    #[test]
    fn rows_share_experts_by_chance() {
        let c = real();
        assert!((expected_distinct(&c, 1) - 10.0).abs() < 1e-9);
        assert!((expected_distinct(&c, 2) - (20.0 - 100.0 / 512.0)).abs() < 1e-9);
        assert!(expected_distinct(&c, 1000) > 511.9);
    }
}
