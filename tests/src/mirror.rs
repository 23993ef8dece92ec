//! A second device that runs what a scene's host runs.

use std::sync::OnceLock;

use graph::host::HostOptions;
use graph::{Arena, Device, Emission, Kernel, Stream};
use kernels::numerics::Element;
use kernels::tiles::{self, Pack, Place};
use kernels::weight::{Matrix, Order};

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

    /// Matrices in the order that the device reads.
    pub(crate) fn order<E: Element>(&self, rows: &[E], matrix: &Matrix) -> Vec<E> {
        match Order::of(&self.device) {
            Order::Rows => rows.to_vec(),
            Order::Tiles => rows.chunks(matrix.elements(Order::Rows)).flat_map(|m| pack(m, matrix)).collect(),
        }
    }
}

/// A matrix in tiles.
pub fn pack<E: Element>(rows: &[E], matrix: &Matrix) -> Vec<E> {
    let device = Device::host(HostOptions::default());
    let arena = |label: &str, elements: usize| {
        device.arena(label, elements * size_of::<E>()).expect("memory is plenty")
    };
    let count = matrix.elements(Order::Tiles);
    let (from, to) = (arena("rows", rows.len()), arena("tiles", count));
    from.write(from.base().cast(), rows).expect("the rows are written");
    let place = |order, arena: &Arena| Place::new(matrix, 1, order, size_of::<E>(), arena.base());
    let args = tiles::Args::new(matrix, 1, place(Order::Rows, &from), place(Order::Tiles, &to));
    Mirror::new(device.clone()).launch::<Pack<E>>(&args, &[from, to.clone()]).expect("the matrix is packed");
    to.read(to.base().cast(), count).expect("the tiles are read")
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
