//! Results on their way to the host, and the ring that keeps them until they are taken.

use graph::{Arena, Readback};
use proptest::prelude::*;

use crate::rig::{Rig, fault, words, zeros};

/// A ring for one word, and a word whose values go through it.
fn ring(rig: &Rig) -> (Arena, Readback) {
    (zeros(&rig.device, "result", 1), Readback::new(&rig.device, "results", 4).unwrap())
}

fn fill(rig: &Rig, to: &Arena, value: u8) {
    let mut emission = graph::Emission::new();
    emission.fill(to.base(), 4, value);
    rig.stream.run(emission, std::slice::from_ref(to)).unwrap();
}

fn word(value: u8) -> u32 {
    u32::from_ne_bytes([value; 4])
}

#[test]
fn results_arrive_and_nothing_later_is_waited_for() {
    let rig = Rig::new();
    let (from, mut ring) = ring(&rig);
    let keeps = std::slice::from_ref(&from);
    fill(&rig, &from, 1);
    let first = ring.queue::<u32>(&rig.stream, from.base().cast(), 1, keeps).unwrap();
    fill(&rig, &from, 2);
    let second = ring.queue::<u32>(&rig.stream, from.base().cast(), 1, keeps).unwrap();
    assert_eq!(ring.take(first), Ok(vec![word(1)]));
    assert_eq!(words(&from, 1), [word(1)], "the second round has not run");
    assert_eq!(ring.take(second), Ok(vec![word(2)]));
}

#[test]
fn a_buffer_is_not_reused_before_it_was_taken() {
    let rig = Rig::new();
    let (from, mut ring) = ring(&rig);
    let queue = |ring: &mut Readback, value| {
        fill(&rig, &from, value);
        ring.queue::<u32>(&rig.stream, from.base().cast(), 1, std::slice::from_ref(&from))
    };
    let first = queue(&mut ring, 1).unwrap();
    let second = queue(&mut ring, 2).unwrap();
    rig.stream.synchronize().unwrap();
    let text = queue(&mut ring, 3).unwrap_err().to_string();
    assert_eq!(text, "read back: all 2 buffers hold results under way; take the oldest first");
    assert_eq!(ring.take(first), Ok(vec![word(1)]));
    let third = queue(&mut ring, 4).unwrap();
    assert_eq!((ring.take(third), ring.take(second)), (Ok(vec![word(4)]), Ok(vec![word(2)])));
}

#[test]
fn what_does_not_belong_here_is_refused() {
    let rig = Rig::new();
    let (from, mut here) = ring(&rig);
    let (_, mut other) = ring(&rig);
    let text = here.queue::<u32>(&rig.stream, from.base().cast(), 2, &[]).unwrap_err().to_string();
    assert_eq!(text, "read back: 8 bytes do not fit a read-back buffer of 4");
    let pending = here.queue::<u32>(&rig.stream, from.base().cast(), 1, &[]).unwrap();
    assert!(other.take(pending).unwrap_err().to_string().contains("not under way here"));
}

#[test]
fn a_queued_copy_holds_its_source_and_an_upload_its_target() {
    let rig = Rig::new();
    let (from, mut ring) = ring(&rig);
    let pending = ring.queue::<u32>(&rig.stream, from.base().cast(), 1, std::slice::from_ref(&from)).unwrap();
    drop(from);
    assert_eq!(ring.take(pending), Ok(vec![0]));

    let (to, mut staging) = (zeros(&rig.device, "to", 1), graph::Staging::new(&rig.device, "up", 4).unwrap());
    staging.upload(&rig.stream, to.base(), 4, std::slice::from_ref(&to), |bytes| bytes.fill(1)).unwrap();
    drop(to);
    rig.stream.synchronize().unwrap();
}

#[test]
fn a_fault_reaches_whoever_takes() {
    let rig = Rig::new();
    let (from, mut ring) = ring(&rig);
    rig.stream.run(crate::rig::launch::<crate::rig::Fail>(&0), &[]).unwrap();
    let pending = ring.queue::<u32>(&rig.stream, from.base().cast(), 1, &[]).unwrap();
    assert_eq!(fault(ring.take(pending).map(drop)).work, "fail");
}

proptest! {
    /// Whenever the device runs, and in whatever order up to two are under way, each value is its own.
    #[test]
    fn what_is_taken_is_what_was_made(steps in prop::collection::vec((0usize..4, any::<bool>()), 1..40)) {
        let rig = Rig::new();
        let (from, mut ring) = ring(&rig);
        let mut under_way = std::collections::VecDeque::new();
        for (round, (advance, early)) in steps.into_iter().enumerate() {
            if under_way.len() == 2 || (early && !under_way.is_empty()) {
                let (value, pending) = under_way.pop_front().unwrap();
                prop_assert_eq!(ring.take::<u32>(pending), Ok(vec![word(value)]));
            }
            fill(&rig, &from, round as u8);
            let pending = ring.queue(&rig.stream, from.base().cast(), 1, &[]).unwrap();
            under_way.push_back((round as u8, pending));
            rig.stream.advance(advance).unwrap();
        }
    }
}
