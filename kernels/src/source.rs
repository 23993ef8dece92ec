//! The CUDA sources of the crate, and every operation that has a twin in them.
//!
//! A source is a text that the binary carries; a device compiles it when it starts. It includes no CUDA
//! header, only the crate's own files.
//!
//! A twin computes what its contract says, with the rounding points of the host. The order of its sums is its
//! own, but as fixed as the host's: a function of the widths (for attention, of the row's own positions). What
//! the host reports as outside the domain, a twin leaves unwritten: a device has nobody to tell.

use graph::{Definition, Grid, Kernel, Source, Twin};
use half::bf16;

use crate::numerics::Element;
use crate::weight::{Format, Fp8, Nvfp4, Plain};
use crate::{
    advance, affine, attend, conv, delta, embed, experts, gate, heads, hyper, index, layer_norm, linear,
    ngram, patch, pixels, random, read, residual, router, rows, sample, span, tiles, weave,
};

/// The operations that a CUDA device runs: those in bf16, and those without an element type.
pub const ALL: &[&Definition] = &[
    rows::Rows::DEFINITION,
    embed::Embed::<bf16>::DEFINITION,
    embed::EmbedFeatures::<bf16>::DEFINITION,
    residual::Residual::<bf16>::DEFINITION,
    hyper::MixDown::<bf16>::DEFINITION,
    hyper::MixUp::<bf16>::DEFINITION,
    hyper::MixDownPrompt::<bf16>::DEFINITION,
    hyper::MixUpPrompt::<bf16>::DEFINITION,
    linear::Linear::<bf16>::DEFINITION,
    linear::LinearWide::<bf16>::DEFINITION,
    linear::LinearCut::<bf16>::DEFINITION,
    linear::LinearPrompt::<bf16>::DEFINITION,
    linear::LinearWidePrompt::<bf16>::DEFINITION,
    linear::LinearCutPrompt::<bf16>::DEFINITION,
    linear::Linear::<bf16, Fp8>::DEFINITION,
    linear::LinearCut::<bf16, Fp8>::DEFINITION,
    linear::LinearPrompt::<bf16, Fp8>::DEFINITION,
    linear::LinearCutPrompt::<bf16, Fp8>::DEFINITION,
    linear::Linear::<bf16, Nvfp4>::DEFINITION,
    linear::LinearCut::<bf16, Nvfp4>::DEFINITION,
    linear::LinearPrompt::<bf16, Nvfp4>::DEFINITION,
    linear::LinearCutPrompt::<bf16, Nvfp4>::DEFINITION,
    tiles::Pack::<bf16>::DEFINITION,
    tiles::Pack::<bf16, Fp8>::DEFINITION,
    tiles::Pack::<bf16, Nvfp4>::DEFINITION,
    conv::Conv::<bf16>::DEFINITION,
    delta::DeltaStep::<bf16>::DEFINITION,
    delta::DeltaReady::<bf16>::DEFINITION,
    delta::DeltaChunk::<bf16>::DEFINITION,
    gate::GatedNorm::<bf16>::DEFINITION,
    heads::Heads::<bf16>::DEFINITION,
    index::IndexPool::<bf16>::DEFINITION,
    index::IndexSelect::<bf16>::DEFINITION,
    index::split::IndexScore::<bf16>::DEFINITION,
    index::split::IndexTop::<bf16>::DEFINITION,
    attend::Attend::<bf16>::DEFINITION,
    attend::parts::AttendPart::<bf16>::DEFINITION,
    attend::parts::AttendJoin::<bf16>::DEFINITION,
    router::Route::DEFINITION,
    experts::ExpertsUp::<bf16>::DEFINITION,
    experts::ExpertsDown::<bf16>::DEFINITION,
    experts::ExpertsGroup::DEFINITION,
    experts::ExpertsUpPrompt::<bf16>::DEFINITION,
    experts::ExpertsProducts::<bf16>::DEFINITION,
    experts::ExpertsSum::DEFINITION,
    experts::ExpertsUp::<bf16, Plain, Fp8>::DEFINITION,
    experts::ExpertsDown::<bf16, Plain, Fp8>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Plain, Fp8>::DEFINITION,
    experts::ExpertsProducts::<bf16, Plain, Fp8>::DEFINITION,
    experts::ExpertsUp::<bf16, Fp8, Plain>::DEFINITION,
    experts::ExpertsDown::<bf16, Fp8, Plain>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Fp8, Plain>::DEFINITION,
    experts::ExpertsProducts::<bf16, Fp8, Plain>::DEFINITION,
    experts::ExpertsUp::<bf16, Fp8, Fp8>::DEFINITION,
    experts::ExpertsDown::<bf16, Fp8, Fp8>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Fp8, Fp8>::DEFINITION,
    experts::ExpertsProducts::<bf16, Fp8, Fp8>::DEFINITION,
    experts::ExpertsUp::<bf16, Nvfp4, Plain>::DEFINITION,
    experts::ExpertsDown::<bf16, Nvfp4, Plain>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Nvfp4, Plain>::DEFINITION,
    experts::ExpertsProducts::<bf16, Nvfp4, Plain>::DEFINITION,
    experts::ExpertsUp::<bf16, Nvfp4, Fp8>::DEFINITION,
    experts::ExpertsDown::<bf16, Nvfp4, Fp8>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Nvfp4, Fp8>::DEFINITION,
    experts::ExpertsProducts::<bf16, Nvfp4, Fp8>::DEFINITION,
    experts::ExpertsUp::<bf16, Nvfp4, Nvfp4>::DEFINITION,
    experts::ExpertsDown::<bf16, Nvfp4, Nvfp4>::DEFINITION,
    experts::ExpertsUpPrompt::<bf16, Nvfp4, Nvfp4>::DEFINITION,
    experts::ExpertsProducts::<bf16, Nvfp4, Nvfp4>::DEFINITION,
    ngram::NgramGather::<bf16>::DEFINITION,
    ngram::NgramGather::<bf16, Fp8>::DEFINITION,
    ngram::NgramGather::<bf16, Nvfp4>::DEFINITION,
    ngram::NgramGate::<bf16>::DEFINITION,
    ngram::NgramConv::<bf16>::DEFINITION,
    weave::Weave::<bf16>::DEFINITION,
    sample::Mark::DEFINITION,
    sample::Sample::<bf16>::DEFINITION,
    advance::Advance::DEFINITION,
    pixels::Pixels::<bf16>::DEFINITION,
    affine::Affine::<bf16>::DEFINITION,
    affine::AffineTanh::<bf16>::DEFINITION,
    affine::AffineErf::<bf16>::DEFINITION,
    affine::AffineAdd::<bf16>::DEFINITION,
    layer_norm::LayerNorm::<bf16>::DEFINITION,
    patch::AddPositions::<bf16>::DEFINITION,
    patch::TurnPatches::<bf16>::DEFINITION,
    span::AttendSpan::<bf16>::DEFINITION,
    random::Random::<bf16>::DEFINITION,
    random::Bits::DEFINITION,
    read::Read::DEFINITION,
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
    AFFINE = "affine.cu",
    ATTEND = "attend.cu",
    CHUNK = "chunk.cu",
    CONV = "conv.cu",
    DELTA = "delta.cu",
    EMBED = "embed.cu",
    EXPERTS = "experts.cu",
    EXPERTS_FP8 = "experts_fp8.cu",
    EXPERTS_FP8_FP8 = "experts_fp8_fp8.cu",
    EXPERTS_NVFP4 = "experts_nvfp4.cu",
    EXPERTS_NVFP4_FP8 = "experts_nvfp4_fp8.cu",
    EXPERTS_NVFP4_NVFP4 = "experts_nvfp4_nvfp4.cu",
    EXPERTS_PLAIN_FP8 = "experts_plain_fp8.cu",
    GATE = "gate.cu",
    HEADS = "heads.cu",
    HYPER = "hyper.cu",
    INDEX = "index.cu",
    LAYER_NORM = "layer_norm.cu",
    LINEAR = "linear.cu",
    LINEAR_FP8 = "linear_fp8.cu",
    LINEAR_NVFP4 = "linear_nvfp4.cu",
    NGRAM = "ngram.cu",
    PACK = "pack.cu",
    PATCH = "patch.cu",
    PIXELS = "pixels.cu",
    RANDOM = "random.cu",
    READ = "read.cu",
    RESIDUAL = "residual.cu",
    ROUTER = "router.cu",
    ROWS = "rows.cu",
    SAMPLE = "sample.cu",
    SPAN = "span.cu",
    WEAVE = "weave.cu",
}

macro_rules! includes {
    ($($file:literal),+ $(,)?) => { &[$(($file, include_str!(concat!("../cuda/", $file)))),+] };
}

const INCLUDES: &[(&str, &str)] = includes![
    "attention.cuh",
    "cluster.cuh",
    "common.cuh",
    "delta.cuh",
    "experts.cuh",
    "few.cuh",
    "formats.cuh",
    "history.cuh",
    "items.cuh",
    "linear.cuh",
    "ptx.cuh",
    "select.cuh",
    "state.cuh",
    "tiles.cuh",
];

/// The twin of a kernel without an element type, `block` threads wide.
pub(crate) const fn plain(source: &'static Source, symbol: &'static str, block: u32) -> Option<Twin> {
    Some(Twin { source, symbol, block, shared_bytes: 0, overlaps: true })
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

/// As [`twin`], with dynamic shared memory.
pub(crate) const fn shared_twin<E: Element>(
    source: &'static Source,
    symbol: &'static str,
    block: u32,
    shared_bytes: u32,
) -> Option<Twin> {
    match E::CUDA {
        true => Some(Twin { source, symbol, block, shared_bytes, overlaps: true }),
        false => None,
    }
}

/// Blocks of a cluster, where blocks work together.
pub(crate) const CLUSTER: usize = 8;

/// Tiles and rows of a panel: what a block of a prompt's matrix product computes.
pub(crate) const PANEL_TILES: usize = 8;
pub(crate) const PANEL_ROWS: usize = 64;
/// Its shared memory: three stages of a unit.
pub(crate) const PANEL_SHARED: u32 = wide_shared(Format::Plain, PANEL_TILES, PANEL_ROWS, 3);

/// Rows of a panel of the vision tower, and its shared memory.
pub(crate) const AFFINE_ROWS: usize = 96;
pub(crate) const AFFINE_SHARED: u32 = wide_shared(Format::Plain, PANEL_TILES, AFFINE_ROWS, 3);

/// Tiles and rows of a part: the same where rows are few, or operands take more registers.
pub(crate) const PART_TILES: usize = 8;
pub(crate) const PART_ROWS: usize = 32;

/// Shared memory of a part: four stages.
pub(crate) const fn part_shared(format: Format) -> u32 {
    wide_shared(format, PART_TILES, PART_ROWS, 4)
}

/// Shared memory of so many stages, each a unit of so many tiles and rows; a row is padded to nine quads.
const fn wide_shared(format: Format, tiles: usize, rows: usize, stages: usize) -> u32 {
    let unit = match format {
        Format::Plain => 128,
        Format::Fp8 => 64,
        Format::Nvfp4 => 32,
    };
    (stages * (tiles * unit + rows * 9) * 16) as u32
}

/// A grid of one block per row and run of `block` channels.
pub(crate) fn channel_grid(rows: usize, channels: u32, block: u32) -> Grid {
    Grid::plane(rows, channels.div_ceil(block) as usize)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::weight;

    #[test]
    fn every_operation_has_a_twin_in_its_source() {
        let mut symbols = BTreeSet::new();
        for definition in ALL {
            let twin = definition.twin.unwrap_or_else(|| panic!("{definition:?} has no twin"));
            let entry = twin.source.text.lines().find(|line| {
                line.starts_with("extern \"C\" __global__ void")
                    && line.contains(&format!(" {}(", twin.symbol))
            });
            assert!(entry.is_some(), "{} is not an entry of {}", twin.symbol, twin.source.name);
            assert!(symbols.insert(twin.symbol), "two operations are called {}", twin.symbol);
            assert_eq!(twin.symbol, definition.name);
            assert!(twin.block.is_multiple_of(32) && twin.block <= 1024, "{}", twin.symbol);
            for line in twin.source.text.lines().filter_map(|line| line.strip_prefix("#include \"")) {
                let file = line.trim_end_matches('"');
                assert!(
                    INCLUDES.iter().any(|(name, _)| *name == file),
                    "{} includes {file}",
                    twin.source.name
                );
            }
        }
        assert_eq!(symbols.len(), ALL.len());
    }

    #[test]
    fn grids_and_sources_count_the_same_tiles() {
        let included = |file| INCLUDES.iter().find(|(name, _)| *name == file).expect("it is listed").1;
        let (tiles, formats, cluster) =
            (included("tiles.cuh"), included("formats.cuh"), included("cluster.cuh"));
        let (experts, linear) = (included("experts.cuh"), included("linear.cuh"));
        let constants = [
            (cluster, "CLUSTER", CLUSTER as u32),
            (tiles, "NARROW_ROWS", weight::NARROW_ROWS as u32),
            (formats, "TILE", weight::TILE as u32),
            (formats, "UNIT", weight::UNIT as u32),
            (experts, "PLACES", crate::experts::PLACES),
            (experts, "DOWN_ROWS", crate::experts::DOWN_ROWS),
            (experts, "DOWN_TILES", crate::experts::DOWN_TILES),
            (experts, "DOWN_COLUMNS", crate::experts::DOWN_COLUMNS),
            (experts, "UP_ROWS", crate::experts::UP_ROWS),
            (experts, "UP_TILES", crate::experts::UP_TILES),
            (experts, "UP_COLUMNS", crate::experts::CUDA_COLUMNS),
            (included("items.cuh"), "GROUP", crate::experts::GROUP),
            (ROUTER.text, "EXPERTS", router::CUDA_EXPERTS),
            (ROUTER.text, "CHOICES", router::CUDA_CHOICES),
            (HYPER.text, "DOWN_WARPS", hyper::DOWN_WARPS),
            (HYPER.text, "DOWN_ROWS", hyper::DOWN_ROWS as u32),
            (linear, "CUT_ROWS", crate::linear::CUT_ROWS as u32),
            (HYPER.text, "UP_WARPS", hyper::UP_WARPS),
            (ATTEND.text, "HEADS", attend::HEADS),
            (ATTEND.text, "SPAN", attend::SPAN as u32),
            (ATTEND.text, "WIDTH", attend::CUDA_WIDTH),
            (ATTEND.text, "JOINED", attend::parts::JOINED),
            (GATE.text, "HEADS", gate::HEADS),
            (RESIDUAL.text, "THREADS", residual::THREADS),
            (RESIDUAL.text, "HELD", residual::HELD),
            (NGRAM.text, "GATE_THREADS", residual::THREADS),
            (NGRAM.text, "GATE_HELD", residual::HELD),
            (INDEX.text, "HELD", 2 * index::CUDA_TOP),
            (WEAVE.text, "RUN", crate::weave::RUN),
            (PIXELS.text, "RUN", pixels::RUN),
            (AFFINE.text, "AFFINE_ROWS", AFFINE_ROWS as u32),
            (LAYER_NORM.text, "THREADS", layer_norm::THREADS),
            (LAYER_NORM.text, "HELD", layer_norm::HELD),
            (PATCH.text, "TURNED", patch::CUDA_TURNED),
            (SPAN.text, "QUERIES", span::QUERIES),
            (SPAN.text, "KEYS", span::KEYS),
            (SPAN.text, "WIDTH", span::CUDA_WIDTH),
            (CHUNK.text, "CHUNK_ROWS", delta::CHUNK_ROWS),
            (CHUNK.text, "CHUNK_SHARED", delta::CHUNK_SHARED),
            (CHUNK.text, "READY", delta::READY as u32),
        ];
        for (text, name, value) in constants {
            let line = format!("constexpr u32 {name} = {value};");
            assert!(text.lines().any(|l| l == line), "the source does not say: {line}");
        }
    }
}
