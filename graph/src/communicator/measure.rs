//! How long gathers take on the device: what decides between NCCL and push at the start, and numbers for people.

use std::slice;

use super::{Communicator, Exchange};
use crate::arena::Arena;
use crate::cuda;
use crate::emission::Emission;
use crate::error::Result;
use crate::exec::Exec;
use crate::recording::Recording;
use crate::stream::Stream;

/// What a gather takes on the device, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherTimes {
    /// The size of each part.
    pub bytes: usize,
    /// What carried it.
    pub exchange: Exchange,
    /// Launched one by one, queued ahead of the device.
    pub eager: f64,
    /// In a graph of nothing else.
    pub graph: f64,
}

/// Gathers of a graph, and how often it is replayed: of a graph for people, and of one for the choice.
const GRAPH: usize = 96;
const CHOICE: usize = 32;
const REPLAYS: usize = 20;
/// The part of a gather in a round of one row.
pub(super) const ROW_BYTES: usize = 10_240;
/// Gathers that are queued at once, how often, and what keeps the device busy meanwhile: fills of an arena.
const EAGER: usize = 200;
const TURNS: usize = 7;
const BUSY_BYTES: usize = 64 << 20;
const BUSY_FILLS: usize = 200;

/// Every means at every size.
pub(super) fn all(end: &Communicator, stream: &Stream, sizes: &[usize]) -> Result<Vec<GatherTimes>> {
    let device = stream.device();
    end.carried_by(Exchange::Nccl)?;
    let most = sizes.iter().copied().max().unwrap_or(0);
    let data = device.arena("gathers to time", 2 * most)?;
    let busy = device.arena("what keeps the device busy", BUSY_BYTES)?;
    let mut times = Vec::new();
    for &bytes in sizes {
        for exchange in [Exchange::Nccl, Exchange::Push] {
            let pushed = exchange == Exchange::Push;
            let Ok(end) = end.carried_by(exchange) else { continue };
            if pushed && bytes > cuda::MOST_BYTES {
                continue;
            }
            let graph = replayed(&end, stream, &data, bytes, GRAPH)?;
            let eager = launched(&end, stream, &data, &busy, bytes)?;
            times.push(GatherTimes { bytes, exchange, eager, graph });
        }
    }
    Ok(times)
}

/// What a gather of a round of one row takes by NCCL and by push.
pub(super) fn both(end: &Communicator, stream: &Stream) -> Result<[f64; 2]> {
    let data = stream.device().arena("gathers to time", 2 * ROW_BYTES)?;
    let time = |exchange| {
        let end = end.carried_by(exchange)?;
        replayed(&end, stream, &data, ROW_BYTES, CHOICE)
    };
    Ok([time(Exchange::Nccl)?, time(Exchange::Push)?])
}

/// `count` gathers.
fn gathers(end: &Communicator, data: &Arena, bytes: usize, count: usize) -> Result<Emission> {
    let mut emission = Emission::new();
    (0..count).try_for_each(|_| emission.gather(end, data.base(), bytes))?;
    Ok(emission)
}

/// Microseconds of a gather in a graph of `count`.
fn replayed(end: &Communicator, stream: &Stream, data: &Arena, bytes: usize, count: usize) -> Result<f64> {
    let graph = capture(end, stream, data, bytes, count)?;
    // The first replay waits for the other rank, and is not counted.
    stream.replay(&graph)?;
    let mut laps = vec![stream.lap()?];
    for _ in 0..REPLAYS {
        stream.replay(&graph)?;
        laps.push(stream.lap()?);
    }
    stream.synchronize()?;
    let times = laps.windows(2).map(|laps| laps[1].microseconds_since(&laps[0]));
    Ok(median(times.collect::<Result<Vec<_>>>()?) / count as f64)
}

fn capture(end: &Communicator, stream: &Stream, data: &Arena, bytes: usize, count: usize) -> Result<Exec> {
    let recording = Recording::begin(stream, "gathers to time")?;
    stream.run(gathers(end, data, bytes, count)?, slice::from_ref(data))?;
    recording.finish(vec![])
}

/// Microseconds of a gather among launches that the device finds queued.
fn launched(end: &Communicator, stream: &Stream, data: &Arena, busy: &Arena, bytes: usize) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..TURNS {
        // The device is busy while all is queued; then a gather that is not counted waits for the other rank.
        let mut before = Emission::new();
        (0..BUSY_FILLS).for_each(|_| before.fill(busy.base(), BUSY_BYTES, 0));
        before.append(&gathers(end, data, bytes, 1)?);
        stream.run(before, &[data.clone(), busy.clone()])?;
        let start = stream.lap()?;
        stream.run(gathers(end, data, bytes, EAGER)?, slice::from_ref(data))?;
        let stop = stream.lap()?;
        stream.synchronize()?;
        times.push(stop.microseconds_since(&start)? / EAGER as f64);
    }
    Ok(median(times))
}

/// The one in the middle.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Whether both ranks push: what they measured for NCCL and for push, and the means of both for people. Either order of
/// the ranks gives the same, to the bit.
pub(super) fn decide(one: [f64; 2], other: [f64; 2]) -> (bool, [f64; 2]) {
    let [nccl, push] = [0, 1].map(|at| (one[at] + other[at]) / 2.0);
    (push < nccl, [nccl, push])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ranks_decide_alike_and_from_the_sum() {
        let cases = [
            ([6.2, 2.4], [6.1, 2.5], true),
            ([2.0, 9.0], [2.1, 8.0], false),
            // One rank alone would decide otherwise.
            ([6.0, 5.0], [6.0, 8.0], false),
            ([6.0, 7.0], [6.0, 4.0], true),
            // What is equal stays with NCCL; what is no number does too.
            ([6.0, 6.0], [6.0, 6.0], false),
            ([6.0, f64::NAN], [6.0, 1.0], false),
        ];
        for (one, other, pushes) in cases {
            let (here, there) = (decide(one, other), decide(other, one));
            assert_eq!(here.0, pushes, "{one:?} {other:?}");
            assert_eq!(here.0, there.0);
            assert_eq!(here.1.map(f64::to_bits), there.1.map(f64::to_bits));
        }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(vec![2.0, 1.0]), 2.0);
    }
}
