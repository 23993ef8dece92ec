//! A small device to test, and kernels that do one thing each.

use bytemuck::{Pod, Zeroable};
use graph::error::FaultKind;
use graph::host::{Access, HostOptions};
use graph::{Arena, Device, Emission, Error, Fault, Grid, Kernel, Pinned, Ptr, Stream};

/// A device of one megabyte with one stream and a log in its memory.
pub(crate) struct Rig {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) log: Log,
}

impl Rig {
    pub(crate) fn new() -> Rig {
        let device = device(1 << 20);
        let log = Log::new(&device);
        Rig { stream: device.stream(), log, device }
    }

    /// Queues one note on the rig's stream.
    pub(crate) fn note(&self, value: u32) {
        self.log.note(&self.stream, value);
    }
}

pub(crate) fn device(memory_bytes: usize) -> Device {
    Device::host(HostOptions { memory_bytes, ..HostOptions::default() })
}

/// Words on a device that start as zeros.
pub(crate) fn zeros(device: &Device, label: &str, count: usize) -> Arena {
    let arena = device.arena(label, 4 * count).unwrap();
    arena.write(arena.base().cast(), &vec![0u32; count]).unwrap();
    arena
}

/// The first `count` words of an arena.
pub(crate) fn words(arena: &Arena, count: usize) -> Vec<u32> {
    arena.read(arena.base().cast(), count).unwrap()
}

/// Sets every word of pinned memory.
pub(crate) fn set(pinned: &mut Pinned, value: u32) {
    pinned.write(|bytes| bytes.chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&value.to_ne_bytes())));
}

/// An emission of one copy of one word.
pub(crate) fn copy_word(to: Ptr<u8>, from: Ptr<u8>) -> Emission {
    let mut emission = Emission::new();
    emission.copy::<u32>(to.cast(), from.cast(), 1);
    emission
}

/// An emission of one launch.
pub(crate) fn launch<K: Kernel>(args: &K::Args) -> Emission {
    let mut emission = Emission::new();
    emission.launch::<K>(args).unwrap();
    emission
}

/// The fault that a wait reported.
pub(crate) fn fault(result: Result<(), Error>) -> Fault {
    match result {
        Err(Error::Fault(fault)) => fault,
        other => panic!("expected a fault, got {other:?}"),
    }
}

/// What `near` says in an address fault.
pub(crate) fn near(result: Result<(), Error>) -> String {
    match fault(result).kind {
        FaultKind::Address { near, .. } => near,
        other => panic!("expected an address fault, got {other:?}"),
    }
}

/// Numbers in the order in which the device noted them.
#[derive(Clone)]
pub(crate) struct Log(pub(crate) Arena);

impl Log {
    pub(crate) fn new(device: &Device) -> Log {
        Log(zeros(device, "log", 1024))
    }

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

    /// Forgets what was noted.
    pub(crate) fn clear(&self) {
        self.0.write(self.0.base().cast(), &[0u32]).unwrap();
    }

    pub(crate) fn seen(&self) -> Vec<u32> {
        let all = words(&self.0, 1024);
        all[1..][..all[0] as usize].to_vec()
    }
}

/// Appends a number to a log: the word at `from`, or `value` where that is null.
pub(crate) struct Note;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct NoteArgs {
    pub(crate) log: Ptr<u32>,
    pub(crate) from: Ptr<u32>,
    pub(crate) value: u32,
    pub(crate) pad: u32,
}

impl Kernel for Note {
    type Args = NoteArgs;
    const NAME: &'static str = "note";
    const ELEMENT: &'static str = "";

    fn check(_: &NoteArgs) -> Result<(), String> {
        Ok(())
    }

    fn grid(_: &NoteArgs) -> Grid {
        Grid::line(1)
    }

    fn host(args: &NoteArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let value = if args.from.is_null() { args.value } else { memory.read(args.from, 1)?[0] };
        let log = memory.write(args.log, 1024)?;
        log[0] += 1;
        log[log[0] as usize] = value;
        Ok(())
    }
}

/// `to[i] = from[i] + value`.
pub(crate) struct Add;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct AddArgs {
    pub(crate) to: Ptr<u32>,
    pub(crate) from: Ptr<u32>,
    pub(crate) count: u32,
    pub(crate) value: u32,
}

impl Kernel for Add {
    type Args = AddArgs;
    const NAME: &'static str = "add";
    const ELEMENT: &'static str = "u32";

    fn check(args: &AddArgs) -> Result<(), String> {
        match args.count {
            0 => Err("count is 0".into()),
            _ => Ok(()),
        }
    }

    fn grid(args: &AddArgs) -> Grid {
        Grid::line(args.count as usize)
    }

    fn host(args: &AddArgs, memory: &Access<'_>) -> Result<(), Fault> {
        let from = memory.read(args.from, args.count as usize)?;
        let to = memory.write(args.to, args.count as usize)?;
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wrapping_add(args.value));
        Ok(())
    }
}

/// Asks for two slices of bytes, each to read or to write.
pub(crate) struct Touch;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct TouchArgs {
    pub(crate) at: [Ptr<u8>; 2],
    pub(crate) bytes: [u32; 2],
    pub(crate) writes: [u32; 2],
}

impl Kernel for Touch {
    type Args = TouchArgs;
    const NAME: &'static str = "touch";
    const ELEMENT: &'static str = "";

    fn check(_: &TouchArgs) -> Result<(), String> {
        Ok(())
    }

    fn grid(_: &TouchArgs) -> Grid {
        Grid::line(1)
    }

    fn host(args: &TouchArgs, memory: &Access<'_>) -> Result<(), Fault> {
        for turn in 0..2 {
            let (at, bytes) = (args.at[turn], args.bytes[turn] as usize);
            match args.writes[turn] {
                0 => assert_eq!(memory.read(at, bytes)?.len(), bytes),
                _ => memory.write(at, bytes)?.fill(turn as u8),
            }
        }
        Ok(())
    }
}

/// Fails: by a fault of its own (0), or by a panic (1).
pub(crate) struct Fail;

impl Kernel for Fail {
    type Args = u32;
    const NAME: &'static str = "fail";
    const ELEMENT: &'static str = "";

    fn check(_: &u32) -> Result<(), String> {
        Ok(())
    }

    fn grid(_: &u32) -> Grid {
        Grid::line(1)
    }

    fn host(how: &u32, memory: &Access<'_>) -> Result<(), Fault> {
        match how {
            0 => Err(memory.domain("id 9 of a table of 4 rows")),
            how => panic!("kernel bug {how}"),
        }
    }
}
