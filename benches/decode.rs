//! Ids per second of the tiny model in bf16, alone and in sum over 16 lanes, beside what memory allows.

use benches::{Crowd, Figure, Meter, Unit, note, options, read_bytes_per_second, round_bytes, tiny};
use kernels::numerics::ElementType;

const PROMPT: usize = 32;

fn main() {
    let mut meter = Meter::new("decode");
    let mut crowd = Crowd::open(&tiny(), &options(16, 1024));
    let bandwidth = read_bytes_per_second();
    note("decode", "memory read by all threads", "GB/s", bandwidth / 1e9);
    let mut alone = Vec::new();
    for (lanes, need) in [(1, Some(150.0)), (4, None), (16, Some(300.0))] {
        crowd.gather(lanes, PROMPT, 96);
        crowd.finish();
        let made = crowd.made();
        assert_eq!(made.len(), lanes * 96);
        // Lane 0 is told first in every round, and its prompt is the first to be done.
        match lanes {
            1 => alone = made.to_vec(),
            _ => assert_eq!(made[0], alone[0], "crowded = alone"),
        }
        // Half way through a stretch of rounds.
        let config = &crowd.engine.runner().model.config;
        let bytes = round_bytes(config, ElementType::Bf16, lanes, lanes, PROMPT + 128);
        let weights = crowd.engine.runner().weights.bytes() as f64;
        let states = crowd.engine.slabs()[0].slab.arena().bytes() as f64;
        assert!(bytes < weights + states + crowd.engine.slabs()[0].pool.arena.bytes() as f64);
        note("decode", &format!("bytes read at least {lanes} lanes"), "MB per round", bytes / 1e6);
        let figure = Figure::new(format!("tiny {lanes} lanes"), Unit::PerSecond(lanes as f64, "tok/s"));
        let figure = Figure { need, ..figure }.floor(lanes as f64 * bandwidth / bytes).seconds(6.0);
        meter.measure(&figure, |rounds| crowd.decode(lanes, PROMPT, rounds));
    }
}
