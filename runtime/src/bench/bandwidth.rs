//! What memory delivers to a kernel that only reads.

use std::time::Instant;

use graph::{Device, Emission, Recording};
use kernels::read;

use super::report::Bandwidth;
use crate::error::Error;
use crate::runner::Runner;

/// Blocks of the grids that are tried.
const GRIDS: [usize; 4] = [512, 1056, 2112, 4224];
/// Reads of a measurement, one after another.
const READS: usize = 4;

/// The best of a few grids, over the weights or as much spare memory as there is.
pub(super) fn measure(runner: &Runner) -> Result<Bandwidth, Error> {
    let (device, stream) = (&runner.device, &runner.stream);
    let most = match device {
        Device::Host(_) => 64 << 20,
        Device::Cuda(_) => 4usize << 30,
    };
    let spare = (device.free_bytes() / 2).min(most);
    let area = match runner.weights.arena.bytes() >= spare {
        true => runner.weights.arena.clone(),
        false => device.arena("memory to read", spare)?,
    };
    let quads = area.bytes().min(most) / 16;
    let sums = device.arena("sums", 4 * GRIDS[3])?;
    let mut best = f64::MAX;
    for blocks in GRIDS {
        let mut emission = Emission::new();
        let (words, to) = (area.base().cast(), sums.base().cast());
        let args = read::Args { words, sums: to, quads: quads as u64, blocks: blocks as u32, zero: 0 };
        emission.launch::<read::Read>(&args)?;
        let recording = Recording::begin(stream, "a read of memory")?;
        stream.run(emission, &[])?;
        let exec = recording.finish(vec![area.clone(), sums.clone()])?;
        stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..READS {
            stream.replay(&exec)?;
        }
        stream.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / READS as f64);
    }
    Ok(Bandwidth { bytes: 16 * quads, per_second: (16 * quads) as f64 / best })
}
