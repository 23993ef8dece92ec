//! Packing of weight matrices: where every element goes.

use graph::Ptr;
use half::bf16;
use kernels::numerics::Element;
use kernels::tiles::{Args, Pack, Place};
use kernels::weight::{Matrix, Order};
use tests::check::{Draw, Scene, same};

tests::tests! {
    any: every_element_is_in_its_place_and_the_rest_is_zero;
    host: what_cannot_be_packed_is_refused, a_matrix_packed_in_runs_is_the_matrix_packed_whole;
}

/// Packs by walking the elements of the matrix, not those of the tiles.
fn want<E: Element>(m: &Matrix, from: &[E]) -> Vec<E> {
    let mut to = vec![E::zeroed(); m.elements(Order::Tiles)];
    let (width, per_tile) = (m.columns / m.cuts, m.tile_outputs());
    for (at, &value) in from.iter().enumerate() {
        let (column, row) = (at % m.columns, at / m.columns);
        let (group, output) = (row / m.outputs, row % m.outputs);
        let (cut, column) = (column / width, column % width);
        let (tile, row) = (output / per_tile, group * per_tile + output % per_tile);
        let unit = cut * (m.units() / m.cuts) + column / 64;
        // Of the 64 columns of a unit, lane t of a row has 16, product j four of them.
        let (t, j, of_four) = (column % 64 / 16, column % 16 / 4, column % 4);
        let (g, upper) = (row % 8, row / 8);
        let register = of_four / 2 * 2 + upper;
        to[(((tile * m.units() + unit) * 4 + j) * 32 + g * 4 + t) * 8 + register * 2 + of_four % 2] = value;
    }
    to
}

fn check<E: Element>(matrix: Matrix, draw: &mut Draw) {
    let from: Vec<E> = draw.elements(matrix.elements(Order::Rows), 1.0);
    let mut scene = Scene::new();
    let to: Ptr<E> = scene.output("to", matrix.elements(Order::Tiles));
    let place = |order, base| Place::new(&matrix, 1, order, size_of::<E>(), base);
    let from_at = scene.input("from", &from).cast();
    let args = Args::new(&matrix, 1, place(Order::Rows, from_at), place(Order::Tiles, to.cast()));
    scene.run::<Pack<E>>(&args);
    same(&format!("{matrix:?}"), &scene.read(to, matrix.elements(Order::Tiles)), &want(&matrix, &from));
}

fn every_element_is_in_its_place_and_the_rest_is_zero() {
    let mut draw = Draw::new(11);
    for outputs in [16, 1, 15, 33] {
        for columns in [64, 10, 130, 256] {
            for matrix in [
                Matrix::plain(outputs, columns),
                Matrix::plain(outputs, columns).cut(),
                Matrix::plain(2 * outputs, columns).grouped(2),
                Matrix::plain(3 * outputs, columns).grouped(3),
                Matrix::plain(4 * outputs, columns).grouped(4).cut(),
            ] {
                check::<bf16>(matrix, &mut draw);
                check::<f32>(matrix, &mut draw);
            }
        }
    }
}

fn a_matrix_packed_in_runs_is_the_matrix_packed_whole() {
    let matrix = Matrix::plain(50, 96);
    let from: Vec<bf16> = Draw::new(3).elements(matrix.elements(Order::Rows), 1.0);
    let run = matrix.run(20 * 96);
    assert_eq!(run, 16, "whole tiles, as many as fit");
    let mut parts = Vec::new();
    for first in (0..50).step_by(run) {
        let part = Matrix { outputs: run.min(50 - first), ..matrix };
        parts.extend(want(&part, &from[first * 96..][..part.elements(Order::Rows)]));
    }
    same("parts", &parts, &want(&matrix, &from));
    assert_eq!(matrix.run(1), 16, "one tile at least");
    assert_eq!(matrix.grouped(2).run(1), 25, "groups share tiles");
}

fn what_cannot_be_packed_is_refused() {
    let scene = Scene::new();
    let good = Args { outputs: 4, groups: 2, columns: 8, cuts: 2, count: 1, ..bytemuck::Zeroable::zeroed() };
    for args in [
        Args { outputs: 0, ..good },
        Args { groups: 0, ..good },
        Args { groups: 17, ..good },
        Args { columns: 0, ..good },
        Args { columns: 9, ..good },
        Args { cuts: 0, ..good },
    ] {
        let why = scene.refused::<Pack<bf16>>(&args);
        assert!(why.contains(&format!("columns {}", args.columns)), "{why}");
    }
}
