//! Figures: measured by criterion, and printed as rows of the record.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use criterion::Criterion;

/// Samples of a figure.
const SAMPLES: usize = 20;

/// Measures the figures of one bench.
pub struct Meter {
    bench: &'static str,
    criterion: Criterion,
}

/// What is measured, and what it is held against.
pub struct Figure {
    /// Its name, unique in its bench.
    pub name: String,
    /// What it counts.
    pub unit: Unit,
    /// What it must reach: at most so much time, or at least so much per second.
    pub need: Option<f64>,
    /// What no machine with this memory could beat, in the same unit.
    pub floor: Option<f64>,
    /// How long to measure.
    pub seconds: f64,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unit {
    /// Time of one repetition.
    Microseconds,
    /// Time of one repetition.
    Seconds,
    /// So many of these in one repetition: their number per second.
    PerSecond(f64, &'static str),
}

impl Meter {
    /// The meter of a bench.
    pub fn new(bench: &'static str) -> Meter {
        Meter { bench, criterion: Criterion::default().sample_size(SAMPLES).configure_from_args() }
    }

    /// Measures `routine`, which repeats the work as often as it is told and returns the time that counts.
    /// The median of the samples in nanoseconds; none if nothing is measured, in a test or by a filter.
    pub fn measure(&mut self, figure: &Figure, mut routine: impl FnMut(u64) -> Duration) -> Option<f64> {
        let samples = RefCell::new(Vec::new());
        let seconds = Duration::from_secs_f64(figure.seconds);
        let mut group = self.criterion.benchmark_group(self.bench);
        group.measurement_time(seconds).warm_up_time(seconds / 4).sample_size(SAMPLES);
        group.bench_function(&figure.name, |bencher| {
            bencher.iter_custom(|repetitions| {
                let took = routine(repetitions);
                samples.borrow_mut().push(took.as_nanos() as f64 / repetitions as f64);
                took
            });
        });
        group.finish();
        let mut samples = samples.into_inner();
        if !measuring() || samples.len() < SAMPLES {
            return None;
        }
        // What came before was warming up.
        let mut samples = samples.split_off(samples.len() - SAMPLES);
        samples.sort_by(f64::total_cmp);
        let (best, median) = (samples[0], samples[SAMPLES / 2]);
        self.print(figure, median, best);
        Some(median)
    }

    /// One row of the record: see `benches/record/README.md` for the columns.
    fn print(&self, figure: &Figure, median: f64, best: f64) {
        let Figure { name, unit, need, floor, .. } = figure;
        let (median, best) = (unit.of(median), unit.of(best));
        let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
        let kept = need.map_or("", |need| if unit.reaches(median, need) { "yes" } else { "no" });
        let share = floor.map(|floor| if unit.more_is_better() { median / floor } else { floor / median });
        println!(
            "record,{},{name},{},{},{},{},{kept},{},{}",
            self.bench,
            unit.name(),
            number(Some(median)),
            number(Some(best)),
            number(*need),
            number(*floor),
            number(share),
        );
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.criterion.final_summary();
    }
}

impl Figure {
    /// A figure that need not reach anything.
    pub fn new(name: impl Into<String>, unit: Unit) -> Figure {
        Figure { name: name.into(), unit, need: None, floor: None, seconds: 2.0 }
    }

    /// What it must reach.
    pub fn need(self, need: f64) -> Figure {
        Figure { need: Some(need), ..self }
    }

    /// What no machine with this memory could beat.
    pub fn floor(self, floor: f64) -> Figure {
        Figure { floor: Some(floor), ..self }
    }

    /// How long to measure.
    pub fn seconds(self, seconds: f64) -> Figure {
        Figure { seconds, ..self }
    }
}

impl Unit {
    fn of(self, nanoseconds: f64) -> f64 {
        match self {
            Unit::Microseconds => nanoseconds / 1e3,
            Unit::Seconds => nanoseconds / 1e9,
            Unit::PerSecond(count, _) => count * 1e9 / nanoseconds,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Unit::Microseconds => "us",
            Unit::Seconds => "s",
            Unit::PerSecond(_, name) => name,
        }
    }

    fn more_is_better(self) -> bool {
        matches!(self, Unit::PerSecond(..))
    }

    fn reaches(self, value: f64, need: f64) -> bool {
        if self.more_is_better() { value >= need } else { value <= need }
    }
}

/// Whether the program was asked to measure (`cargo bench`), not only to run once (`cargo test`).
pub fn measuring() -> bool {
    let mut asked = false;
    std::env::args().all(|argument| {
        asked |= argument == "--bench";
        argument != "--test"
    }) && asked
}

/// A row of the record that criterion did not measure.
pub fn note(bench: &str, name: &str, unit: &str, value: f64) {
    if measuring() {
        println!("record,{bench},{name},{unit},{value:.4},,,,,");
    }
}

/// The time that `work` takes, and what it makes.
pub fn spent_on<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let made = work();
    (start.elapsed(), made)
}
