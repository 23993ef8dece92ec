//! Emissions: refusals, digests, parts and text.

use std::collections::HashMap;

use bytemuck::{Pod, Zeroable};
use graph::host::Access;
use graph::{Digest, Emission, Error, Fault, Grid, Kernel, Ptr, Source, Twin};
use proptest::prelude::*;

use crate::rig::{Add, AddArgs, launch};

/// Forty bytes of arguments, none of which does anything.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Blank {
    at: Ptr<u32>,
    rest: [u32; 8],
}

const BLANK: Blank = Blank { at: Ptr::new(0x7000), rest: [1, 2, 3, 4, 5, 6, 7, 8] };

static SOURCE: Source = Source { name: "blank.cu", text: "", includes: &[] };
static OTHER_SOURCE: Source = Source { name: "blanks.cu", text: "", includes: &[] };
const TWIN: Twin = Twin { source: &SOURCE, symbol: "blank", block: 64, shared_bytes: 128, overlaps: false };

/// Kernels that differ in one thing.
macro_rules! kernel {
    ($kernel:ident, $name:literal, $element:literal, $grid:expr) => {
        kernel!($kernel, $name, $element, $grid, None);
    };
    ($kernel:ident, $name:literal, $element:literal, $grid:expr, $twin:expr) => {
        struct $kernel;
        impl Kernel for $kernel {
            type Args = Blank;
            const NAME: &'static str = $name;
            const ELEMENT: &'static str = $element;
            const TWIN: Option<Twin> = $twin;
            fn check(_: &Blank) -> Result<(), String> {
                Ok(())
            }
            fn grid(_: &Blank) -> Grid {
                $grid
            }
            fn host(_: &Blank, _: &Access<'_>) -> Result<(), Fault> {
                Ok(())
            }
        }
    };
}
kernel!(Plain, "blank", "f32", Grid([2, 3, 4]));
kernel!(OtherName, "blanks", "f32", Grid([2, 3, 4]));
kernel!(OtherElement, "blank", "bf16", Grid([2, 3, 4]));
kernel!(Shifted, "blan", "kf32", Grid([2, 3, 4]));
kernel!(GridX, "blank", "f32", Grid([3, 3, 4]));
kernel!(GridY, "blank", "f32", Grid([2, 2, 4]));
kernel!(GridZ, "blank", "f32", Grid([2, 3, 5]));
kernel!(GridTurned, "blank", "f32", Grid([4, 3, 2]));
kernel!(WithTwin, "blank", "f32", Grid([2, 3, 4]), Some(TWIN));
kernel!(TwinSource, "blank", "f32", Grid([2, 3, 4]), Some(Twin { source: &OTHER_SOURCE, ..TWIN }));
kernel!(TwinSymbol, "blank", "f32", Grid([2, 3, 4]), Some(Twin { symbol: "blank2", ..TWIN }));
kernel!(TwinBlock, "blank", "f32", Grid([2, 3, 4]), Some(Twin { block: 128, ..TWIN }));
kernel!(TwinOverlaps, "blank", "f32", Grid([2, 3, 4]), Some(Twin { overlaps: true, ..TWIN }));
kernel!(TwinShared, "blank", "f32", Grid([2, 3, 4]), Some(Twin { shared_bytes: 64, ..TWIN }));
kernel!(TwinTurned, "blank", "f32", Grid([2, 3, 4]), Some(Twin { block: 128, shared_bytes: 64, ..TWIN }));
kernel!(NamedCopy, "copy", "", Grid([2, 3, 4]));
kernel!(NoGroups, "none", "", Grid([2, 0, 1]));
kernel!(TooTall, "tall", "", Grid::plane(1, 65_536));
kernel!(TooWide, "wide", "", Grid::line((1 << 32) + 1));
kernel!(Tall, "tall", "", Grid::plane(i32::MAX as usize, 65_535));

const ADD: AddArgs = AddArgs { to: Ptr::new(0x2000), from: Ptr::new(0x1000), count: 4, value: 7 };

fn copy(to: u64, from: u64, bytes: usize) -> Emission {
    let mut emission = Emission::new();
    emission.copy::<u8>(Ptr::new(to), Ptr::new(from), bytes);
    emission
}

fn fill(to: u64, bytes: usize, value: u8) -> Emission {
    let mut emission = Emission::new();
    emission.fill(Ptr::new(to), bytes, value);
    emission
}

fn joined(parts: &[&Emission]) -> Emission {
    let mut all = Emission::new();
    parts.iter().for_each(|part| all.append(part));
    all
}

#[test]
fn a_refused_launch_adds_nothing() {
    let mut emission = launch::<Add>(&ADD);
    let before = (emission.digest(), emission.to_string());
    let refused = emission.launch::<Add>(&AddArgs { count: 0, ..ADD });
    assert_eq!(refused, Err(Error::Launch { kernel: "add", why: "count is 0".into() }));
    assert_eq!((emission.digest(), emission.to_string()), before);
    emission.launch::<Add>(&AddArgs { value: 9, ..ADD }).unwrap();
    assert_eq!(emission.args::<Add>(1).unwrap().value, 9, "the next block is where it belongs");
}

#[test]
fn grids_that_a_device_cannot_launch_are_refused() {
    let mut emission = Emission::new();
    let refusals = [
        emission.launch::<NoGroups>(&BLANK),
        emission.launch::<TooTall>(&BLANK),
        emission.launch::<TooWide>(&BLANK),
    ];
    for (refusal, grid) in refusals.into_iter().zip(["2x0x1", "1x65536x1", "4294967295x1x1"]) {
        let text = refusal.expect_err(grid).to_string();
        assert!(text.contains(&format!("a grid of {grid}")), "{text}");
    }
    assert!(emission.is_empty());
    emission.launch::<Tall>(&BLANK).unwrap();
}

#[test]
fn equal_lists_have_equal_digests() {
    let make = || joined(&[&launch::<Plain>(&BLANK), &copy(1, 2, 3), &fill(4, 5, 6), &launch::<Add>(&ADD)]);
    assert_eq!(make().digest(), make().digest());
    assert_eq!(make().digest(), make().clone().digest());
    assert_eq!(Emission::new().digest(), Emission::default().digest());
}

#[test]
fn any_difference_changes_the_digest() {
    let mut seen: HashMap<Digest, String> = HashMap::new();
    let mut add = |name: String, emission: &Emission| {
        if let Some(other) = seen.insert(emission.digest(), name.clone()) {
            panic!("`{name}` and `{other}` have one digest");
        }
    };
    let (plain, a_copy, a_fill) = (launch::<Plain>(&BLANK), copy(0x10, 0x20, 5), fill(0x10, 5, 6));
    add("nothing".into(), &Emission::new());
    add("plain".into(), &plain);
    for byte in 0..size_of::<Blank>() {
        for bit in 0..8 {
            let mut args = BLANK;
            bytemuck::bytes_of_mut(&mut args)[byte] ^= 1 << bit;
            add(format!("bit {bit} of argument byte {byte}"), &launch::<Plain>(&args));
        }
    }
    add("name".into(), &launch::<OtherName>(&BLANK));
    add("element".into(), &launch::<OtherElement>(&BLANK));
    add("a letter moved from the name to the element".into(), &launch::<Shifted>(&BLANK));
    add("grid x".into(), &launch::<GridX>(&BLANK));
    add("grid y".into(), &launch::<GridY>(&BLANK));
    add("grid z".into(), &launch::<GridZ>(&BLANK));
    add("grid turned".into(), &launch::<GridTurned>(&BLANK));
    add("a twin".into(), &launch::<WithTwin>(&BLANK));
    add("a twin of another source".into(), &launch::<TwinSource>(&BLANK));
    add("a twin of another symbol".into(), &launch::<TwinSymbol>(&BLANK));
    add("a twin with more threads".into(), &launch::<TwinBlock>(&BLANK));
    add("a twin that starts early".into(), &launch::<TwinOverlaps>(&BLANK));
    add("a twin with less shared memory".into(), &launch::<TwinShared>(&BLANK));
    add("a twin with its numbers turned".into(), &launch::<TwinTurned>(&BLANK));
    add("a kernel named copy".into(), &launch::<NamedCopy>(&BLANK));
    add("copy".into(), &a_copy);
    add("copy, other way".into(), &copy(0x20, 0x10, 5));
    add("copy, other target".into(), &copy(0x11, 0x20, 5));
    add("copy, other source".into(), &copy(0x10, 0x21, 5));
    add("copy, other size".into(), &copy(0x10, 0x20, 6));
    add("fill".into(), &a_fill);
    add("fill, other target".into(), &fill(0x11, 5, 6));
    add("fill, other size".into(), &fill(0x10, 6, 6));
    add("fill, other value".into(), &fill(0x10, 5, 7));
    add("a copy with the fill's numbers".into(), &copy(0x10, 5, 6));
    for (name, parts) in [
        ("plain twice", [&plain, &plain]),
        ("plain, copy", [&plain, &a_copy]),
        ("copy, plain", [&a_copy, &plain]),
        ("copy, fill", [&a_copy, &a_fill]),
        ("fill, copy", [&a_fill, &a_copy]),
    ] {
        add(name.into(), &joined(&parts));
    }
}

#[test]
fn parts_have_arguments_digests_and_text_of_their_own() {
    let (first, second) = (launch::<Add>(&ADD), launch::<Add>(&AddArgs { value: 8, ..ADD }));
    let all = joined(&[&first, &fill(1, 2, 3), &launch::<Plain>(&BLANK), &second]);
    assert_eq!(all.slice(3..4).digest(), second.digest());
    assert_eq!(all.slice(3..4).to_string(), second.to_string());
    assert_eq!(all.slice(3..4).args::<Add>(0).unwrap().value, 8);
    assert_eq!(all.args::<Add>(3).unwrap().value, 8);
    assert!(all.args::<Add>(1).is_none() && all.args::<Add>(2).is_none());
    assert!(all.args::<OtherElement>(2).is_none(), "another element is another kernel");
    assert_eq!(all.slice(0..2).len(), 2);
    assert!(all.slice(2..2).is_empty());
}

#[test]
fn a_cleared_emission_is_like_a_new_one() {
    let mut emission = joined(&[&launch::<Plain>(&BLANK), &fill(1, 2, 3)]);
    emission.clear();
    assert_eq!((emission.len(), emission.digest()), (0, Emission::new().digest()));
    emission.launch::<Add>(&ADD).unwrap();
    assert_eq!(emission.digest(), launch::<Add>(&ADD).digest());
}

#[test]
fn the_text_shows_one_entry_a_line() {
    let all = joined(&[&launch::<Add>(&ADD), &copy(0x3000, 0x4000, 5), &fill(0x5000, 16, 255)]);
    let expected = "   0 add[u32] grid 4x1x1 AddArgs { to: @2000, from: @1000, count: 4, value: 7 }
   1 copy 5 bytes @4000 -> @3000
   2 fill 16 bytes @5000 with 0xff
";
    assert_eq!(all.to_string(), expected);
}

proptest! {
    /// However a list is cut and joined again, it is the same list.
    #[test]
    fn cut_and_joined_is_the_same(kinds in prop::collection::vec(0u32..4, 0..12), at in 0usize..13) {
        let parts: Vec<Emission> = kinds.iter().enumerate().map(|(index, kind)| match kind {
            0 => launch::<Add>(&AddArgs { value: index as u32, ..ADD }),
            1 => launch::<Plain>(&BLANK),
            2 => copy(index as u64, 2, 3),
            _ => fill(index as u64, 2, 3),
        }).collect();
        let all = joined(&parts.iter().collect::<Vec<_>>());
        let at = at.min(all.len());
        let again = joined(&[&all.slice(0..at), &all.slice(at..all.len())]);
        prop_assert_eq!(again.digest(), all.digest());
        prop_assert_eq!(again.to_string(), all.to_string());
        prop_assert_eq!(all.len(), kinds.len());
    }
}
