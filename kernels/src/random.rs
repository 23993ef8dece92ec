//! Made values: what weights are when nothing is read, and pages whose content does not matter.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::{source, spread};

/// Fills memory with numbers that look random, each made of a seed and its own place alone.
///
/// ```text
/// y[i] = r16(scale * u(seed, i)),  u in [-1, 1): a multiple of 2^-23 ([`uniform`])
/// ```
/// Shapes     y: `[count]`, elements
/// Domain     scale is finite
/// Effects    writes y
/// Numbers    the same bits on every device
pub struct Random<E>(PhantomData<E>);

/// Arguments of [`Random`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// y.
    pub to: Ptr<u8>,
    /// Number of elements.
    pub count: u64,
    /// The seed; another one gives other numbers everywhere.
    pub seed: u64,
    /// The largest magnitude.
    pub scale: f32,
    /// Not used; zero.
    pub zero: u32,
}

/// Fills memory with words some of whose bits look random, each made of a seed and its own place alone: codes and
/// scales of made weights.
///
/// ```text
/// y[i] = (the upper half of mixed(seed, i)) & free | fixed      [`mixed`]
/// ```
/// Shapes     y: `[words]`, u32
/// Domain     words is positive; no bit is both free and fixed
/// Effects    writes y
/// Numbers    the same bits on every device
pub struct Bits;

/// Arguments of [`Bits`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BitsArgs {
    /// y.
    pub to: Ptr<u32>,
    /// Number of words.
    pub words: u64,
    /// The seed; another one gives other bits everywhere.
    pub seed: u64,
    /// The bits that may be set.
    pub free: u32,
    /// The bits that are set.
    pub fixed: u32,
}

/// The 64 bits of a seed and a place: a counter, mixed.
///
/// ```text
/// z = seed + (place + 1) * 0x9e3779b97f4a7c15
/// z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9
/// z = (z ^ z >> 27) * 0x94d049bb133111eb
/// z ^ z >> 31                                      all modulo 2^64
/// ```
pub fn mixed(seed: u64, place: u64) -> u64 {
    let mut z = seed.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The number of a seed and a place: the upper 24 of their bits, as a fraction from -1 to below 1.
pub fn uniform(seed: u64, place: u64) -> f32 {
    let steps = (mixed(seed, place) >> 40) as i32 - (1 << 23);
    steps as f32 * (1.0 / (1 << 23) as f32)
}

/// Threads of a block of the CUDA twin.
const THREADS: u32 = 256;
/// Elements of a block.
const BLOCK: u64 = 4096;

impl<E: Element> Kernel for Random<E> {
    type Args = Args;
    const NAME: &'static str = "random";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::RANDOM, Self::NAME, THREADS);

    fn check(args: &Args) -> Result<(), String> {
        match args.count > 0 && args.scale.is_finite() {
            true => Ok(()),
            false => Err(format!("count {}, scale {}: positive and finite", args.count, args.scale)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(usize::try_from(args.count.div_ceil(BLOCK)).unwrap_or(usize::MAX))
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let values = memory.write::<E>(args.to.cast(), args.count as usize)?;
        let runs: Vec<(usize, &mut [E])> = values.chunks_mut(BLOCK as usize).enumerate().collect();
        spread::each(runs, args.count as usize, |(run, values)| {
            let first = run as u64 * BLOCK;
            for (place, value) in (first..).zip(values) {
                *value = E::narrow(args.scale * uniform(args.seed, place));
            }
        });
        Ok(())
    }
}

impl Kernel for Bits {
    type Args = BitsArgs;
    const NAME: &'static str = "bits";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::RANDOM, Self::NAME, THREADS);

    fn check(args: &BitsArgs) -> Result<(), String> {
        match args.words > 0 && args.free & args.fixed == 0 {
            true => Ok(()),
            false => Err(format!(
                "words {}, free {:#x}, fixed {:#x}: positive, and no bit both free and fixed",
                args.words, args.free, args.fixed
            )),
        }
    }

    fn grid(args: &BitsArgs) -> Grid {
        Grid::line(usize::try_from(args.words.div_ceil(BLOCK)).unwrap_or(usize::MAX))
    }

    fn host(args: &BitsArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let words = memory.write(args.to, args.words as usize)?;
        let runs: Vec<(usize, &mut [u32])> = words.chunks_mut(BLOCK as usize).enumerate().collect();
        spread::each(runs, args.words as usize, |(run, words)| {
            let first = run as u64 * BLOCK;
            for (place, word) in (first..).zip(words) {
                *word = (mixed(args.seed, place) >> 32) as u32 & args.free | args.fixed;
            }
        });
        Ok(())
    }
}
