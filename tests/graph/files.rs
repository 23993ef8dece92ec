//! Memory outside the device that launches read: pinned arenas, and files, which nothing may write.

use std::fs::File;

use graph::error::FaultKind;
use graph::{Emission, Error, Recording};

use crate::rig::{Add, AddArgs, Rig, fault, launch, words, zeros};

const OFFSET: usize = 4096 + 12;
const COUNT: usize = 3000;

/// A file of words that count from 0, open.
fn counting() -> File {
    let values: Vec<u32> = (0..(OFFSET / 4 + COUNT + 100) as u32).collect();
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, bytemuck::cast_slice(&values)).unwrap();
    file
}

#[test]
fn a_launch_reads_a_file_and_a_pinned_arena() {
    let rig = Rig::new();
    let used = rig.device.used_bytes();
    let file = rig.device.file_arena("file", &counting(), OFFSET as u64, 4 * COUNT).unwrap();
    let pinned = rig.device.pinned_arena("pinned", 4 * COUNT).unwrap();
    assert_eq!(rig.device.used_bytes(), used, "neither is device memory");
    assert_eq!((file.bytes(), file.base().address() % 4096), (4 * COUNT, 12));
    assert_ne!(file.epoch(), pinned.epoch());
    let first = (OFFSET / 4) as u32;
    let expected: Vec<u32> = (first..first + COUNT as u32).collect();
    assert_eq!(words(&file, COUNT), expected);
    pinned.write(pinned.base().cast(), &expected).unwrap();
    for from in [&file, &pinned] {
        let to = zeros(&rig.device, "to", COUNT);
        let (to_at, from_at) = (to.base().cast(), from.base().cast());
        let args = AddArgs { to: to_at, from: from_at, count: COUNT as u32, value: 1 };
        rig.stream.run(launch::<Add>(&args), &[to.clone(), from.clone()]).unwrap();
        rig.stream.synchronize().unwrap();
        let more: Vec<u32> = expected.iter().map(|value| value + 1).collect();
        assert_eq!(words(&to, COUNT), more, "from `{}`", from.label());
    }
}

#[test]
fn whoever_writes_a_file_is_refused() {
    type Write = fn(&Rig, &graph::Arena, &graph::Arena) -> Emission;
    let writes: [Write; 3] = [
        |_, file, data| {
            let (to, from) = (file.base().cast(), data.base().cast());
            launch::<Add>(&AddArgs { to, from, count: 4, value: 1 })
        },
        |_, file, data| {
            let mut emission = Emission::new();
            emission.copy(file.base(), data.base(), 16);
            emission
        },
        |_, file, _| {
            let mut emission = Emission::new();
            emission.fill(file.base(), 16, 7);
            emission
        },
    ];
    for write in writes {
        let rig = Rig::new();
        let file = rig.device.file_arena("a table", &counting(), OFFSET as u64, 64).unwrap();
        let data = zeros(&rig.device, "data", 4);
        match file.write(file.base(), &[1u8]) {
            Err(Error::Size { call: "write", why }) => assert!(why.contains("`a table`"), "{why}"),
            other => panic!("{other:?}"),
        }
        rig.stream.run(write(&rig, &file, &data), &[]).unwrap();
        let found = fault(rig.stream.synchronize());
        let address = file.base().address();
        assert_eq!(found.kind, FaultKind::ReadOnly { address, bytes: 16, label: "a table".into() });
        assert!(found.to_string().contains("a file mapped to be read"), "{found}");
    }
}

#[test]
fn a_file_ends_where_it_was_cut_and_when_its_owner_goes() {
    let rig = Rig::new();
    let file = rig.device.file_arena("file", &counting(), OFFSET as u64, 64).unwrap();
    assert!(matches!(file.read::<u8>(file.base(), 65), Err(Error::Size { call: "read", .. })));
    let recording = Recording::begin(&rig.stream, "round").unwrap();
    let mapped = rig.device.file_arena("late", &counting(), 0, 64).err();
    assert!(matches!(mapped, Some(Error::Capturing { call: "mapping a file", .. })), "{mapped:?}");
    drop(recording);
    let read = rig.log.emission_of(file.base());
    rig.stream.run(read.clone(), std::slice::from_ref(&file)).unwrap();
    drop(file);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [(OFFSET / 4) as u32], "queued work held it");
    rig.stream.run(read, &[]).unwrap();
    let found = fault(rig.stream.synchronize());
    assert!(found.to_string().contains("freed `file`"), "{found}");
}
