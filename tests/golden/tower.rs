//! The vision tower against recorded values of another implementation: rows after the patches are embedded, rows after
//! the last block, and features; and the equalities of its pieces and of pictures together.

use graph::Device;
use graph::host::HostOptions;
use kernels::numerics::ElementType;
use kernels::weight::Order;
use runtime::bench::time_tower;
use runtime::checkpoint::Checkpoint;
use runtime::memory::Size;
use runtime::open::{Load, Opened};
use runtime::place::Place;
use runtime::tower::{Encoding, Patches, TowerBuffers, TowerLimits};
use runtime::weights::WeightForm;
use tests::fixture::repository;
use tests::oracle::assert_close;
use tests::tower::{self, Item, Rig, items, prompts};

use crate::{INNER, LOGITS};

fn host() -> Device {
    Device::host(HostOptions::default())
}

fn base() -> Checkpoint {
    Checkpoint::open(&repository("tests/oracle/checkpoints/base_bf16")).expect("a checkpoint")
}

#[test]
fn rows_and_features_agree() {
    for case in prompts() {
        let (items, kind) = items(&case);
        let checkpoint = Checkpoint::open(&case.checkpoint()).expect("a checkpoint");
        let seen = Rig::new(&host(), &checkpoint, ElementType::F32, TowerLimits::of(256)).encode(items);
        let expected = |name: &str| &case.tensor(&format!("{kind}_{name}")).values[..];
        let what = |name: &str| format!("{} {name}", case.id());
        assert_close(&what("tower input"), &seen.input, expected("tower_input"), INNER);
        assert_close(&what("tower hidden"), &seen.hidden, expected("tower_hidden"), INNER);
        assert_close(&what("features"), &seen.features, expected("features"), LOGITS);
    }
}

#[test]
fn features_are_close_in_bf16() {
    tower::features_are_close_in_bf16(&host());
}

#[test]
fn pictures_together_and_in_pieces_are_pictures_alone() {
    tower::pictures_together_and_in_pieces_are_pictures_alone(&host(), ElementType::F32);
    tower::pictures_together_and_in_pieces_are_pictures_alone(&host(), ElementType::Bf16);
}

fn dummy() -> Load {
    Load::Dummy { layers: Some(1), seed: 1, stored: Default::default() }
}

/// The tower of the published model, and what it takes beside its weights.
#[test]
fn the_real_shape_has_the_published_size() {
    let open = |vision| {
        let form = WeightForm { vision, ..WeightForm::new(ElementType::Bf16, Order::Rows) };
        Opened::without_text(&repository("models/real"), form, dummy()).expect("a folder of settings")
    };
    let with = open(true);
    let bytes = with.weights.bytes() - open(false).weights.bytes();
    let over = bytes as f64 / 2.0 / 448_931_056.0 - 1.0;
    assert!((0.0..1e-4).contains(&over), "{bytes} bytes");
    let config = with.checkpoint.config.vision.expect("a tower");
    let size =
        |patches| Size(TowerBuffers::bytes(&config, ElementType::Bf16, TowerLimits::of(patches))).to_string();
    assert_eq!([size(8160), size(65_536)], ["175 MiB", "679 MiB"]);
}

/// Made weights keep rows of the order of one, and a bench that times them runs.
#[test]
fn a_made_tower_stays_finite_and_is_timed() {
    let dir = repository("models/tiny");
    let item = |seed: usize| Patches {
        bytes: (0..24 * 1536).map(|at| (at * seed % 251) as u8).collect::<Vec<u8>>(),
        grid: [1, 4, 6],
    };
    let mut rig = Rig::made(&host(), &dir, TowerLimits::of(64));
    let [one, other] = [7, 11].map(|seed| rig.encode(vec![item(seed)]).features);
    assert!(one.iter().all(|x| x.is_finite() && x.abs() < 100.0) && one.iter().any(|x| x.abs() > 0.05));
    assert!(one != other, "pixels count");
    let line =
        time_tower(&dir, Place::Host, ElementType::Bf16, dummy(), [4, 6], &mut |_| {}).expect("it runs");
    assert_eq!(line.tokens, 6);
    let attended = line.kinds.iter().find(|(name, ..)| *name == "attend_span").expect("it attends");
    assert_eq!(attended.1, 4, "once in every block");
    assert!(line.to_string().contains("6 tokens"), "{line}");
}

#[test]
fn what_is_no_picture_or_too_much_is_refused_by_name() {
    let mut rig = Rig::new(&host(), &base(), ElementType::F32, TowerLimits::of(16));
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
    let mut rig = Rig::new(&host(), &base(), ElementType::F32, TowerLimits::of(16));
    let room = rig.device.arena("features", 4096).expect("memory");
    let item = Patches { bytes: vec![0u8; 4 * 1536], grid: [1, 2, 2] };
    let mut first = rig.tower.begin(vec![item.clone()], &room, room.base()).expect("a picture");
    rig.tower.begin(vec![item], &room, room.base()).expect("a picture");
    let _ = rig.tower.step(&mut first, &rig.stream);
}
