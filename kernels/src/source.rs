//! The CUDA sources of the crate, and every operation that has a twin in them.
//!
//! A source is a text that the binary carries; a device compiles it when it starts. It includes no CUDA
//! header, only the crate's own files.

use graph::{Definition, Grid, Kernel, Source, Twin};
use half::bf16;

use crate::numerics::Element;
use crate::{
    advance, attend, conv, delta, embed, experts, gate, heads, hyper, index, linear, ngram, residual, router,
    rows, sample,
};

/// The operations that a CUDA device runs: those in bf16, and those without an element type.
pub const ALL: &[&Definition] = &[
    rows::Rows::DEFINITION,
    embed::Embed::<bf16>::DEFINITION,
    residual::Residual::<bf16>::DEFINITION,
    hyper::MixDown::<bf16>::DEFINITION,
    hyper::MixUp::<bf16>::DEFINITION,
    linear::Linear::<bf16>::DEFINITION,
    linear::LinearWide::<bf16>::DEFINITION,
    linear::LinearCut::<bf16>::DEFINITION,
    conv::Conv::<bf16>::DEFINITION,
    delta::DeltaStep::<bf16>::DEFINITION,
    delta::DeltaChunk::<bf16>::DEFINITION,
    gate::GatedNorm::<bf16>::DEFINITION,
    heads::Heads::<bf16>::DEFINITION,
    index::IndexPool::<bf16>::DEFINITION,
    index::IndexSelect::<bf16>::DEFINITION,
    attend::Attend::<bf16>::DEFINITION,
    router::Route::DEFINITION,
    experts::ExpertsUp::<bf16>::DEFINITION,
    experts::ExpertsDown::<bf16>::DEFINITION,
    ngram::NgramGather::<bf16>::DEFINITION,
    ngram::NgramGate::<bf16>::DEFINITION,
    ngram::NgramConv::<bf16>::DEFINITION,
    sample::Mark::DEFINITION,
    sample::Sample::<bf16>::DEFINITION,
    advance::Advance::DEFINITION,
];

/// The sources, one for every file of operations.
macro_rules! sources {
    ($($source:ident = $file:literal),+ $(,)?) => {
        $(
            #[doc = concat!("`", $file, "`.")]
            pub(crate) static $source: Source = Source {
                name: $file,
                text: include_str!(concat!("../cuda/", $file)),
                includes: INCLUDES,
            };
        )+
    };
}

sources! {
    ADVANCE = "advance.cu",
    ATTEND = "attend.cu",
    CONV = "conv.cu",
    DELTA = "delta.cu",
    EMBED = "embed.cu",
    EXPERTS = "experts.cu",
    GATE = "gate.cu",
    HEADS = "heads.cu",
    HYPER = "hyper.cu",
    INDEX = "index.cu",
    LINEAR = "linear.cu",
    NGRAM = "ngram.cu",
    RESIDUAL = "residual.cu",
    ROUTER = "router.cu",
    ROWS = "rows.cu",
    SAMPLE = "sample.cu",
}

macro_rules! includes {
    ($($file:literal),+ $(,)?) => { &[$(($file, include_str!(concat!("../cuda/", $file)))),+] };
}

const INCLUDES: &[(&str, &str)] = includes![
    "attention.cuh",
    "common.cuh",
    "history.cuh",
    "matrix.cuh",
    "ptx.cuh",
    "select.cuh",
    "state.cuh",
];

/// The twin of a kernel without an element type, `block` threads wide.
pub(crate) const fn plain(source: &'static Source, symbol: &'static str, block: u32) -> Option<Twin> {
    Some(Twin { source, symbol, block, shared_bytes: 0 })
}

/// The twin of the instance for `E`, if it has one.
pub(crate) const fn twin<E: Element>(
    source: &'static Source,
    symbol: &'static str,
    block: u32,
) -> Option<Twin> {
    match E::CUDA {
        true => plain(source, symbol, block),
        false => None,
    }
}

/// As [`twin`], for a kernel that multiplies matrices in tiles.
pub(crate) const fn matrix_twin<E: Element>(
    source: &'static Source,
    symbol: &'static str,
    block: u32,
) -> Option<Twin> {
    match E::CUDA {
        true => Some(Twin { source, symbol, block, shared_bytes: MATRIX_SHARED }),
        false => None,
    }
}

/// Two stages of 64 rows and 64 weight rows, each of 64 elements and padding.
const MATRIX_SHARED: u32 = 2 * 2 * 64 * (64 + 8) * 2;

/// Rows up to which a product is computed in narrow tiles. The bits do not depend on the kind of tile.
const NARROW_ROWS: u32 = 32;

/// Outputs of a narrow tile.
pub(crate) const NARROW_OUTPUTS: u32 = 16;

/// Outputs and rows of a wide tile.
const WIDE: u32 = 64;

/// The tiles of a product.
pub(crate) fn product_tiles(rows: u32, outputs: u32) -> usize {
    match rows <= NARROW_ROWS {
        true => outputs.div_ceil(NARROW_OUTPUTS) as usize,
        false => outputs.div_ceil(WIDE) as usize * rows.div_ceil(WIDE) as usize,
    }
}

/// A grid of one block per row and run of `block` channels.
pub(crate) fn channel_grid(rows: usize, channels: u32, block: u32) -> Grid {
    Grid::plane(rows, channels.div_ceil(block) as usize)
}
