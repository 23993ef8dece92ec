//! A bench for one kernel: memory between guard bands, drawn inputs, and the tolerances of every suite.

use bytemuck::Pod;
use graph::error::FaultKind;
use graph::host::{HostOptions, POISON};
use graph::{Arena, Device, Emission, Error, Kernel, Ptr, Stream};
use kernels::numerics::{Element, ElementType};
use kernels::table::{Fact, PREVIOUS};

/// f32 results may differ from the f64 formula by this much of the largest result.
const F32_TOLERANCE: f64 = 2e-5;
/// bf16 results may differ by this much of an element's size at each store: one unit in the last place.
const BF16_TOLERANCE: f64 = 1.0 / 128.0;
/// Where the f32 inside of a kernel may cancel, a bf16 result is taken to be at least this much of the largest.
const CANCELLED: f64 = F32_TOLERANCE / BF16_TOLERANCE;

/// Bytes of a guard band.
const GUARD_BYTES: usize = 512;
/// What fills a guard band.
const GUARD: u8 = 0xa5;

/// A host device and the buffers of one kernel.
pub struct Scene {
    device: Device,
    stream: Stream,
    buffers: Vec<Buffer>,
}

struct Buffer {
    arena: Arena,
    start: Ptr<u8>,
    bytes: usize,
    /// What must still be there after a launch, for a buffer that is only read.
    input: Option<Vec<u8>>,
}

impl Default for Scene {
    fn default() -> Self {
        Scene::new()
    }
}

impl Scene {
    /// A fresh device with no buffers.
    pub fn new() -> Scene {
        let device = Device::host(HostOptions::default());
        Scene { stream: device.stream(), device, buffers: Vec::new() }
    }

    /// Memory that launches may only read.
    pub fn input<T: Pod>(&mut self, label: &str, values: &[T]) -> Ptr<T> {
        let ptr = self.state(label, values);
        self.buffers.last_mut().expect("just added").input = Some(bytemuck::cast_slice(values).to_vec());
        ptr
    }

    /// Memory that launches read and write.
    pub fn state<T: Pod>(&mut self, label: &str, values: &[T]) -> Ptr<T> {
        let ptr = self.output(label, values.len());
        self.buffers.last().expect("just added").arena.write(ptr, values).expect("the buffer is this large");
        ptr
    }

    /// Poisoned memory that launches write.
    pub fn output<T: Pod>(&mut self, label: &str, count: usize) -> Ptr<T> {
        let bytes = count * size_of::<T>();
        let arena = self.device.arena(label, GUARD_BYTES + bytes + GUARD_BYTES).expect("memory is plenty");
        let start = arena.base().byte_add(GUARD_BYTES);
        for guard in [arena.base(), start.byte_add(bytes)] {
            arena.write(guard, &[GUARD; GUARD_BYTES]).expect("the guard lies in its arena");
        }
        self.buffers.push(Buffer { arena, start, bytes, input: None });
        start.cast()
    }

    /// Launches `K`, and checks that guards and inputs are as they were.
    pub fn run<K: Kernel>(&self, args: &K::Args) {
        self.launch::<K>(args).unwrap_or_else(|error| panic!("{error}\n{args:?}"));
        for Buffer { arena, start, bytes, input } in &self.buffers {
            for guard in [arena.base(), start.byte_add(*bytes)] {
                let band: Vec<u8> = arena.read(guard, GUARD_BYTES).expect("the guard lies in its arena");
                assert!(band.iter().all(|&b| b == GUARD), "{} wrote around `{}`", K::NAME, arena.label());
            }
            if let Some(input) = input {
                let now: Vec<u8> = arena.read(*start, *bytes).expect("the buffer lies in its arena");
                assert!(now == *input, "{} changed its input `{}`", K::NAME, arena.label());
            }
        }
    }

    /// Launches `K`, which must find a value outside its domain, and returns what it says. The scene is of no
    /// more use.
    pub fn domain_fault<K: Kernel>(&self, args: &K::Args) -> String {
        match self.launch::<K>(args) {
            Err(Error::Fault(graph::Fault { kind: FaultKind::Domain(why), .. })) => why,
            other => panic!("{} should have refused a value: {other:?}", K::NAME),
        }
    }

    /// Asks for a launch of `K` that is not legal, and returns why.
    pub fn refused<K: Kernel>(&self, args: &K::Args) -> String {
        match self.launch::<K>(args) {
            Err(Error::Launch { why, .. }) => why,
            other => panic!("{} should have been refused: {other:?}", K::NAME),
        }
    }

    fn launch<K: Kernel>(&self, args: &K::Args) -> graph::Result<()> {
        let mut emission = Emission::new();
        emission.launch::<K>(args)?;
        let keeps: Vec<Arena> = self.buffers.iter().map(|buffer| buffer.arena.clone()).collect();
        self.stream.run(emission, &keeps)?;
        self.stream.synchronize()
    }

    /// `count` values at `from`.
    pub fn read<T: Pod>(&self, from: Ptr<T>, count: usize) -> Vec<T> {
        self.buffer(from).arena.read(from, count).expect("the buffer is this large")
    }

    /// Writes `values` at `to`, in memory that is no input.
    pub fn write<T: Pod>(&self, to: Ptr<T>, values: &[T]) {
        let buffer = self.buffer(to);
        assert!(buffer.input.is_none(), "`{}` is an input", buffer.arena.label());
        buffer.arena.write(to, values).expect("the buffer is this large");
    }

    /// How many buffers there are.
    pub fn buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Forgets all buffers but the first `count`.
    pub fn truncate(&mut self, count: usize) {
        self.buffers.truncate(count);
    }

    fn buffer<T>(&self, at: Ptr<T>) -> &Buffer {
        let holds =
            |b: &&Buffer| (b.start.address()..b.start.address() + b.bytes as u64).contains(&at.address());
        self.buffers.iter().find(holds).expect("the address is in one of the buffers")
    }
}

/// Draws of a fixed seed.
pub struct Draw(u64);

impl Draw {
    /// The draws of `seed`.
    pub fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// A value in `-scale..scale`.
    pub fn value(&mut self, scale: f32) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 * scale - scale
    }

    /// `count` elements in `-scale..scale`.
    pub fn elements<E: Element>(&mut self, count: usize, scale: f32) -> Vec<E> {
        (0..count).map(|_| E::narrow(self.value(scale))).collect()
    }
}

/// The facts of a round: `(slot, rows)` for every slot in it. Ids and histories are zero.
pub fn facts(runs: &[(u32, usize)]) -> Vec<Fact> {
    let mut facts = Vec::new();
    for &(slot, count) in runs {
        let first = facts.len() as u32;
        facts.extend((0..count as u32).map(|place| Fact {
            slot,
            place,
            first,
            count: count as u32,
            id: 0,
            position: place,
            axes: [place as i32; 3],
            previous: [0; PREVIOUS],
        }));
    }
    facts
}

/// `r16` of a value in f64: the identity if `E` is f32.
pub fn r16<E: Element>(value: f64) -> f64 {
    if E::NAME == ElementType::F32.name() { value } else { E::round(value as f32).into() }
}

/// What a formula in f64 says: the value, and the size of the terms that it was added from.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// The value.
    pub value: f64,
    /// Its size if nothing had cancelled.
    pub scale: f64,
}

impl From<f64> for Want {
    fn from(value: f64) -> Want {
        Want { value, scale: value.abs() }
    }
}

/// Results whose terms cancel inside a kernel, in f32: none is judged as if it were much smaller than the rest.
pub fn cancelling(wants: impl IntoIterator<Item = f64>) -> Vec<Want> {
    let mut wants: Vec<Want> = wants.into_iter().map(Want::from).collect();
    let least = CANCELLED * largest(&wants);
    wants.iter_mut().for_each(|want| want.scale = want.scale.max(least));
    wants
}

fn largest(wants: &[Want]) -> f64 {
    wants.iter().fold(0.0, |largest, want| largest.max(want.value.abs()))
}

/// Asserts that results are what the formula says, after `stores` roundings on the way.
#[track_caller]
pub fn close<E: Element>(label: &str, got: &[E], wants: &[impl Into<Want> + Copy], stores: u32) {
    assert_eq!(got.len(), wants.len(), "{label}: number of results");
    let wants: Vec<Want> = wants.iter().map(|&want| want.into()).collect();
    let largest = largest(&wants);
    for (i, (got, want)) in got.iter().zip(wants).enumerate() {
        let allowed = match E::NAME == ElementType::F32.name() {
            true => F32_TOLERANCE * largest,
            false => BF16_TOLERANCE * f64::from(stores) * want.scale.max(want.value.abs()),
        };
        let got = f64::from(got.widen());
        assert!(
            (got - want.value).abs() <= allowed,
            "{label}: element {i} is {got}, not {want:?} +- {allowed:e}"
        );
    }
}

/// Asserts that two results are the same bytes.
#[track_caller]
pub fn same<T: Pod>(label: &str, a: &[T], b: &[T]) {
    let (a, b): (&[u8], &[u8]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
    let differ = a.iter().zip(b).position(|(a, b)| a != b);
    assert!(a.len() == b.len() && differ.is_none(), "{label}: bytes differ, first at {differ:?}");
}

/// Asserts that nothing was written.
#[track_caller]
pub fn poisoned<T: Pod>(label: &str, values: &[T]) {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    assert!(bytes.iter().all(|&byte| byte == POISON), "{label}: written");
}
