//! The vision tower on a device: what encoding a picture takes, and what each kind of its launches does.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use graph::{Arena, Emission, Stream};
use kernels::numerics::ElementType;

use super::kernels::{kinds, of_kind};
use crate::error::Error;
use crate::open::{Load, Opened, Progress};
use crate::place::Place;
use crate::tower::{Patches, Tower, TowerLimits, patch_bytes};
use crate::weights::{TablePlace, WeightForm};

/// What encoding a picture took.
#[derive(Clone, Debug)]
pub struct TowerLine {
    /// Its lines and columns, in patches.
    pub grid: [u32; 2],
    /// Rows of features.
    pub tokens: usize,
    /// Seconds from the first byte to the last feature, the median of several times.
    pub seconds: f64,
    /// Seconds of the launches alone.
    pub device_seconds: f64,
    /// The launches by kind: the name, how many, and the seconds of all of them one after another.
    pub kinds: Vec<(&'static str, usize, f64)>,
}

impl fmt::Display for TowerLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TowerLine { grid: [height, width], tokens, seconds, device_seconds, kinds } = self;
        write!(
            f,
            "picture of {height} x {width} patches, {tokens} tokens: {:.2} ms, launches {:.2} ms",
            seconds * 1e3,
            device_seconds * 1e3
        )?;
        for (name, launches, seconds) in kinds {
            write!(f, "\n  {name:<14} {launches:>4} launches {:>9.3} ms", seconds * 1e3)?;
        }
        Ok(())
    }
}

/// Times the encoding of a picture of this many lines and columns of patches by the tower of a model folder, whose
/// text layers are best few: they are opened too.
///
/// # Errors
/// The model has no tower or cannot be opened, the picture is none, or the device failed.
pub fn time_tower(
    dir: &Path,
    place: Place,
    element: ElementType,
    load: Load,
    grid: [u32; 2],
    progress: &mut dyn FnMut(Progress),
) -> Result<TowerLine, Error> {
    let form = WeightForm { vision: true, ..place.form(element, TablePlace::Device) };
    let opened = Opened::without_text(dir, form, load)?;
    let device = place.open(element, false, 64 << 30)?;
    let config = opened.checkpoint.config.vision.clone();
    let model = opened.load(&device, progress)?;
    let (Some(config), Some(weights)) = (&config, &model.model.weights.tower) else {
        unreachable!("a form with a tower is refused for a model without one");
    };
    let [height, width] = grid;
    let patches = height as usize * width as usize;
    let mut tower =
        Tower::new(&device, config, element, weights, &model.weights, TowerLimits::of(patches.max(1)))?;
    let item = || {
        let bytes = (0..patches * patch_bytes(config)).map(|at| (at * 31 + at / 251) as u8).collect();
        Patches::<Vec<u8>> { bytes, grid: [1, height, width] }
    };
    let tokens = tower.tokens(item().grid);
    let room = device.arena("vision features", tower.feature_bytes(tokens).max(1))?;
    let stream = device.stream();

    let mut times = Vec::new();
    for take in 0..=super::rig::TAKES {
        let mut encoding = tower.begin(vec![item()], &room, room.base())?;
        stream.synchronize()?;
        let start = Instant::now();
        while tower.step(&mut encoding, &stream)? {}
        stream.synchronize()?;
        // The first one warms up.
        times.extend((take > 0).then(|| start.elapsed().as_secs_f64()));
    }
    let encoding = tower.begin(vec![item()], &room, room.base())?;
    let all = tower.launches(&encoding)?;
    let keeps: Vec<Arena> = [tower.arena.clone(), room].into_iter().chain(model.weights.arenas()).collect();
    let device_seconds = repeated(&stream, &all, &keeps)?;
    let kinds = kinds(&all).into_iter().map(|name| {
        let some = of_kind(&all, name);
        Ok((name, some.len(), repeated(&stream, &some, &keeps)?))
    });
    let kinds = kinds.collect::<Result<_, Error>>()?;
    Ok(TowerLine { grid, tokens, seconds: median(times), device_seconds, kinds })
}

/// The median time of an emission.
fn repeated(stream: &Stream, emission: &Emission, keeps: &[Arena]) -> Result<f64, Error> {
    let mut times = Vec::new();
    for _ in 0..super::rig::TAKES {
        let mut list = Emission::new();
        list.append(emission);
        let start = Instant::now();
        stream.run(list, keeps)?;
        stream.synchronize()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
