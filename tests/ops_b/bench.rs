//! A bench for one kernel: guarded buffers on a host device. After every launch the guard bands and the
//! inputs must be what they were.

use bytemuck::Pod;
use graph::host::HostOptions;
use graph::{Arena, Device, Emission, Fault, Kernel, Ptr, Stream};

/// Bytes of the bands around every buffer, and what they hold.
const GUARD: usize = 512;
const GUARD_BYTE: u8 = 0xa5;

pub(crate) struct Bench {
    device: Device,
    stream: Stream,
    buffers: Vec<Buffer>,
}

struct Buffer {
    arena: Arena,
    bytes: usize,
    /// What an input holds.
    frozen: Option<Vec<u8>>,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let device = Device::host(HostOptions::default());
        Bench { stream: device.stream(), device, buffers: Vec::new() }
    }

    /// A buffer that no launch may change.
    pub(crate) fn input<T: Pod>(&mut self, values: &[T]) -> Ptr<T> {
        let ptr = self.state(values);
        let buffer = self.buffers.last_mut().expect("just added");
        buffer.frozen = Some(bytemuck::cast_slice(values).to_vec());
        ptr
    }

    /// A buffer of poison.
    pub(crate) fn output<T: Pod>(&mut self, count: usize) -> Ptr<T> {
        let bytes = count * size_of::<T>();
        let arena = self.device.arena("buffer", bytes + 2 * GUARD).expect("room");
        let band = [GUARD_BYTE; GUARD];
        arena.write(arena.base(), &band).expect("inside");
        arena.write(arena.base().byte_add(GUARD + bytes), &band).expect("inside");
        let ptr = arena.base().byte_add(GUARD).cast();
        self.buffers.push(Buffer { arena, bytes, frozen: None });
        ptr
    }

    /// A buffer that launches may read and change.
    pub(crate) fn state<T: Pod>(&mut self, values: &[T]) -> Ptr<T> {
        let ptr = self.output(values.len());
        self.buffers.last().expect("just added").arena.write(ptr, values).expect("inside");
        ptr
    }

    pub(crate) fn write<T: Pod>(&self, to: Ptr<T>, values: &[T]) {
        self.arena(to).write(to, values).expect("inside");
    }

    pub(crate) fn read<T: Pod>(&self, from: Ptr<T>, count: usize) -> Vec<T> {
        self.arena(from).read(from, count).expect("inside")
    }

    /// Runs one launch and checks guards and inputs.
    pub(crate) fn run<K: Kernel>(&self, args: &K::Args) {
        self.launch::<K>(args).unwrap_or_else(|fault| panic!("{fault}"));
        for Buffer { arena, bytes, frozen } in &self.buffers {
            for band in [arena.base(), arena.base().byte_add(GUARD + bytes)] {
                let band = arena.read(band, GUARD).expect("inside");
                assert!(band.iter().all(|&byte| byte == GUARD_BYTE), "{} wrote past a buffer", K::NAME);
            }
            if let Some(frozen) = frozen {
                let now = arena.read(arena.base().byte_add(GUARD), *bytes).expect("inside");
                assert!(now == *frozen, "{} changed an input", K::NAME);
            }
        }
    }

    /// Runs one launch that may fault. After a fault the bench is of no more use.
    pub(crate) fn launch<K: Kernel>(&self, args: &K::Args) -> Result<(), Fault> {
        let mut emission = Emission::new();
        emission.launch::<K>(args).expect("legal arguments");
        let arenas: Vec<Arena> = self.buffers.iter().map(|buffer| buffer.arena.clone()).collect();
        self.stream.run(emission, &arenas).expect("a healthy device");
        match self.stream.synchronize() {
            Ok(()) => Ok(()),
            Err(graph::Error::Fault(fault)) => Err(fault),
            Err(other) => panic!("{other}"),
        }
    }

    /// Forgets the buffers added since there were `count`.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.buffers.truncate(count);
    }

    pub(crate) fn len(&self) -> usize {
        self.buffers.len()
    }

    fn arena<T>(&self, ptr: Ptr<T>) -> &Arena {
        let holds = |arena: &Arena| {
            (arena.base().address()..arena.base().address() + arena.bytes() as u64).contains(&ptr.address())
        };
        &self.buffers.iter().find(|buffer| holds(&buffer.arena)).expect("an address of the bench").arena
    }
}

/// Numbers that look random and are the same in every run.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// From -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Elements from `-scale` to `scale`.
    pub(crate) fn elements<E: kernels::numerics::Element>(&mut self, count: usize, scale: f32) -> Vec<E> {
        (0..count).map(|_| E::narrow(self.unit() * scale)).collect()
    }
}
