//! Positions of patches: what is added for them, and how queries and keys turn.

use half::bf16;
use kernels::numerics::Element;
use kernels::patch::{AddPositions, Patches, PositionArgs, TurnArgs, TurnPatches};
use kernels::rope::frequencies;
use tests::check::{Draw, Scene, Want, close, r16, same};

use crate::ops::formula::wide;

tests::tests! {
    any: positions_in_bf16, turns_in_bf16, a_row_alone_is_the_row_among_others;
    host: positions_in_f32, turns_in_f32, patches_come_in_squares, sizes_without_a_meaning_are_refused;
}

/// Pictures as (height, width, merge), in patches.
const SIZES: [(u32, u32, u32); 6] = [(2, 2, 2), (4, 6, 2), (6, 4, 2), (1, 5, 1), (3, 1, 1), (6, 9, 3)];

/// Two pictures and a half, from patch `first` on.
fn patches((height, width, merge): (u32, u32, u32), first: u32) -> Patches {
    Patches { first, rows: height * width * 5 / 2, height, width, merge, zero: 0 }
}

/// The places of all patches of a picture, in order.
fn places((height, width, merge): (u32, u32, u32)) -> Vec<(usize, usize)> {
    let mut places = Vec::new();
    for y in (0..height).step_by(merge as usize) {
        for x in (0..width).step_by(merge as usize) {
            for (down, right) in (0..merge).flat_map(|down| (0..merge).map(move |right| (down, right))) {
                places.push(((y + down) as usize, (x + right) as usize));
            }
        }
    }
    places
}

fn patches_come_in_squares() {
    for size in SIZES {
        let places = places(size);
        for first in [0, 1, 7] {
            for row in 0..places.len() * 2 {
                let want = places[(first + row) % places.len()];
                assert_eq!(patches(size, first as u32).place(row), want, "{size:?} from {first} on");
            }
        }
    }
}

const SIDE: usize = 5;

fn add_positions<E: Element>(patches: Patches, x: &[E], table: &[E]) -> Vec<E> {
    let mut scene = Scene::new();
    let hidden = table.len() / (SIDE * SIDE);
    let at = scene.state("x", x);
    let args = PositionArgs {
        patches,
        x: at.cast(),
        table: scene.input("table", table).cast(),
        side: SIDE as u32,
        hidden: hidden as u32,
    };
    scene.run::<AddPositions<E>>(&args);
    scene.read(at, x.len())
}

fn positions<E: Element>() {
    let mut draw = Draw::new(1);
    for hidden in [1, 7, 8, 32, 516] {
        let table: Vec<E> = draw.elements(SIDE * SIDE * hidden, 1.0);
        for size in SIZES {
            let patches = patches(size, 3);
            let x: Vec<E> = draw.elements(patches.rows as usize * hidden, 1.0);
            let got = add_positions(patches, &x, &table);
            let places = places(size);
            for (row, (x, got)) in x.chunks(hidden).zip(got.chunks(hidden)).enumerate() {
                let (line, column) = places[(3 + row) % places.len()];
                let axis = |at: usize, count: u32| {
                    let place = (at * (SIDE - 1)) as f64 / f64::from(count.max(2) - 1);
                    let low = (place + 1e-9).floor().min((SIDE - 1) as f64);
                    (low as usize, (low as usize + 1).min(SIDE - 1), place - low)
                };
                let ((y0, y1, dy), (x0, x1, dx)) = (axis(line, size.0), axis(column, size.1));
                let entry = |y: usize, x: usize| wide(&table[(y * SIDE + x) * hidden..][..hidden]);
                let near = [entry(y0, x0), entry(y0, x1), entry(y1, x0), entry(y1, x1)];
                let want: Vec<Want> = (wide(x).iter().enumerate())
                    .map(|(j, x)| {
                        let top = near[0][j] * (1.0 - dx) + near[1][j] * dx;
                        let bottom = near[2][j] * (1.0 - dx) + near[3][j] * dx;
                        let position = top * (1.0 - dy) + bottom * dy;
                        let value = x + r16::<E>(position);
                        Want { value, scale: x.abs().max(position.abs()).max(1e-2) }
                    })
                    .collect();
                close(&format!("{size:?}, hidden {hidden}, row {row}"), got, &want, 2);
            }
        }
    }
}

fn positions_in_bf16() {
    positions::<bf16>();
}

fn positions_in_f32() {
    positions::<f32>();
}

fn turn<E: Element>(patches: Patches, x: &[E], heads: usize, width: usize) -> Vec<E> {
    let mut scene = Scene::new();
    let at = scene.state("x", x);
    let args = TurnArgs {
        patches,
        x: at.cast(),
        frequencies: scene.input("frequencies", &frequencies(10_000.0, width / 2)),
        heads: heads as u32,
        width: width as u32,
        stride: (x.len() / patches.rows as usize) as u32,
        zero: 0,
    };
    scene.run::<TurnPatches<E>>(&args);
    scene.read(at, x.len())
}

fn turns<E: Element>() {
    let mut draw = Draw::new(2);
    for (heads, width) in [(1, 4), (3, 16), (2, 32), (2, 72), (1, 256)] {
        let frequencies = frequencies(10_000.0, width / 2);
        for size in [(4, 6, 2), (3, 1, 1), (60, 2, 2)] {
            let patches = patches(size, 5);
            let stride = 3 * heads * width;
            let x: Vec<E> = draw.elements(patches.rows as usize * stride, 1.0);
            let got = turn(patches, &x, heads, width);
            let places = places(size);
            for (row, (x, got)) in x.chunks(stride).zip(got.chunks(stride)).enumerate() {
                let (line, column) = places[(5 + row) % places.len()];
                let (turned, values) = x.split_at(2 * heads * width);
                same("values stay", &got[turned.len()..], values);
                for (head, got) in turned.chunks(width).zip(got.chunks(width)) {
                    let (v, half) = (wide(head), width / 2);
                    let want: Vec<Want> = (0..width)
                        .map(|j| {
                            let i = j % half;
                            let at = if i < half / 2 { line } else { column };
                            let angle = f64::from(at as f32 * frequencies[i % (half / 2)]);
                            let (a, b) = (v[i], v[i + half]);
                            let value = match j < half {
                                true => a * angle.cos() - b * angle.sin(),
                                false => b * angle.cos() + a * angle.sin(),
                            };
                            Want { value, scale: a.hypot(b) }
                        })
                        .collect();
                    close(&format!("{size:?}, {heads} heads of {width}, row {row}"), got, &want, 1);
                }
            }
        }
    }
}

fn turns_in_bf16() {
    turns::<bf16>();
}

fn turns_in_f32() {
    turns::<f32>();
}

fn a_row_alone_is_the_row_among_others() {
    let mut draw = Draw::new(3);
    let (heads, width, hidden) = (2, 72, 144);
    let table: Vec<bf16> = draw.elements(SIDE * SIDE * hidden, 1.0);
    for size in SIZES {
        let all = patches(size, 1);
        let x: Vec<bf16> = draw.elements(all.rows as usize * 3 * hidden, 1.0);
        let (turned, moved) = (turn(all, &x, heads, width), add_positions(all, &x[..x.len() / 3], &table));
        for row in 0..all.rows {
            let one = Patches { first: all.first + row, rows: 1, ..all };
            let label = format!("row {row} of {size:?}");
            let at = row as usize * 3 * hidden..(row as usize + 1) * 3 * hidden;
            same(&label, &turn(one, &x[at.clone()], heads, width), &turned[at]);
            let at = row as usize * hidden..(row as usize + 1) * hidden;
            same(&label, &add_positions(one, &x[at.clone()], &table), &moved[at]);
        }
    }
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let patches = patches((4, 6, 2), 0);
    let position = PositionArgs { patches, side: 5, hidden: 8, ..bytemuck::Zeroable::zeroed() };
    let turn = TurnArgs { patches, heads: 2, width: 8, stride: 48, ..bytemuck::Zeroable::zeroed() };
    for (wrong, says) in [
        (Patches { rows: 0, ..patches }, "all positive"),
        (Patches { merge: 0, ..patches }, "all positive"),
        (Patches { width: 5, ..patches }, "4 by 5 patches are not squares of 2 by 2"),
        (Patches { height: 1 << 16, width: 1 << 16, ..patches }, "more than 2^32"),
    ] {
        let why = scene.refused::<AddPositions<f32>>(&PositionArgs { patches: wrong, ..position });
        assert!(why.contains(says), "{why}");
        let why = scene.refused::<TurnPatches<f32>>(&TurnArgs { patches: wrong, ..turn });
        assert!(why.contains(says), "{why}");
    }
    for args in [PositionArgs { side: 0, ..position }, PositionArgs { hidden: 0, ..position }] {
        let why = scene.refused::<AddPositions<f32>>(&args);
        assert!(why.contains("both positive"), "{why}");
    }
    let why = scene.refused::<AddPositions<f32>>(&PositionArgs { side: u32::MAX, ..position });
    assert!(why.contains("too many for a table"), "{why}");
    let why = scene.refused::<TurnPatches<f32>>(&TurnArgs { width: 6, ..turn });
    assert!(why.contains("2 heads of 6: at least one, of a multiple of 4"), "{why}");
    let why = scene.refused::<TurnPatches<f32>>(&TurnArgs { stride: 31, ..turn });
    assert!(why.contains("do not fit a row of 31"), "{why}");
}
