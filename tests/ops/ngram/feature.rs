//! The gate of the n-gram embedding.

use half::bf16;
use kernels::ngram::{GateArgs, NgramGate};
use kernels::numerics::Element;
use kernels::state::RowRange;
use tests::check::{Draw, Scene, close, facts, poisoned, same};

use crate::ops::formula::{sigmoid, wide};

tests::tests! {
    any: the_formula_in_bf16, a_row_alone_is_the_row_among_others;
    host: the_formula_in_f32, a_gate_of_zero_is_half_open;
}

const STREAMS: usize = 4;
const EPS: f32 = 1e-6;

struct Layer<E> {
    hidden: usize,
    norm_key: Vec<E>,
    norm_query: Vec<E>,
    norm_conv: Vec<E>,
}

impl<E: Element> Layer<E> {
    fn new(hidden: usize, draw: &mut Draw) -> Self {
        let mut gain = || draw.elements(STREAMS * hidden, 0.5);
        Layer { hidden, norm_key: gain(), norm_query: gain(), norm_conv: gain() }
    }

    fn width(&self) -> usize {
        STREAMS * self.hidden
    }

    /// gv and cn of the rows, behind `first` rows of others.
    fn run(&self, first: usize, keyval: &[E], streams: &[E]) -> (Vec<E>, Vec<E>) {
        let (width, rows) = (self.width(), streams.len() / self.width());
        let pad = |width: usize, values: &[E]| {
            let mut padded = vec![E::narrow(f32::NAN); first * width];
            padded.extend(values);
            padded
        };
        let mut scene = Scene::new();
        let gv = scene.output::<E>("gv", (first + rows) * width);
        let cn = scene.output::<E>("cn", (first + rows) * width);
        let args = GateArgs {
            rows: RowRange {
                facts: scene.input("facts", &facts(&[(0, first + rows)])),
                first: first as u32,
                count: rows as u32,
            },
            keyval: scene.input("keyval", &pad(width + self.hidden, keyval)).cast(),
            streams: scene.input("streams", &pad(width, streams)).cast(),
            norm_key: scene.input("norm_key", &self.norm_key).cast(),
            norm_query: scene.input("norm_query", &self.norm_query).cast(),
            norm_conv: scene.input("norm_conv", &self.norm_conv).cast(),
            gv: gv.cast(),
            cn: cn.cast(),
            count: STREAMS as u32,
            hidden: self.hidden as u32,
            eps: EPS,
            zero: 0,
        };
        scene.run::<NgramGate<E>>(&args);
        let outputs = [gv, cn].map(|ptr| scene.read(ptr, (first + rows) * width));
        outputs.iter().for_each(|output| poisoned("rows before the range", &output[..first * width]));
        let [gv, cn] = outputs.map(|output| output[first * width..].to_vec());
        (gv, cn)
    }

    /// Gates and gv by the formula.
    fn formula(&self, keyval: &[E], streams: &[E]) -> Vec<f64> {
        let (width, hidden) = (self.width(), self.hidden);
        let mut gv = Vec::new();
        for (keyval, streams) in keyval.chunks(width + hidden).zip(streams.chunks(width)) {
            for s in 0..STREAMS {
                let part = s * hidden..(s + 1) * hidden;
                let key = rms(&wide(&keyval[part.clone()]), &self.norm_key[part.clone()]);
                let query = rms(&wide(&streams[part.clone()]), &self.norm_query[part]);
                let dot: f64 = key.iter().zip(&query).map(|(k, q)| k * q).sum();
                let gate = dot / (hidden as f64).sqrt();
                let root = gate.abs().max(1e-6).sqrt() * if gate == 0.0 { 0.0 } else { gate.signum() };
                let open = sigmoid(root);
                gv.extend(keyval[width..].iter().map(|v| open * f64::from(v.widen())));
            }
        }
        gv
    }
}

/// The norm with a zero-centred gain.
fn rms<E: Element>(x: &[f64], gain: &[E]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter().zip(gain).map(|(x, gain)| x * scale * (1.0 + f64::from(gain.widen()))).collect()
}

fn against_the_formula<E: Element>() {
    let mut draw = Draw::new(1);
    for hidden in [1, 15, 16, 17, 64] {
        for rows in [1, 2, 3, 9, 65] {
            let layer = Layer::<E>::new(hidden, &mut draw);
            let keyval: Vec<E> = draw.elements(rows * (layer.width() + hidden), 2.0);
            let streams: Vec<E> = draw.elements(rows * layer.width(), 3.0);
            let (gv, cn) = layer.run(rows % 3, &keyval, &streams);
            let label = format!("hidden {hidden}, {rows} rows");
            close(&format!("{label}: gv"), &gv, &layer.formula(&keyval, &streams), 1);
            let gains = layer.norm_conv.chunks(hidden).cycle();
            let want = gv.chunks(hidden).zip(gains).flat_map(|(gv, gain)| rms(&wide(gv), gain));
            close(&format!("{label}: cn"), &cn, &want.collect::<Vec<_>>(), 1);
        }
    }
}

fn the_formula_in_f32() {
    against_the_formula::<f32>();
}

fn the_formula_in_bf16() {
    against_the_formula::<bf16>();
}

fn a_gate_of_zero_is_half_open() {
    let mut layer = Layer::<f32>::new(2, &mut Draw::new(2));
    layer.norm_key.fill(0.0);
    layer.norm_query.fill(0.0);
    // Stream 0 has no key, stream 1 an orthogonal one, streams 2 and 3 tiny products of either sign.
    let keyval = [0.0, 0.0, 1.0, 1.0, 1.0, 1e-8, 1.0, -1e-8, 8.0, -4.0];
    let streams = [1.0, 2.0, 1.0, -1.0, 0.0, 1.0, 0.0, 1.0];
    let (gv, _) = layer.run(0, &keyval, &streams);
    assert_eq!(gv[..4], [4.0, -2.0, 4.0, -2.0]);
    let open = 1.0 / (1.0 + (-1e-3f32).exp());
    for (got, want) in gv[4..].iter().zip([8.0 * open, -4.0 * open, 8.0 * (1.0 - open), -4.0 * (1.0 - open)])
    {
        assert!((got - want).abs() < 1e-6, "{got} {want}");
    }
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(3);
    let layer = Layer::<bf16>::new(24, &mut draw);
    let (width, kv_width) = (layer.width(), layer.width() + 24);
    for rows in [2, 3, 17, 64] {
        let keyval: Vec<bf16> = draw.elements(rows * kv_width, 2.0);
        let streams: Vec<bf16> = draw.elements(rows * width, 3.0);
        let (gv, cn) = layer.run(1, &keyval, &streams);
        for row in [0, rows / 2, rows - 1] {
            let (keyval, streams) = (&keyval[row * kv_width..][..kv_width], &streams[row * width..][..width]);
            let (gv_alone, cn_alone) = layer.run(0, keyval, streams);
            same("gv", &gv[row * width..][..width], &gv_alone);
            same("cn", &cn[row * width..][..width], &cn_alone);
        }
    }
}
