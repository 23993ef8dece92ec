//! Arenas and pinned memory: what is written is read, and nothing else changes.

use graph::host::{HostOptions, POISON};
use graph::{Arena, Device, Emission, Error};

use crate::rig::{Rig, add, of_words, open, words, zeros};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("what_is_written_is_read", what_is_written_is_read),
    ("a_write_touches_its_range_only", a_write_touches_its_range_only),
    ("ranges_outside_are_refused", ranges_outside_are_refused),
    ("fresh_memory_is_filled_as_asked", fresh_memory_is_filled_as_asked),
    ("copies_and_fills_keep_to_their_bytes", copies_and_fills_keep_to_their_bytes),
    ("pinned_memory_goes_both_ways", pinned_memory_goes_both_ways),
    ("empty_copies_and_fills_do_nothing", empty_copies_and_fills_do_nothing),
    ("memory_of_the_past_is_given_back", memory_of_the_past_is_given_back),
    ("out_of_memory_says_the_numbers", out_of_memory_says_the_numbers),
    ("pinned_memory_is_read_by_launches", pinned_memory_is_read_by_launches),
    ("a_mapped_file_is_read_by_launches_or_refused", a_mapped_file_is_read_by_launches_or_refused),
    ("arenas_of_another_device_are_refused", arenas_of_another_device_are_refused),
    ("a_device_describes_itself", a_device_describes_itself),
];

fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect()
}

fn what_is_written_is_read() {
    let device = open(true);
    for bytes in [0, 1, 3, 255, 4096, (64 << 10) + 1, (8 << 20) + 7] {
        let (arena, values) = (device.arena("bytes", bytes).unwrap(), pattern(bytes, 1));
        arena.write(arena.base(), &values).unwrap();
        assert!(arena.read::<u8>(arena.base(), bytes).unwrap() == values, "{bytes} bytes");
    }
}

fn a_write_touches_its_range_only() {
    let device = open(true);
    let arena = device.arena("guarded", 3000).unwrap();
    arena.write(arena.base().byte_add(1001), &pattern(777, 2)).unwrap();
    let all: Vec<u8> = arena.read(arena.base(), 3000).unwrap();
    assert_eq!(all[1001..1778], pattern(777, 2));
    assert!(all[..1001].iter().chain(&all[1778..]).all(|&byte| byte == POISON));
}

fn ranges_outside_are_refused() {
    let device = open(true);
    let arena = device.arena("small", 16).unwrap();
    let past = arena.base().byte_add(13).cast::<u32>();
    assert!(matches!(arena.write(past, &[1u32]), Err(Error::Size { call: "write", .. })));
    assert!(matches!(arena.read(past, 1), Err(Error::Size { call: "read", .. })));
}

fn fresh_memory_is_filled_as_asked() {
    for (poison, value) in [(true, POISON), (false, 0)] {
        let device = open(poison);
        let (arena, pinned) = (device.arena("a", 5000).unwrap(), device.pinned("p", 5000).unwrap());
        assert_eq!(arena.read::<u8>(arena.base(), 5000).unwrap(), vec![value; 5000]);
        pinned.read(|bytes| assert_eq!(bytes, vec![value; 5000]));
    }
}

fn copies_and_fills_keep_to_their_bytes() {
    let rig = Rig::new();
    let (from, to) = (rig.device.arena("from", 4096).unwrap(), rig.device.arena("to", 4096).unwrap());
    from.write(from.base(), &pattern(4096, 3)).unwrap();
    let mut emission = Emission::new();
    emission.copy(to.base().byte_add(100), from.base().byte_add(7), 999);
    emission.fill(to.base().byte_add(2000), 31, 0x5a);
    rig.stream.run(emission, &[from.clone(), to.clone()]).unwrap();
    rig.stream.synchronize().unwrap();
    let mut expected = vec![POISON; 4096];
    expected[100..1099].copy_from_slice(&pattern(4096, 3)[7..1006]);
    expected[2000..2031].fill(0x5a);
    assert!(to.read::<u8>(to.base(), 4096).unwrap() == expected);
    assert!(from.read::<u8>(from.base(), 4096).unwrap() == pattern(4096, 3), "the source is as it was");
}

fn pinned_memory_goes_both_ways() {
    let rig = Rig::new();
    let arena = rig.device.arena("middle", 10_000).unwrap();
    let (mut up, down) = (rig.device.pinned("up", 10_000).unwrap(), rig.device.pinned("down", 10_000));
    let down = down.unwrap();
    up.write(|bytes| bytes.copy_from_slice(&pattern(10_000, 4)));
    let mut emission = Emission::new();
    emission.copy(arena.base(), up.base(), 10_000);
    emission.copy(down.base(), arena.base(), 9_999);
    rig.stream.run(emission, &[arena]).unwrap();
    rig.stream.synchronize().unwrap();
    down.read(|bytes| {
        assert!(bytes[..9_999] == pattern(10_000, 4)[..9_999]);
        assert_eq!(bytes[9_999], POISON);
    });
}

fn empty_copies_and_fills_do_nothing() {
    let rig = Rig::new();
    let arena = of_words(&rig.device, "words", &[1, 2]);
    let mut emission = Emission::new();
    emission.copy::<u32>(arena.base().cast(), arena.base().cast(), 0);
    emission.fill(arena.base(), 0, 9);
    rig.stream.run(emission, std::slice::from_ref(&arena)).unwrap();
    rig.stream.synchronize().unwrap();
    assert_eq!(words(&arena, 2), [1, 2]);
}

fn memory_of_the_past_is_given_back() {
    const BYTES: usize = 256 << 20;
    let device = open(true);
    let (used, free) = (device.used_bytes(), device.free_bytes());
    let arena = device.arena("large", BYTES).unwrap();
    assert_eq!(device.used_bytes(), used + BYTES);
    assert!(device.free_bytes() + BYTES <= free + (32 << 20), "{} of {free} are free", device.free_bytes());
    let clone = arena.clone();
    drop(arena);
    assert_eq!(device.used_bytes(), used + BYTES, "a clone still owns it");
    drop(clone);
    assert_eq!(device.used_bytes(), used);
    device.stream().synchronize().unwrap();
    assert!(device.free_bytes() + (32 << 20) >= free, "{} of {free} are free", device.free_bytes());
}

fn out_of_memory_says_the_numbers() {
    let rig = Rig::new();
    let asked = rig.device.free_bytes() + (64 << 30);
    match rig.device.arena("far too much", asked).err() {
        Some(Error::OutOfMemory { label, asked: said, free }) => {
            assert_eq!((label.as_str(), said), ("far too much", asked));
            assert!(free > 0 && free < asked, "{free} free");
        }
        other => panic!("{other:?}"),
    }
    rig.note(5);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [5], "the device is as it was");
}

/// Copies `count` words with a kernel and gives them, plus one.
fn through_a_launch(rig: &Rig, from: &Arena, count: usize) -> Vec<u32> {
    let to = zeros(&rig.device, "to", count);
    rig.stream.run(add(&to, from, count, 1), &[to.clone(), from.clone()]).unwrap();
    rig.stream.synchronize().unwrap();
    words(&to, count)
}

fn pinned_memory_is_read_by_launches() {
    const COUNT: usize = 1 << 18;
    let rig = Rig::new();
    let used = rig.device.used_bytes();
    let pinned = rig.device.pinned_arena("pinned", 4 * COUNT).unwrap();
    assert_eq!(rig.device.used_bytes(), used);
    assert_eq!(pinned.read::<u8>(pinned.base(), 9).unwrap(), [POISON; 9]);
    let values: Vec<u32> = (0..COUNT as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    pinned.write(pinned.base().cast(), &values).unwrap();
    assert!(pinned.read::<u32>(pinned.base().cast(), COUNT).unwrap() == values);
    let more: Vec<u32> = values.iter().map(|value| value.wrapping_add(1)).collect();
    assert!(through_a_launch(&rig, &pinned, COUNT) == more);
}

fn a_mapped_file_is_read_by_launches_or_refused() {
    const COUNT: usize = 1 << 16;
    const OFFSET: usize = 4096 + 12;
    let rig = Rig::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("words");
    let values: Vec<u32> = (0..COUNT as u32 + 2048).collect();
    std::fs::write(&path, bytemuck::cast_slice::<u32, u8>(&values)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    if let Err(error) = rig.device.maps_files() {
        println!("{error}");
        let refused = rig.device.file_arena("file", &file, OFFSET as u64, 4 * COUNT).err();
        assert_eq!(refused, Some(error));
        return;
    }
    let arena = rig.device.file_arena("file", &file, OFFSET as u64, 4 * COUNT).unwrap();
    let expected: Vec<u32> = values[OFFSET / 4..][..COUNT].to_vec();
    assert!(arena.read::<u32>(arena.base().cast(), COUNT).unwrap() == expected);
    let more: Vec<u32> = expected.iter().map(|value| value + 1).collect();
    assert!(through_a_launch(&rig, &arena, COUNT) == more);
    assert!(matches!(arena.write(arena.base(), &[1u8]), Err(Error::Size { call: "write", .. })));
    drop(arena);
    rig.stream.synchronize().unwrap();
    rig.note(1);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.log.seen(), [1], "the map is gone and the device is as it was");
}

fn arenas_of_another_device_are_refused() {
    let rig = Rig::new();
    let host = Device::host(HostOptions::default());
    let elsewhere = [zeros(&host, "host", 4), zeros(&open(true), "another handle's", 4)];
    for arena in elsewhere {
        let refused = rig.stream.run(Emission::new(), &[arena]);
        assert_eq!(refused, Err(Error::OtherDevice { call: "running work" }));
    }
    let refused = rig.stream.record(&host.event());
    assert_eq!(refused, Err(Error::OtherDevice { call: "recording an event" }));
}

fn a_device_describes_itself() {
    let device = open(false);
    let (text, Device::Cuda(cuda)) = (device.describe(), &device) else { panic!("a CUDA device is one") };
    println!("{text}");
    assert!(text.contains(cuda.architecture()) && text.contains("GiB") && text.contains("driver"), "{text}");
}
