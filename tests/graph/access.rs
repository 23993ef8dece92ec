//! Slices of one launch: a written one overlaps no other.

use graph::Error;
use graph::error::FaultKind;

use crate::rig::{Rig, Touch, TouchArgs, fault, launch, words, zeros};

/// Runs one launch over two ranges (offset, bytes) of one arena.
fn touch(ranges: [(usize, u32); 2], writes: [u32; 2]) -> Result<(), Error> {
    let rig = Rig::new();
    let a = rig.device.arena("a", 64).unwrap();
    let at = ranges.map(|(offset, _)| a.base().byte_add(offset));
    let args = TouchArgs { at, bytes: ranges.map(|(_, bytes)| bytes), writes };
    rig.stream.run(launch::<Touch>(&args), &[a]).unwrap();
    rig.stream.synchronize()
}

const READ: u32 = 0;
const WRITE: u32 = 1;

#[test]
fn what_is_written_overlaps_nothing() {
    let overlapping = [
        [(8, 8), (8, 8)],
        [(8, 8), (15, 8)],
        [(15, 8), (8, 8)],
        [(8, 16), (10, 2)],
        [(10, 2), (8, 16)],
        [(0, 64), (63, 1)],
    ];
    for ranges in overlapping {
        for writes in [[WRITE, READ], [READ, WRITE], [WRITE, WRITE]] {
            let found = fault(touch(ranges, writes));
            assert_eq!(found.work, "touch");
            let FaultKind::Overlap { bytes, .. } = found.kind else {
                panic!("{ranges:?} {writes:?}: {found}")
            };
            assert_eq!(bytes, ranges[1].1 as usize, "the newer slice is named");
        }
        assert_eq!(touch(ranges, [READ, READ]), Ok(()), "two readers may share {ranges:?}");
    }
}

#[test]
fn neighbours_and_empty_slices_overlap_nothing() {
    let apart =
        [[(8, 8), (16, 8)], [(16, 8), (8, 8)], [(0, 4), (60, 4)], [(8, 8), (12, 0)], [(12, 0), (8, 8)]];
    for ranges in apart {
        for writes in [[WRITE, READ], [READ, WRITE], [WRITE, WRITE]] {
            assert_eq!(touch(ranges, writes), Ok(()), "{ranges:?} {writes:?}");
        }
    }
}

#[test]
fn the_rule_is_per_launch() {
    let rig = Rig::new();
    let a = zeros(&rig.device, "a", 1);
    let args = TouchArgs { at: [a.base(), a.base().byte_add(2)], bytes: [2, 2], writes: [WRITE; 2] };
    let mut twice = launch::<Touch>(&args);
    twice.append(&twice.clone());
    rig.stream.run(twice, std::slice::from_ref(&a)).unwrap();
    assert_eq!(rig.stream.synchronize(), Ok(()));
    assert_eq!(words(&a, 1), [u32::from_ne_bytes([0, 0, 1, 1])]);
}
