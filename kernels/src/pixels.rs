//! Pixels of a picture's patches, as elements.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::Element;
use crate::source;

/// Brings bytes to the range from -1 to 1.
///
/// ```text
/// y[i] = r16((bytes[i] - 127.5) / 127.5)
/// ```
/// Shapes     bytes: `[count]` u8, y: `[count]` elements
/// Effects    writes all of y
/// Source     MODEL: image preprocessing
pub struct Pixels<E>(PhantomData<E>);

/// Arguments of [`Pixels`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The bytes.
    pub bytes: Ptr<u8>,
    /// y.
    pub y: Ptr<u8>,
    /// How many.
    pub count: u64,
}

/// Bytes of a block of the CUDA twin.
pub(crate) const RUN: u32 = 4096;

impl<E: Element> Kernel for Pixels<E> {
    type Args = Args;
    const NAME: &'static str = "pixels";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::PIXELS, Self::NAME, 256);

    fn check(args: &Args) -> Result<(), String> {
        match args.count {
            0 => Err("count 0: nothing to do".into()),
            _ => Ok(()),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.count.div_ceil(RUN.into()) as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let bytes = memory.read(args.bytes, args.count as usize)?;
        let y = memory.write::<E>(args.y.cast(), args.count as usize)?;
        for (y, byte) in y.iter_mut().zip(bytes) {
            *y = E::narrow((f32::from(*byte) - 127.5) / 127.5);
        }
        Ok(())
    }
}
