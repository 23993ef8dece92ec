//! The mirror of a scene: what a second device does wrong is found. The second device here is a host as well.

use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::{Pod, Zeroable};
use graph::host::{Access, HostOptions};
use graph::{Device, Fault, Grid, Kernel, Ptr, Source, Twin};
use kernels::weight::{Matrix, Order};
use tests::check::{Draw, Scene, same};
use tests::differ::{Kind, differ};
use tests::mirror::pack;

tests::tests! {
    host: results_of_the_mirror_are_taken_over, a_wrong_value_is_found, a_write_around_a_buffer_is_found,
        a_changed_input_is_found, numbers_that_look_like_an_address_are_not_taken_for_one,
        what_is_stacked_is_packed_one_by_one, values_differ_by_what_their_kind_allows;
}

/// How often [`Fickle`] ran, by its number: the first is the host's, the second the mirror's.
static RUNS: [AtomicU32; 8] = [const { AtomicU32::new(0) }; 8];

/// Writes 1 at `right`, and on the mirror `change` so many words after `wrong` instead.
struct Fickle;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct FickleArgs {
    right: Ptr<u32>,
    wrong: Ptr<u32>,
    words: i64,
    number: u32,
    change: u32,
    looks: [u32; 2],
}

impl Kernel for Fickle {
    type Args = FickleArgs;
    const NAME: &'static str = "fickle";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = Some(Twin {
        source: &Source { name: "fickle.cu", text: "", includes: &[] },
        symbol: "fickle",
        block: 32,
        shared_bytes: 0,
        overlaps: false,
    });

    fn check(_: &FickleArgs) -> Result<(), String> {
        Ok(())
    }

    fn grid(_: &FickleArgs) -> Grid {
        Grid::line(1)
    }

    fn host(args: &FickleArgs, memory: &Access<'_>) -> Result<(), Fault> {
        match RUNS[args.number as usize].fetch_add(1, Ordering::Relaxed) {
            0 => memory.write(args.right, 1)?[0] = 1,
            _ => {
                let at = args.wrong.address().wrapping_add_signed(4 * args.words);
                memory.write(Ptr::new(at), 1)?[0] = args.change;
            }
        }
        Ok(())
    }
}

fn mirrored() -> Scene {
    let device = Device::host(HostOptions::default());
    // Addresses of the mirror are others.
    let before = device.arena("what was there before", 1).expect("memory");
    let scene = Scene::mirrored_on(device);
    drop(before);
    scene
}

/// What a scene says of a launch.
fn said(scene: &Scene, args: &FickleArgs) -> String {
    scene.try_run::<Fickle>(args).expect_err("the launch is found out")
}

fn args(number: u32, right: Ptr<u32>, wrong: Ptr<u32>, change: u32) -> FickleArgs {
    FickleArgs { right, wrong, words: 0, number, change, looks: [0; 2] }
}

fn results_of_the_mirror_are_taken_over() {
    let mut scene = mirrored();
    let y = scene.output::<u32>("y", 3);
    scene.holds(y, Kind::Own);
    scene.run::<Fickle>(&args(0, y.at(1), y.at(1), 7));
    assert_eq!(scene.read(y, 3), [u32::MAX, 7, u32::MAX]);
}

fn a_wrong_value_is_found() {
    let mut scene = mirrored();
    let y = scene.output::<u32>("y", 3);
    let why = said(&scene, &args(1, y.at(1), y.at(1), 2));
    assert!(why.contains("the twin of fickle: `y`: 1 values, worst 4: 1 on the host, 2 on CUDA"), "{why}");
    // What the host writes, the mirror must write too.
    let mut scene = mirrored();
    let (y, z) = (scene.output::<u32>("y", 1), scene.output::<u32>("z", 1));
    let why = said(&scene, &args(2, y, z, 1));
    assert!(why.contains("`y`: 4 values"), "{why}");
}

fn a_write_around_a_buffer_is_found() {
    for (number, words) in [(3, -1), (4, 2)] {
        let mut scene = mirrored();
        let y = scene.output::<u32>("y", 2);
        let why = said(&scene, &FickleArgs { words, ..args(number, y, y, 1) });
        assert_eq!(why, "the twin of fickle wrote around `y`");
    }
}

fn a_changed_input_is_found() {
    let mut scene = mirrored();
    let (y, x) = (scene.output::<u32>("y", 1), scene.input("x", &[5u32]));
    let why = said(&scene, &args(5, y, x, 1));
    assert!(why.contains("the twin of fickle changed its input `x`"), "{why}");
}

fn numbers_that_look_like_an_address_are_not_taken_for_one() {
    let mut scene = mirrored();
    let y = scene.output::<u32>("y", 1);
    let looks = [y.address() as u32, (y.address() >> 32) as u32];
    let why = said(&scene, &FickleArgs { looks, ..args(6, y, y, 1) });
    assert_eq!(why, "3 words look like the 2 addresses");
    // Numbers that are not the very address are left alone, even if they lie in a buffer.
    let looks = [y.at(1).address() as u32, looks[1]];
    scene.run::<Fickle>(&FickleArgs { looks, ..args(7, y, y, 1) });
}

fn what_is_stacked_is_packed_one_by_one() {
    let matrix = Matrix::plain(6, 10).grouped(2);
    let rows: Vec<f32> = Draw::new(1).elements(matrix.elements(Order::Rows), 1.0);
    let mut bytes = bytemuck::cast_slice::<f32, u8>(&rows).to_vec();
    bytes.resize(matrix.bytes(1, Order::Rows, 4), 0);
    let tiles: Vec<f32> = bytemuck::pod_collect_to_vec(&pack::<f32>(&bytes, &matrix, 1));
    assert_eq!(tiles.len(), matrix.elements(Order::Tiles));
    assert_eq!(tiles.iter().filter(|&&x| x != 0.0).count(), rows.len());
    same("rows", &mirrored_matrix(&rows, matrix), &rows);
}

/// Two times the matrix, as a scene has it on a host.
fn mirrored_matrix(rows: &[f32], matrix: Matrix) -> Vec<f32> {
    let mut scene = mirrored();
    let w = scene.matrix("w", &[rows, rows].concat(), matrix, 2);
    scene.read(w.at(rows.len()), rows.len())
}

fn values_differ_by_what_their_kind_allows() {
    let check = |kind: Kind, a: [f32; 2], b: [f32; 2], good: bool| {
        let why = differ(kind, bytemuck::bytes_of(&a), bytemuck::bytes_of(&b));
        assert_eq!(why.is_none(), good, "{kind:?} {a:?} {b:?}: {why:?}");
    };
    check(Kind::F32, [100.0, 1.0], [100.0, 1.009], true);
    check(Kind::F32, [100.0, 1.0], [100.0, 1.011], false);
    check(Kind::Wide, [100.0, 1.0], [100.0, 1.7], true);
    check(Kind::Wide, [100.0, 1.0], [102.0, 1.0], false);
    check(Kind::Exact, [1.0, 1.0], [1.0, 1.000_001], false);
    check(Kind::Own, [1.0, 1.0], [5.0, 5.0], true);
    check(Kind::F32, [f32::NAN, 1.0], [f32::NAN, 1.0], true);
    check(Kind::F32, [f32::NAN, 1.0], [0.0, 1.0], false);
    check(Kind::F32, [0.0, 1.0], [f32::NAN, 1.0], false);
}
