//! A bench for one kernel: memory between guard bands, drawn inputs, and the tolerances of every suite.

use bytemuck::Pod;
use graph::error::FaultKind;
use graph::host::{HostOptions, POISON};
use graph::{Arena, Device, Emission, Error, Kernel, Ptr, Stream};
use kernels::numerics::{Element, ElementType};
use kernels::table::{Fact, PREVIOUS};
use kernels::weight::{Matrix, Order};

use crate::differ::{Kind, differ};
use crate::guarded::Guarded;
use crate::mirror::{Mirror, translated};

/// f32 results may differ from the f64 formula by this much of the largest result.
const F32_TOLERANCE: f64 = 2e-5;
/// bf16 results may differ by this much of an element's size at each store: one unit in the last place.
const BF16_TOLERANCE: f64 = 1.0 / 128.0;
/// Where the f32 inside of a kernel may cancel, a bf16 result is taken to be at least this much of the largest.
const CANCELLED: f64 = F32_TOLERANCE / BF16_TOLERANCE;

/// A host device and the buffers of one kernel. Where scenes are mirrored, a second device runs every launch
/// of a kernel that it has a twin of, must agree, and its results take the place of the host's.
pub struct Scene {
    device: Device,
    stream: Stream,
    buffers: Vec<Buffer>,
    mirror: Option<Mirror>,
}

struct Buffer {
    host: Guarded,
    twin: Option<Guarded>,
    kind: Kind,
}

impl Default for Scene {
    fn default() -> Self {
        Scene::new()
    }
}

impl Scene {
    /// A fresh device with no buffers.
    pub fn new() -> Scene {
        Scene::mirrored(Mirror::everywhere())
    }

    /// The same, mirrored on a device of its own.
    pub fn mirrored_on(device: Device) -> Scene {
        Scene::mirrored(Some(Mirror::new(device)))
    }

    fn mirrored(mirror: Option<Mirror>) -> Scene {
        let device = Device::host(HostOptions::default());
        Scene { stream: device.stream(), device, buffers: Vec::new(), mirror }
    }

    /// Memory that launches may only read.
    pub fn input<T: Pod>(&mut self, label: &str, values: &[T]) -> Ptr<T> {
        self.kept(label, values, values.to_vec())
    }

    /// So many weight matrices that launches may only read, row by row. A mirror has them in its own order.
    pub fn matrix<E: Element>(&mut self, label: &str, rows: &[E], matrix: Matrix, count: usize) -> Ptr<E> {
        assert_eq!(rows.len(), count * matrix.elements(Order::Rows), "`{label}`");
        let mut bytes: Vec<u8> = bytemuck::cast_slice(rows).to_vec();
        bytes.resize(matrix.bytes(count, Order::Rows, size_of::<E>()), 0);
        self.stored::<E>(label, &bytes, matrix, count).cast()
    }

    /// The same of matrices in any format, as bytes: [`Matrix::parts`] says which.
    pub fn stored<E: Element>(&mut self, label: &str, bytes: &[u8], matrix: Matrix, count: usize) -> Ptr<u8> {
        let order = |mirror: &Mirror| mirror.order::<E>(bytes, &matrix, count);
        let there = self.mirror.as_ref().map_or(Vec::new(), order);
        self.kept(label, bytes, there)
    }

    /// Addresses in other buffers, which launches may only read. A mirror has those of its own buffers.
    pub fn addresses(&mut self, label: &str, here: &[Ptr<u8>]) -> Ptr<Ptr<u8>> {
        let there = here.iter().map(|at| match &self.mirror {
            Some(_) => Ptr::new(self.there(at.address()).expect("the address is in one of the buffers")),
            None => *at,
        });
        let there = there.collect();
        self.kept(label, here, there)
    }

    /// Memory that launches read and write.
    pub fn state<T: Pod>(&mut self, label: &str, values: &[T]) -> Ptr<T> {
        let ptr = self.output(label, values.len());
        self.buffers.last().expect("just added").host.fill(values);
        ptr
    }

    /// Poisoned memory that launches write.
    pub fn output<T: Pod>(&mut self, label: &str, count: usize) -> Ptr<T> {
        self.add::<T>(label, count, count).host.start.cast()
    }

    /// Says what a buffer holds, where its type does not.
    pub fn holds<T>(&mut self, at: Ptr<T>, kind: Kind) {
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.host.start.address() == at.address());
        buffer.expect("a buffer starts there").kind = kind;
    }

    fn kept<T: Pod>(&mut self, label: &str, here: &[T], there: Vec<T>) -> Ptr<T> {
        let buffer = self.add::<T>(label, here.len(), there.len());
        buffer.host.keep(here);
        if let Some(twin) = &mut buffer.twin {
            twin.keep(&there);
        }
        buffer.host.start.cast()
    }

    fn add<T: Pod>(&mut self, label: &str, here: usize, there: usize) -> &mut Buffer {
        let host = Guarded::new(&self.device, label, here * size_of::<T>());
        let twin = |mirror: &Mirror| Guarded::new(&mirror.device, label, there * size_of::<T>());
        let twin = self.mirror.as_ref().map(twin);
        self.buffers.push(Buffer { host, twin, kind: Kind::of::<T>() });
        self.buffers.last_mut().expect("just added")
    }

    /// Launches `K`, and checks that guards and inputs are as they were.
    pub fn run<K: Kernel>(&self, args: &K::Args) {
        self.try_run::<K>(args).unwrap_or_else(|why| panic!("{why}\n{args:?}"));
    }

    /// As [`Scene::run`]; says what is wrong.
    pub fn try_run<K: Kernel>(&self, args: &K::Args) -> Result<(), String> {
        let mirror = self.mirror.as_ref().filter(|_| K::TWIN.is_some());
        if mirror.is_some() {
            for (host, twin, _) in self.twins().filter(|(host, ..)| host.input.is_none()) {
                twin.fill(&host.read());
            }
        }
        self.launch::<K>(args).map_err(|error| error.to_string())?;
        self.buffers.iter().try_for_each(|buffer| buffer.host.check(K::NAME))?;
        mirror.map_or(Ok(()), |mirror| self.reflect::<K>(mirror, args))
    }

    /// Launches `K` on the mirror, from what the host had before, and takes its results over.
    fn reflect<K: Kernel>(&self, mirror: &Mirror, args: &K::Args) -> Result<(), String> {
        let name = format!("the twin of {}", K::NAME);
        let there = translated(args, |address| self.there(address));
        let keeps: Vec<Arena> = self.twins().map(|(_, twin, _)| twin.arena.clone()).collect();
        mirror.launch::<K>(&there?, &keeps).map_err(|error| format!("{name}: {error}"))?;
        self.twins().try_for_each(|(_, twin, _)| twin.check(&name))?;
        for (host, twin, kind) in self.twins().filter(|(host, ..)| host.input.is_none()) {
            let (here, there) = (host.read(), twin.read());
            if here != there {
                if let Some(why) = differ(kind, &here, &there) {
                    return Err(format!("{name}: `{}`: {why}", host.arena.label()));
                }
                host.fill(&there);
            }
        }
        Ok(())
    }

    /// What an address is on the mirror.
    fn there(&self, address: u64) -> Option<u64> {
        let find = |(host, twin, _): (&Guarded, &Guarded, Kind)| Some((twin.start, host.offset(address)?));
        let (start, offset) = self.twins().find_map(find)?;
        Some(start.byte_add(offset).address())
    }

    /// The buffers that a mirror has too.
    fn twins(&self) -> impl Iterator<Item = (&Guarded, &Guarded, Kind)> {
        self.buffers.iter().filter_map(|buffer| Some((&buffer.host, buffer.twin.as_ref()?, buffer.kind)))
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
        let keeps: Vec<Arena> = self.buffers.iter().map(|buffer| buffer.host.arena.clone()).collect();
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

    fn buffer<T>(&self, at: Ptr<T>) -> &Guarded {
        let holds = |b: &&Guarded| b.offset(at.address()).is_some_and(|offset| offset < b.bytes);
        let mut hosts = self.buffers.iter().map(|buffer| &buffer.host);
        hosts.find(holds).expect("the address is in one of the buffers")
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
