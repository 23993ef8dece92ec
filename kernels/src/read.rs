//! Reading memory and nothing else: what the memory of a device delivers.

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::{source, spread};

/// Sums words, so that each is read once and a wrong or skipped one shows.
///
/// ```text
/// sums[b] = sum of the words of quad q over all q with (q / 256) % blocks = b, modulo 2^32
/// ```
/// Shapes     words: `[quads, 4]` u32, sums: `[blocks]` u32
/// Domain     words is aligned to 16 bytes
/// Effects    writes sums
pub struct Read;

/// Arguments of [`Read`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The words.
    pub words: Ptr<u32>,
    /// The sums.
    pub sums: Ptr<u32>,
    /// Number of quads.
    pub quads: u64,
    /// Number of sums, and of blocks.
    pub blocks: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Threads of a block of the CUDA twin, and quads of a run.
const THREADS: usize = 256;

impl Kernel for Read {
    type Args = Args;
    const NAME: &'static str = "read";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::READ, Self::NAME, THREADS as u32);

    fn check(args: &Args) -> Result<(), String> {
        match args.quads > 0 && args.blocks > 0 && args.words.address().is_multiple_of(16) {
            true => Ok(()),
            false => Err(format!(
                "quads {}, blocks {}, words at {:?}: positive, and at a multiple of 16",
                args.quads, args.blocks, args.words
            )),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.blocks as usize)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let words = memory.read(args.words, args.quads as usize * 4)?;
        let sums = memory.write(args.sums, args.blocks as usize)?;
        let runs = spread::map(words.chunks(4 * THREADS).collect(), words.len(), |run| {
            run.iter().fold(0u32, |sum, word| sum.wrapping_add(*word))
        });
        sums.fill(0);
        for (run, sum) in runs.into_iter().enumerate() {
            let to = &mut sums[run % args.blocks as usize];
            *to = to.wrapping_add(sum);
        }
        Ok(())
    }
}
