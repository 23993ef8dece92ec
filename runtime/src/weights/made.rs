//! Made weights: a model of the right shape whose every weight comes from a seed, for measuring and trying.
//!
//! Scales are such that activations stay of the order of one through any number of layers: a matrix divides by
//! the root of its inner width, a gain is near what its formula wants, a decay forgets slowly.

use graph::{Device, Emission, Ptr};
use half::bf16;
use kernels::launch;
use kernels::numerics::{Element, ElementType};
use kernels::random::{self, uniform};

use super::{Fill, Loaded, TablePlace, WeightPlan};
use crate::checkpoint::layout::Spec;
use crate::error::Error;

/// What a weight is made as: `centre + scale * u`, with `u` from -1 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Made {
    centre: f32,
    scale: f32,
}

impl Made {
    /// What comes from the settings is never made.
    pub(super) const NOTHING: Made = Made { centre: 0.0, scale: 0.0 };
    /// The gain of a norm that does not add one.
    pub(super) const PLAIN_GAIN: Made = Made { centre: 1.0, scale: 0.1 };
    /// The logarithm of a decay's rate: rates from 1 to 16.
    pub(super) const A_LOG: Made = Made { centre: 1.4, scale: 1.4 };
    /// What is added before the softplus of a decay: steps from 0.001 to 0.1.
    pub(super) const DT_BIAS: Made = Made { centre: -4.6, scale: 2.3 };

    /// What a tensor is made as if nothing else is known: a zero-centred gain if it is a list, or else a matrix.
    pub(super) fn of(spec: &Spec) -> Made {
        match spec.shape[..] {
            [.., _, inner] => Made::matrix(inner),
            _ => Made { centre: 0.0, scale: 0.1 },
        }
    }

    /// What a matrix of so many columns is made as.
    pub(super) fn matrix(columns: usize) -> Made {
        Made { centre: 0.0, scale: 1.0 / (columns as f32).sqrt() }
    }

    fn value(self, seed: u64, place: u64) -> f32 {
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
                Fill::Elements(_) | Fill::Matrices { .. } => {
                    fill(&mut emission, self.form.element, to, bytes, seed, made.scale)?
                }
            }
        }
        let mut tables = Vec::new();
        for (table, seed) in self.tables.iter().zip(seeds) {
            let (room, to) = table.room(&arena, device)?;
            fill(&mut emission, self.form.element, to, table.bytes, seed, table.made.scale)?;
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
