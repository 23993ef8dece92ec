//! The logits of a head whose ids several ranks share: from one part after another to whole rows.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::source;

/// Puts the parts of rows side by side.
///
/// ```text
/// to[r, p * width + i] = from[p, r, i]
/// ```
/// Shapes     from: `[parts, rows, width]`, to: `[rows, parts * width]` elements
/// Effects    writes all of to
/// Source     MODEL: tensor parallelism, the head
pub struct Weave<E>(PhantomData<E>);

/// Arguments of [`Weave`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// from.
    pub from: Ptr<u8>,
    /// to.
    pub to: Ptr<u8>,
    /// Number of parts.
    pub parts: u32,
    /// Number of rows.
    pub rows: u32,
    /// Width of a part.
    pub width: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Elements of a block of the CUDA twin.
pub(crate) const RUN: u32 = 4096;

impl<E: Element> Kernel for Weave<E> {
    type Args = Args;
    const NAME: &'static str = "weave";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::WEAVE, Self::NAME, 256);

    fn check(args: &Args) -> Result<(), String> {
        match [args.parts, args.rows, args.width].contains(&0) {
            false => Ok(()),
            true => {
                Err(format!("parts {}, rows {}, width {}: all positive", args.parts, args.rows, args.width))
            }
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::space(args.width.div_ceil(RUN) as usize, args.parts as usize, args.rows as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let [parts, rows, width] = [args.parts, args.rows, args.width].map(|n| n as usize);
        let from = memory.read::<E>(args.from.cast(), parts * rows * width)?;
        let to = memory.write::<E>(args.to.cast(), rows * parts * width)?;
        for (at, part) in from.chunks_exact(width).enumerate() {
            to[(at % rows * parts + at / rows) * width..][..width].copy_from_slice(part);
        }
        Ok(())
    }
}
