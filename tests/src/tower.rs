//! The vision tower in tests: encodings that are looked at on their way, the recorded cases, and what must hold on
//! either device.

use std::path::Path;
use std::sync::Arc;

use graph::{Arena, Device, Stream};
use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::weight::Order;
use runtime::checkpoint::Checkpoint;
use runtime::open::{Load, Opened};
use runtime::request::Media;
use runtime::tower::{Patches, Stage, Tower, TowerLimits};
use runtime::weights::{Loaded, WeightForm, WeightPlan};
use vision::{ContentKey, Grid, Span};

use crate::fixture::repository;
use crate::oracle::{Case, cases, rms_relative};

/// A picture, or a clip.
pub type Item = Patches<Vec<u8>>;

/// A tower on a device, with a stream for its encodings.
pub struct Rig {
    /// The device.
    pub device: Device,
    /// The stream.
    pub stream: Stream,
    /// The tower.
    pub tower: Tower,
    element: ElementType,
}

/// What an encoding left.
#[derive(PartialEq)]
pub struct Seen {
    /// Rows when the patches are embedded.
    pub input: Vec<f32>,
    /// Rows after the last block.
    pub hidden: Vec<f32>,
    /// Features.
    pub features: Vec<f32>,
}

impl Rig {
    /// The tower of a checkpoint on a device.
    pub fn new(device: &Device, checkpoint: &Checkpoint, element: ElementType, limits: TowerLimits) -> Rig {
        let form = WeightForm { vision: true, ..WeightForm::new(element, Order::of(device)) };
        let plan = WeightPlan::new(checkpoint, form).expect("weights are laid out");
        let loaded = plan.load(checkpoint, device, &mut |_, _| {}).expect("weights load");
        Rig::of(device, checkpoint, element, &loaded, limits)
    }

    /// A tower of the shape that a folder's settings say, with made weights, in bf16.
    pub fn made(device: &Device, dir: &Path, limits: TowerLimits) -> Rig {
        let element = ElementType::Bf16;
        let form = WeightForm { vision: true, ..WeightForm::new(element, Order::of(device)) };
        let load = Load::Dummy { layers: Some(1), seed: 1, stored: Default::default() };
        let Opened { checkpoint, weights, .. } =
            Opened::without_text(dir, form, load).expect("a folder of settings");
        let loaded = weights.make(1, device).expect("weights are made");
        Rig::of(device, &checkpoint, element, &loaded, limits)
    }

    fn of(
        device: &Device,
        checkpoint: &Checkpoint,
        element: ElementType,
        loaded: &Loaded,
        limits: TowerLimits,
    ) -> Rig {
        device.prepare(kernels::source::ALL).expect("kernels load");
        let config = checkpoint.config.vision.as_ref().expect("a tower");
        let weights = loaded.weights.tower.as_ref().expect("its weights");
        let tower =
            Tower::new(device, config, element, weights, &loaded.memory, limits).expect("buffers fit");
        Rig { stream: device.stream(), device: device.clone(), tower, element }
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

    /// Encodes items, looking at their rows.
    pub fn encode(&mut self, items: Vec<Item>) -> Seen {
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
pub fn items(case: &Case) -> (Vec<Item>, &'static str) {
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

/// The same as a request brings them, with where they are in the prompt.
pub fn media(case: &Case) -> Vec<Media> {
    let checkpoint = Checkpoint::open(&case.checkpoint()).expect("a checkpoint");
    let config = checkpoint.config.vision.as_ref().expect("a tower");
    let (items, kind) = items(case);
    let id = if kind == "video" { config.tokens.video } else { config.tokens.image };
    let (ids, merge, mut next) = (case.input_ids(), config.spatial_merge_size as u32, 0);
    let one = |(medium, item): (usize, Item)| {
        let [pairs, height, width] = item.grid;
        let span = |pair| {
            let first = next + ids[next..].iter().position(|other| *other == id).expect("a placeholder");
            let mut span = Span { medium, row: 0, first, height: height / merge, width: width / merge };
            span.row = pair * span.rows();
            next = first + span.rows();
            assert!(ids[first..next].iter().all(|other| *other == id), "{}", case.id());
            span
        };
        let spans = (0..pairs as usize).map(span).collect();
        picture(item, spans)
    };
    items.into_iter().enumerate().map(one).collect()
}

/// A picture or a clip as a request brings it.
pub fn picture(item: Item, spans: Vec<Span>) -> Media {
    let [pairs, height, width] = item.grid;
    let mut digest = graph::Digester::new();
    for size in item.grid {
        digest.number(size.into());
    }
    let key = digest.bytes(&item.bytes).finish().0.to_le_bytes();
    let patches = vision::Patches { grid: Grid { pairs, height, width }, bytes: item.bytes };
    Media { patches: Arc::new(patches), spans, key: ContentKey(key) }
}

/// The cases with pictures or clips.
pub fn prompts() -> Vec<Case> {
    let mut all = cases("image_prompt");
    all.extend(cases("video_prompt"));
    all
}

/// Asserts that features in bf16 are as close to those of f32 as the rule for logits allows beside the noise of the
/// other implementation's own bf16.
pub fn features_are_close_in_bf16(device: &Device) {
    for case in prompts() {
        let (items, kind) = items(&case);
        let checkpoint = Checkpoint::open(&case.checkpoint()).expect("a checkpoint");
        let seen = Rig::new(device, &checkpoint, ElementType::Bf16, TowerLimits::of(256)).encode(items);
        let distance = rms_relative(&seen.features, &case.tensor(&format!("{kind}_features")).values);
        assert!(distance <= 0.02, "{}: rms distance {distance:.4}", case.id());
    }
}

/// Asserts that a picture alone has the bytes of the same picture among others and in pieces of any size, and that
/// pairs of frames do not see each other.
pub fn pictures_together_and_in_pieces_are_pictures_alone(device: &Device, element: ElementType) {
    let case = cases("image_prompt").into_iter().find(|case| case.id().ends_with("image_two"));
    let (two, _) = items(&case.expect("a case"));
    let (clip, _) = items(&cases("video_prompt")[0]);
    let all = [two.clone(), clip.clone(), two[..1].to_vec(), two[..1].to_vec()].concat();
    let checkpoint =
        Checkpoint::open(&repository("tests/oracle/checkpoints/base_bf16")).expect("a checkpoint");
    let mut rig = Rig::new(device, &checkpoint, element, TowerLimits::of(512));
    let together = rig.encode(all.clone());
    for piece in [4, 12, 52, 100] {
        let limits = TowerLimits { patches: 512, piece };
        let pieces = Rig::new(device, &checkpoint, element, limits).encode(all.clone());
        assert!(pieces == together, "{element:?} in pieces of {piece} patches");
    }
    assert!(alone(&mut rig, all) == together.features, "{element:?}");
    let [pairs, height, width] = clip[0].grid;
    let each = clip[0].bytes.len() / pairs as usize;
    let pair = |bytes: &[u8]| Patches { bytes: bytes.to_vec(), grid: [1, height, width] };
    let apart = rig.encode(clip[0].bytes.chunks(each).map(pair).collect());
    assert!(rig.encode(clip.clone()) == apart, "{element:?}");
}

/// The features of items, each encoded by itself.
pub fn alone(rig: &mut Rig, items: Vec<Item>) -> Vec<f32> {
    items.into_iter().flat_map(|item| rig.encode(vec![item]).features).collect()
}
