//! What a kernel is to a device: a name, a plain argument block, a grid, and a host implementation.

use std::fmt;

use bytemuck::Pod;

use crate::digest::Digester;
use crate::error::Fault;
use crate::host::Access;

/// An operation that can be launched. The argument block is plain old data without padding; everything a
/// capture freezes is in it or in the grid.
pub trait Kernel: 'static {
    /// The argument block.
    type Args: Pod + fmt::Debug;

    /// The name, one word per operation.
    const NAME: &'static str;
    /// The element type of the instance, or "" where there is only one.
    const ELEMENT: &'static str;

    /// Whether the arguments are legal; the error names the argument.
    fn check(args: &Self::Args) -> Result<(), String>;
    /// The launch shape for these arguments.
    fn grid(args: &Self::Args) -> Grid;
    /// The specification: computes the launch on the host.
    fn host(args: &Self::Args, memory: &Access<'_>) -> Result<(), Fault>;

    /// The CUDA twin of this instance; none where the host alone runs it (f32 is the host's precision).
    const TWIN: Option<Twin> = None;

    /// The definition that entries point to.
    const DEFINITION: &'static Definition = &Definition {
        name: Self::NAME,
        element: Self::ELEMENT,
        args_bytes: size_of::<Self::Args>(),
        twin: Self::TWIN,
        host: |bytes, memory| Self::host(&bytemuck::pod_read_unaligned(bytes), memory),
        describe: |bytes, f| write!(f, "{:?}", bytemuck::pod_read_unaligned::<Self::Args>(bytes)),
    };
}

/// The CUDA twin of a kernel. It takes the argument block by value as its only parameter, and is launched
/// with [`Kernel::grid`]. Block size and shared memory are constants of the twin: nothing of a launch varies
/// that is not in its entry.
#[derive(Clone, Copy, Debug)]
pub struct Twin {
    /// The source file.
    pub source: &'static Source,
    /// The `extern "C"` name of the kernel.
    pub symbol: &'static str,
    /// Threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
    /// Whether its blocks may start while the work ahead of it in the stream still runs (programmatic dependent
    /// launch, where the device has it). Its code then waits (`griddepcontrol.wait`) in every block before it
    /// touches what that work writes or reads, and before it returns.
    pub overlaps: bool,
}

impl Twin {
    /// Adds all that a launch of it takes from here. A source is told by its name: a binary has each once.
    pub(crate) fn hash(&self, digest: &mut Digester) {
        // Taken apart, so that no field can be added and left out of digests.
        let Twin { source, symbol, block, shared_bytes, overlaps } = self;
        digest.text(source.name).text(symbol).number((*block).into()).number((*shared_bytes).into());
        digest.number((*overlaps).into());
    }
}

/// A CUDA source file. It includes no CUDA header, only files of its own crate.
#[derive(Debug)]
pub struct Source {
    /// The file's name, as errors and the cache say it.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The files it may include: name and text.
    pub includes: &'static [(&'static str, &'static str)],
}

/// The launch shape: how many groups along each axis. Part of what a capture freezes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Grid(pub [u32; 3]);

impl Grid {
    /// A grid along one axis.
    pub fn line(x: usize) -> Grid {
        Grid::plane(x, 1)
    }

    /// A grid along two axes.
    pub fn plane(x: usize, y: usize) -> Grid {
        Grid::space(x, y, 1)
    }

    /// A grid along three axes. A number that does not fit becomes one that no device can launch.
    pub fn space(x: usize, y: usize, z: usize) -> Grid {
        Grid([x, y, z].map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
    }

    /// Whether a device can launch it. The limits are CUDA's: no axis is empty, the first has at most
    /// 2^31 - 1 groups and the others 65,535.
    pub(crate) fn check(self) -> Result<(), String> {
        let Grid([x, y, z]) = self;
        let fits = (1..=i32::MAX as u32).contains(&x) && [y, z].iter().all(|n| (1..=65_535).contains(n));
        match fits {
            true => Ok(()),
            false => {
                Err(format!("a grid of {x}x{y}x{z}, of at least 1x1x1 and at most 2147483647x65535x65535"))
            }
        }
    }
}

/// A [`Kernel`] with its type erased: what an entry of an emission points to.
pub struct Definition {
    /// [`Kernel::NAME`].
    pub name: &'static str,
    /// [`Kernel::ELEMENT`].
    pub element: &'static str,
    /// Size of the argument block.
    pub args_bytes: usize,
    /// The CUDA twin.
    pub twin: Option<Twin>,
    /// The host implementation over the block's bytes.
    pub host: fn(&[u8], &Access<'_>) -> Result<(), Fault>,
    /// Prints the block.
    pub describe: fn(&[u8], &mut fmt::Formatter<'_>) -> fmt::Result,
}

impl fmt::Debug for Definition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.name, self.element)
    }
}
