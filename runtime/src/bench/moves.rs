//! What one launch must move at least: its weights, its state, its rows in and out, each once.

use graph::Emission;
use kernels::attend::parts;
use kernels::index::split;
use kernels::numerics::{CUTS, Element, ElementType};
use kernels::weight::{Format, Fp8, Nvfp4, Plain, WeightFormat};
use kernels::{attend, conv, delta, embed, experts, gate, heads, hyper, index, linear, ngram};
use kernels::{residual, router, sample};

use super::bytes::{number_bytes, selected};
use crate::config::ModelConfig;

/// What argument blocks do not say.
pub(super) struct Seen<'a> {
    pub(super) config: &'a ModelConfig,
    /// Lanes whose state is touched.
    pub(super) lanes: usize,
    /// Positions that a row sees.
    pub(super) visible: usize,
    /// Experts that some row chose.
    pub(super) distinct: usize,
    /// Whether the rows are one prompt's, and so share what they look at.
    pub(super) prompt: bool,
}

/// Bytes of entry `at`; 0 where they are too few to matter.
pub(super) fn moved<E: Element>(e: &Emission, at: usize, seen: &Seen<'_>) -> f64 {
    let b = size_of::<E>();
    let lanes = seen.lanes;
    let element = if b == 2 { ElementType::Bf16 } else { ElementType::F32 };
    let of = |format| number_bytes(format, element);
    let wide = e.args::<linear::LinearWide<E>>(at).or(e.args::<linear::LinearWidePrompt<E>>(at));
    let wide = wide.map(|args| (args, Format::Plain, 4));
    let products = [layer::<E, Plain>(e, at), layer::<E, Fp8>(e, at), layer::<E, Nvfp4>(e, at), wide];
    if let Some((a, format, output)) = products.into_iter().flatten().next() {
        let [rows, inner, outputs] = [a.rows, a.inner, a.outputs].map(|n| n as usize);
        return of(format) * (inner * outputs) as f64 + (rows * (b * inner + output * outputs)) as f64;
    }
    if let Some(mixture) = mixture::<E>(e, at) {
        let Mixture { sizes: s, matrices, formats: [routed, shared], moved } = mixture;
        let weights = of(routed) * (seen.distinct * s.inner) as f64 + of(shared) * s.shared_inner as f64;
        return (matrices * s.hidden) as f64 * weights + moved as f64;
    }
    let bytes = if let Some(a) = e.args::<embed::Embed<E>>(at) {
        b * a.rows.len() * (a.hidden * (1 + a.count)) as usize
    } else if let Some(a) = e.args::<residual::Residual<E>>(at) {
        let (rows, hidden, width) = (a.rows as usize, a.hidden as usize, (a.hidden * a.count) as usize);
        let pending = if a.partials.is_null() { 0 } else { rows * (4 * CUTS * hidden + b * width) };
        let normed = if a.gain.is_null() { 0 } else { b * width * (rows + 1) };
        b * rows * width + pending + normed
    } else if let Some(a) = e.args::<hyper::MixDown<E>>(at).or(e.args::<hyper::MixDownPrompt<E>>(at)) {
        let (rows, width, rank) = (a.rows as usize, (a.hidden * a.streams) as usize, a.rank as usize);
        let injected = if a.inject.is_null() { 0 } else { a.streams as usize };
        b * (width * (rank + injected + rows) + rows * rank)
    } else if let Some(a) = e.args::<hyper::MixUp<E>>(at).or(e.args::<hyper::MixUpPrompt<E>>(at)) {
        let (rows, width, rank) = (a.rows as usize, (a.hidden * a.streams) as usize, a.rank as usize);
        b * (width * rank + rows * (rank + width + a.hidden as usize))
    } else if let Some(a) = e.args::<conv::Conv<E>>(at) {
        let (rows, channels, taps) = (a.rows.len(), a.channels as usize, a.taps as usize);
        b * channels * (taps + 2 * rows + 2 * lanes * (taps - 1))
    } else if let Some(a) = e.args::<delta::DeltaStep<E>>(at).or(e.args::<delta::DeltaChunk<E>>(at)) {
        let [k_heads, v_heads, k, v] = [a.k_heads, a.v_heads, a.k_width, a.v_width].map(|n| n as usize);
        8 * lanes * v_heads * k * v + b * a.rows.len() * (2 * k_heads * k + 2 * v_heads * v)
    } else if let Some(a) = e.args::<delta::DeltaReady<E>>(at) {
        let (keys, heads) = ((a.k_heads * a.k_width) as usize, a.v_heads as usize);
        a.rows.len() * (2 * b * keys + 4 * heads * delta::READY)
    } else if let Some(a) = e.args::<gate::GatedNorm<E>>(at) {
        3 * b * (a.rows * a.heads * a.width) as usize
    } else if let Some(a) = e.args::<heads::Heads<E>>(at) {
        let (p, g) = (a.projection, a.pages);
        let queries = p.q_heads * g.width + p.index_heads * g.index_width;
        2 * b * a.rows.len() * (queries + 2 * g.kv_heads * g.width) as usize
    } else if let Some(a) = e.args::<index::IndexPool<E>>(at) {
        2 * b * a.rows.len() * a.pages.index_width as usize
    } else if let Some(a) = e.args::<index::IndexSelect<E>>(at) {
        let queries = (a.projection.index_heads * a.pages.index_width) as usize;
        let keys = seen.visible / a.pages.ratio as usize * a.pages.index_width as usize;
        b * (lanes * keys + a.rows.len() * queries) + 4 * a.rows.len() * a.top as usize
    } else if let Some(a) = e.args::<attend::Attend<E>>(at) {
        let (queries, width) = (a.projection.q_heads * a.pages.width, a.pages.kv_heads * a.pages.width);
        let positions = if seen.prompt { seen.visible } else { selected(seen.config, seen.visible) };
        b * (lanes * positions * 2 * width as usize + 3 * a.rows.len() * queries as usize)
    } else if let Some(a) = e.args::<split::IndexScore<E>>(at) {
        let (width, blocks) = (a.pages.index_width as usize, seen.visible / a.pages.ratio as usize);
        match blocks > a.top as usize {
            true => {
                b * width * (lanes * blocks + a.rows.len() * a.heads as usize) + 4 * a.rows.len() * blocks
            }
            false => 0,
        }
    } else if let Some(a) = e.args::<split::IndexTop<E>>(at) {
        let (top, blocks) = (a.top as usize, seen.visible / a.pages.ratio as usize);
        let scores = if blocks > top { blocks } else { 0 };
        a.rows.len() * (4 * (scores + top) + 2 * b * a.pages.index_width as usize)
    } else if let Some(a) = e.args::<parts::AttendPart<E>>(at) {
        let (queries, width) = (a.projection.q_heads as usize, a.pages.width as usize);
        let positions = selected(seen.config, seen.visible);
        let keys_and_values = lanes * positions * 2 * a.pages.kv_heads as usize * width;
        b * (keys_and_values + a.rows.len() * queries * width)
            + span_bytes(a.rows.len() * queries, width, positions)
    } else if let Some(a) = e.args::<parts::AttendJoin<E>>(at) {
        let (heads, width) = (a.rows.len() * a.projection.q_heads as usize, a.pages.width as usize);
        span_bytes(heads, width, selected(seen.config, seen.visible)) + 2 * b * heads * width
    } else if let Some(a) = e.args::<router::Route>(at) {
        (4 * a.rows * (a.experts + 2 * a.k)) as usize
    } else if let Some(a) = e.args::<experts::ExpertsGroup>(at) {
        let s = sizes(a.sizes);
        4 * (2 * s.rows * s.k + a.sizes.experts as usize + 1)
    } else if let Some(a) = e.args::<experts::ExpertsSum>(at) {
        let s = sizes(a.sizes);
        4 * CUTS * s.rows * (s.k + 2) * s.hidden
    } else if let Some((a, format)) = gather::<E>(e, at) {
        let numbers = a.rows.len() * ((a.ngram_size - 1) * a.heads_per_ngram * a.width) as usize;
        return (of(format) + b as f64) * numbers as f64;
    } else if let Some(a) = e.args::<ngram::NgramGate<E>>(at) {
        let (hidden, width) = (a.hidden as usize, (a.hidden * a.count) as usize);
        b * (3 * width + a.rows.len() * (4 * width + hidden))
    } else if let Some(a) = e.args::<ngram::NgramConv<E>>(at) {
        let (width, taps) = (a.width as usize, a.taps as usize);
        let window = (taps - 1) * a.dilation as usize;
        b * width * (taps + 4 * a.rows.len() + 2 * lanes * window)
    } else if let Some(a) = e.args::<sample::Sample<E>>(at) {
        b * a.rows.len() * a.vocab as usize
    } else {
        0
    };
    bytes as f64
}

/// A product with a matrix in this format, and bytes of an output of a row.
fn layer<E: Element, F: WeightFormat>(e: &Emission, at: usize) -> Option<(linear::Args, Format, usize)> {
    let narrow = e.args::<linear::Linear<E, F>>(at).or(e.args::<linear::LinearPrompt<E, F>>(at));
    let cut = e.args::<linear::LinearCut<E, F>>(at).or(e.args::<linear::LinearCutPrompt<E, F>>(at));
    let narrow = narrow.map(|args| (args, F::FORMAT, size_of::<E>()));
    narrow.or(cut.map(|args| (args, F::FORMAT, 4 * CUTS)))
}

/// A look into tables, and how they are stored.
fn gather<E: Element>(e: &Emission, at: usize) -> Option<(ngram::GatherArgs, Format)> {
    let plain = e.args::<ngram::NgramGather<E>>(at).map(|args| (args, Format::Plain));
    let fp8 = || Some((e.args::<ngram::NgramGather<E, Fp8>>(at)?, Format::Fp8));
    let nvfp4 = || Some((e.args::<ngram::NgramGather<E, Nvfp4>>(at)?, Format::Nvfp4));
    plain.or_else(fp8).or_else(nvfp4)
}

/// A product with the experts of a layer.
struct Mixture {
    sizes: Sizes,
    /// Matrices of an expert.
    matrices: usize,
    /// How the routed experts and the shared one are stored.
    formats: [Format; 2],
    /// Bytes of rows in and out.
    moved: usize,
}

fn mixture<E: Element>(e: &Emission, at: usize) -> Option<Mixture> {
    let shared = |routed: [Option<Mixture>; 3]| routed.into_iter().flatten().next();
    let plain =
        [pair::<E, Plain, Plain>(e, at), pair::<E, Plain, Fp8>(e, at), pair::<E, Plain, Nvfp4>(e, at)];
    let fp8 = [pair::<E, Fp8, Plain>(e, at), pair::<E, Fp8, Fp8>(e, at), pair::<E, Fp8, Nvfp4>(e, at)];
    let nvfp4 =
        [pair::<E, Nvfp4, Plain>(e, at), pair::<E, Nvfp4, Fp8>(e, at), pair::<E, Nvfp4, Nvfp4>(e, at)];
    shared(plain).or_else(|| shared(fp8)).or_else(|| shared(nvfp4))
}

fn pair<E: Element, R: WeightFormat, S: WeightFormat>(e: &Emission, at: usize) -> Option<Mixture> {
    let b = size_of::<E>();
    let up = e.args::<experts::ExpertsUp<E, R, S>>(at).or(e.args::<experts::ExpertsUpPrompt<E, R, S>>(at));
    let down = e.args::<experts::ExpertsDown<E, R, S>>(at);
    let products = e.args::<experts::ExpertsProducts<E, R, S>>(at);
    let places = |s: &Sizes| s.k * s.inner + s.shared_inner;
    let of = |args: experts::Sizes, matrices, moved: &dyn Fn(&Sizes) -> usize| {
        let sizes = sizes(args);
        Mixture { moved: sizes.rows * moved(&sizes), sizes, matrices, formats: [R::FORMAT, S::FORMAT] }
    };
    let up = up.map(|a| of(a.sizes, 2, &|s| b * (s.hidden + places(s))));
    let down = down.map(|a| of(a.sizes, 1, &|s| b * places(s) + 4 * CUTS * s.hidden));
    let products = products.map(|a| of(a.sizes, 1, &|s| b * places(s) + 4 * CUTS * (s.k + 1) * s.hidden));
    up.or(down).or(products)
}

/// Bytes of the sums and marks of so many heads' spans.
fn span_bytes(heads: usize, width: usize, positions: usize) -> usize {
    4 * heads * positions.div_ceil(parts::SPAN) * (width + 2)
}

/// [`experts::Sizes`] as sizes.
struct Sizes {
    rows: usize,
    hidden: usize,
    inner: usize,
    shared_inner: usize,
    k: usize,
}

fn sizes(s: experts::Sizes) -> Sizes {
    let [rows, hidden, inner, shared_inner, k] =
        [s.rows, s.hidden, s.inner, s.shared_inner, s.k].map(|n| n as usize);
    Sizes { rows, hidden, inner, shared_inner, k }
}
