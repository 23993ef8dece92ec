//! How weights come into memory: in batches of any size, as the device's order wants them, and not at all.

use std::fs::{self, OpenOptions};
use std::path::Path;

use graph::host::HostOptions;
use graph::{Device, Emission, Planted, Ptr};
use half::bf16;
use kernels::launch;
use kernels::numerics::ElementType;
use kernels::tiles::{self, Place};
use kernels::weight::{Matrix, Order};
use runtime::checkpoint::Checkpoint;
use runtime::checkpoint::layout::Part;
use runtime::error::Error;
use runtime::weights::{DenseForm, Loaded, MixerWeights, TablePlace, WeightForm, WeightPlan};
use tests::fixture::repository;

const FOLDERS: [&str; 4] = ["base_bf16", "base_fp32", "quant_fp8_block", "quant_nvfp4"];
const ELEMENTS: [ElementType; 2] = [ElementType::Bf16, ElementType::F32];
const ORDERS: [Order; 2] = [Order::Rows, Order::Tiles];
/// Bytes of a batch and of a piece: from a tile's rows at a time, each by itself, to whole matrices, with boundaries
/// inside of and across tensors.
const BATCHES: [(usize, usize); 5] = [(1, 1), (1000, 300), (5000, 700), (50_000, 20_000), (1 << 30, 777)];

fn host() -> Device {
    Device::host(HostOptions::default())
}

fn open(folder: &str) -> Checkpoint {
    Checkpoint::open(&repository("tests/oracle/checkpoints").join(folder)).expect("the checkpoint opens")
}

fn plan(checkpoint: &Checkpoint, form: WeightForm) -> WeightPlan {
    WeightPlan::new(checkpoint, form).expect("a plan")
}

fn load(plan: WeightPlan, checkpoint: &Checkpoint) -> Loaded {
    plan.load(checkpoint, &host(), &mut |_, _| {}).expect("weights load")
}

/// All bytes of loaded weights. What was loaded to fresh devices lies at the same addresses.
fn bytes(loaded: &Loaded) -> Vec<Vec<u8>> {
    let arenas = loaded.memory.arenas();
    arenas.map(|arena| arena.read(arena.base(), arena.bytes()).expect("the weights are there")).collect()
}

#[test]
fn batches_of_any_size_leave_the_same_bytes() {
    for folder in FOLDERS {
        let checkpoint = open(folder);
        for element in ELEMENTS {
            for order in ORDERS {
                for (table, dense) in [
                    (TablePlace::Device, DenseForm::Stored),
                    (TablePlace::Pinned, DenseForm::Stored),
                    (TablePlace::Device, DenseForm::Fp8),
                ] {
                    let vision = checkpoint.config.vision.is_some();
                    let form = WeightForm { table, dense, vision, ..WeightForm::new(element, order) };
                    let want = bytes(&load(plan(&checkpoint, form), &checkpoint));
                    for (size, piece) in BATCHES {
                        let got = bytes(&load(plan(&checkpoint, form).in_batches(size, piece), &checkpoint));
                        assert!(
                            got == want,
                            "{folder} {element:?} {order:?}, table {table}, dense {dense:?}, {size} bytes"
                        );
                    }
                }
            }
        }
    }
}

/// What rows are packed into, all at once.
fn packed(rows: &Loaded, at: Ptr<u8>, matrix: Matrix, count: usize) -> Vec<u8> {
    let device = host();
    let size = |order| matrix.bytes(count, order, 2);
    let from = device.arena("rows", size(Order::Rows)).expect("memory");
    let to = device.arena("tiles", size(Order::Tiles)).expect("memory");
    let bytes: Vec<u8> = rows.memory.arena.read(at, from.bytes()).expect("the weights are there");
    from.write(from.base(), &bytes).expect("written");
    let place = |order, base| Place::new(&matrix, count, order, 2, base);
    let args =
        tiles::Args::new(&matrix, count, place(Order::Rows, from.base()), place(Order::Tiles, to.base()));
    let mut emission = Emission::new();
    launch!(emission, ElementType::Bf16, [matrix.format], tiles::Pack, &args).expect("it is legal");
    let stream = device.stream();
    stream.run(emission, &[from, to.clone()]).expect("queued");
    stream.synchronize().expect("packed");
    to.read(to.base(), to.bytes()).expect("tiles")
}

#[test]
fn tiles_are_what_all_rows_at_once_are_packed_into() {
    for folder in FOLDERS {
        let checkpoint = open(folder);
        let form = |order| WeightForm::new(ElementType::Bf16, order);
        let rows = load(plan(&checkpoint, form(Order::Rows)), &checkpoint);
        let config = &checkpoint.config;
        let (hidden, inner, experts) = (config.hidden_size, config.moe_intermediate_size, config.num_experts);
        for (size, piece) in BATCHES {
            let tiled = load(plan(&checkpoint, form(Order::Tiles)).in_batches(size, piece), &checkpoint);
            let same = |what: &str, at: Ptr<u8>, tiles: Ptr<u8>, matrix: Matrix, count: usize| {
                let got: Vec<u8> = tiled
                    .memory
                    .arena
                    .read(tiles, matrix.bytes(count, Order::Tiles, 2))
                    .expect("the weights are there");
                assert!(got == packed(&rows, at, matrix, count), "{folder} {what}, {size} bytes");
            };
            for (a, b) in rows.weights.layers.iter().zip(&tiled.weights.layers) {
                let gate_up = Matrix::plain(2 * inner, hidden).grouped(2).stored(a.moe.routed);
                same("gate_up", a.moe.gate_up, b.moe.gate_up, gate_up, experts);
                let down = Matrix::plain(hidden, inner).cut().stored(a.moe.routed);
                same("down", a.moe.down, b.moe.down, down, experts);
                let (MixerWeights::Sparse(a), MixerWeights::Sparse(b)) = (&a.mixer, &b.mixer) else {
                    continue;
                };
                for (a, b) in a.input.iter().zip(&b.input) {
                    let input = Matrix::plain(a.outputs, hidden).stored(a.format);
                    same("attention input", a.at, b.at, input, 1);
                }
            }
        }
    }
}

#[test]
fn every_byte_is_told_once_whatever_the_batches() {
    for folder in FOLDERS {
        let checkpoint = open(folder);
        let stored = checkpoint.bytes(Part::Text) + checkpoint.bytes(Part::Table);
        for order in ORDERS {
            for (size, piece) in BATCHES {
                let (mut last, mut calls) = (None, 0);
                let plan =
                    plan(&checkpoint, WeightForm::new(ElementType::Bf16, order)).in_batches(size, piece);
                let loaded = plan.load(&checkpoint, &host(), &mut |done, total| {
                    let (before, all) = last.unwrap_or((0, total));
                    assert!(done >= before && done <= total && total == all, "{done} of {total}");
                    assert_eq!(done == 0, calls == 0, "reading begins at nothing, and goes on");
                    (last, calls) = (Some((done, total)), calls + 1);
                });
                loaded.expect("weights load");
                let (done, total) = last.expect("it was told");
                assert_eq!(done, total, "{folder} {order:?}, {size} bytes");
                // Scales that are one number for a whole tensor are not told.
                let untold = stored - total;
                assert!(untold * 100 < stored && (untold == 0 || folder.starts_with("quant")), "{untold}");
            }
        }
    }
}

#[test]
fn loading_takes_as_much_memory_as_is_planned() {
    let checkpoint = open("base_bf16");
    for order in ORDERS {
        for (size, piece) in BATCHES {
            let device = host();
            let plan = plan(&checkpoint, WeightForm::new(ElementType::Bf16, order)).in_batches(size, piece);
            let (staging, ring) = (plan.staging_bytes(), plan.ring_bytes());
            assert_eq!(staging > 0, order == Order::Tiles);
            assert!(2 * staging <= ring, "a buffer holds what is packed");
            assert_eq!(ring > 0, order == Order::Tiles, "the host device needs none");
            let mut most = 0;
            let loaded = plan.load(&checkpoint, &device, &mut |_, _| most = device.used_bytes().max(most));
            assert_eq!(most, loaded.expect("weights load").memory.bytes() + staging);
        }
    }
}

#[test]
fn without_the_fence_of_the_ring_rows_are_overwritten_under_their_copy() {
    for folder in FOLDERS {
        let checkpoint = open(folder);
        let mut plan = plan(&checkpoint, WeightForm::new(ElementType::Bf16, Order::Tiles));
        plan.remove_fence();
        let failed = plan.load(&checkpoint, &host(), &mut |_, _| {});
        let why = failed.map(|_| ()).expect_err("the device notices").to_string();
        assert!(why.contains("`weights on their way` was overwritten"), "{why}");
    }
}

/// The error of loading a copy of a checkpoint whose file ends, once it is open, in the middle of the second batch
/// of the first weight.
fn cut_off(device: &Device) -> Error {
    const BATCH: usize = 4096;
    let copy = tempfile::tempdir().expect("a folder");
    copied(&repository("tests/oracle/checkpoints/base_bf16"), copy.path());
    let checkpoint = Checkpoint::open(copy.path()).expect("the checkpoint opens");
    let embed = checkpoint.expect(&checkpoint.layout.embed_tokens);
    assert!(embed.bytes() > 3 * BATCH as u64);
    let file = OpenOptions::new().write(true).open(checkpoint.path(embed)).expect("a file");
    file.set_len(embed.range.start + BATCH as u64 * 3 / 2).expect("it is cut off");
    let plan = plan(&checkpoint, WeightForm::new(ElementType::Bf16, Order::Tiles)).in_batches(BATCH, 1000);
    let mut told = Vec::new();
    let failed = plan.load(&checkpoint, device, &mut |done, _| told.push(done));
    assert_eq!(told, [0, BATCH as u64], "the first batch was read");
    failed.map(|_| ()).expect_err("the second was not")
}

fn copied(from: &Path, to: &Path) {
    for file in fs::read_dir(from).expect("the folder is there") {
        let file = file.expect("a file");
        fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
    }
}

#[test]
fn an_error_in_the_middle_names_the_tensor_and_gives_all_memory_back() {
    let device = host();
    let before = device.arena("before", 1000).expect("memory");
    let why = cut_off(&device).to_string();
    assert!(why.contains("embed_tokens"), "{why}");
    assert_eq!(device.used_bytes(), before.bytes());
    let checkpoint = open("base_bf16");
    let form = WeightForm::new(ElementType::Bf16, Order::Rows);
    let again = plan(&checkpoint, form).load(&checkpoint, &device, &mut |_, _| {});
    assert!(again.is_ok(), "the device is as it was");
}

/// Queued work that is dropped would never meet the planted fault.
#[test]
fn what_is_queued_ends_before_an_error_is_told() {
    let device = host();
    device.plant(Some(Planted::Launch(0)));
    let why = cut_off(&device).to_string();
    assert!(why.contains("embed_tokens"), "{why}");
    let why = device.stream().synchronize().expect_err("the first batch was brought").to_string();
    assert!(why.contains("a planted fault"), "{why}");
}

#[test]
fn a_device_that_fails_in_the_middle_is_told_and_keeps_nothing() {
    let checkpoint = open("quant_fp8_block");
    // At the start, and in the middle.
    for after in [0, 100] {
        let device = host();
        device.plant(Some(Planted::Launch(after)));
        let plan = plan(&checkpoint, WeightForm::new(ElementType::F32, Order::Tiles)).in_batches(5000, 700);
        let failed = plan.load(&checkpoint, &device, &mut |_, _| {});
        let error = failed.map(|_| ()).expect_err("it failed");
        assert!(error.is_device() && error.to_string().contains("a planted fault"), "{error}");
        assert_eq!(device.used_bytes(), 0);
    }
}

/// Elements are those of the file, converted.
#[test]
fn elements_are_those_of_the_file_in_batches_too() {
    for (folder, element) in [("base_bf16", ElementType::F32), ("base_fp32", ElementType::Bf16)] {
        let checkpoint = open(folder);
        let spec = &checkpoint.layout.embed_tokens;
        let mut raw = vec![0; checkpoint.expect(spec).bytes() as usize];
        checkpoint.read(&spec.name, &mut raw).expect("read");
        for order in ORDERS {
            let form = WeightForm::new(element, order);
            let loaded = load(plan(&checkpoint, form).in_batches(1000, 300), &checkpoint);
            let (arena, at) = (&loaded.memory.arena, loaded.weights.embed);
            let same = match element {
                ElementType::F32 => {
                    let want = raw.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
                    let want: Vec<f32> = want.collect();
                    arena.read::<f32>(at.cast(), want.len()).expect("there") == want
                }
                ElementType::Bf16 => {
                    let want =
                        raw.as_chunks().0.iter().map(|bytes| bf16::from_f32(f32::from_le_bytes(*bytes)));
                    let want: Vec<bf16> = want.collect();
                    arena.read::<bf16>(at.cast(), want.len()).expect("there") == want
                }
            };
            assert!(same, "{folder} {order:?}");
        }
    }
}
