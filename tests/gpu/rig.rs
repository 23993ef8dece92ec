//! A device to test, and kernels that do one thing each, on the host and on CUDA.

use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use graph::host::Access;
use graph::{
    Arena, CudaOptions, Definition, Device, Emission, Fault, Grid, Kernel, Ptr, Source, Stream, Twin,
};

/// The source of the test kernels.
pub(crate) static WORDS: Source = Source {
    name: "words.cu",
    text: include_str!("words.cu"),
    includes: &[("words.cuh", include_str!("words.cuh"))],
};

/// Every test kernel that can be launched.
pub(crate) const KERNELS: [&Definition; 8] = [
    Add::DEFINITION,
    Note::DEFINITION,
    Spin::DEFINITION,
    Echo::DEFINITION,
    Turn::DEFINITION,
    Late::DEFINITION,
    Look::DEFINITION,
    Hasty::DEFINITION,
];

/// A device that poisons its memory, one stream of it, and a log in its memory.
pub(crate) struct Rig {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) log: Log,
}

impl Rig {
    /// The first CUDA device, with every test kernel loaded.
    pub(crate) fn new() -> Rig {
        let device = open(true);
        device.prepare(&KERNELS).unwrap();
        Rig::on(device)
    }

    pub(crate) fn on(device: Device) -> Rig {
        let log = Log(zeros(&device, "log", 1024));
        Rig { stream: device.stream(), log, device }
    }

    /// Queues one note on the rig's stream.
    pub(crate) fn note(&self, value: u32) {
        self.log.note(&self.stream, value);
    }

    /// Keeps the rig's stream busy for so long.
    pub(crate) fn spin(&self, milliseconds: u64) {
        spin(&self.stream, milliseconds);
    }
}

/// The first CUDA device: a handle of its own, with its own state.
pub(crate) fn open(poison: bool) -> Device {
    // As long as one handle lives, the driver keeps the context that they share: making it is slow.
    static FIRST: OnceLock<Device> = OnceLock::new();
    FIRST.get_or_init(|| Device::cuda(0).unwrap());
    Device::cuda_with(CudaOptions { poison, ..CudaOptions::default() }).unwrap()
}

/// Keeps a stream busy for so long.
pub(crate) fn spin(stream: &Stream, milliseconds: u64) {
    stream.run(launch::<Spin>(&(milliseconds * 1_000_000)), &[]).unwrap();
}

/// Words on a device that start as zeros.
pub(crate) fn zeros(device: &Device, label: &str, count: usize) -> Arena {
    of_words(device, label, &vec![0; count])
}

/// Words on a device.
pub(crate) fn of_words(device: &Device, label: &str, words: &[u32]) -> Arena {
    let arena = device.arena(label, 4 * words.len()).unwrap();
    arena.write(arena.base().cast(), words).unwrap();
    arena
}

/// The first `count` words of an arena.
pub(crate) fn words(arena: &Arena, count: usize) -> Vec<u32> {
    arena.read(arena.base().cast(), count).unwrap()
}

/// An emission of one launch.
pub(crate) fn launch<K: Kernel>(args: &K::Args) -> Emission {
    let mut emission = Emission::new();
    emission.launch::<K>(args).unwrap();
    emission
}

/// An emission of one addition over `count` words.
pub(crate) fn add(to: &Arena, from: &Arena, count: usize, value: u32) -> Emission {
    let (to, from) = (to.base().cast(), from.base().cast());
    launch::<Add>(&AddArgs { to, from, count: count as u32, value })
}

/// Numbers in the order in which the device noted them.
#[derive(Clone)]
pub(crate) struct Log(pub(crate) Arena);

impl Log {
    /// Queues a note.
    pub(crate) fn note(&self, stream: &Stream, value: u32) {
        stream.run(self.emission(value), std::slice::from_ref(&self.0)).unwrap();
    }

    pub(crate) fn emission(&self, value: u32) -> Emission {
        launch::<Note>(&NoteArgs { log: self.0.base().cast(), from: Ptr::NULL, value, pad: 0 })
    }

    /// A note of what lies at `from` when it runs.
    pub(crate) fn emission_of(&self, from: Ptr<u8>) -> Emission {
        launch::<Note>(&NoteArgs { log: self.0.base().cast(), from: from.cast(), value: 0, pad: 0 })
    }

    pub(crate) fn seen(&self) -> Vec<u32> {
        let all = words(&self.0, 1024);
        all[1..][..all[0] as usize].to_vec()
    }
}

/// As [`twin`], for one that may start early.
const fn early_twin(symbol: &'static str) -> Option<Twin> {
    Some(Twin { source: &WORDS, symbol, block: 1, shared_bytes: 0, overlaps: true })
}

const fn twin(symbol: &'static str, block: u32, shared_bytes: u32) -> Option<Twin> {
    Some(Twin { source: &WORDS, symbol, block, shared_bytes, overlaps: false })
}

/// Declares a kernel whose arguments are always legal.
macro_rules! kernel {
    ($(#[$doc:meta])* $kernel:ident($args:ty) = $name:literal [$element:literal], $twin:expr,
        $grid:expr, $host:expr) => {
        $(#[$doc])*
        pub(crate) struct $kernel;

        impl Kernel for $kernel {
            type Args = $args;
            const NAME: &'static str = $name;
            const ELEMENT: &'static str = $element;
            const TWIN: Option<Twin> = $twin;

            fn check(_: &$args) -> Result<(), String> {
                Ok(())
            }

            fn grid(args: &$args) -> Grid {
                let grid: fn(&$args) -> usize = $grid;
                Grid::line(grid(args))
            }

            fn host(args: &$args, memory: &Access<'_>) -> Result<(), Fault> {
                let host: fn(&$args, &Access<'_>) -> Result<(), Fault> = $host;
                host(args, memory)
            }
        }
    };
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct AddArgs {
    pub(crate) to: Ptr<u32>,
    pub(crate) from: Ptr<u32>,
    pub(crate) count: u32,
    pub(crate) value: u32,
}

fn add_on_host(args: &AddArgs, memory: &Access<'_>) -> Result<(), Fault> {
    let count = args.count as usize;
    if args.to == args.from {
        memory.write(args.to, count)?.iter_mut().for_each(|word| *word = word.wrapping_add(args.value));
        return Ok(());
    }
    let (from, to) = (memory.read(args.from, count)?, memory.write(args.to, count)?);
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wrapping_add(args.value));
    Ok(())
}

fn blocks_of_128(args: &AddArgs) -> usize {
    args.count.div_ceil(128) as usize
}

kernel!(
    /// `to[i] = from[i] + value`; `to` may be `from`.
    Add(AddArgs) = "add" ["u32"], twin("add", 128, 0), blocks_of_128, add_on_host
);

kernel!(
    /// An addition that CUDA lacks.
    AddF32(AddArgs) = "add" ["f32"], None, blocks_of_128, add_on_host
);

kernel!(
    /// An addition that no device can launch: a block has at most 1024 threads.
    Crowd(AddArgs) = "crowd" ["u32"], twin("add", 2048, 0), blocks_of_128, add_on_host
);

kernel!(
    /// An addition whose twin takes other arguments.
    Misfit(u64) = "misfit" [""], twin("add", 128, 0), |_| 1, |_, _| Ok(())
);

kernel!(
    /// A kernel that its source does not have.
    Absent(u64) = "absent" [""], twin("absent", 32, 0), |_| 1, |_, _| Ok(())
);

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct NoteArgs {
    pub(crate) log: Ptr<u32>,
    pub(crate) from: Ptr<u32>,
    pub(crate) value: u32,
    pub(crate) pad: u32,
}

kernel!(
    /// Appends a number to a log: the word at `from`, or `value` where that is null.
    Note(NoteArgs) = "note" [""], twin("note", 1, 0), |_| 1, |args, memory| {
        let value = if args.from.is_null() { args.value } else { memory.read(args.from, 1)?[0] };
        let log = memory.write(args.log, 1024)?;
        log[0] += 1;
        log[log[0] as usize] = value;
        Ok(())
    }
);

kernel!(
    /// Takes so many nanoseconds.
    Spin(u64) = "spin" [""], twin("spin", 1, 0), |_| 1, |_, _| Ok(())
);

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct EchoArgs {
    pub(crate) to: Ptr<u64>,
    pub(crate) words: [u64; 63],
}

kernel!(
    /// Writes the words of its argument block to memory.
    Echo(EchoArgs) = "echo" [""], twin("echo", 64, 0), |_| 1, |args, memory| {
        memory.write(args.to, 63)?.copy_from_slice(&args.words);
        Ok(())
    }
);

/// How many words [`Turn`] has room for: more than a block may use without asking.
pub(crate) const TURN: usize = 16 << 10;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct TurnArgs {
    pub(crate) words: Ptr<u32>,
    pub(crate) count: u32,
    pub(crate) pad: u32,
}

kernel!(
    /// Turns a list of words around.
    Turn(TurnArgs) = "turn" [""], twin("turn", 256, 4 * TURN as u32), |_| 1, |args, memory| {
        memory.write(args.words, args.count as usize)?.reverse();
        Ok(())
    }
);

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct LateArgs {
    pub(crate) to: Ptr<u32>,
    pub(crate) value: u32,
    pub(crate) nanoseconds: u32,
}

kernel!(
    /// Lets the next launch start, and writes so much later.
    Late(LateArgs) = "late" [""], early_twin("late"), |_| 1, |args, memory| {
        memory.write(args.to, 1)?[0] = args.value;
        Ok(())
    }
);

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct LookArgs {
    pub(crate) to: Ptr<u32>,
    pub(crate) from: Ptr<u32>,
}

fn look_on_host(args: &LookArgs, memory: &Access<'_>) -> Result<(), Fault> {
    memory.write(args.to, 1)?[0] = memory.read(args.from, 1)?[0];
    Ok(())
}

kernel!(
    /// Starts early, waits, and copies a word.
    Look(LookArgs) = "look" [""], early_twin("look"), |_| 1, look_on_host
);

kernel!(
    /// Starts early and copies a word as it is before it waits.
    Hasty(LookArgs) = "hasty" [""], early_twin("hasty"), |_| 1, look_on_host
);
