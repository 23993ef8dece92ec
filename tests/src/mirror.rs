//! A second device that runs what a scene's host runs.

use std::sync::OnceLock;

use graph::host::HostOptions;
use graph::{Arena, Device, Emission, Kernel, Stream};
use kernels::numerics::Element;
use kernels::tiles::{self, Pack, Place};
use kernels::weight::{Format, Fp8, Matrix, Nvfp4, Order};

/// The device that every new scene is mirrored on.
static EVERYWHERE: OnceLock<Device> = OnceLock::new();

/// Mirrors all scenes that are made from now on, of all threads.
pub fn everywhere(device: Device) {
    assert!(EVERYWHERE.set(device).is_ok(), "scenes are mirrored once");
}

/// That device, if there is one.
pub fn device() -> Option<Device> {
    EVERYWHERE.get().cloned()
}

pub(crate) struct Mirror {
    pub(crate) device: Device,
    stream: Stream,
}

impl Mirror {
    pub(crate) fn everywhere() -> Option<Mirror> {
        device().map(Mirror::new)
    }

    pub(crate) fn new(device: Device) -> Mirror {
        Mirror { stream: device.stream(), device }
    }

    pub(crate) fn launch<K: Kernel>(&self, args: &K::Args, keeps: &[Arena]) -> graph::Result<()> {
        let mut emission = Emission::new();
        emission.launch::<K>(args)?;
        self.stream.run(emission, keeps)?;
        self.stream.synchronize()
    }

    /// `count` matrices, whose rows are these bytes, in the order that the device reads.
    pub(crate) fn order<E: Element>(&self, rows: &[u8], matrix: &Matrix, count: usize) -> Vec<u8> {
        match Order::of(&self.device) {
            Order::Rows => rows.to_vec(),
            Order::Tiles => pack::<E>(rows, matrix, count),
        }
    }
}

/// `count` matrices in tiles; the bytes are as [`Matrix::parts`] says.
pub fn pack<E: Element>(rows: &[u8], matrix: &Matrix, count: usize) -> Vec<u8> {
    let device = Device::host(HostOptions::default());
    let bytes = |order| matrix.bytes(count, order, size_of::<E>());
    assert_eq!(rows.len(), bytes(Order::Rows), "{count} of {matrix:?}");
    let arena = |label: &str, order| device.arena(label, bytes(order)).expect("memory is plenty");
    let (from, to) = (arena("rows", Order::Rows), arena("tiles", Order::Tiles));
    // What lies between parts is nobody's.
    to.write(to.base(), &vec![0u8; bytes(Order::Tiles)]).expect("the tiles are zero");
    from.write(from.base(), rows).expect("the rows are written");
    let place = |order, arena: &Arena| Place::new(matrix, count, order, size_of::<E>(), arena.base());
    let args = tiles::Args::new(matrix, count, place(Order::Rows, &from), place(Order::Tiles, &to));
    let mirror = Mirror::new(device.clone());
    let keeps = [from, to.clone()];
    let packed = match matrix.format {
        Format::Plain => mirror.launch::<Pack<E>>(&args, &keeps),
        Format::Fp8 => mirror.launch::<Pack<E, Fp8>>(&args, &keeps),
        Format::Nvfp4 => mirror.launch::<Pack<E, Nvfp4>>(&args, &keeps),
    };
    packed.expect("the matrices are packed");
    to.read(to.base(), bytes(Order::Tiles)).expect("the tiles are read")
}

/// An argument block with its addresses changed: the words that `there` knows, which must be those that the
/// block prints as addresses. Two numbers side by side may look like one of them; that is an error.
pub(crate) fn translated<A: bytemuck::Pod + std::fmt::Debug>(
    args: &A,
    there: impl Fn(u64) -> Option<u64>,
) -> Result<A, String> {
    let text = format!("{args:?}");
    let printed: Vec<u64> = text
        .split('@')
        .skip(1)
        .map(|rest| rest.split(|c: char| !c.is_ascii_hexdigit()).next().unwrap_or(""))
        .map(|digits| u64::from_str_radix(digits, 16).expect("an address follows"))
        .filter(|&address| address != 0)
        .collect();
    let mut block = bytemuck::bytes_of(args).to_vec();
    let mut found = 0;
    for word in block.as_chunks_mut::<8>().0 {
        let address = u64::from_le_bytes(*word);
        if printed.contains(&address) {
            let there = there(address).ok_or_else(|| format!("@{address:x} is in no buffer"))?;
            *word = there.to_le_bytes();
            found += 1;
        }
    }
    match found == printed.len() {
        true => Ok(bytemuck::pod_read_unaligned(&block)),
        false => Err(format!("{found} words look like the {} addresses", printed.len())),
    }
}
