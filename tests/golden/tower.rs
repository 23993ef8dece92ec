//! The vision tower against recorded values of another implementation: rows after the patches are embedded, rows after
//! the last block, and features; and the equalities of its pieces and of pictures together.

use graph::host::HostOptions;
use graph::{Arena, Device, Stream};
use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::weight::Order;
use runtime::checkpoint::Checkpoint;
use runtime::tower::{Encoding, Patches, Stage, Tower, TowerLimits};
use runtime::weights::{WeightForm, WeightPlan};
use tests::fixture::repository;
use tests::oracle::{Case, assert_close, cases, rms_relative};

use crate::{INNER, LOGITS};

type Item = Patches<Vec<u8>>;

/// A tower on a device, with a stream for its encodings.
struct Rig {
    device: Device,
    stream: Stream,
    tower: Tower,
    element: ElementType,
}

/// What an encoding left.
#[derive(PartialEq)]
struct Seen {
    input: Vec<f32>,
    hidden: Vec<f32>,
    features: Vec<f32>,
}

impl Rig {
    fn new(checkpoint: &Checkpoint, element: ElementType, limits: TowerLimits) -> Rig {
        let device = Device::host(HostOptions::default());
        let form = WeightForm { vision: true, ..WeightForm::new(element, Order::Rows) };
        let plan = WeightPlan::new(checkpoint, form).expect("weights are laid out");
        let loaded = plan.load(checkpoint, &device, &mut |_, _| {}).expect("weights load");
        let config = checkpoint.config.vision.as_ref().expect("a tower");
        let weights = loaded.weights.tower.as_ref().expect("its weights");
        let tower =
            Tower::new(&device, config, element, weights, &loaded.memory, limits).expect("buffers fit");
        Rig { stream: device.stream(), device, tower, element }
    }

    fn floats(&self, arena: &Arena, at: graph::Ptr<u8>, count: usize) -> Vec<f32> {
        match self.element {
            ElementType::F32 => arena.read(at.cast(), count).expect("in the arena"),
            ElementType::Bf16 => {
                let values: Vec<bf16> = arena.read(at.cast(), count).expect("in the arena");
                values.into_iter().map(Element::widen).collect()
            }
        }
    }

    fn encode(&mut self, items: Vec<Item>) -> Seen {
        let tokens: usize = items.iter().map(|item| self.tower.tokens(item.grid)).sum();
        let room = self.device.arena("features", self.tower.feature_bytes(tokens)).expect("memory");
        let mut encoding = self.tower.begin(items, &room, room.base()).expect("pictures");
        let mut seen = Seen { input: Vec::new(), hidden: Vec::new(), features: Vec::new() };
        let mut rows = 0;
        while let Some(step) = encoding.next_step() {
            rows = rows.max(step.rows.end);
            if step.rows.start == 0 && matches!(step.stage, Stage::Project(0) | Stage::Merge) {
                let looked = self.rows(rows);
                match step.stage {
                    Stage::Merge => seen.hidden = looked,
                    _ => seen.input = looked,
                }
            }
            assert!(self.tower.step(&mut encoding, &self.stream).expect("it runs"));
        }
        assert!(!self.tower.step(&mut encoding, &self.stream).expect("it has ended"));
        self.stream.synchronize().expect("it runs");
        let width = self.tower.feature_bytes(1) / self.element.bytes();
        seen.features = self.floats(&room, room.base(), tokens * width);
        seen
    }

    /// The residual rows as they are now.
    fn rows(&self, rows: usize) -> Vec<f32> {
        self.stream.synchronize().expect("it runs");
        let (arena, at) = (&self.tower.arena, self.tower.buffers().rows);
        let width = self.tower.row_width();
        self.floats(arena, at, rows * width)
    }
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().map(|value| *value as u8).collect()
}

/// The pictures of a case, or its clip, and what its tensors begin with.
fn items(case: &Case) -> (Vec<Item>, &'static str) {
    let grids = |name: &str| -> Vec<[u32; 3]> {
        case.indices(name).chunks(3).map(|grid| [0, 1, 2].map(|axis| grid[axis] as u32)).collect()
    };
    if case.manifest["kind"] == "video_prompt" {
        let grid = grids("video_grid_thw")[0];
        let all = cases("video_prompt");
        let pixels = all.iter().find_map(|case| case.tensors.get("pixel_values_videos_u8"));
        return (vec![Patches { bytes: bytes(&pixels.expect("a clip").values), grid }], "video");
    }
    let pictures = case.manifest["images"].as_array().expect("pictures").iter();
    let all = cases("image_preprocess");
    let items = pictures.zip(grids("image_grid_thw")).map(|(picture, grid)| {
        let made = all.iter().find(|case| case.manifest["image"] == *picture).expect("a picture");
        Patches { bytes: bytes(&made.tensor("pixel_u8").values), grid }
    });
    (items.collect(), "image")
}

fn prompts() -> Vec<Case> {
    let mut all = cases("image_prompt");
    all.extend(cases("video_prompt"));
    all
}

#[test]
fn rows_and_features_agree() {
    for case in prompts() {
        let (items, kind) = items(&case);
        let checkpoint = Checkpoint::open(&case.checkpoint()).expect("a checkpoint");
        let seen = Rig::new(&checkpoint, ElementType::F32, TowerLimits::of(256)).encode(items.clone());
        let expected = |name: &str| &case.tensor(&format!("{kind}_{name}")).values[..];
        let what = |name: &str| format!("{} {name}", case.id());
        assert_close(&what("tower input"), &seen.input, expected("tower_input"), INNER);
        assert_close(&what("tower hidden"), &seen.hidden, expected("tower_hidden"), INNER);
        assert_close(&what("features"), &seen.features, expected("features"), LOGITS);

        // What the rule for logits allows beside the noise of the other implementation's bf16.
        let seen = Rig::new(&checkpoint, ElementType::Bf16, TowerLimits::of(256)).encode(items);
        let distance = rms_relative(&seen.features, expected("features"));
        assert!(distance <= 0.02, "{}: rms distance {distance:.4}", what("features in bf16"));
    }
}

/// A picture alone, and the same pixels as many items, one clip, and in pieces of any size.
#[test]
fn pictures_together_and_in_pieces_are_pictures_alone() {
    let case =
        cases("image_prompt").into_iter().find(|case| case.id().ends_with("image_two")).expect("a case");
    let (two, _) = items(&case);
    let (clip, _) = items(&cases("video_prompt")[0]);
    let all = [two.clone(), clip.clone(), two[..1].to_vec(), two[..1].to_vec()].concat();
    let checkpoint =
        Checkpoint::open(&repository("tests/oracle/checkpoints/base_bf16")).expect("a checkpoint");
    for element in [ElementType::F32, ElementType::Bf16] {
        let mut rig = Rig::new(&checkpoint, element, TowerLimits::of(512));
        let together = rig.encode(all.clone());
        for piece in [4, 12, 52, 100] {
            let limits = TowerLimits { patches: 512, piece };
            let pieces = Rig::new(&checkpoint, element, limits).encode(all.clone());
            assert!(pieces == together, "{element:?} in pieces of {piece} patches");
        }
        let mut alone = Vec::new();
        for item in all.clone() {
            alone.extend(rig.encode(vec![item]).features);
        }
        assert!(alone == together.features, "{element:?}");
        // Pairs of frames do not see each other.
        let [pairs, height, width] = clip[0].grid;
        let each = clip[0].bytes.len() / pairs as usize;
        let pair = |bytes: &[u8]| Patches { bytes: bytes.to_vec(), grid: [1, height, width] };
        let apart = rig.encode(clip[0].bytes.chunks(each).map(pair).collect());
        assert!(rig.encode(clip.clone()) == apart, "{element:?}");
    }
}

#[test]
fn what_is_no_picture_or_too_much_is_refused_by_name() {
    let checkpoint =
        Checkpoint::open(&repository("tests/oracle/checkpoints/base_bf16")).expect("a checkpoint");
    let mut rig = Rig::new(&checkpoint, ElementType::F32, TowerLimits::of(16));
    let item = |grid: [u32; 3], patches: usize| Patches { bytes: vec![0u8; patches * 1536], grid };
    let mut refused = |items: Vec<Item>, says: &str| {
        let room = rig.device.arena("features", 4096).expect("memory");
        let begun: Result<Encoding<Vec<u8>>, _> = rig.tower.begin(items, &room, room.base());
        let why = begun.err().expect("it is refused").to_string();
        assert!(why.contains(says), "{says:?} is not in: {why}");
    };
    refused(vec![item([1, 2, 2], 4), item([1, 4, 6], 24)], "picture 1: 1 x 4 x 6 patches are not 1 to 16");
    refused(vec![item([1, 0, 2], 0)], "picture 0: 1 x 0 x 2 patches");
    refused(vec![item([u32::MAX; 3], 0)], "patches are not 1 to 16");
    refused(vec![item([1, 3, 2], 6)], "picture 0: 3 x 2 patches are not squares of 2 x 2");
    refused(vec![item([1, 2, 2], 3)], "picture 0: 4608 bytes for 4 patches, which have 6144");
    refused(vec![item([1, 2, 4], 8); 3], "3 pictures of 24 patches together: 1 to 16 are encoded at a time");
    refused(Vec::new(), "0 pictures of 0 patches");
}

/// Steps of other work may come between, but not another encoding.
#[test]
#[should_panic(expected = "another encoding has begun")]
fn of_two_encodings_only_the_later_goes_on() {
    let checkpoint =
        Checkpoint::open(&repository("tests/oracle/checkpoints/base_bf16")).expect("a checkpoint");
    let mut rig = Rig::new(&checkpoint, ElementType::F32, TowerLimits::of(16));
    let room = rig.device.arena("features", 4096).expect("memory");
    let item = Patches { bytes: vec![0u8; 4 * 1536], grid: [1, 2, 2] };
    let mut first = rig.tower.begin(vec![item.clone()], &room, room.base()).expect("a picture");
    rig.tower.begin(vec![item], &room, room.base()).expect("a picture");
    let _ = rig.tower.step(&mut first, &rig.stream);
}
