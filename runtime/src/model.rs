//! The model as a straight list of launches: what a round enqueues, eager or captured.
//!
//! Emitting reads the shape of a round and nothing of its content. No decision in here depends on a
//! lane's data; what varies lies in the staged table and in resident state.
//!
//! ```text
//! rows ─ embed ─ [ n-gram ] ─ (hyper ─ mixer ─ hyper ─ experts) per layer ─ hyper ─ head ─ sample ─ advance
//! ```
//! A block's output reaches the streams one launch later, merged with the norm of the next block; so the
//! partial sums of the last block are always *pending* ([`Body::pending`]).

use graph::{Communicator, Emission, Ptr, Result};
use kernels::attend::parts;
use kernels::index::split;
use kernels::numerics::ElementType;
use kernels::rope::Rotary;
use kernels::state::RowRange;
use kernels::table::Kind;
use kernels::{advance, attend, conv, delta, embed, experts, gate, heads, hyper, index, launch, linear};
use kernels::{ngram, residual, router, rows, sample, weave};

use crate::config::{ModelConfig, OutputGate};
use crate::lanes::{Lanes, LayerSpans};
use crate::scratch::Buffers;
use crate::share::Share;
use crate::weights::{
    HyperWeights, MixerWeights, MoeWeights, NgramWeights, Piece, RecurrentWeights, SparseWeights, Weights,
};

/// Launches a kernel on the route of the round's kind.
macro_rules! route {
    ($body:expr, $decode:ident::$of:ident, $prompt:ident::$or:ident, $args:expr) => {
        match $body.shape.kind {
            Kind::Decode => launch!($body.e, $body.model.element, $decode::$of, $args),
            Kind::Prompt => launch!($body.e, $body.model.element, $prompt::$or, $args),
        }
    };
    ($body:expr, [$format:expr], $decode:ident::$of:ident, $prompt:ident::$or:ident, $args:expr) => {
        match $body.shape.kind {
            Kind::Decode => launch!($body.e, $body.model.element, [$format], $decode::$of, $args),
            Kind::Prompt => launch!($body.e, $body.model.element, [$format], $prompt::$or, $args),
        }
    };
}

/// What a round looks like: all that an emission depends on, beside the model and its buffers.
pub struct RoundShape<'a> {
    /// Prompt or decode.
    pub kind: Kind,
    /// Consecutive rows of lanes in one slab, slab by slab.
    pub groups: &'a [Group<'a>],
    /// Which rows reach the head.
    pub picks: Picks,
}

/// Consecutive rows whose lanes lie in one slab.
pub struct Group<'a> {
    /// The slab.
    pub lanes: &'a Lanes,
    /// How many rows.
    pub rows: usize,
}

/// Rows of a prompt round that take features instead of what their ids stand for. A round with any is eager.
#[derive(Clone, Copy, Debug)]
pub struct PictureRows {
    /// The first of the rows.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// Their features, `[rows, hidden]` elements.
    pub features: Ptr<u8>,
}

/// Which rows of a round reach the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Picks {
    /// All of them: decode rounds, and prompts whose every logit is wanted.
    All,
    /// The last row: the end of a prompt.
    Last,
    /// None: a piece of a prompt that is not its last.
    None,
}

/// A model ready to emit rounds, or one rank's share of it.
pub struct Model {
    /// The settings of what is here.
    pub config: ModelConfig,
    /// Which part of the model that is.
    pub share: Share,
    /// Element type of activations and weights.
    pub element: ElementType,
    /// Its weights.
    pub weights: Weights,
    /// Ids from here on have no text and are never picked.
    pub choices: usize,
    /// The way to the rank with the other share; none if everything is here.
    pub communicator: Option<Communicator>,
}

impl Model {
    /// Columns that the first block of fp8 has before the first of this rank's `columns` of a cut sum.
    fn offset(&self, columns: usize) -> u32 {
        self.share.offset(columns) as u32
    }

    /// Emits a round of this shape over `buffers`.
    pub fn emit(&self, shape: &RoundShape<'_>, buffers: &Buffers, emission: &mut Emission) -> Result<()> {
        self.emit_with(shape, &[], buffers, emission)
    }

    /// The same of a round some of whose rows are of pictures.
    pub fn emit_with(
        &self,
        shape: &RoundShape<'_>,
        pictures: &[PictureRows],
        buffers: &Buffers,
        emission: &mut Emission,
    ) -> Result<()> {
        let rows = shape.groups.iter().map(|group| group.rows).sum();
        let mut body =
            Body { model: self, c: &self.config, b: buffers, shape, rows, pending: false, e: emission };
        body.begin()?;
        body.pictures(pictures)?;
        for (layer, weights) in self.weights.layers.iter().enumerate() {
            if let Some(ngram) = &weights.ngram {
                body.ngram(ngram, layer)?;
            }
            body.hyper(&weights.attn)?;
            match &weights.mixer {
                MixerWeights::Recurrent(weights) => body.recurrent(weights, layer)?,
                MixerWeights::Sparse(weights) => body.sparse(weights, layer)?,
            }
            body.hyper(&weights.mlp)?;
            body.experts(&weights.moe)?;
        }
        body.end()
    }
}

/// One emission in progress.
struct Body<'a> {
    model: &'a Model,
    c: &'a ModelConfig,
    b: &'a Buffers,
    shape: &'a RoundShape<'a>,
    rows: usize,
    /// Whether the last block's partial sums have yet to be written back to the streams.
    pending: bool,
    e: &'a mut Emission,
}

impl<'a> Body<'a> {
    /// Resolves the staged table and looks up embeddings.
    fn begin(&mut self) -> Result<()> {
        for (first, lanes, count) in self.groups() {
            self.e.launch::<rows::Rows>(&rows::Args {
                table: self.b.table,
                heads: lanes.part(lanes.layout.head),
                page_tables: lanes.part(lanes.layout.page_table),
                facts: self.b.facts,
                first: first as u32,
                count: count as u32,
                slab: lanes.number,
                slots: lanes.slab.slots() as u32,
                pages: lanes.layout.pages_per_lane as u32,
                edits: (self.b.table_layout.edits.bytes / size_of::<kernels::table::PageEdit>()) as u32,
                boundary: self.c.boundary,
                kind: rows::kind_code(self.shape.kind),
            })?;
        }
        launch!(
            self.e,
            self.model.element,
            embed::Embed,
            &embed::Args {
                rows: self.range(0, self.rows),
                table: self.model.weights.embed,
                streams: self.b.streams,
                vocab: self.c.vocab_size as u32,
                hidden: self.c.hidden_size as u32,
                count: self.c.hc_count as u32,
                zero: 0,
            }
        )
    }

    /// Puts features in the place of embeddings.
    fn pictures(&mut self, pictures: &[PictureRows]) -> Result<()> {
        for picture in pictures {
            let end = picture.row + picture.rows;
            assert!(end <= self.rows, "rows {}..{end} of a round of {}", picture.row, self.rows);
            let offset = picture.row * self.c.streams_width() * self.model.element.bytes();
            let args = embed::FeatureArgs {
                features: picture.features,
                streams: self.b.streams.byte_add(offset),
                rows: picture.rows as u32,
                hidden: self.c.hidden_size as u32,
                count: self.c.hc_count as u32,
                zero: 0,
            };
            launch!(self.e, self.model.element, embed::EmbedFeatures, &args)?;
        }
        Ok(())
    }

    /// The n-gram embedding, added to the streams.
    fn ngram(&mut self, w: &NgramWeights<Ptr<u8>>, layer: usize) -> Result<()> {
        let (c, b, element) = (self.c, self.b, self.model.element);
        let ngram = c.ngram.expect("a layer with an n-gram embedding has its settings");
        let streams = c.streams_width();
        self.write_back()?;
        launch!(
            self.e,
            element,
            [w.format],
            ngram::NgramGather,
            &ngram::GatherArgs {
                rows: self.range(0, self.rows),
                multipliers: w.multipliers.cast(),
                primes: w.primes.cast(),
                offsets: w.offsets.cast(),
                shards: w.shards.cast(),
                scales: w.scales.map_or(Ptr::NULL, Ptr::cast),
                e: b.ngram,
                table_rows: w.table_rows as u64,
                shard_rows: w.shard_rows as u64,
                width: ngram.head_width() as u32,
                ngram_size: ngram.ngram_size as u32,
                heads_per_ngram: ngram.heads_per_ngram as u32,
                boundary: c.boundary,
                global: w.global,
                zero: 0,
            }
        )?;
        self.linear(b.ngram, w.key_value, b.ngram_key_value, ngram.embed_dim, streams + c.hidden_size)?;
        launch!(
            self.e,
            element,
            ngram::NgramGate,
            &ngram::GateArgs {
                rows: self.range(0, self.rows),
                keyval: b.ngram_key_value,
                streams: b.streams,
                norm_key: w.key_gain,
                norm_query: w.query_gain,
                norm_conv: w.conv_gain,
                gv: b.ngram_gated,
                cn: b.ngram_normed,
                count: c.hc_count as u32,
                hidden: c.hidden_size as u32,
                eps: c.rms_norm_eps,
                zero: 0,
            }
        )?;
        for (first, lanes, count) in self.groups() {
            let window =
                lanes.layout.ngram_windows[layer].expect("a layer with an n-gram embedding has a window");
            launch!(
                self.e,
                element,
                ngram::NgramConv,
                &ngram::ConvArgs {
                    rows: self.range(first, count),
                    gv: b.ngram_gated,
                    cn: b.ngram_normed,
                    weight: w.conv,
                    window: lanes.part(window),
                    streams: b.streams,
                    width: streams as u32,
                    taps: ngram.conv_kernel_size as u32,
                    dilation: ngram.ngram_size as u32,
                    zero: 0,
                }
            )?;
        }
        Ok(())
    }

    /// A hyper-connection: writes back what is pending and mixes the streams into the next block's input.
    fn hyper(&mut self, w: &HyperWeights<Ptr<u8>>) -> Result<()> {
        self.residual(w.gain, 0, self.rows)?;
        self.mix(w, self.b.normed, self.b.mixed, self.rows)
    }

    /// The gated delta net.
    fn recurrent(&mut self, w: &RecurrentWeights<Ptr<u8>>, layer: usize) -> Result<()> {
        let (c, b, element) = (self.c, self.b, self.model.element);
        let (channels, values, heads) =
            (c.linear_conv_width(), c.linear_value_width(), c.linear_num_value_heads);
        let stride = channels + values + 2 * heads;
        self.stack(b.mixed, &w.input, b.stacked, c.hidden_size, stride)?;
        for (first, lanes, count) in self.groups() {
            let LayerSpans::Recurrent { state, window } = lanes.layout.layers[layer] else {
                unreachable!("layer {layer} is recurrent in its weights and in its state")
            };
            launch!(
                self.e,
                element,
                conv::Conv,
                &conv::Args {
                    rows: self.range(first, count),
                    x: b.stacked,
                    weight: w.conv,
                    window: lanes.part(window),
                    y: b.conv,
                    channels: channels as u32,
                    taps: c.linear_conv_kernel_dim as u32,
                    stride: stride as u32,
                    zero: 0,
                }
            )?;
            let args = delta::Args {
                rows: self.range(first, count),
                qkv: b.conv,
                x: b.stacked,
                a_log: w.a_log.cast(),
                dt_bias: w.dt_bias.cast(),
                state: lanes.part(state),
                y: b.core,
                ready: b.ready,
                stride: stride as u32,
                beta_at: (channels + values) as u32,
                decay_at: (channels + values + heads) as u32,
                k_heads: c.linear_num_key_heads as u32,
                v_heads: heads as u32,
                k_width: c.linear_key_head_dim as u32,
                v_width: c.linear_value_head_dim as u32,
                zero: 0,
            };
            match self.shape.kind {
                Kind::Prompt => {
                    launch!(self.e, element, delta::DeltaReady, &args)?;
                    launch!(self.e, element, delta::DeltaChunk, &args)?;
                }
                Kind::Decode => launch!(self.e, element, delta::DeltaStep, &args)?,
            }
        }
        launch!(
            self.e,
            element,
            gate::GatedNorm,
            &gate::Args {
                o: b.core,
                x: b.stacked,
                gain: w.norm,
                y: b.gated,
                rows: self.rows as u32,
                heads: heads as u32,
                width: c.linear_value_head_dim as u32,
                stride: stride as u32,
                z_at: channels as u32,
                gate: match c.output_gate {
                    OutputGate::Sigmoid => 0,
                    OutputGate::Silu => 1,
                },
                eps: c.rms_norm_eps,
                zero: 0,
            }
        )?;
        self.linear_cut(b.gated, &w.output, values)
    }

    /// Sparse attention.
    fn sparse(&mut self, w: &SparseWeights<Ptr<u8>>, layer: usize) -> Result<()> {
        let (c, b, element) = (self.c, self.b, self.model.element);
        let stride = 2 * c.attention_width() + 2 * c.kv_width() + c.index_width();
        let top = (c.indexer_budget / c.indexer_compress_ratio) as u32;
        let projection = heads::Projection {
            base: b.stacked,
            stride: stride as u32,
            q_heads: c.num_attention_heads as u32,
            index_heads: c.indexer_n_heads as u32,
            zero: 0,
        };
        let rotary = Rotary {
            frequencies: self.model.weights.frequencies.cast(),
            half: (c.rotary.width / 2) as u32,
            height: c.rotary.sections[1] as u32,
            width: c.rotary.sections[2] as u32,
            zero: 0,
        };
        self.stack(b.mixed, &w.input, b.stacked, c.hidden_size, stride)?;
        for (first, lanes, count) in self.groups() {
            let LayerSpans::Sparse { ring, page_offset } = lanes.layout.layers[layer] else {
                unreachable!("layer {layer} is sparse in its weights and in its state")
            };
            let (rows, pages) = (self.range(first, count), lanes.pages(page_offset));
            launch!(
                self.e,
                element,
                heads::Heads,
                &heads::Args {
                    rows,
                    projection,
                    q_gain: w.q_gain,
                    k_gain: w.k_gain,
                    iq_gain: w.index_q_gain,
                    q: b.queries,
                    iq: b.index_queries,
                    pages,
                    rotary,
                    eps: c.rms_norm_eps,
                    zero: 0,
                }
            )?;
            launch!(
                self.e,
                element,
                index::IndexPool,
                &index::PoolArgs {
                    rows,
                    projection,
                    gain: w.index_k_gain,
                    ring: lanes.part(ring),
                    axes: lanes.part(lanes.layout.axes),
                    pages,
                    rotary,
                    eps: c.rms_norm_eps,
                    zero: 0,
                }
            )?;
            let (ring, zero) = (lanes.part(ring), 0);
            let (iq, chosen, q, out) = (b.index_queries, b.chosen, b.queries, b.gated);
            match self.shape.kind {
                Kind::Prompt => {
                    let args = index::SelectArgs { rows, projection, iq, chosen, ring, pages, top, zero };
                    launch!(self.e, element, index::IndexSelect, &args)?;
                    let args = attend::Args { rows, projection, q, chosen, pages, out, top, zero };
                    launch!(self.e, element, attend::Attend, &args)?;
                }
                Kind::Decode => {
                    let (scores, room, heads) = (b.scores, b.score_room as u32, projection.index_heads);
                    let args = split::ScoreArgs { rows, iq, scores, pages, heads, top, room, zero };
                    launch!(self.e, element, split::IndexScore, &args)?;
                    let args = split::TopArgs { rows, projection, scores, chosen, ring, pages, top, room };
                    launch!(self.e, element, split::IndexTop, &args)?;
                    let (sums, marks) = (b.span_sums, b.span_marks);
                    let args = parts::PartArgs { rows, projection, q, chosen, pages, sums, marks, top, zero };
                    launch!(self.e, element, parts::AttendPart, &args)?;
                    let args = parts::JoinArgs { rows, projection, sums, marks, pages, out, top, zero };
                    launch!(self.e, element, parts::AttendJoin, &args)?;
                }
            }
        }
        self.linear_cut(b.gated, &w.output, c.attention_width())
    }

    /// The mixture of experts.
    fn experts(&mut self, w: &MoeWeights<Ptr<u8>>) -> Result<()> {
        let (c, b, element) = (self.c, self.b, self.model.element);
        let sizes = experts::Sizes {
            rows: self.rows as u32,
            hidden: c.hidden_size as u32,
            inner: c.moe_intermediate_size as u32,
            shared_inner: c.shared_expert_intermediate_size as u32,
            experts: c.num_experts as u32,
            k: c.num_experts_per_tok as u32,
            cuts: self.model.share.cuts() as u32,
            offset: self.model.offset(c.moe_intermediate_size),
            shared_offset: self.model.offset(c.shared_expert_intermediate_size),
            zero: 0,
        };
        let logits = self.linear_args(b.mixed, w.router, b.router.cast(), c.hidden_size, c.num_experts + 1);
        route!(self, linear::LinearWide, linear::LinearWidePrompt, &logits)?;
        self.e.launch::<router::Route>(&router::Args {
            logits: b.router,
            ids: b.experts,
            weights: b.expert_weights,
            rows: self.rows as u32,
            experts: c.num_experts as u32,
            k: c.num_experts_per_tok as u32,
            norm: u32::from(c.norm_topk_prob),
        })?;
        let (ids, list, starts) = match self.shape.kind {
            Kind::Prompt => (b.experts, b.expert_list, b.expert_starts),
            Kind::Decode => (b.experts, Ptr::NULL, Ptr::NULL),
        };
        let (x, a, s) = (b.mixed, b.expert_inner, b.shared_inner);
        let (gate_up, shared_gate_up) = (w.gate_up, w.shared_gate_up);
        let up = experts::UpArgs { x, ids, list, starts, gate_up, shared_gate_up, a, s, sizes };
        let (down, shared_down, weights, p) = (w.down, w.shared_down, b.expert_weights, self.own_partials());
        match self.shape.kind {
            Kind::Decode => {
                launch!(self.e, element, [w.routed, w.shared], experts::ExpertsUp, &up)?;
                let args = experts::DownArgs { a, s, ids, weights, down, shared_down, p, sizes };
                launch!(self.e, element, [w.routed, w.shared], experts::ExpertsDown, &args)?;
            }
            Kind::Prompt => {
                let products = b.expert_products;
                self.e.launch::<experts::ExpertsGroup>(&experts::GroupArgs { ids, list, starts, sizes })?;
                launch!(self.e, element, [w.routed, w.shared], experts::ExpertsUpPrompt, &up)?;
                let args = experts::ProductsArgs { a, s, list, starts, down, shared_down, products, sizes };
                launch!(self.e, element, [w.routed, w.shared], experts::ExpertsProducts, &args)?;
                self.e.launch::<experts::ExpertsSum>(&experts::SumArgs {
                    products,
                    ids,
                    weights,
                    p,
                    sizes,
                })?;
            }
        }
        self.exchange_partials()
    }

    /// The head and the sampler over the rows that reach them, and the hand-over to the next round.
    fn end(&mut self) -> Result<()> {
        if self.shape.kind == Kind::Prompt {
            self.mark()?;
        }
        match self.shape.picks {
            Picks::All => self.pick(0)?,
            Picks::Last => self.pick(self.rows - 1)?,
            Picks::None => {}
        }
        for (first, lanes, count) in self.groups() {
            self.e.launch::<advance::Advance>(&advance::Args {
                rows: self.range(first, count),
                heads: lanes.part(lanes.layout.head),
                axes: lanes.part(lanes.layout.axes),
            })?;
        }
        Ok(())
    }

    /// Notes which ids the prompt holds.
    fn mark(&mut self) -> Result<()> {
        for (first, lanes, count) in self.groups() {
            self.e.launch::<sample::Mark>(&sample::MarkArgs {
                rows: self.range(first, count),
                counts: lanes.part(lanes.layout.counts),
                vocab: self.c.vocab_size as u32,
                zero: 0,
            })?;
        }
        Ok(())
    }

    /// The head and the sampler over rows `from..`.
    fn pick(&mut self, from: usize) -> Result<()> {
        let (c, b, element, w) = (self.c, self.b, self.model.element, &self.model.weights);
        let picked = self.rows - from;
        if from > 0 {
            self.write_back()?;
        }
        self.residual(w.mixer.gain, from, picked)?;
        let normed = b.normed.byte_add(from * c.streams_width() * element.bytes());
        self.mix(&w.mixer, normed, b.hidden, picked)?;
        self.head(picked)?;
        for (first, lanes, count) in self.groups().filter(|(first, _, count)| first + count > from) {
            let picked_first = first.max(from);
            let at = picked_first - from;
            launch!(
                self.e,
                element,
                sample::Sample,
                &sample::Args {
                    rows: self.range(picked_first, first + count - picked_first),
                    sampling: b.table.sampling,
                    logits: b.logits.byte_add(at * c.vocab_size * element.bytes()),
                    outcomes: b.outcomes.at(at),
                    heads: lanes.part(lanes.layout.head),
                    counts: lanes.part(lanes.layout.counts),
                    biases: lanes.part(lanes.layout.biases),
                    vocab: c.vocab_size as u32,
                    choices: self.model.choices as u32,
                    kind: rows::kind_code(self.shape.kind),
                    zero: 0,
                }
            )?;
        }
        Ok(())
    }

    /// The logits of so many rows.
    fn head(&mut self, rows: usize) -> Result<()> {
        let (c, b, element, share) = (self.c, self.b, self.model.element, self.model.share);
        let (w, width) = (&self.model.weights.head, self.model.weights.head.outputs);
        let part = rows * width * element.bytes();
        let to = match &self.model.communicator {
            None => b.logits,
            Some(_) => b.logit_parts.byte_add(share.rank() * part),
        };
        let args = self.linear_args(b.hidden, w.at, to, c.hidden_size, width);
        let args = linear::Args { rows: rows as u32, ..args };
        route!(self, [w.format], linear::Linear, linear::LinearPrompt, &args)?;
        let Some(communicator) = &self.model.communicator else { return Ok(()) };
        self.e.gather(communicator, b.logit_parts, part)?;
        let (from, to, parts) = (b.logit_parts, b.logits, share.ranks() as u32);
        let args = weave::Args { from, to, parts, rows: rows as u32, width: width as u32, zero: 0 };
        launch!(self.e, element, weave::Weave, &args)
    }

    /// Writes what is pending back to the streams, and norms nothing.
    fn write_back(&mut self) -> Result<()> {
        match self.pending {
            true => self.residual(Ptr::NULL, 0, self.rows),
            false => Ok(()),
        }
    }

    /// Writes what is pending back to the streams, and norms rows `from..from + rows` with `gain`. What is
    /// pending covers all rows, so a norm of only some of them finds nothing pending.
    fn residual(&mut self, gain: Ptr<u8>, from: usize, rows: usize) -> Result<()> {
        let (c, b) = (self.c, self.b);
        let pending = std::mem::take(&mut self.pending);
        debug_assert!(!pending || rows == self.rows);
        let offset = from * c.streams_width() * self.model.element.bytes();
        launch!(
            self.e,
            self.model.element,
            residual::Residual,
            &residual::Args {
                streams: b.streams.byte_add(offset),
                partials: if pending { b.partials } else { Ptr::NULL },
                inject: if pending { b.inject } else { Ptr::NULL },
                gain,
                normed: if gain.is_null() { Ptr::NULL } else { b.normed.byte_add(offset) },
                rows: rows as u32,
                count: c.hc_count as u32,
                hidden: c.hidden_size as u32,
                eps: c.rms_norm_eps,
            }
        )
    }

    /// Mixes normed streams into a block's input.
    fn mix(&mut self, w: &HyperWeights<Ptr<u8>>, normed: Ptr<u8>, mixed: Ptr<u8>, rows: usize) -> Result<()> {
        let (c, b) = (self.c, self.b);
        let (rows, streams) = (rows as u32, c.hc_count as u32);
        let (hidden, rank) = (c.hidden_size as u32, c.hc_lowrank as u32);
        let low = b.low;
        let inject = if w.injects { b.inject } else { Ptr::NULL };
        let args = hyper::DownArgs { normed, down: w.down, low, inject, rows, streams, hidden, rank };
        route!(self, hyper::MixDown, hyper::MixDownPrompt, &args)?;
        let args = hyper::UpArgs { low, up: w.up, normed, mixed, rows, streams, hidden, rank };
        route!(self, hyper::MixUp, hyper::MixUpPrompt, &args)
    }

    /// A linear layer over all rows.
    fn linear(&mut self, x: Ptr<u8>, w: Ptr<u8>, y: Ptr<u8>, inner: usize, outputs: usize) -> Result<()> {
        let args = self.linear_args(x, w, y, inner, outputs);
        route!(self, linear::Linear, linear::LinearPrompt, &args)
    }

    /// The input projections of a mixer over all rows, each of which is `stride` wide.
    fn stack(
        &mut self,
        x: Ptr<u8>,
        pieces: &[Piece<Ptr<u8>>],
        y: Ptr<u8>,
        inner: usize,
        stride: usize,
    ) -> Result<()> {
        let mut first = 0;
        for piece in pieces {
            let y = y.byte_add(first * self.model.element.bytes());
            let args = self.linear_args(x, piece.at, y, inner, piece.outputs);
            let args = linear::Args { stride: stride as u32, ..args };
            route!(self, [piece.format], linear::Linear, linear::LinearPrompt, &args)?;
            first += piece.outputs;
        }
        Ok(())
    }

    /// The output projection of a mixer over all rows: partial sums, which are then pending.
    fn linear_cut(&mut self, x: Ptr<u8>, w: &Piece<Ptr<u8>>, inner: usize) -> Result<()> {
        let args = self.linear_args(x, w.at, self.own_partials().cast(), inner, self.c.hidden_size);
        let (cuts, offset) = (self.model.share.cuts() as u32, self.model.offset(inner));
        let args = linear::Args { cuts, offset, ..args };
        route!(self, [w.format], linear::LinearCut, linear::LinearCutPrompt, &args)?;
        self.exchange_partials()
    }

    /// Where the partial sums go that are made here.
    fn own_partials(&self) -> Ptr<f32> {
        self.b.partials.at(self.model.share.rank() * self.rows * self.c.hidden_size)
    }

    /// Brings the partial sums of all ranks to each of them. They are pending then.
    fn exchange_partials(&mut self) -> Result<()> {
        self.pending = true;
        match &self.model.communicator {
            Some(communicator) => {
                let bytes = size_of::<f32>() * self.rows * self.c.hidden_size;
                self.e.gather(communicator, self.b.partials.cast(), bytes)
            }
            None => Ok(()),
        }
    }

    fn linear_args(&self, x: Ptr<u8>, w: Ptr<u8>, y: Ptr<u8>, inner: usize, outputs: usize) -> linear::Args {
        linear::Args {
            x,
            w,
            y,
            rows: self.rows as u32,
            inner: inner as u32,
            outputs: outputs as u32,
            stride: outputs as u32,
            cuts: 1,
            offset: 0,
        }
    }

    fn range(&self, first: usize, count: usize) -> RowRange {
        RowRange { facts: self.b.facts, first: first as u32, count: count as u32 }
    }

    /// First row, slab and number of rows of each group.
    fn groups(&self) -> impl Iterator<Item = (usize, &'a Lanes, usize)> + use<'a> {
        self.shape.groups.iter().scan(0, |next, group| {
            let first = *next;
            *next += group.rows;
            Some((first, group.lanes, group.rows))
        })
    }
}
