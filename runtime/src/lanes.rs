//! Where the state of lanes lies: the layout of a slot and of a page, and the memory of one slab.
//!
//! ```text
//! slot = head | page table | rotary ring | counts of ids | bias list | per layer: recurrent state and windows, or index ring | n-gram windows
//! page = per sparse layer: keys [64, kv_heads, width] | values, the same | pooled index keys [64 / ratio, width]
//! ```
//! A slot is reached through its number, so launches bake a slab's address and stride, never a slot's.

use std::sync::Arc;

use graph::{Arena, Device, Digest, Digester, Region, Slab, Span};
use kernels::numerics::ElementType;
use kernels::state::{Pages, Part};
use kernels::table::{BIASES, Bias, Head, PAGE};

use crate::config::{LayerKind, ModelConfig};

/// The layout of one lane's state, the same in every slab.
#[derive(Clone, Debug)]
pub struct LaneLayout {
    /// Element type of caches and windows.
    pub element: ElementType,
    /// The slot as labelled spans.
    pub slot: Region,
    /// The [`Head`].
    pub head: Span,
    /// The page table: u32 per page of the context.
    pub page_table: Span,
    /// The rotary positions of the last 64 positions.
    pub axes: Span,
    /// How often each id of the vocabulary occurred: u32 per id.
    pub counts: Span,
    /// The request's [`Bias`] list.
    pub biases: Span,
    /// What each layer keeps in the slot.
    pub layers: Vec<LayerSpans>,
    /// The windows of the n-gram embeddings, by layer.
    pub ngram_windows: Vec<Option<Span>>,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages of the longest context.
    pub pages_per_lane: usize,
    /// A view of one sparse layer's part of a page, without addresses.
    view: Pages,
    /// Digest of every offset and size that argument blocks bake. Spans never change after they are laid out.
    spans: Digest,
}

/// What one layer keeps in a slot.
#[derive(Clone, Copy, Debug)]
pub enum LayerSpans {
    /// A recurrent layer: its state, f32 `[v_heads, k_width, v_width]`, and its convolution window.
    Recurrent {
        /// The state.
        state: Span,
        /// The window: the last raw columns, oldest first.
        window: Span,
    },
    /// A sparse layer: its ring of raw index keys, and where its part of a page begins.
    Sparse {
        /// The ring: `[64, index_width]`.
        ring: Span,
        /// Bytes from the start of a page.
        page_offset: usize,
    },
}

impl LaneLayout {
    /// The layout for a model run with `element`, with room for `context` positions.
    pub fn new(config: &ModelConfig, element: ElementType, context: usize) -> LaneLayout {
        let bytes = element.bytes();
        let pages_per_lane = context.div_ceil(PAGE);
        let view = Pages {
            kv_heads: config.num_key_value_heads as u32,
            width: config.head_dim as u32,
            ratio: config.indexer_compress_ratio as u32,
            index_width: config.indexer_head_dim as u32,
            ..bytemuck::Zeroable::zeroed()
        };
        let mut slot = Region::new();
        let head = slot.array::<Head>("head", 1);
        let page_table = slot.array::<u32>(PAGE_TABLE, pages_per_lane);
        let axes = slot.array::<[i32; 3]>("rotary ring", PAGE);
        let counts = slot.array::<u32>("counts of ids", config.vocab_size);
        let biases = slot.array::<Bias>("bias list", BIASES);
        let mut page_bytes = 0;
        let layers = config.layers.iter().enumerate().map(|(layer, kind)| match kind {
            LayerKind::LinearAttention => {
                let heads = config.linear_num_value_heads;
                let state = heads * config.linear_key_head_dim * config.linear_value_head_dim;
                let window = (config.linear_conv_kernel_dim - 1) * config.linear_conv_width();
                LayerSpans::Recurrent {
                    state: slot.array::<f32>(format!("layer {layer} recurrent state"), state),
                    window: slot.add(format!("layer {layer} convolution window"), window * bytes),
                }
            }
            LayerKind::SparseAttention => {
                let page_offset = page_bytes;
                page_bytes += view.layer_bytes(bytes).next_multiple_of(graph::region::SPAN_ALIGN);
                let ring = PAGE * config.indexer_head_dim * bytes;
                LayerSpans::Sparse { ring: slot.add(format!("layer {layer} index ring"), ring), page_offset }
            }
        });
        let layers: Vec<LayerSpans> = layers.collect();
        let windows = (0..config.num_hidden_layers).map(|layer| {
            let ngram = config.ple.iter().find(|ple| ple.layer == layer).and(config.ngram)?;
            let columns = (ngram.conv_kernel_size - 1) * ngram.ngram_size;
            Some(slot.add(format!("layer {layer} n-gram window"), columns * config.streams_width() * bytes))
        });
        let ngram_windows = windows.collect();
        let mut spans = Digester::new();
        spans.bytes(bytemuck::bytes_of(&view));
        // Labels say whose a span is: two layouts may cut a slot alike and use it otherwise.
        slot.spans().for_each(|(label, span)| {
            spans.text(label).number(span.offset as u64).number(span.bytes as u64);
        });
        for layer in &layers {
            if let LayerSpans::Sparse { page_offset, .. } = *layer {
                spans.number(page_offset as u64);
            }
        }
        let spans = spans.finish();
        LaneLayout {
            element,
            slot,
            head,
            page_table,
            axes,
            counts,
            biases,
            layers,
            ngram_windows,
            page_bytes,
            pages_per_lane,
            view,
            spans,
        }
    }

    /// The parts of a slot that are state: all but the page table, which says where state is.
    pub fn parts(&self) -> impl Iterator<Item = (&str, Span)> {
        self.slot.spans().filter(|(label, _)| *label != PAGE_TABLE)
    }

    /// The view of a page's part of one sparse layer, without addresses: for its sizes.
    pub fn page_view(&self) -> &Pages {
        &self.view
    }
}

const PAGE_TABLE: &str = "page table";

/// A pool of pages, which the lanes of one cache class share.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// The memory.
    pub arena: Arena,
    /// Number of pages.
    pub pages: usize,
}

impl PagePool {
    /// Allocates a pool of `pages` pages of this layout.
    pub fn new(device: &Device, layout: &LaneLayout, pages: usize) -> graph::Result<PagePool> {
        Ok(PagePool { arena: device.arena("pages", layout.page_bytes * pages)?, pages })
    }
}

/// The memory of one slab: its slots, and the pool of pages that its page tables name.
#[derive(Clone)]
pub struct Lanes {
    /// Its number, as page edits name it.
    pub number: u32,
    /// The layout of a slot and of a page.
    pub layout: Arc<LaneLayout>,
    /// The slots.
    pub slab: Slab,
    /// The pages.
    pub pool: PagePool,
}

impl Lanes {
    /// Allocates a slab of `slots` slots whose pages lie in `pool`.
    pub fn new(
        device: &Device,
        number: u32,
        layout: Arc<LaneLayout>,
        slots: usize,
        pool: PagePool,
    ) -> graph::Result<Lanes> {
        let slab = Slab::new(device, "lane slots", &layout.slot, slots)?;
        Ok(Lanes { number, layout, slab, pool })
    }

    /// A part of every slot.
    pub fn part(&self, span: Span) -> Part {
        Part { base: self.slab.arena().base().byte_add(span.offset), stride: self.slab.stride() as u64 }
    }

    /// The pages as the layer sees them whose part of a page begins at `page_offset`.
    pub fn pages(&self, page_offset: usize) -> Pages {
        Pages {
            base: self.pool.arena.base().byte_add(page_offset),
            stride: self.layout.page_bytes as u64,
            tables: self.part(self.layout.page_table),
            capacity: self.layout.pages_per_lane as u32,
            pages: self.pool.pages as u32,
            ..self.layout.view
        }
    }

    /// The buffer digest of every lane of this slab: each address, stride, capacity and type that an
    /// argument block bakes for it.
    pub fn digest(&self) -> Digest {
        let mut digest = Digester::new();
        self.baked().iter().for_each(|&(_, part)| {
            digest.digest(part);
        });
        digest.finish()
    }

    /// The parts of [`Lanes::digest`], by name. Leaving one out would let two slabs that need different
    /// launches share a graph.
    ///
    /// The digest of the slab covers the stride and the number of its slots although its epoch implies them:
    /// a slab never changes them. The element is implied by the spans, which elements of another size move;
    /// two types of one size would not move them.
    #[doc(hidden)]
    pub fn baked(&self) -> [(&'static str, Digest); 8] {
        let number = |number: usize| Digest(number as u128);
        let Lanes { layout, pool, .. } = self;
        [
            ("number", number(self.number as usize)),
            ("slab", self.slab.digest()),
            ("pool", pool.arena.digest()),
            ("pages", number(pool.pages)),
            ("page bytes", number(layout.page_bytes)),
            ("pages per lane", number(layout.pages_per_lane)),
            ("spans", layout.spans),
            ("element", number(layout.element as usize)),
        ]
    }

    /// The arenas that launches on this slab point into.
    pub fn arenas(&self) -> [Arena; 2] {
        [self.slab.arena().clone(), self.pool.arena.clone()]
    }
}
