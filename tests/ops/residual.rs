//! The streams of the residual: the write-back and the norm, together and alone.

use graph::Ptr;
use half::bf16;
use kernels::numerics::Element;
use kernels::residual::{Args, Residual};
use tests::check::{Draw, Scene, Want, close, poisoned, r16, same};

use crate::ops::formula::{ROWS, rms, wide};

tests::tests! {
    any: the_formula_in_bf16, the_sum_of_the_cuts_is_rounded_before_it_is_injected, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, a_row_of_zeros_has_a_norm_of_zeros, a_launch_with_nothing_to_do_is_refused;
}

const STREAMS: usize = 3;
const EPS: f32 = 1e-6;

/// Streams, a block's output, and the gain of the next norm.
#[derive(Clone)]
struct Rows<E> {
    hidden: usize,
    streams: Vec<E>,
    partials: [Vec<f32>; 2],
    inject: Vec<f32>,
    gain: Vec<E>,
}

impl<E: Element> Rows<E> {
    fn new(rows: usize, hidden: usize, draw: &mut Draw) -> Self {
        Rows {
            hidden,
            streams: draw.elements(rows * STREAMS * hidden, 2.0),
            partials: [draw.elements(rows * hidden, 1.0), draw.elements(rows * hidden, 1.0)],
            inject: draw.elements(rows * STREAMS, 2.0),
            gain: draw.elements(STREAMS * hidden, 0.5),
        }
    }

    fn one(&self, row: usize) -> Self {
        let (hidden, width) = (self.hidden, STREAMS * self.hidden);
        Rows {
            streams: self.streams[row * width..][..width].to_vec(),
            partials: self.partials.each_ref().map(|p| p[row * hidden..][..hidden].to_vec()),
            inject: self.inject[row * STREAMS..][..STREAMS].to_vec(),
            ..self.clone()
        }
    }

    /// The streams and their norm after a launch.
    fn run(&self, write: bool, norm: bool) -> (Vec<E>, Vec<E>) {
        let mut scene = Scene::new();
        let count = self.streams.len();
        let streams = match write {
            true => scene.state("streams", &self.streams),
            false => scene.input("streams", &self.streams),
        };
        let normed = scene.output::<E>("normed", count);
        let args = Args {
            streams: streams.cast(),
            partials: if write { scene.input("partials", &self.partials.concat()) } else { Ptr::NULL },
            inject: if write { scene.input("inject", &self.inject) } else { Ptr::NULL },
            gain: if norm { scene.input("gain", &self.gain).cast() } else { Ptr::NULL },
            normed: normed.cast(),
            rows: (count / STREAMS / self.hidden) as u32,
            count: STREAMS as u32,
            hidden: self.hidden as u32,
            eps: EPS,
        };
        scene.run::<Residual<E>>(&args);
        (scene.read(streams, count), scene.read(normed, count))
    }

    /// The streams after the write-back.
    fn written(&self) -> Vec<Want> {
        let at = |i: usize| {
            let (row, stream, j) = (i / self.hidden / STREAMS, i / self.hidden % STREAMS, i % self.hidden);
            let [p0, p1] = self.partials.each_ref().map(|p| f64::from(p[row * self.hidden + j]));
            let added = r16::<E>(p0 + p1) * f64::from(self.inject[row * STREAMS + stream]);
            let old = f64::from(self.streams[i].widen());
            Want { value: old + added, scale: old.abs() + added.abs() }
        };
        (0..self.streams.len()).map(at).collect()
    }

    /// The norm of streams, with the rounding of the store.
    fn normed(&self, streams: &[E]) -> Vec<f64> {
        let gain = wide(&self.gain);
        let norm = |(i, x): (usize, &[E])| {
            let gain = &gain[i % STREAMS * self.hidden..][..self.hidden];
            rms::<E>(&wide(x), gain, f64::from(EPS))
        };
        streams.chunks(self.hidden).enumerate().flat_map(norm).collect()
    }
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for hidden in [1, 15, 16, 17, 100] {
        for rows in ROWS {
            let case = Rows::<E>::new(rows, hidden, &mut draw);
            let label = format!("{rows} rows of {hidden}");
            let (streams, normed) = case.run(true, true);
            // Two roundings: that of y, and that of the store.
            close(&format!("{label}: streams"), &streams, &case.written(), 2);
            // The norm is that of the streams as they were stored.
            close(&format!("{label}: norm"), &normed, &case.normed(&streams), 1);

            let (written, nothing) = case.run(true, false);
            same(&format!("{label}: streams without a norm"), &written, &streams);
            poisoned(&format!("{label}: norm that was not asked for"), &nothing);
            let (kept, normed) = case.run(false, true);
            same(&format!("{label}: streams that are only read"), &kept, &case.streams);
            close(&format!("{label}: norm alone"), &normed, &case.normed(&kept), 1);
        }
    }
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

/// The two partial sums are added and rounded before the injection: 1 and 2^-8 make 1 in bf16.
fn the_sum_of_the_cuts_is_rounded_before_it_is_injected() {
    let case = Rows::<bf16> {
        hidden: 1,
        streams: vec![bf16::ZERO; STREAMS],
        partials: [vec![1.0], vec![1.0 / 256.0]],
        inject: vec![1.0, 256.0, 0.0],
        gain: vec![bf16::ZERO; STREAMS],
    };
    assert_eq!(case.run(true, false).0, [1.0, 256.0, 0.0].map(bf16::from_f32));
}

fn a_row_of_zeros_has_a_norm_of_zeros() {
    let mut case = Rows::<f32>::new(2, 5, &mut Draw::new(2));
    case.streams.fill(0.0);
    assert!(case.run(false, true).1.iter().all(|&n| n == 0.0));
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(3);
    for rows in [2, 3, 4, 5, 31, 32, 33, 63, 64] {
        let case = Rows::<bf16>::new(rows, 37, &mut draw);
        let (streams, normed) = case.run(true, true);
        for row in [0, rows / 2, rows - 1] {
            let (streams_alone, normed_alone) = case.one(row).run(true, true);
            let width = STREAMS * 37;
            same("streams", &streams[row * width..][..width], &streams_alone);
            same("norm", &normed[row * width..][..width], &normed_alone);
        }
    }
}

fn a_launch_with_nothing_to_do_is_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, count: 1, hidden: 1, ..bytemuck::Zeroable::zeroed() };
    let why = scene.refused::<Residual<f32>>(&args);
    assert!(why.contains("nothing to do"), "{why}");
    for args in [Args { rows: 0, ..args }, Args { count: 0, ..args }, Args { hidden: 0, ..args }] {
        let why = scene.refused::<Residual<f32>>(&args);
        assert!(why.contains("all positive"), "{why}");
    }
}
