//! `pixels`: bytes as elements.

use half::bf16;
use kernels::numerics::Element;
use kernels::pixels::{Args, Pixels};
use tests::check::{Draw, Scene, close, same};

tests::tests! {
    any: bytes_become_what_the_formula_says_in_bf16;
    host: bytes_become_what_the_formula_says_in_f32, nothing_to_do_is_refused;
}

fn run<E: Element>(bytes: &[u8]) -> Vec<E> {
    let mut scene = Scene::new();
    let y = scene.output::<E>("y", bytes.len());
    let args = Args { bytes: scene.input("bytes", bytes), y: y.cast(), count: bytes.len() as u64 };
    scene.run::<Pixels<E>>(&args);
    scene.read(y, bytes.len())
}

fn against_the_formula<E: Element>() {
    let all: Vec<u8> = (0..=255).collect();
    let table: Vec<E> = run(&all);
    let want: Vec<f64> = all.iter().map(|&byte| (f64::from(byte) - 127.5) / 127.5).collect();
    close("every byte", &table, &want, 1);
    assert_eq!([table[0].widen(), table[255].widen()], [-1.0, 1.0]);
    let mut draw = Draw::new(1);
    for count in [1, 15, 16, 17, 4095, 4096, 4097, 3 * 1536] {
        let bytes: Vec<u8> = (0..count).map(|_| draw.bits() as u8).collect();
        let want: Vec<E> = bytes.iter().map(|&byte| table[byte as usize]).collect();
        same(&format!("{count} bytes"), &run::<E>(&bytes), &want);
    }
}

fn bytes_become_what_the_formula_says_in_bf16() {
    against_the_formula::<bf16>();
}

fn bytes_become_what_the_formula_says_in_f32() {
    against_the_formula::<f32>();
}

fn nothing_to_do_is_refused() {
    let why = Scene::new().refused::<Pixels<f32>>(&bytemuck::Zeroable::zeroed());
    assert!(why.contains("count 0"), "{why}");
}
