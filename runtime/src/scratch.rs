//! The buffers of a round: the staged table and the activations, at addresses that never move.

use graph::{Arena, Device, Ptr, Region};
use kernels::attend::parts;
use kernels::delta::READY;
use kernels::index::split;
use kernels::numerics::{CUTS, ElementType};
use kernels::table::{Fact, Outcome, PAGE, Table, TableLayout};

use crate::config::{LayerKind, ModelConfig};
use crate::share::Share;

/// How large the rounds are that the buffers are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundLimits {
    /// Rows of a round.
    pub rows: usize,
    /// Rows of a round that reach the head.
    pub picked_rows: usize,
    /// Rows of a decode round.
    pub decode_rows: usize,
    /// Positions of the longest lane.
    pub context: usize,
    /// Page edits of a round.
    pub edits: usize,
}

/// The buffers of a round with the memory that holds them.
pub struct Scratch {
    /// The memory.
    pub arena: Arena,
    /// The sizes they were made for.
    pub limits: RoundLimits,
    /// Where each buffer lies.
    pub buffers: Buffers,
}

/// The buffers of a round, by address. Activations are `[rows, ...]` of elements unless said otherwise.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The layout of the staged table.
    pub table_layout: TableLayout,
    /// The staged table.
    pub table: Table,
    /// First address of the staged table.
    pub table_base: Ptr<u8>,
    /// What each row is.
    pub facts: Ptr<Fact>,
    /// The residual streams.
    pub streams: Ptr<u8>,
    /// The normed streams.
    pub normed: Ptr<u8>,
    /// The low-rank part of a hyper-connection.
    pub low: Ptr<u8>,
    /// Injection strengths, f32.
    pub inject: Ptr<f32>,
    /// A block's input.
    pub mixed: Ptr<u8>,
    /// A mixer's stacked input projection.
    pub stacked: Ptr<u8>,
    /// Convolved queries, keys and values.
    pub conv: Ptr<u8>,
    /// What a prompt's row brings ready to its value heads, f32.
    pub ready: Ptr<f32>,
    /// The recurrent layers' output before its gate.
    pub core: Ptr<u8>,
    /// A mixer's gated output.
    pub gated: Ptr<u8>,
    /// Rotated queries.
    pub queries: Ptr<u8>,
    /// Rotated index queries.
    pub index_queries: Ptr<u8>,
    /// Chosen index blocks.
    pub chosen: Ptr<u32>,
    /// Scores of a decode row's index blocks, f32.
    pub scores: Ptr<f32>,
    /// Room for scores of a row.
    pub score_room: usize,
    /// Weighted values of a decode row's spans, f32.
    pub span_sums: Ptr<f32>,
    /// Their largest scores and sums of weights, f32.
    pub span_marks: Ptr<f32>,
    /// Partial sums `[2, rows, hidden]`, f32.
    pub partials: Ptr<f32>,
    /// Router logits, f32.
    pub router: Ptr<f32>,
    /// Chosen experts.
    pub experts: Ptr<u32>,
    /// Weights of the chosen experts and of the shared one, f32.
    pub expert_weights: Ptr<f32>,
    /// Activations of the chosen experts.
    pub expert_inner: Ptr<u8>,
    /// Activations of the shared expert.
    pub shared_inner: Ptr<u8>,
    /// The places of a prompt's rows by expert.
    pub expert_list: Ptr<u32>,
    /// Where each expert's places start.
    pub expert_starts: Ptr<u32>,
    /// Down projections of every place of a prompt's rows, `[2, rows, k + 1, hidden]`, f32.
    pub expert_products: Ptr<f32>,
    /// Looked-up n-gram embeddings.
    pub ngram: Ptr<u8>,
    /// Their stacked key and value projection.
    pub ngram_key_value: Ptr<u8>,
    /// Gated values.
    pub ngram_gated: Ptr<u8>,
    /// Gated values, normed.
    pub ngram_normed: Ptr<u8>,
    /// The head's input, `[picked_rows, hidden]`.
    pub hidden: Ptr<u8>,
    /// `[picked_rows, vocab]`.
    pub logits: Ptr<u8>,
    /// The logits of each rank's ids, `[ranks, picked_rows, vocab / ranks]`, where several share the head.
    pub logit_parts: Ptr<u8>,
    /// `[picked_rows]`.
    pub outcomes: Ptr<Outcome>,
}

impl Scratch {
    /// Allocates the buffers of a model, or of a share of it, for rounds of these sizes.
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        share: Share,
        element: ElementType,
        limits: RoundLimits,
    ) -> graph::Result<Scratch> {
        let arena = device.arena("round buffers", Self::bytes(config, share, element, limits))?;
        let (buffers, _) = Buffers::carve(config, share, element, limits, arena.base());
        Ok(Scratch { arena, limits, buffers })
    }

    /// Size of all buffers in bytes.
    pub fn bytes(config: &ModelConfig, share: Share, element: ElementType, limits: RoundLimits) -> usize {
        Buffers::carve(config, share, element, limits, Ptr::NULL).1
    }
}

impl Buffers {
    /// Lays the buffers out from `base` on; the second value is the size of all of them. Run once with no
    /// memory to learn the size, and once more to bind addresses.
    fn carve(
        c: &ModelConfig,
        share: Share,
        element: ElementType,
        limits: RoundLimits,
        base: Ptr<u8>,
    ) -> (Buffers, usize) {
        let bytes = element.bytes();
        let streams = c.streams_width();
        let recurrent = c.linear_conv_width() + c.linear_value_width() + 2 * c.linear_num_value_heads;
        let sparse = 2 * c.attention_width() + 2 * c.kv_width() + c.index_width();
        let stacked = c.layers.iter().map(|kind| match kind {
            LayerKind::LinearAttention => recurrent,
            LayerKind::SparseAttention => sparse,
        });
        let stacked = stacked.max().unwrap_or(0);
        let k = c.num_experts_per_tok;
        let (ngram, ngram_key_value, ngram_streams) = match c.ngram.filter(|_| !c.ple.is_empty()) {
            Some(ngram) => (ngram.embed_dim, streams + c.hidden_size, streams),
            None => (0, 0, 0),
        };

        let top = c.indexer_budget / c.indexer_compress_ratio;
        let score_room = split::room(limits.context.div_ceil(PAGE), c.indexer_compress_ratio);
        let row_spans = c.num_attention_heads * parts::spans(c.indexer_compress_ratio, top);

        let mut region = Region::new();
        let table_layout = TableLayout::new(limits.rows, limits.edits);
        let table_base = region.add("staged table", table_layout.bytes).at::<u8>(base);
        let mut add =
            |label: &str, rows: usize, row_bytes: usize| region.add(label, rows * row_bytes).at::<u8>(base);
        let (rows, picked, decode) = (limits.rows, limits.picked_rows, limits.decode_rows);
        let buffers = Buffers {
            table_layout,
            table: table_layout.at(table_base),
            table_base,
            facts: add("facts", rows, size_of::<Fact>()).cast(),
            streams: add("streams", rows, streams * bytes),
            normed: add("normed", rows, streams * bytes),
            low: add("low", rows, c.hc_lowrank * bytes),
            inject: add("inject", rows, c.hc_count * 4).cast(),
            mixed: add("mixed", rows, c.hidden_size * bytes),
            stacked: add("stacked", rows, stacked * bytes),
            conv: add("conv", rows, c.linear_conv_width() * bytes),
            ready: add("ready", rows, c.linear_num_value_heads * READY * 4).cast(),
            core: add("core", rows, c.linear_value_width() * bytes),
            gated: add("gated", rows, c.linear_value_width().max(c.attention_width()) * bytes),
            queries: add("queries", rows, c.attention_width() * bytes),
            index_queries: add("index queries", rows, c.indexer_n_heads * c.indexer_head_dim * bytes),
            chosen: add("chosen blocks", rows, top * 4).cast(),
            scores: add("index scores", decode, score_room * 4).cast(),
            score_room,
            span_sums: add("span sums", decode, row_spans * c.head_dim * 4).cast(),
            span_marks: add("span marks", decode, row_spans * 2 * 4).cast(),
            partials: add("partials", rows, CUTS * c.hidden_size * 4).cast(),
            router: add("router", rows, (c.num_experts + 1) * 4).cast(),
            experts: add("chosen experts", rows, k * 4).cast(),
            expert_weights: add("expert weights", rows, (k + 1) * 4).cast(),
            expert_inner: add("expert inner", rows, k * c.moe_intermediate_size * bytes),
            shared_inner: add("shared inner", rows, c.shared_expert_intermediate_size * bytes),
            expert_list: add("expert list", rows, k * 4).cast(),
            expert_starts: add("expert starts", 1, (c.num_experts + 1) * 4).cast(),
            expert_products: add("expert products", rows, CUTS * (k + 1) * c.hidden_size * 4).cast(),
            ngram: add("n-gram", rows, ngram * bytes),
            ngram_key_value: add("n-gram key value", rows, ngram_key_value * bytes),
            ngram_gated: add("n-gram gated", rows, ngram_streams * bytes),
            ngram_normed: add("n-gram normed", rows, ngram_streams * bytes),
            hidden: add("hidden", picked, c.hidden_size * bytes),
            logits: add("logits", picked, c.vocab_size * bytes),
            logit_parts: match share {
                Share::WHOLE => Ptr::NULL,
                _ => add("parts of logits", picked, c.vocab_size * bytes),
            },
            outcomes: add("outcomes", picked, size_of::<Outcome>()).cast(),
        };
        (buffers, region.bytes())
    }
}
