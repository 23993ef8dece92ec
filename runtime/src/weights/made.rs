//! Made weights: a model of the right shape whose every weight comes from a seed, for measuring and trying.
//!
//! Scales are such that activations stay of the order of one through any number of layers: a matrix divides by
//! the root of its inner width, a gain is near what its formula wants, a decay forgets slowly.

use graph::{Device, Emission, Ptr};
use half::bf16;
use kernels::launch;
use kernels::numerics::{Element, ElementType};
use kernels::random::{self, Bits, BitsArgs, uniform};
use kernels::weight::{Format, Matrix, Order};

use super::{Fill, Loaded, TablePlace, WeightForm, WeightPlan};
use crate::checkpoint::layout::Spec;
use crate::error::Error;

/// What a weight is made as: `centre + scale * u`, with `u` from -1 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Made {
    centre: f32,
    pub(super) scale: f32,
}

impl Made {
    /// What comes from the settings is never made.
    pub(super) const NOTHING: Made = Made { centre: 0.0, scale: 0.0 };
    /// The gain of a norm that does not add one.
    pub(crate) const PLAIN_GAIN: Made = Made { centre: 1.0, scale: 0.1 };
    /// The logarithm of a decay's rate: rates from 1 to 16.
    pub(crate) const A_LOG: Made = Made { centre: 1.4, scale: 1.4 };
    /// What is added before the softplus of a decay: steps from 0.001 to 0.1.
    pub(crate) const DT_BIAS: Made = Made { centre: -4.6, scale: 2.3 };

    /// What a tensor is made as if nothing else is known: a zero-centred gain if it is a list, or else a matrix.
    pub(crate) fn of(spec: &Spec) -> Made {
        match spec.shape[..] {
            [.., _, inner] => Made::matrix(inner),
            _ => Made { centre: 0.0, scale: 0.1 },
        }
    }

    /// What a matrix of so many columns is made as.
    pub(super) fn matrix(columns: usize) -> Made {
        Made { centre: 0.0, scale: 1.0 / (columns as f32).sqrt() }
    }

    /// What all numbers of a quantised weight are multiplied by, so that they are as large as plain ones on average.
    pub(super) fn unit(self, format: Format) -> f32 {
        // Root of the mean square of what is made: of uniform numbers, of fp8 codes below 2, and of nvfp4 codes under
        // scales from 1 to below 2.
        let of_uniform = 1.0 / 3f32.sqrt();
        self.scale
            * match format {
                Format::Plain => 1.0,
                Format::Fp8 => of_uniform / 0.598,
                Format::Nvfp4 => of_uniform / (2.926 * 1.466),
            }
    }

    /// Number `place` of what is made of a seed.
    pub(crate) fn value(self, seed: u64, place: u64) -> f32 {
        self.centre + self.scale * uniform(seed, place)
    }
}

impl WeightPlan {
    /// Allocates the memory and makes every weight in it. Equal seeds make equal weights on one kind of device:
    /// matrices are made in the device's order, what pads them too.
    ///
    /// # Errors
    /// The device has no room, or failed.
    ///
    /// # Panics
    /// If the n-gram tables are to be mapped: what is made is in no file.
    pub fn make(self, seed: u64, device: &Device) -> Result<Loaded, Error> {
        assert_ne!(self.form.table, TablePlace::Mapped, "made tables are in no file");
        let arena = device.arena("weights", self.region.bytes())?;
        let mut emission = Emission::new();
        // Every weight has a seed of its own, far from its neighbours'.
        let seed = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut seeds = (0..).map(|number: u64| seed.wrapping_add(number << 40));
        for (source, seed) in self.sources.iter().zip(&mut seeds) {
            let to = source.span.at::<u8>(arena.base());
            let (made, bytes) = (source.made, source.span.bytes);
            match &source.fill {
                Fill::Bytes(bytes) => arena.write(to, bytes)?,
                Fill::Wide(_) => arena.write(to.cast(), &listed::<f32>(made, seed, bytes))?,
                // Few values, and not about zero.
                Fill::Elements(_) if made.centre != 0.0 => match self.form.element {
                    ElementType::F32 => arena.write(to.cast(), &listed::<f32>(made, seed, bytes))?,
                    ElementType::Bf16 => arena.write(to.cast(), &listed::<bf16>(made, seed, bytes))?,
                },
                Fill::Elements(_) => fill(&mut emission, self.form.element, to, bytes, seed, made.scale)?,
                Fill::Matrices { matrix, count, .. } => {
                    matrices(&mut emission, self.form, matrix, *count, to, seed, made)?
                }
            }
        }
        let mut tables = Vec::new();
        for (table, seed) in self.tables.iter().zip(seeds) {
            let (room, to) = table.room(&arena, device)?;
            table.make(&mut emission, self.form.element, to, seed)?;
            table.tell_from(&arena, to)?;
            tables.extend(table.span.is_none().then_some(room));
        }
        let loaded = self.loaded(arena, tables);
        let stream = device.stream();
        stream.run(emission, &loaded.memory.arenas().collect::<Vec<_>>())?;
        stream.synchronize()?;
        Ok(loaded)
    }
}

/// Adds launches that make `count` matrices at `to`, part by part.
fn matrices(
    emission: &mut Emission,
    WeightForm { element, order, .. }: WeightForm,
    matrix: &Matrix,
    count: usize,
    to: Ptr<u8>,
    seed: u64,
    made: Made,
) -> graph::Result<()> {
    let (parts, bytes) = matrix.parts(count, order, element.bytes());
    if matrix.format == Format::Plain {
        return fill(emission, element, to, bytes, seed, made.scale);
    }
    codes(emission, matrix.format, to, parts.scales, seed)?;
    let (scales, globals) = (to.byte_add(parts.scales), to.byte_add(parts.globals));
    let unit = made.unit(matrix.format);
    match (matrix.format, order) {
        (Format::Fp8, _) => words(emission, scales, parts.globals - parts.scales, 0, (0, unit.to_bits())),
        (_, Order::Rows) => {
            scales_of_groups(emission, scales, parts.globals - parts.scales, seed)?;
            words(emission, globals, bytes - parts.globals, 0, (0, unit.to_bits()))
        }
        // Codes and scales of tiles are read in another way, which a row's number makes up for.
        (_, Order::Tiles) => {
            words(emission, scales, parts.globals - parts.scales, !seed, (0x0707_0707, 0x4848_4848))?;
            words(emission, globals, bytes - parts.globals, 0, (0, (128.0 * unit).to_bits()))
        }
    }
}

/// Adds a launch that makes codes: those of nvfp4 of all kinds, those of fp8 below 2.
pub(super) fn codes(
    emission: &mut Emission,
    format: Format,
    to: Ptr<u8>,
    bytes: usize,
    seed: u64,
) -> graph::Result<()> {
    words(emission, to, bytes, seed, (if format == Format::Fp8 { 0xbfbf_bfbf } else { !0 }, 0))
}

/// Adds a launch that makes e4m3 scales from 1 to below 2.
pub(super) fn scales_of_groups(
    emission: &mut Emission,
    to: Ptr<u8>,
    bytes: usize,
    seed: u64,
) -> graph::Result<()> {
    words(emission, to, bytes, !seed, (0x0707_0707, 0x3838_3838))
}

/// Adds a launch that fills whole words, whose bits are (free, fixed).
fn words(
    emission: &mut Emission,
    to: Ptr<u8>,
    bytes: usize,
    seed: u64,
    (free, fixed): (u32, u32),
) -> graph::Result<()> {
    emission.launch::<Bits>(&BitsArgs { to: to.cast(), words: (bytes / 4) as u64, seed, free, fixed })
}

/// Adds a launch that fills bytes with made elements about zero.
pub fn fill(
    emission: &mut Emission,
    element: ElementType,
    to: Ptr<u8>,
    bytes: usize,
    seed: u64,
    scale: f32,
) -> graph::Result<()> {
    let args = random::Args { to, count: (bytes / element.bytes()) as u64, seed, scale, zero: 0 };
    launch!(emission, element, random::Random, &args)
}

fn listed<E: Element>(made: Made, seed: u64, bytes: usize) -> Vec<E> {
    let places = 0..(bytes / size_of::<E>()) as u64;
    places.map(|place| E::narrow(made.value(seed, place))).collect()
}
