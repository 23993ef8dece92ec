//! Quantised weights: the numbers that codes stand for, their packing, and every kernel that reads them, which must
//! make what it makes of plain weights of the same numbers.

use std::ops::Range;

use graph::Ptr;
use half::bf16;
use kernels::experts::{DownArgs, ExpertsDown, ExpertsGroup, ExpertsProducts, ExpertsSum, ExpertsUp};
use kernels::experts::{ExpertsUpPrompt, GroupArgs, ProductsArgs, Sizes, SumArgs, UpArgs};
use kernels::linear::{Args, Linear, LinearCut, LinearCutPrompt, LinearPrompt};
use kernels::ngram::{GatherArgs, NgramGather};
use kernels::numerics::{Element, narrow};
use kernels::quant::{fp8, nvfp4};
use kernels::state::RowRange;
use kernels::table::Fact;
use kernels::weight::{BLOCK, Format, Fp8, GROUP, Matrix, Nvfp4, Order, Plain, WeightFormat};
use tests::check::{Draw, Scene, cancelling, close, facts, poisoned, same};
use tests::mirror::pack;

use crate::ops::formula::{dot, wide};

tests::tests! {
    any: linear_layers_by_the_formula, a_row_alone_is_the_row_among_others, experts_in_every_pair_of_formats,
        a_half_alone_is_the_half_of_both, experts_of_a_rank_are_their_part_of_all,
        table_rows_are_what_their_codes_stand_for;
    host: every_code_is_its_number, quantising_what_was_quantised_changes_nothing,
        quantised_weights_are_near_what_they_were, sums_are_those_of_the_numbers_bit_for_bit,
        tiles_decode_to_the_rows, scales_and_nibbles_matter, sizes_that_do_not_fit_a_format_are_refused;
    mirror: experts_of_real_size;
}

/// Matrices in memory order of the host, and the numbers they stand for.
struct Stored {
    bytes: Vec<u8>,
    values: Vec<f32>,
}

/// Quantises `count` matrices, group by group, as if each group were a tensor.
fn store<E: Element>(rows: &[f32], matrix: Matrix, count: usize) -> Stored {
    let (parts, size) = matrix.parts(count, Order::Rows, size_of::<E>());
    let (mut bytes, mut values) = (vec![0; size], Vec::new());
    let one = matrix.sizes(Order::Rows, size_of::<E>());
    let mut put = |from: usize, part: &[u8]| bytes[from..][..part.len()].copy_from_slice(part);
    for (tensor, rows) in rows.chunks(matrix.outputs * matrix.columns).enumerate() {
        let at = |part: usize, each: usize| part + tensor * each / matrix.groups;
        match matrix.format {
            Format::Plain => {
                let mut elements = vec![E::zeroed(); rows.len()];
                narrow(rows, &mut elements);
                put(at(parts.codes, one.codes), bytemuck::cast_slice(&elements));
                values.extend(elements.iter().map(|x| x.widen()));
            }
            Format::Fp8 => {
                let blocks = fp8::quantise(rows, matrix.columns, fp8::Scale::F32);
                let scales = (0..matrix.outputs)
                    .flat_map(|row| fp8::scales_of_row(&blocks.scales, matrix.columns, row).to_vec());
                put(at(parts.codes, one.codes), &blocks.codes);
                put(at(parts.scales, one.scales), bytemuck::cast_slice(&scales.collect::<Vec<f32>>()));
                values.extend(fp8::dequantise(&blocks, matrix.columns));
            }
            Format::Nvfp4 => {
                let groups = nvfp4::quantise(rows, matrix.columns);
                put(at(parts.codes, one.codes), &groups.codes);
                put(at(parts.scales, one.scales), &groups.scales);
                put(
                    at(parts.globals, one.globals),
                    bytemuck::cast_slice(&vec![groups.global; matrix.outputs]),
                );
                values.extend(nvfp4::dequantise(&groups));
            }
        }
    }
    Stored { bytes, values }
}

/// Some outputs of each group of stored matrices, and some columns of them: what a rank has. Of cut columns it has one
/// cut.
fn part<E: Element>(
    bytes: &[u8],
    matrix: Matrix,
    count: usize,
    outputs: Range<usize>,
    columns: Range<usize>,
) -> (Vec<u8>, Matrix) {
    let cuts = if columns.len() < matrix.columns { 1 } else { matrix.cuts };
    let kept =
        Matrix { outputs: outputs.len(), columns: columns.len(), cuts, ..matrix }.from_column(columns.start);
    let row = |matrix: Matrix| {
        Matrix { outputs: 1, groups: 1, cuts: 1, ..matrix }.sizes(Order::Rows, size_of::<E>())
    };
    let (one, own) = (row(matrix), row(kept));
    let (from, _) = matrix.parts(count, Order::Rows, size_of::<E>());
    let (to, size) = kept.parts(count, Order::Rows, size_of::<E>());
    let scales = match matrix.format {
        Format::Plain => 0,
        Format::Fp8 => columns.start / BLOCK * 4,
        Format::Nvfp4 => columns.start / GROUP,
    };
    let mut made = vec![0; size];
    for group in 0..count * matrix.groups {
        for (at, output) in outputs.clone().enumerate() {
            let (here, there) = (group * matrix.outputs + output, group * kept.outputs + at);
            for (from, one, skip, to, own) in [
                (from.codes, one.codes, columns.start * one.codes / matrix.columns, to.codes, own.codes),
                (from.scales, one.scales, scales, to.scales, own.scales),
                (from.globals, one.globals, 0, to.globals, own.globals),
            ] {
                made[to + there * own..][..own].copy_from_slice(&bytes[from + here * one + skip..][..own]);
            }
        }
    }
    (made, kept)
}

/// Drawn numbers whose size differs from block to block, so that a scale of the neighbour is another.
fn uneven(draw: &mut Draw, count: usize, columns: usize, scale: f32) -> Vec<f32> {
    let rows = count.div_ceil(columns);
    let sizes: Vec<f32> = (0..rows.div_ceil(8) * columns.div_ceil(GROUP))
        .map(|_| scale * (0.1 + draw.value(1.0).abs()))
        .collect();
    (0..count)
        .map(|at| {
            let block = at / columns / 8 * columns.div_ceil(GROUP) + at % columns / GROUP;
            draw.value(sizes[block])
        })
        .collect()
}

fn every_code_is_its_number() {
    for code in 0..=255u8 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let size = match exponent {
            15 if mantissa == 7.0 => f64::NAN,
            0 => mantissa / 512.0,
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        let want = if code & 0x80 == 0 { size } else { -size };
        let got = fp8::decode(code);
        assert!(f64::from(got) == want || want.is_nan() && got.is_nan(), "{code:#x}: {got}, not {want}");
        assert_eq!(fp8::encode(got), code, "{got}");
    }
    for (code, want) in [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].into_iter().enumerate() {
        assert_eq!(nvfp4::decode(code as u8), want);
        assert_eq!(nvfp4::decode(code as u8 | 8), -want);
        assert_eq!(nvfp4::encode(want), code as u8);
        assert_eq!(nvfp4::encode(-want), code as u8 | 8);
    }
    // Ties go to the even mantissa, and what is too large to the largest.
    for (value, want) in
        [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
    {
        assert_eq!(nvfp4::decode(nvfp4::encode(value)), want, "{value}");
    }
    for (value, want) in [(1e9, 6.0), (5.01, 6.0), (f32::INFINITY, 6.0)] {
        assert_eq!(nvfp4::decode(nvfp4::encode(value)), want, "{value}");
    }
    for (value, want) in [(1e9, 448.0), (465.0, 448.0), (17.0, 16.0), (19.0, 20.0), (1.0 / 1024.0, 0.0)] {
        assert_eq!(fp8::decode(fp8::encode(value)), want, "{value}");
    }
    // The nearest of all codes, everywhere.
    let mut draw = Draw::new(5);
    for _ in 0..20_000 {
        let value = draw.value(1.0) * 2f32.powi(draw.below(22) as i32 - 12);
        let near = |decode: fn(u8) -> f32, codes: u8| {
            let all = (0..=codes).map(decode).filter(|x| !x.is_nan());
            all.map(|x| (f64::from(x) - f64::from(value)).abs()).fold(f64::MAX, f64::min)
        };
        let of = |x: f32| (f64::from(x) - f64::from(value)).abs();
        assert_eq!(of(fp8::decode(fp8::encode(value))), near(fp8::decode, 255), "{value}");
        assert_eq!(of(nvfp4::decode(nvfp4::encode(value))), near(nvfp4::decode, 15), "{value}");
    }
}

fn quantising_what_was_quantised_changes_nothing() {
    let mut draw = Draw::new(6);
    for (rows, columns) in [(1, 16), (130, 272), (128, 128)] {
        let weights = uneven(&mut draw, rows * columns, columns, 3.0);
        let blocks = fp8::quantise(&weights, columns, fp8::Scale::Bf16);
        let again = fp8::codes(&fp8::dequantise(&blocks, columns), columns, &blocks.scales);
        same("fp8", &again, &blocks.codes);
        let groups = nvfp4::quantise(&weights, columns);
        let again = nvfp4::codes(&nvfp4::dequantise(&groups), &groups.scales, groups.global);
        // Of the two zeros one may become the other.
        let values = |codes: &[u8]| -> Vec<f32> {
            codes
                .iter()
                .flat_map(|code| [nvfp4::decode(*code) + 0.0, nvfp4::decode(code >> 4) + 0.0])
                .collect()
        };
        same("nvfp4", &values(&again), &values(&groups.codes));
    }
    let zeros = [0f32; 256];
    assert_eq!(fp8::dequantise(&fp8::quantise(&zeros, 16, fp8::Scale::F32), 16), zeros);
    assert_eq!(nvfp4::dequantise(&nvfp4::quantise(&zeros, 16)), zeros);
}

fn quantised_weights_are_near_what_they_were() {
    let mut draw = Draw::new(7);
    let (rows, columns) = (140, 320);
    let weights = uneven(&mut draw, rows * columns, columns, 2.0);
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |most, x| most.max(x.abs()));
    let blocks = fp8::quantise(&weights, columns, fp8::Scale::F32);
    for (at, (got, want)) in fp8::dequantise(&blocks, columns).iter().zip(&weights).enumerate() {
        let scale = blocks.scales[at / columns / BLOCK * columns.div_ceil(BLOCK) + at % columns / BLOCK];
        assert!((got - want).abs() <= (want.abs() / 15.0).max(scale / 1023.0), "{at}: {got}, not {want}");
    }
    let groups = nvfp4::dequantise(&nvfp4::quantise(&weights, columns));
    for (got, want) in groups.chunks(GROUP).zip(weights.chunks(GROUP)) {
        let most = largest(&mut want.iter().copied());
        // Half of the largest step of codes, 2 of 6, and what rounding the scale adds.
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= most * (1.0 / 6.0 + 1.0 / 14.0), "{got}, not {want}");
        }
    }
}

/// A layer in a format: what it makes by both routes, which must agree, in rows that are `gap` apart.
fn linear<E: Element, F: WeightFormat>(
    scene: &mut Scene,
    w: Ptr<u8>,
    x: &[E],
    [inner, outputs, cuts, gap]: [usize; 4],
) -> Vec<f32> {
    let permanent = scene.buffers();
    let (rows, stride) = (x.len() / inner, outputs + gap);
    let x = scene.input("x", x).cast();
    let numbers = cuts * rows * stride;
    let args = |y: Ptr<u8>| Args {
        x,
        w,
        y,
        rows: rows as u32,
        inner: inner as u32,
        outputs: outputs as u32,
        stride: stride as u32,
        cuts: cuts as u32,
        offset: 0,
    };
    let strip = |row: &[f32]| {
        poisoned("between rows", &row[outputs..]);
        row[..outputs].to_vec()
    };
    let made = if cuts == 2 {
        let y = [scene.output::<f32>("p", numbers), scene.output::<f32>("p of the prompt route", numbers)];
        scene.run::<LinearCut<E, F>>(&args(y[0].cast()));
        scene.run::<LinearCutPrompt<E, F>>(&args(y[1].cast()));
        let made = scene.read(y[0], numbers);
        same("the prompt route", &scene.read(y[1], numbers), &made);
        made.chunks(stride).flat_map(strip).collect()
    } else {
        let y = [scene.output::<E>("y", numbers), scene.output::<E>("y of the prompt route", numbers)];
        scene.run::<Linear<E, F>>(&args(y[0].cast()));
        scene.run::<LinearPrompt<E, F>>(&args(y[1].cast()));
        let made: Vec<E> = scene.read(y[0], numbers);
        same("the prompt route", &scene.read(y[1], numbers), &made);
        made.chunks(stride)
            .flat_map(|row| {
                poisoned("between rows", &row[outputs..]);
                row[..outputs].iter().map(|x| x.widen()).collect::<Vec<_>>()
            })
            .collect()
    };
    scene.truncate(permanent);
    made
}

const SHAPES: [(usize, usize); 6] = [(64, 16), (128, 33), (192, 8), (320, 130), (640, 48), (2048, 24)];

fn by_the_formula<E: Element, F: WeightFormat>(cuts: usize) {
    let mut draw = Draw::new(8);
    for (inner, outputs) in SHAPES {
        let matrix = Matrix { cuts, ..Matrix::plain(outputs, inner).stored(F::FORMAT) };
        // Only what CUDA reads too; the host reads the others in the test of sums.
        if matrix.check(Order::Tiles).is_err() {
            continue;
        }
        let stored = store::<E>(&uneven(&mut draw, outputs * inner, inner, 1.0), matrix, 1);
        for rows in [1, 3, 9, 17, 33, 65] {
            let mut scene = Scene::new();
            let w = scene.stored::<E>("w", &stored.bytes, matrix, 1);
            let x: Vec<E> = draw.elements(rows * inner, 2.0);
            let made = linear::<E, F>(&mut scene, w, &x, [inner, outputs, cuts, rows % 5]);
            let label = format!("{:?}, {rows} rows, {inner} to {outputs}, {cuts} cuts", F::FORMAT);
            let part = inner / cuts;
            let mut want = Vec::new();
            for cut in 0..cuts {
                for x in x.chunks(inner) {
                    let x = wide(&x[cut * part..][..part]);
                    let of = |w: &[f32]| dot(&x, &wide(&w[cut * part..][..part]));
                    want.extend(stored.values.chunks(inner).map(of));
                }
            }
            let elements: Vec<E> = made.iter().map(|x| E::narrow(*x)).collect();
            match cuts {
                1 => close(&label, &elements, &cancelling(want), 1),
                _ => close(&label, &made, &want, 0),
            }
        }
    }
}

fn linear_layers_by_the_formula() {
    for cuts in [1, 2] {
        by_the_formula::<bf16, Fp8>(cuts);
        by_the_formula::<bf16, Nvfp4>(cuts);
    }
}

/// With the bits of a product with the plain numbers, whatever the cut and however blocks lie across it.
fn sums_are_those_of_the_numbers_bit_for_bit() {
    fn check<F: WeightFormat>(inner: usize, outputs: usize, cuts: usize, draw: &mut Draw) {
        let matrix = Matrix { cuts, ..Matrix::plain(outputs, inner).stored(F::FORMAT) };
        let stored = store::<f32>(&uneven(draw, outputs * inner, inner, 1.0), matrix, 1);
        let x: Vec<f32> = draw.elements(5 * inner, 2.0);
        let mut scene = Scene::new();
        let w = scene.stored::<f32>("w", &stored.bytes, matrix, 1);
        let plain = scene.matrix("numbers", &stored.values, matrix.stored(Format::Plain), 1).cast();
        let sizes = [inner, outputs, cuts, 3];
        let (made, want) =
            (linear::<f32, F>(&mut scene, w, &x, sizes), linear::<f32, Plain>(&mut scene, plain, &x, sizes));
        same(&format!("{:?} {sizes:?}", F::FORMAT), &made, &want);
    }
    let mut draw = Draw::new(9);
    for cuts in [1, 2] {
        for (inner, outputs) in [(16, 1), (96, 17), (272, 150), (320, 5), (1024, 300)] {
            check::<Fp8>(inner, outputs, cuts, &mut draw);
            check::<Nvfp4>(inner, outputs, cuts, &mut draw);
        }
        check::<Fp8>(130, 3, cuts, &mut draw);
    }
}

fn a_row_alone_is_the_row_among_others() {
    fn check<F: WeightFormat>(draw: &mut Draw) {
        let (inner, outputs) = (640, 100);
        for cuts in [1, 2] {
            let matrix = Matrix { cuts, ..Matrix::plain(outputs, inner).stored(F::FORMAT) };
            let stored = store::<bf16>(&uneven(draw, outputs * inner, inner, 1.0), matrix, 1);
            let mut scene = Scene::new();
            let w = scene.stored::<bf16>("w", &stored.bytes, matrix, 1);
            for rows in [2, 8, 9, 16, 17, 32, 33, 64, 65] {
                let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
                let among = linear::<bf16, F>(&mut scene, w, &x, [inner, outputs, cuts, 0]);
                for row in [0, rows / 2, rows - 1] {
                    let x = &x[row * inner..][..inner];
                    let alone = linear::<bf16, F>(&mut scene, w, x, [inner, outputs, cuts, 0]);
                    for cut in 0..cuts {
                        let among = &among[(cut * rows + row) * outputs..][..outputs];
                        same(&format!("row {row} of {rows}"), among, &alone[cut * outputs..][..outputs]);
                    }
                }
            }
        }
    }
    let mut draw = Draw::new(10);
    check::<Fp8>(&mut draw);
    check::<Nvfp4>(&mut draw);
}

/// A cut layer of which a rank has one half: the bits of that half where both are.
fn a_half_alone_is_the_half_of_both() {
    fn check<F: WeightFormat>(inner: usize, outputs: usize, draw: &mut Draw) {
        let matrix = Matrix { cuts: 2, ..Matrix::plain(outputs, inner).stored(F::FORMAT) };
        let stored = store::<bf16>(&uneven(draw, outputs * inner, inner, 1.0), matrix, 1);
        let half = inner / 2;
        for rows in [1, 9, 40] {
            let x: Vec<bf16> = draw.elements(rows * inner, 2.0);
            let mut scene = Scene::new();
            let w = scene.stored::<bf16>("w", &stored.bytes, matrix, 1);
            let both = linear::<bf16, F>(&mut scene, w, &x, [inner, outputs, 2, 0]);
            for rank in 0..2 {
                let columns = rank * half..(rank + 1) * half;
                let (bytes, own) = part::<bf16>(&stored.bytes, matrix, 1, 0..outputs, columns.clone());
                let w = scene.stored::<bf16>("w of a rank", &bytes, own, 1);
                let x: Vec<bf16> = x.chunks(inner).flat_map(|x| x[columns.clone()].to_vec()).collect();
                let permanent = scene.buffers();
                let p = [
                    scene.output::<f32>("p", rows * outputs),
                    scene.output::<f32>("p, prompt", rows * outputs),
                ];
                let x = scene.input("x", &x).cast();
                let args = |y: Ptr<f32>| Args {
                    x,
                    w,
                    y: y.cast(),
                    rows: rows as u32,
                    inner: half as u32,
                    outputs: outputs as u32,
                    stride: outputs as u32,
                    cuts: 1,
                    offset: own.offset as u32,
                };
                scene.run::<LinearCut<bf16, F>>(&args(p[0]));
                scene.run::<LinearCutPrompt<bf16, F>>(&args(p[1]));
                let label = format!("{:?}, {rows} rows, {inner} to {outputs}, rank {rank}", F::FORMAT);
                for p in p {
                    let made: Vec<f32> = scene.read(p, rows * outputs);
                    same(&label, &made, &both[rank * rows * outputs..][..rows * outputs]);
                }
                scene.truncate(permanent);
            }
        }
    }
    let mut draw = Draw::new(14);
    for (inner, outputs) in [(128, 33), (256, 8), (640, 48), (4096, 40)] {
        check::<Plain>(inner, outputs, &mut draw);
        check::<Fp8>(inner, outputs, &mut draw);
        check::<Nvfp4>(inner, outputs, &mut draw);
    }
}

/// Weights of a mixture in two formats, and what they make of rows by both routes.
struct Mixture {
    sizes: Sizes,
    matrices: [Matrix; 4],
    counts: [usize; 4],
    rows: [Vec<f32>; 4],
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Mixture {
    fn new(sizes: Sizes, draw: &mut Draw) -> Mixture {
        let [rows, hidden, inner, shared, experts, k] =
            [sizes.rows, sizes.hidden, sizes.inner, sizes.shared_inner, sizes.experts, sizes.k]
                .map(|n| n as usize);
        let pairs = |inner: usize| Matrix::plain(2 * inner, hidden).grouped(2);
        let halves = |inner: usize| Matrix::plain(hidden, inner).cut();
        let matrices = [pairs(inner), pairs(shared), halves(inner), halves(shared)];
        let counts = [experts, 1, experts, 1];
        let scale = 2.0 / (hidden as f32).sqrt();
        let made = std::array::from_fn(|i| {
            let matrix = matrices[i];
            uneven(draw, counts[i] * matrix.elements(Order::Rows), matrix.columns, scale)
        });
        let mut ids = Vec::new();
        for _ in 0..rows {
            let mut left: Vec<u32> = (0..experts as u32).collect();
            ids.extend((0..k).map(|_| left.swap_remove(draw.below(left.len()))));
        }
        // Numbers that every element type holds.
        let x = draw.elements::<bf16>(rows * hidden, 2.0).iter().map(|x| x.widen()).collect();
        let weights = (0..rows * (k + 1)).map(|_| draw.value(1.0).abs()).collect();
        Mixture { sizes, matrices, counts, rows: made, x, ids, weights }
    }

    /// The weights in these formats, or, if `plain`, the numbers that they stand for.
    fn weights<E: Element>(&self, scene: &mut Scene, formats: [Format; 2], plain: bool) -> [Ptr<u8>; 4] {
        std::array::from_fn(|i| {
            let (matrix, count) = (self.matrices[i].stored(formats[i % 2]), self.counts[i]);
            let stored = store::<E>(&self.rows[i], matrix, count);
            match plain {
                false => scene.stored::<E>("weights", &stored.bytes, matrix, count),
                true => {
                    let values: Vec<E> = stored.values.iter().map(|x| E::narrow(*x)).collect();
                    scene.matrix("numbers", &values, matrix.stored(Format::Plain), count).cast()
                }
            }
        })
    }

    /// a, s and p of rows `from .. from + rows`.
    fn run<E: Element, F: WeightFormat, S: WeightFormat>(
        &self,
        scene: &mut Scene,
        [gate_up, shared_gate_up, down, shared_down]: [Ptr<u8>; 4],
        from: usize,
        rows: usize,
    ) -> [Vec<f32>; 3] {
        let permanent = scene.buffers();
        let sizes = Sizes { rows: rows as u32, ..self.sizes };
        let [hidden, inner, shared_inner, k] =
            [sizes.hidden, sizes.inner, sizes.shared_inner, sizes.k].map(|size| size as usize);
        let x: Vec<E> = self.x[from * hidden..][..rows * hidden].iter().map(|x| E::narrow(*x)).collect();
        let ids = scene.input("ids", &self.ids[from * k..][..rows * k]);
        let list = scene.output("list", rows * k);
        let starts = scene.output("starts", sizes.experts as usize + 1);
        scene.run::<ExpertsGroup>(&GroupArgs { ids, list, starts, sizes });
        let (a, s) = (scene.output::<E>("a", rows * k * inner), scene.output::<E>("s", rows * shared_inner));
        let x = scene.input("x", &x).cast();
        let (to_a, to_s) = (a.cast(), s.cast());
        let up = UpArgs { x, ids, list, starts, gate_up, shared_gate_up, a: to_a, s: to_s, sizes };
        scene.run::<ExpertsUp<E, F, S>>(&up);
        let read = |scene: &Scene| (scene.read(a, rows * k * inner), scene.read(s, rows * shared_inner));
        let (got_a, got_s) = read(scene);
        let weights = scene.input("weights", &self.weights[from * (k + 1)..][..rows * (k + 1)]);
        let cuts = sizes.cuts as usize;
        let p = scene.output("p", cuts * rows * hidden);
        let (a, s) = (to_a, to_s);
        scene.run::<ExpertsDown<E, F, S>>(&DownArgs { a, s, ids, weights, down, shared_down, p, sizes });
        let got_p: Vec<f32> = scene.read(p, cuts * rows * hidden);
        scene.run::<ExpertsUpPrompt<E, F, S>>(&up);
        let (prompt_a, prompt_s) = read(scene);
        same("a of the prompt route", &prompt_a, &got_a);
        same("s of the prompt route", &prompt_s, &got_s);
        let products = scene.output("products", cuts * rows * (k + 1) * hidden);
        let args = ProductsArgs { a, s, list, starts, down, shared_down, products, sizes };
        scene.run::<ExpertsProducts<E, F, S>>(&args);
        let p = scene.output("p of the prompt route", cuts * rows * hidden);
        scene.run::<ExpertsSum>(&SumArgs { products, ids, weights, p, sizes });
        same("p of the prompt route", &scene.read(p, cuts * rows * hidden), &got_p);
        scene.truncate(permanent);
        let widen = |values: Vec<E>| values.iter().map(|x| x.widen()).collect();
        [widen(got_a), widen(got_s), got_p]
    }
}

/// The host's bits are those of plain numbers; a row alone is the row among others; and, on a mirror, CUDA agrees.
fn experts_in<F: WeightFormat, S: WeightFormat>(sizes: Sizes, draw: &mut Draw) {
    let mixture = Mixture::new(sizes, draw);
    let (rows, formats) = (sizes.rows as usize, [F::FORMAT, S::FORMAT]);
    let mut scene = Scene::new();
    let weights = mixture.weights::<f32>(&mut scene, formats, false);
    let made = mixture.run::<f32, F, S>(&mut scene, weights, 0, rows);
    let numbers = mixture.weights::<f32>(&mut scene, formats, true);
    let want = mixture.run::<f32, Plain, Plain>(&mut scene, numbers, 0, rows);
    for (made, want) in made.iter().zip(&want) {
        same(&format!("{formats:?}"), made, want);
    }
    among_others::<F, S>(&mixture);
}

fn among_others<F: WeightFormat, S: WeightFormat>(mixture: &Mixture) {
    let (rows, formats) = (mixture.sizes.rows as usize, [F::FORMAT, S::FORMAT]);
    let mut scene = Scene::new();
    let weights = mixture.weights::<bf16>(&mut scene, formats, false);
    let among = mixture.run::<bf16, F, S>(&mut scene, weights, 0, rows);
    for row in [0, rows - 1] {
        let alone = mixture.run::<bf16, F, S>(&mut scene, weights, row, 1);
        for (part, (among, alone)) in among.iter().zip(&alone).enumerate() {
            // p is two halves, each of all rows.
            let halves = if part == 2 { 2 } else { 1 };
            let width = alone.len() / halves;
            for half in 0..halves {
                let among = &among[(half * rows + row) * width..][..width];
                same(&format!("{formats:?}, row {row} of {rows}"), among, &alone[half * width..][..width]);
            }
        }
    }
}

fn experts_in_every_pair_of_formats() {
    let mut draw = Draw::new(12);
    for (rows, hidden, inner, shared_inner, experts, k) in
        [(1, 64, 32, 64, 3, 2), (5, 192, 128, 32, 6, 3), (40, 128, 64, 64, 4, 4), (3, 256, 640, 128, 14, 12)]
    {
        let sizes = Sizes { rows, hidden, inner, shared_inner, experts, k, ..Sizes::WHOLE };
        experts_in::<Plain, Plain>(sizes, &mut draw);
        experts_in::<Plain, Fp8>(sizes, &mut draw);
        experts_in::<Plain, Nvfp4>(sizes, &mut draw);
        experts_in::<Fp8, Plain>(sizes, &mut draw);
        experts_in::<Fp8, Fp8>(sizes, &mut draw);
        experts_in::<Fp8, Nvfp4>(sizes, &mut draw);
        experts_in::<Nvfp4, Plain>(sizes, &mut draw);
        experts_in::<Nvfp4, Fp8>(sizes, &mut draw);
        experts_in::<Nvfp4, Nvfp4>(sizes, &mut draw);
    }
}

/// What a rank's half of the inner widths makes: its columns of a and s, and its half of p.
fn experts_of_a_rank_are_their_part_of_all() {
    fn check<F: WeightFormat, S: WeightFormat>(sizes: Sizes, draw: &mut Draw) {
        let mixture = Mixture::new(sizes, draw);
        let formats = [F::FORMAT, S::FORMAT];
        let [rows, hidden, inner, shared] =
            [sizes.rows, sizes.hidden, sizes.inner, sizes.shared_inner].map(|size| size as usize);
        let mut scene = Scene::new();
        let weights = mixture.weights::<bf16>(&mut scene, formats, false);
        let [all_a, all_s, all_p] = mixture.run::<bf16, F, S>(&mut scene, weights, 0, rows);
        for rank in 0..2 {
            let half = |width: usize| rank * width / 2..(rank + 1) * width / 2;
            let widths = [inner, shared, inner, shared];
            let mut offsets = [0; 4];
            let weights = std::array::from_fn(|i| {
                let (matrix, count) = (mixture.matrices[i].stored(formats[i % 2]), mixture.counts[i]);
                let stored = store::<bf16>(&mixture.rows[i], matrix, count);
                let (outputs, columns) = match i {
                    0 | 1 => (half(widths[i]), 0..hidden),
                    _ => (0..hidden, half(widths[i])),
                };
                let (bytes, own) = part::<bf16>(&stored.bytes, matrix, count, outputs, columns);
                offsets[i] = own.offset as u32;
                scene.stored::<bf16>("weights of a rank", &bytes, own, count)
            });
            let [_, _, offset, shared_offset] = offsets;
            let (inner, shared_inner) = (sizes.inner / 2, sizes.shared_inner / 2);
            let own = Mixture {
                sizes: Sizes { inner, shared_inner, cuts: 1, offset, shared_offset, ..sizes },
                rows: Default::default(),
                x: mixture.x.clone(),
                ids: mixture.ids.clone(),
                weights: mixture.weights.clone(),
                ..mixture
            };
            let [a, s, p] = own.run::<bf16, F, S>(&mut scene, weights, 0, rows);
            let columns = |all: &[f32], width: usize| -> Vec<f32> {
                all.chunks(width).flat_map(|row| row[half(width)].to_vec()).collect()
            };
            let label = format!("{formats:?}, {rows} rows, rank {rank}");
            same(&format!("a of {label}"), &a, &columns(&all_a, widths[0]));
            same(&format!("s of {label}"), &s, &columns(&all_s, widths[1]));
            same(&format!("p of {label}"), &p, &all_p[rank * rows * hidden..][..rows * hidden]);
        }
    }
    let mut draw = Draw::new(15);
    for (rows, hidden, inner, shared_inner, experts, k) in
        [(1, 64, 64, 128, 3, 2), (20, 192, 128, 256, 6, 3), (3, 256, 640, 640, 14, 12)]
    {
        let sizes = Sizes { rows, hidden, inner, shared_inner, experts, k, ..Sizes::WHOLE };
        check::<Plain, Plain>(sizes, &mut draw);
        check::<Plain, Fp8>(sizes, &mut draw);
        check::<Fp8, Plain>(sizes, &mut draw);
        check::<Fp8, Fp8>(sizes, &mut draw);
        check::<Nvfp4, Plain>(sizes, &mut draw);
        check::<Nvfp4, Fp8>(sizes, &mut draw);
        check::<Nvfp4, Nvfp4>(sizes, &mut draw);
    }
}

fn experts_of_real_size() {
    let mut draw = Draw::new(13);
    let sizes =
        Sizes { rows: 9, hidden: 2560, inner: 640, shared_inner: 640, experts: 24, k: 10, ..Sizes::WHOLE };
    let mixture = Mixture::new(sizes, &mut draw);
    among_others::<Fp8, Plain>(&mixture);
    among_others::<Nvfp4, Plain>(&mixture);
}

fn table_rows_are_what_their_codes_stand_for() {
    fn check<E: Element, F: WeightFormat>(draw: &mut Draw) {
        let (width, shard_rows, shards, heads) = (32, 12, 3, 4);
        let table: Vec<f32> = draw.elements(shards * shard_rows * width, 1.0);
        let mut scene = Scene::new();
        let mut at = (Vec::new(), Vec::new());
        let (values, global) = match F::FORMAT {
            Format::Nvfp4 => {
                let groups = nvfp4::quantise(&table, width);
                let parts = groups.codes.chunks(shard_rows * width / 2);
                for (codes, scales) in parts.zip(groups.scales.chunks(shard_rows * width / GROUP)) {
                    at.0.push(scene.input("shard", codes));
                    at.1.push(scene.input("scales", scales));
                }
                (nvfp4::dequantise(&groups), groups.global)
            }
            _ => {
                let (codes, scale) = fp8::quantise_table(&table);
                at.0.extend(codes.chunks(shard_rows * width).map(|codes| scene.input("shard", codes)));
                (codes.iter().map(|code| fp8::decode(*code) * scale).collect(), scale)
            }
        };
        let scales = if at.1.is_empty() { Ptr::NULL } else { scene.addresses("scales", &at.1) };
        let ids: Vec<u32> = (0..9).map(|_| draw.below(1000) as u32).collect();
        let mut facts: Vec<Fact> = facts(&[(0, ids.len())]);
        facts.iter_mut().zip(&ids).for_each(|(fact, id)| fact.id = *id);
        let (primes, offsets) = ([5u64, 7, 11, 13], [0u64, 5, 12, 23]);
        let e: Ptr<E> = scene.output("e", ids.len() * heads * width);
        let args = GatherArgs {
            rows: RowRange { facts: scene.input("facts", &facts), first: 0, count: ids.len() as u32 },
            multipliers: scene.input("multipliers", &[3u64, 5, 7]),
            primes: scene.input("primes", &primes),
            offsets: scene.input("offsets", &offsets),
            shards: scene.addresses("shards", &at.0),
            scales,
            e: e.cast(),
            table_rows: (shards * shard_rows) as u64,
            shard_rows: shard_rows as u64,
            width: width as u32,
            ngram_size: 3,
            heads_per_ngram: 2,
            boundary: 1000,
            global,
            zero: 0,
        };
        scene.run::<NgramGather<E, F>>(&args);
        let mut want = Vec::new();
        for id in &ids {
            for head in 0..heads {
                // Nothing was before: the hash is that of the id alone.
                let row = u64::from(*id) * 3 % primes[head] + offsets[head];
                want.extend(values[row as usize * width..][..width].iter().map(|x| E::narrow(*x)));
            }
        }
        same(&format!("{:?}", F::FORMAT), &scene.read(e, want.len()), &want);
    }
    let mut draw = Draw::new(14);
    check::<f32, Fp8>(&mut draw);
    check::<f32, Nvfp4>(&mut draw);
    check::<bf16, Fp8>(&mut draw);
    check::<bf16, Nvfp4>(&mut draw);
}

fn f32_at(bytes: &[u8], index: usize) -> f32 {
    f32::from_le_bytes(bytes[4 * index..][..4].try_into().expect("four bytes"))
}

fn bf16_at(pair: u32, half: usize) -> f32 {
    bf16::from_bits((pair >> (16 * half)) as u16).widen()
}

/// Decodes tiles as device code does, by masks, and finds every number of the rows.
fn tiles_decode_to_the_rows() {
    let mut draw = Draw::new(15);
    for matrix in [
        Matrix::plain(16, 64),
        Matrix::plain(40, 640).cut(),
        Matrix::plain(2 * 24, 320).grouped(2),
        Matrix::plain(33, 128),
    ] {
        for format in [Format::Fp8, Format::Nvfp4] {
            let matrix = matrix.stored(format);
            matrix.check(Order::Tiles).expect("a size that tiles hold");
            let numbers = matrix.elements(Order::Rows);
            let stored = store::<bf16>(&uneven(&mut draw, 2 * numbers, matrix.columns, 1.0), matrix, 2);
            let tiles = pack::<bf16>(&stored.bytes, &matrix, 2);
            let (parts, _) = matrix.parts(2, Order::Tiles, 2);
            let (units, per_tile) = (matrix.units(), matrix.tile_outputs());
            let width = matrix.columns / matrix.cuts;
            for (at, want) in stored.values.iter().enumerate() {
                let (index, row, column) =
                    (at / numbers, at % numbers / matrix.columns, at % numbers % matrix.columns);
                let (group, output) = (row / matrix.outputs, row % matrix.outputs);
                let (tile, of_tile) = (output / per_tile, group * per_tile + output % per_tile);
                let (cut, column) = (column / width, column % width);
                let unit =
                    (index * matrix.tiles() + tile) * units + cut * (units / matrix.cuts) + column / 64;
                let (g, upper) = (of_tile % 8, of_tile / 8);
                let (t, j, c) = (column % 64 / 16, column % 16 / 4, column % 4);
                let lane = 4 * g + t;
                let word =
                    |index: usize| u32::from_le_bytes(tiles[4 * index..][..4].try_into().expect("a word"));
                let got = match format {
                    Format::Fp8 => {
                        let w = word(((unit * 2 + j / 2) * 32 + lane) * 4 + j % 2 * 2 + c / 2);
                        let pair = match upper {
                            0 => (w >> 4 & 0x07f0_07f0) | (w & 0x8000_8000),
                            _ => (w << 4 & 0x07f0_07f0) | (w << 8 & 0x8000_8000),
                        };
                        bf16_at(pair, c % 2)
                            * 2f32.powi(120)
                            * f32_at(&tiles[parts.scales..], unit * 2 + upper)
                    }
                    _ => {
                        let (w, places) = (word((unit * 32 + lane) * 4 + j), 0x81c0_81c0);
                        let pair = match (c / 2, upper) {
                            (0, 0) => w & places,
                            (0, _) => w << 3 & places,
                            (_, 0) => (w & 0x2007_2007).wrapping_mul(68) & places,
                            _ => (w >> 3 & 0x01c0_01c0) | (w << 1 & 0x8000_8000),
                        };
                        let scale = u32::from(tiles[parts.scales + (unit * 32 + lane) * 2 + upper]);
                        let scale = bf16_at(scale * 0x0010_0010 + 0x7680_7680, 0);
                        let global =
                            f32_at(&tiles[parts.globals..], (index * matrix.tiles() + tile) * 16 + of_tile);
                        bf16::narrow(bf16_at(pair, c % 2) * scale).widen() * global
                    }
                };
                // The products of nvfp4 are made in another order.
                let allowed = if format == Format::Nvfp4 { 2e-7 * want.abs() } else { 0.0 };
                let place = format!("{matrix:?}: matrix {index}, row {row}, column {column}");
                assert!((got - want).abs() <= allowed, "{place}: {got}, not {want}");
            }
        }
    }
}

/// That the data of these tests tells faults: what a wrong scale, a wrong pitch or swapped nibbles make is another.
fn scales_and_nibbles_matter() {
    let mut draw = Draw::new(16);
    let (inner, outputs) = (640, 140);
    let x: Vec<f32> = draw.elements(inner, 2.0);
    fn made<F: WeightFormat>(bytes: &[u8], matrix: Matrix, x: &[f32]) -> Vec<f32> {
        let mut scene = Scene::new();
        let w = scene.stored::<f32>("w", bytes, matrix, 1);
        linear::<f32, F>(&mut scene, w, x, [matrix.columns, matrix.outputs, 1, 0])
    }
    let rows = uneven(&mut draw, outputs * inner, inner, 1.0);
    for format in [Format::Fp8, Format::Nvfp4] {
        let matrix = Matrix::plain(outputs, inner).stored(format);
        let stored = store::<f32>(&rows, matrix, 1);
        let (parts, size) = matrix.parts(1, Order::Rows, 4);
        let run = |bytes: &[u8]| match format {
            Format::Fp8 => made::<Fp8>(bytes, matrix, &x),
            _ => made::<Nvfp4>(bytes, matrix, &x),
        };
        let right = run(&stored.bytes);
        let differs = |what: &str, change: &dyn Fn(&mut [u8])| {
            let mut bytes = stored.bytes.clone();
            change(&mut bytes);
            assert_ne!(run(&bytes), right, "{format:?}: {what}");
        };
        let scale = if format == Format::Fp8 { 4 } else { 1 };
        let scales = parts.scales..if format == Format::Fp8 { size } else { parts.globals };
        differs("scales of the next block", &|bytes| bytes[scales.clone()].rotate_left(scale));
        differs("codes of the next pair", &|bytes| bytes[..parts.scales].rotate_left(1));
        if format == Format::Nvfp4 {
            differs("nibbles swapped", &|bytes| {
                bytes[..parts.scales].iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
            });
            differs("another global", &|bytes| bytes[parts.globals + 3] ^= 1);
        }
    }
}

fn sizes_that_do_not_fit_a_format_are_refused() {
    let scene = Scene::new();
    let args = Args { rows: 1, inner: 24, outputs: 4, stride: 4, cuts: 1, ..bytemuck::Zeroable::zeroed() };
    let why = scene.refused::<Linear<f32, Nvfp4>>(&args);
    assert!(why.contains("24 columns in nvfp4 are no groups of 16"), "{why}");
    // What the host reads and tiles cannot hold.
    let why = Matrix::plain(16, 96).cut().stored(Format::Fp8).check(Order::Tiles);
    assert_eq!(why, Ok(()), "units of 48 columns lie in one block");
    let why =
        Matrix::plain(16, 192).cut().stored(Format::Fp8).check(Order::Tiles).expect_err("96 is cut badly");
    assert!(why.contains("a cut of 96 columns in fp8"), "{why}");
    let why =
        Matrix::plain(16, 48).cut().stored(Format::Nvfp4).check(Order::Tiles).expect_err("24 is no groups");
    assert!(why.contains("a cut of 24 columns in nvfp4"), "{why}");
}
