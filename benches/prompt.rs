//! Prompt passes of the tiny model in bf16, and the time to load it, beside what memory allows.

use std::time::Duration;

use benches::{Crowd, Figure, Meter, Unit, note, options, prompt, read_bytes_per_second, round_bytes};
use benches::{spent_on, tiny};
use kernels::numerics::ElementType;
use kernels::weight::Order;
use runtime::open::Opened;
use runtime::weights::WeightForm;

const PROMPT: usize = 1500;
const PIECE: usize = 512;

fn main() {
    let mut meter = Meter::new("prompt");
    let bandwidth = read_bytes_per_second();
    note("prompt", "memory read by all threads", "GB/s", bandwidth / 1e9);
    let options = options(16, 2048);
    assert_eq!(options.piece_rows as usize, PIECE);

    let mut crowd = Crowd::open(&tiny(), &options);
    let mut first = None;
    let mut pass = || {
        crowd.submit(prompt(0, PROMPT), 1);
        let (took, ()) = spent_on(|| crowd.finish());
        let made = crowd.made();
        assert_eq!((made.len(), *first.get_or_insert(made[0])), (1, made[0]), "run = run");
        took
    };
    pass();
    let form = WeightForm::new(ElementType::Bf16, Order::Rows);
    let config = Opened::new(&tiny(), form).expect("a model").checkpoint.config;
    let bytes = (0..PROMPT).step_by(PIECE).map(|start| {
        let end = PROMPT.min(start + PIECE);
        round_bytes(&config, ElementType::Bf16, end - start, 1, end)
    });
    let bytes: f64 = bytes.sum();
    note("prompt", "bytes read at least", "MB per prompt", bytes / 1e6);
    let figure = Figure::new(format!("tiny {PROMPT} ids"), Unit::PerSecond(PROMPT as f64, "tok/s"));
    let figure = figure.need(1000.0).floor(PROMPT as f64 * bandwidth / bytes).seconds(20.0);
    meter.measure(&figure, |times| (0..times).map(|_| pass()).sum::<Duration>());

    let weights = crowd.engine.runner().weights.bytes() as f64;
    let load = Figure::new("tiny load with its ladder", Unit::Seconds).need(1.0).floor(weights / bandwidth);
    meter.measure(&load.seconds(4.0), |times| {
        let one = || {
            let (took, crowd) = spent_on(|| Crowd::open(&tiny(), &options));
            assert_eq!(crowd.engine.stats().graphs, 16);
            took
        };
        (0..times).map(|_| one()).sum()
    });
}
