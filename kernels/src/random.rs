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

/// The number of a seed and a place: 24 bits of a mixed counter, as a fraction from -1 to below 1.
pub fn uniform(seed: u64, place: u64) -> f32 {
    let mut z = seed.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let steps = ((z ^ (z >> 31)) >> 40) as i32 - (1 << 23);
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
