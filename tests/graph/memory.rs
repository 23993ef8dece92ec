//! Addresses, sizes, poison and owners.

use std::panic::{AssertUnwindSafe, catch_unwind};

use graph::error::FaultKind;
use graph::host::HostOptions;
use graph::{Device, Emission, Error, Ptr, Recording, Region, Slab};
use half::bf16;

use crate::rig::{Add, AddArgs, Log, Rig, copy_word, device, fault, launch, near, words, zeros};

/// Runs a launch that reads `count` words at `from`, and reports how it went.
fn read_words(rig: &Rig, from: Ptr<u8>, count: u32) -> Result<(), Error> {
    let to = zeros(&rig.device, "sink", count as usize);
    let args = AddArgs { to: to.base().cast(), from: from.cast(), count, value: 0 };
    rig.stream.run(launch::<Add>(&args), &[to]).unwrap();
    rig.stream.synchronize()
}

#[test]
fn addresses_are_never_used_again_and_lie_apart() {
    let device = device(1 << 20);
    let mut ranges = Vec::new();
    for turn in 0..200 {
        let bytes = 1 + turn * 37;
        let arena = device.arena("turn", bytes).unwrap();
        let pinned = device.pinned("turn", bytes).unwrap();
        for base in [arena.base().address(), pinned.base().address()] {
            assert_eq!(base % 256, 0);
            ranges.push(base..base + bytes as u64);
        }
    }
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|two| two[1].start - two[0].end >= 1 << 20));
}

#[test]
fn overruns_name_the_memory_and_the_offset() {
    let rig = Rig::new();
    let a = zeros(&rig.device, "first", 8);
    let _b = zeros(&rig.device, "second", 8);
    assert_eq!(near(read_words(&rig, a.base().byte_add(4), 8)), "4 bytes into live `first` of 32 bytes");
}

#[test]
fn a_wrong_index_never_lands_in_a_neighbour() {
    for past in [32u64, 4096, 1 << 20, (1 << 32) - 4] {
        let rig = Rig::new();
        let a = zeros(&rig.device, "first", 8);
        let _b = rig.device.arena("second", 64 << 10).unwrap();
        let at = Ptr::new(a.base().address() + past);
        assert_eq!(near(read_words(&rig, at, 1)), format!("{past} bytes into live `first` of 32 bytes"));
    }
}

#[test]
fn freed_memory_is_named() {
    let rig = Rig::new();
    let old = zeros(&rig.device, "old", 8);
    let at = old.base().byte_add(12);
    drop(old);
    let _new = zeros(&rig.device, "new", 8);
    assert_eq!(near(read_words(&rig, at, 1)), "12 bytes into freed `old` of 32 bytes");
}

#[test]
fn null_and_wild_addresses_are_faults() {
    assert_eq!(near(read_words(&Rig::new(), Ptr::NULL, 1)), "the null address");
    assert_eq!(near(read_words(&Rig::new(), Ptr::new(64), 1)), "below every allocation");
    let rig = Rig::new();
    assert!(near(read_words(&rig, Ptr::new(u64::MAX - 3), 1)).contains("live `sink`"));
}

#[test]
fn misaligned_addresses_are_faults() {
    let rig = Rig::new();
    let a = zeros(&rig.device, "words", 8);
    let at = a.base().byte_add(2);
    let found = fault(read_words(&rig, at, 1));
    assert_eq!(found.work, "add");
    assert_eq!(found.kind, FaultKind::Alignment { address: at.address(), align: 4 });
}

#[test]
fn copies_and_fills_are_checked_on_every_side() {
    type Case = fn(&mut Emission, Ptr<u8>, Ptr<u8>);
    let cases: [(&str, Case, &str); 4] = [
        ("copy of 33 bytes", |e, a, b| e.copy(a, b, 33), "0 bytes into live `b` of 32 bytes"),
        ("copy of 8 bytes", |e, a, b| e.copy(a.byte_add(28), b, 8), "28 bytes into live `a` of 32 bytes"),
        ("fill of 40 bytes", |e, a, _| e.fill(a, 40, 1), "0 bytes into live `a` of 32 bytes"),
        ("fill of 1 bytes", |e, _, _| e.fill(Ptr::NULL, 1, 1), "the null address"),
    ];
    for (work, emit, expected) in cases {
        let rig = Rig::new();
        let (a, b) = (zeros(&rig.device, "a", 8), zeros(&rig.device, "b", 8));
        let mut emission = Emission::new();
        emit(&mut emission, a.base(), b.base());
        rig.stream.run(emission, &[a.clone(), b.clone()]).unwrap();
        let result = rig.stream.synchronize();
        assert_eq!(fault(result.clone()).work, work);
        assert_eq!(near(result), expected, "{work}");
    }
}

#[test]
fn a_copy_onto_itself_is_refused_and_a_copy_beside_itself_is_not() {
    for (offset, good) in [(0, false), (7, false), (8, true), (9, true)] {
        let rig = Rig::new();
        let a = rig.device.arena("a", 64).unwrap();
        let mut emission = Emission::new();
        emission.copy(a.base().byte_add(20 + offset), a.base().byte_add(20), 8);
        emission.copy(a.base().byte_add(20 - offset), a.base().byte_add(20), 8);
        rig.stream.run(emission, &[a]).unwrap();
        let result = rig.stream.synchronize();
        assert_eq!(result.is_ok(), good, "{offset}: {result:?}");
        if !good {
            assert!(matches!(fault(result).kind, FaultKind::Overlap { bytes: 8, .. }));
        }
    }
}

#[test]
fn out_of_memory_tells_the_numbers_and_takes_nothing() {
    let device = device(1000);
    let a = device.arena("weights", 600).unwrap();
    let error = device.arena("pages", 401).err();
    assert_eq!(error, Some(Error::OutOfMemory { label: "pages".into(), asked: 401, free: 400 }));
    assert_eq!((device.used_bytes(), device.free_bytes()), (600, 400));
    let b = device.arena("pages", 400).unwrap();
    assert_eq!(device.free_bytes(), 0);
    let shared = a.clone();
    drop(a);
    assert_eq!(device.free_bytes(), 0, "a clone still owns it");
    drop(shared);
    assert_eq!(device.free_bytes(), 600);
    let _c = device.arena("again", 600).unwrap();
    drop(b);
    assert_eq!((device.used_bytes(), device.free_bytes()), (600, 400));
}

#[test]
fn pinned_memory_takes_no_device_memory() {
    let device = device(100);
    let pinned = device.pinned("staging", 5000).unwrap();
    assert_eq!((device.used_bytes(), pinned.bytes()), (0, 5000));
    drop(pinned);
    assert_eq!((device.used_bytes(), device.free_bytes()), (0, 100));
}

#[test]
fn sizes_that_no_machine_has_are_errors() {
    let device = device(usize::MAX);
    for bytes in [usize::MAX, usize::MAX - 100, isize::MAX as usize] {
        for error in [device.arena("sky", bytes).err(), device.pinned("sky", bytes).err()] {
            let text = error.expect("it cannot be had").to_string();
            assert!(text.contains("`sky`") && text.contains(&bytes.to_string()), "{text}");
        }
    }
    assert_eq!(device.used_bytes(), 0);
}

#[test]
fn fresh_memory_is_nan_even_where_something_was_before() {
    let device = device(1 << 20);
    for _ in 0..20 {
        let arena = device.arena("fresh", 4099).unwrap();
        assert!(arena.read::<f32>(arena.base().cast(), 1024).unwrap().iter().all(|x| x.is_nan()));
        assert!(arena.read::<bf16>(arena.base().cast(), 2049).unwrap().iter().all(|x| x.is_nan()));
        let pinned = device.pinned("fresh", 4099).unwrap();
        assert!(pinned.read(|bytes| bytes.iter().all(|&b| b == 0xff)));
        arena.write(arena.base(), &[0u8; 4099]).unwrap();
    }
}

#[test]
fn without_poison_fresh_memory_is_zero() {
    let device = Device::host(HostOptions { memory_bytes: 1 << 20, poison: false, ..HostOptions::default() });
    for _ in 0..20 {
        let arena = device.arena("fresh", 4099).unwrap();
        assert_eq!(arena.read(arena.base(), 4099).unwrap(), [0u8; 4099]);
        arena.write(arena.base(), &[7u8; 4099]).unwrap();
    }
}

#[test]
fn virtual_arenas_are_addresses_alone() {
    let options = HostOptions { memory_bytes: 1 << 50, virtual_arenas: true, ..HostOptions::default() };
    let device = Device::host(options);
    let arena = device.arena("vast", 1 << 49).unwrap();
    assert_eq!((device.used_bytes(), arena.bytes()), (1 << 49, 1 << 49));
    let far: Ptr<u32> = arena.base().byte_add((1 << 49) - 8).cast();
    arena.write(far, &[1u32; 2]).unwrap();
    assert!(arena.write(far, &[1u32; 3]).is_err(), "ranges are checked all the same");
    let text = arena.read(far, 2).expect_err("no bytes").to_string();
    assert!(text.contains("`vast` is virtual"), "{text}");
    let mut pinned = device.pinned("staged", 8).unwrap();
    pinned.write(|bytes| bytes.fill(3));
    assert!(pinned.read(|bytes| bytes.iter().all(|&byte| byte == 3)), "pinned memory is real");
    let pinned = device.pinned_arena("named", 8).unwrap();
    pinned.write(pinned.base(), &[5u8; 8]).unwrap();
    assert_eq!(pinned.read(pinned.base(), 8).unwrap(), [5u8; 8], "also if launches may name it");

    let stream = device.stream();
    let args = AddArgs { to: far, from: far, count: 2, value: 1 };
    stream.run(launch::<Add>(&args), std::slice::from_ref(&arena)).unwrap();
    let text = stream.synchronize().expect_err("nothing to add to").to_string();
    assert!(text.contains("virtual `vast`"), "{text}");
    assert!(device.arena("vaster", 1 << 51).is_err());
}

#[test]
fn what_the_host_reaches_is_filled_in_its_place() {
    let rig = Rig::new();
    let pinned = rig.device.pinned_arena("table", 8).unwrap();
    for arena in [&pinned, &rig.device.arena("weights", 8).unwrap()] {
        let filled = arena.fill(|bytes| {
            bytes[4..].copy_from_slice(&7u32.to_ne_bytes());
            bytes.len()
        });
        assert_eq!((filled, words(arena, 2)), (Ok(8), vec![u32::MAX, 7]));
    }
    let options = HostOptions { virtual_arenas: true, ..HostOptions::default() };
    let vast = Device::host(options).arena("vast", 8).unwrap();
    let text = vast.fill(|_| panic!("not asked")).map(|_: ()| ()).unwrap_err().to_string();
    assert!(text.contains("`vast` is no memory that the host reaches"), "{text}");
    let recording = Recording::begin(&rig.stream, "fill").unwrap();
    assert!(matches!(pinned.fill(|_| panic!("not asked")), Err::<(), _>(Error::Capturing { .. })));
    assert!(recording.finish(Vec::new()).is_err(), "it breaks the capture");
}

#[test]
fn the_host_reads_and_writes_inside_one_arena_only() {
    let device = device(1 << 20);
    let a = zeros(&device, "a", 4);
    let b = zeros(&device, "b", 4);
    let base = a.base().cast::<u32>();
    a.write(base.at(3), &[5]).unwrap();
    assert_eq!(words(&a, 4), [0, 0, 0, 5]);
    assert_eq!(a.read(a.base().byte_add(13), 1).unwrap(), [0u8], "the host may read at any byte");
    let wild = [base.at(4), base.at(1), Ptr::new(base.address() - 4), Ptr::NULL, b.base().cast()];
    for at in wild.into_iter().chain([Ptr::new(u64::MAX - 3), Ptr::new(u64::MAX)]) {
        let text = a.write(at, &[1; 4]).expect_err("outside").to_string();
        assert!(text.starts_with("write: 16 bytes at") && text.contains("`a`"), "{text}");
        assert!(matches!(a.read(at, 4), Err(Error::Size { call: "read", .. })));
    }
    assert!(a.read(base, usize::MAX).is_err() && a.read(base, usize::MAX / 4 + 1).is_err());
    assert_eq!((words(&a, 4), words(&b, 4)), (vec![0, 0, 0, 5], vec![0; 4]));
}

#[test]
fn queued_work_keeps_its_arenas() {
    let rig = Rig::new();
    let (before, a) = (rig.device.used_bytes(), zeros(&rig.device, "a", 16));
    rig.stream.run(rig.log.emission_of(a.base()), &[a]).unwrap();
    assert_eq!(rig.device.used_bytes(), before + 64);
    rig.stream.synchronize().unwrap();
    assert_eq!((rig.log.seen(), rig.device.used_bytes()), (vec![0], before));
}

#[test]
fn work_that_forgot_its_arena_is_caught_even_behind_work_that_kept_it() {
    let rig = Rig::new();
    let a = zeros(&rig.device, "forgotten", 16);
    let emission = rig.log.emission_of(a.base());
    rig.stream.run(emission.clone(), &[a]).unwrap();
    rig.stream.run(emission, &[]).unwrap();
    assert_eq!(near(rig.stream.synchronize()), "0 bytes into freed `forgotten` of 64 bytes");
}

#[test]
fn a_new_arena_is_never_taken_for_an_old_one() {
    let device = device(1 << 20);
    let old = device.arena("pool", 512).unwrap();
    let (epoch, digest) = (old.epoch(), old.digest());
    assert_eq!((old.clone().epoch(), old.clone().digest()), (epoch, digest));
    drop(old);
    let new = device.arena("pool", 512).unwrap();
    assert!(new.epoch() > epoch);
    assert_ne!(new.digest(), digest);
}

#[test]
fn slots_lie_in_the_slab_one_stride_apart() {
    let device = device(1 << 20);
    let mut slot = Region::new();
    let state = slot.array::<f32>("state", 65);
    let tail = slot.add("tail", 3);
    assert_eq!((tail.offset, slot.bytes()), (512, 768));
    let slab = Slab::new(&device, "lanes", &slot, 3).unwrap();
    assert_eq!((slab.stride(), slab.slots(), slab.arena().bytes()), (768, 3, 3 * 768));
    let base = slab.arena().base().address();
    assert_eq!(slab.slot(2).address(), base + 1536);
    assert_eq!(tail.at::<u8>(slab.slot(1)).address(), base + 768 + 512);
    assert_eq!(state.at::<f32>(slab.slot(0)).at(2).address(), base + 8);
    assert!(catch_unwind(AssertUnwindSafe(|| slab.slot(3))).is_err());
}

#[test]
fn devices_do_not_take_each_others_arenas() {
    let (rig, other) = (Rig::new(), Rig::new());
    let foreign = Log::new(&other.device);
    let result = rig.stream.run(copy_word(foreign.0.base(), rig.log.0.base()), &[foreign.0]);
    assert_eq!(result, Err(Error::OtherDevice { call: "running work" }));
    assert_eq!(rig.stream.synchronize(), Ok(()));
}
