//! The feature cache, against a list that is searched from end to end.

use std::sync::Arc;

use half::bf16;
use proptest::prelude::*;
use vision::{CacheCounts, ContentKey, FeatureCache};

fn key(number: u8) -> ContentKey {
    // Alike in all bytes but one: a key that is cut short would be another's.
    let mut bytes = [9; 16];
    bytes[usize::from(number) % 16] = number;
    ContentKey(bytes)
}

/// Rows that say whose they are.
fn rows(number: u8, length: usize) -> Arc<[bf16]> {
    vec![bf16::from_f32(number.into()); length].into()
}

#[test]
fn a_b_a_and_other_content() {
    let mut cache = FeatureCache::new(100);
    assert_eq!(cache.get(&key(1)), None);
    cache.insert(key(1), rows(1, 10), 2 * 10);
    assert_eq!(cache.get(&key(1)), Some(rows(1, 10)));
    assert_eq!(cache.get(&key(2)), None);
    cache.insert(key(2), rows(2, 10), 2 * 10);
    assert_eq!(cache.get(&key(1)), Some(rows(1, 10)));
    let counts = CacheCounts { hits: 2, misses: 2, evictions: 0, entries: 2, bytes: 40 };
    assert_eq!(cache.counts(), counts);
    // The one that was asked for longest ago goes.
    cache.insert(key(3), rows(3, 40), 2 * 40);
    assert_eq!(cache.get(&key(2)), None);
    assert_eq!(cache.get(&key(1)), Some(rows(1, 10)));
    assert_eq!(cache.counts().evictions, 1);
    // Larger than all of it: not kept, and nothing goes for it.
    cache.insert(key(4), rows(4, 51), 2 * 51);
    assert_eq!(cache.get(&key(4)), None);
    assert_eq!(cache.counts().entries, 2);
}

#[test]
fn no_budget_keeps_nothing() {
    let mut cache: FeatureCache<[bf16]> = FeatureCache::new(0);
    cache.insert(key(1), rows(1, 1), 2);
    assert_eq!(cache.get(&key(1)), None);
    assert_eq!(cache.counts().bytes, 0);
}

/// What a request still needs neither goes nor is forgotten, and what would not fit beside it drives nothing out.
#[test]
fn what_somebody_holds_stays() {
    let mut cache = FeatureCache::new(100);
    cache.insert(key(1), rows(1, 20), 40);
    let held = cache.get(&key(1));
    cache.insert(key(2), rows(2, 20), 40);
    assert_eq!((cache.held(), cache.make_room(61)), (40, false));
    assert_eq!(cache.counts().entries, 2);
    // The other one is younger, and goes.
    assert!(cache.make_room(60));
    assert_eq!((cache.get(&key(1)), cache.get(&key(2))), (held.clone(), None));
    assert!(!cache.evict());
    drop(held);
    assert!(cache.make_room(100) && !cache.evict());
    assert_eq!((cache.counts().bytes, cache.counts().evictions), (0, 2));
}

proptest! {
    #[test]
    fn it_is_a_bounded_list(
        budget in 0usize..200,
        steps in prop::collection::vec((any::<bool>(), 0u8..12, 0usize..60), 0..300),
    ) {
        let mut cache = FeatureCache::new(budget);
        // Oldest use first.
        let mut list: Vec<(u8, usize)> = Vec::new();
        let (mut hits, mut misses, mut evictions) = (0, 0, 0);
        for (insert, number, length) in steps {
            let at = list.iter().position(|(other, _)| *other == number);
            if insert {
                at.map(|at| list.remove(at));
                if 2 * length <= budget {
                    list.push((number, length));
                    while list.iter().map(|(_, length)| 2 * length).sum::<usize>() > budget {
                        list.remove(0);
                        evictions += 1;
                    }
                }
                cache.insert(key(number), rows(number, length), 2 * length);
            } else {
                let expected = at.map(|at| {
                    let entry = list.remove(at);
                    list.push(entry);
                    rows(entry.0, entry.1)
                });
                *if expected.is_some() { &mut hits } else { &mut misses } += 1;
                prop_assert_eq!(cache.get(&key(number)), expected);
            }
            let bytes = list.iter().map(|(_, length)| 2 * length).sum();
            let counts = CacheCounts { hits, misses, evictions, entries: list.len(), bytes };
            prop_assert_eq!(cache.counts(), counts);
            prop_assert!(bytes <= budget);
        }
    }
}
