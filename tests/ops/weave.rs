//! Parts of rows side by side.

use half::bf16;
use kernels::numerics::Element;
use kernels::weave::{Args, Weave};
use tests::check::{Draw, Scene, same};

tests::tests! {
    any: parts_come_side_by_side_in_bf16;
    host: parts_come_side_by_side_in_f32, sizes_without_a_meaning_are_refused;
}

fn weaves<E: Element>() {
    let mut draw = Draw::new(1);
    for (parts, rows, width) in
        [(1, 1, 1), (2, 1, 8), (2, 3, 5), (2, 16, 4096), (2, 5, 4097), (2, 2, 124_160), (3, 4, 40)]
    {
        let mut scene = Scene::new();
        let from: Vec<E> = draw.elements(parts * rows * width, 1.0);
        let to = scene.output::<E>("to", parts * rows * width);
        let args = Args {
            from: scene.input("from", &from).cast(),
            to: to.cast(),
            parts: parts as u32,
            rows: rows as u32,
            width: width as u32,
            zero: 0,
        };
        scene.run::<Weave<E>>(&args);
        let made: Vec<E> = scene.read(to, parts * rows * width);
        for (at, made) in made.chunks(width).enumerate() {
            let (row, part) = (at / parts, at % parts);
            same(&format!("part {part} of row {row}"), made, &from[(part * rows + row) * width..][..width]);
        }
    }
}

fn parts_come_side_by_side_in_bf16() {
    weaves::<bf16>();
}

fn parts_come_side_by_side_in_f32() {
    weaves::<f32>();
}

fn sizes_without_a_meaning_are_refused() {
    let scene = Scene::new();
    let good = Args { parts: 2, rows: 1, width: 1, ..bytemuck::Zeroable::zeroed() };
    for args in [Args { parts: 0, ..good }, Args { rows: 0, ..good }, Args { width: 0, ..good }] {
        assert!(scene.refused::<Weave<f32>>(&args).contains("all positive"));
    }
}
