//! Collectives as entries: refusals, digests, text, and the parts of emissions.

use std::collections::HashMap;

use graph::{Collective, Emission, Entry, Error, Exchange, Ptr};

use super::{Communicator, Duration, LONG, Rank, both, ranks};

const AT: Ptr<u8> = Ptr::new(0x1000);

type Add = fn(&mut Emission, &Communicator, Ptr<u8>, usize) -> Result<(), Error>;

const ADDS: [(&str, Add); 3] =
    [("gather", Emission::gather), ("send", Emission::send), ("receive", Emission::receive)];

fn one(add: Add, end: &Communicator, at: u64, bytes: usize) -> Emission {
    let mut emission = Emission::new();
    add(&mut emission, end, Ptr::new(at), bytes).unwrap();
    emission
}

#[test]
fn no_bytes_and_too_many_are_refused_by_name() {
    let [end, _] = Communicator::pair(LONG);
    let mut emission = Emission::new();
    for (name, add) in ADDS {
        for (bytes, why) in
            [(0, "0 bytes; leave it out on both ranks"), (usize::MAX / 2, "more than any memory")]
        {
            match add(&mut emission, &end, AT, bytes) {
                Err(Error::Size { call, why: found }) => {
                    assert!(call == name && found.contains(why), "{found}")
                }
                other => panic!("{name} of {bytes} bytes: {other:?}"),
            }
        }
    }
    assert!(emission.is_empty() && emission.communicators().next().is_none());
}

#[test]
fn every_difference_changes_the_digest_and_no_other_thing_does() {
    let [first, second] = Communicator::pair(LONG);
    let [other, _] = Communicator::pair(LONG);
    assert_ne!(first.epoch(), other.epoch());
    let mut seen = HashMap::new();
    for (name, add) in ADDS {
        for (end, rank) in [(&first, 0), (&second, 1)] {
            for (at, bytes) in [(0x1000, 32), (0x1001, 32), (0x1000, 33), (32, 0x1000)] {
                let emission = one(add, end, at, bytes);
                let name = format!("{name} as rank {rank} of {bytes} bytes at {at:#x}");
                assert_eq!(emission.digest(), one(add, end, at, bytes).digest(), "{name}");
                if rank == 0 {
                    assert_ne!(emission.digest(), one(add, &other, at, bytes).digest(), "{name}, elsewhere");
                }
                if let Some(before) = seen.insert(emission.digest(), name.clone()) {
                    panic!("`{name}` and `{before}` have one digest");
                }
            }
        }
    }
    // Order, and which of two communicators, are part of it too.
    let list = |adds: [(Add, &Communicator); 2]| {
        let mut emission = Emission::new();
        adds.into_iter().for_each(|(add, end)| add(&mut emission, end, AT, 8).unwrap());
        emission.digest()
    };
    let [(_, gather), (_, send), _] = ADDS;
    let lists = [
        list([(gather, &first), (send, &first)]),
        list([(send, &first), (gather, &first)]),
        list([(gather, &first), (send, &other)]),
        list([(gather, &first), (gather, &first)]),
        list([(gather, &first), (gather, &other)]),
    ];
    for (index, digest) in lists.iter().enumerate() {
        assert!(!lists[..index].contains(digest) && !seen.contains_key(digest), "list {index}");
    }
}

#[test]
fn the_text_says_what_goes_where() {
    let [first, second] = Communicator::pair(LONG);
    let mut emission = Emission::new();
    emission.gather(&first, AT, 10_240).unwrap();
    emission.send(&first, AT, 5).unwrap();
    emission.receive(&second, AT, 6).unwrap();
    let text = "   0 gather 2 x 10240 bytes as rank 0 at @1000
   1 send 5 bytes to rank 1 at @1000
   2 receive 6 bytes from rank 0 at @1000
";
    assert_eq!(emission.to_string(), text);
}

#[test]
fn parts_hold_the_communicators_that_they_use_and_no_others() {
    let [a, _] = Communicator::pair(LONG);
    let [_, b] = Communicator::pair(LONG);
    let mut all = Emission::new();
    all.gather(&a, AT, 1).unwrap();
    all.fill(AT, 2, 3);
    all.send(&b, AT, 4).unwrap();
    all.receive(&a, AT, 5).unwrap();
    let uses = |emission: &Emission| -> Vec<u64> {
        let entries = emission.entries().iter().filter_map(|entry| match *entry {
            Entry::Collective { communicator, .. } => Some(emission.communicator(communicator).epoch()),
            _ => None,
        });
        entries.collect()
    };
    let holds =
        |emission: &Emission| -> Vec<u64> { emission.communicators().map(|end| end.epoch()).collect() };
    let (first, second) = (a.epoch(), b.epoch());
    assert_eq!((uses(&all), holds(&all)), (vec![first, second, first], vec![first, second]));
    let (head, tail) = (all.slice(0..2), all.slice(2..4));
    assert_eq!((uses(&head), holds(&head)), (vec![first], vec![first]));
    assert_eq!((uses(&tail), holds(&tail)), (vec![second, first], vec![second, first]));
    let sends = |_, entry: &Entry| matches!(entry, Entry::Collective { what: Collective::Send, .. });
    let picked = all.pick(sends);
    assert_eq!((uses(&picked), holds(&picked)), (vec![second], vec![second]));
    assert_eq!(picked.digest(), one(Emission::send, &b, AT.address(), 4).digest());
    let mut joined = head.clone();
    joined.append(&tail);
    assert_eq!((joined.digest(), joined.to_string()), (all.digest(), all.to_string()));
    assert_eq!(holds(&joined), [first, second]);
    let mut turned = tail;
    turned.append(&head);
    assert_eq!((uses(&turned), holds(&turned)), (vec![second, first, first], vec![second, first]));
    // What was cleared holds nothing, and what is gone does not either.
    turned.clear();
    joined.clear();
    assert!(holds(&joined).is_empty());
    drop((all, head, joined));
    a.close(Duration::ZERO).unwrap();
    let held = b.clone().close(Duration::ZERO).unwrap_err().to_string();
    assert!(held.contains("1 graphs or emissions still hold"), "{held}: only the picked one is left");
    drop(picked);
    b.close(Duration::ZERO).unwrap();
}

#[test]
fn entries_of_two_communicators_go_to_the_right_peers() {
    let [a, b] = [Communicator::pair(LONG), Communicator::pair(LONG)];
    let (ends, others) = (a, b);
    let ranks = ranks(ends, 8);
    both(&ranks, |rank| {
        let other = &others[rank.end.rank()];
        let mut emission = rank.gather(2);
        emission.gather(other, rank.data.base().byte_add(4), 2).unwrap();
        // One rank runs them picked apart and joined again.
        if rank.end.rank() == 1 {
            let last = emission.slice(1..2);
            emission = emission.pick(|index, _| index == 0);
            emission.append(&last);
        }
        rank.run(emission).unwrap();
    });
    let plain = |rank: usize| -> u8 { rank as u8 };
    let whole: Vec<u8> = (0..8).map(|i: u8| i * 13 + plain(usize::from(i % 4 >= 2))).collect();
    ranks.iter().for_each(|rank| assert_eq!(rank.bytes(), whole));
}

#[test]
fn a_host_end_has_one_means_and_says_so() {
    let [end, _other] = Communicator::pair(LONG);
    assert_eq!(end.means(), "the host device's own collectives, over its link");
    let rank = Rank::new(end, 64);
    let refused = |result: Result<(), Error>| match result {
        Err(Error::Communicator { doing, why }) => {
            assert_eq!(doing, "run collectives of the communicator of rank 0");
            why
        }
        other => panic!("{other:?}"),
    };
    for exchange in [Exchange::Auto, Exchange::Nccl, Exchange::Push] {
        let why = refused(rank.end.carried_by(exchange).map(drop));
        assert_eq!(why, "it is for a host device, which has one means for all", "{exchange}");
    }
    refused(rank.end.measure(&rank.stream, &[64]).map(drop));
    assert_eq!(refused(rank.end.plant_epochs(1)), "there is no push over peer memory");
    assert_eq!(rank.end.ended(), None);
}
