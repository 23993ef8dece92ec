//! The floor under a decode round: the bytes it cannot do without, over what memory delivers.

use std::hint::black_box;
use std::time::Instant;

use kernels::numerics::ElementType;
use rayon::prelude::*;
use runtime::config::{LayerKind, ModelConfig};

/// What all threads together read per second from memory larger than the caches: the best of a few sums.
pub fn read_bytes_per_second() -> f64 {
    let words = vec![1u64; (256 << 20) / size_of::<u64>()];
    let sum =
        || words.par_chunks(1 << 17).map(|part| part.iter().fold(0u64, |sum, w| sum.wrapping_add(*w))).sum();
    let times = (0..8).map(|_| {
        let start = Instant::now();
        let sum: u64 = black_box(sum());
        assert_eq!(sum, words.len() as u64);
        start.elapsed().as_secs_f64()
    });
    size_of_val(&words[..]) as f64 / times.fold(f64::MAX, f64::min)
}

/// Bytes that a round of `rows` rows reads at least: each weight that is active in it once, and the state of
/// `lanes` lanes that have `length` positions. Which experts are active is taken as even chance.
pub fn round_bytes(c: &ModelConfig, element: ElementType, rows: usize, lanes: usize, length: usize) -> f64 {
    weight_values(c, rows) * element.bytes() as f64 + lanes as f64 * state_bytes(c, element, length)
}

/// Values of the weights that `rows` rows use.
fn weight_values(c: &ModelConfig, rows: usize) -> f64 {
    let (hidden, streams) = (c.hidden_size, c.streams_width());
    let hyper = streams * (1 + 2 * c.hc_lowrank + c.hc_count);
    let recurrent = (c.linear_conv_width() + 2 * c.linear_value_width() + 2 * c.linear_num_value_heads)
        * hidden
        + c.linear_conv_width() * c.linear_conv_kernel_dim;
    let sparse = (3 * c.attention_width() + 2 * c.kv_width() + c.index_width()) * hidden;
    let shared = (c.num_experts + 1) * hidden + 3 * c.shared_expert_intermediate_size * hidden;
    let mut dense = c.vocab_size * hidden + streams * (1 + 2 * c.hc_lowrank) + rows * hidden;
    for layer in &c.layers {
        dense += 2 * hyper + shared;
        dense += match layer {
            LayerKind::LinearAttention => recurrent,
            LayerKind::SparseAttention => sparse,
        };
    }
    if let Some(ngram) = c.ngram {
        let each = (streams + hidden) * ngram.embed_dim + streams * (3 + ngram.conv_kernel_size);
        dense += c.ple.len() * (each + rows * ngram.embed_dim);
    }
    let idle = 1.0 - c.num_experts_per_tok as f64 / c.num_experts as f64;
    let experts = c.num_experts as f64 * (1.0 - idle.powi(rows as i32));
    dense as f64 + experts * (c.layers.len() * 3 * c.moe_intermediate_size * hidden) as f64
}

/// Bytes of state that a lane of `length` positions reads.
fn state_bytes(c: &ModelConfig, element: ElementType, length: usize) -> f64 {
    let bytes = element.bytes();
    let recurrent = 4 * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
        + bytes * (c.linear_conv_kernel_dim - 1) * c.linear_conv_width();
    // The chosen blocks, and the open block.
    let seen = length.min(c.indexer_budget + c.indexer_compress_ratio);
    let sparse = bytes * (2 * seen * c.kv_width() + length / c.indexer_compress_ratio * c.indexer_head_dim);
    let layers = c.layers.iter().map(|layer| match layer {
        LayerKind::LinearAttention => recurrent,
        LayerKind::SparseAttention => sparse,
    });
    let windows = c.ngram.map_or(0, |ngram| (ngram.conv_kernel_size - 1) * c.streams_width() * bytes);
    // How often each id occurred: u32 per id, for the sampler.
    (layers.sum::<usize>() + c.ple.len() * windows + 4 * c.vocab_size) as f64
}
