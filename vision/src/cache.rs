//! Features that were computed once: rows of the tower by content, within a budget of bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use half::bf16;

use crate::ContentKey;

/// Rows of the tower by the key of their picture. When the budget is spent, those that were asked for longest ago go.
///
/// A value is found under its own key and no other. One that is larger than the budget is not kept.
#[derive(Debug)]
pub struct FeatureCache {
    budget: usize,
    bytes: usize,
    /// The value of each key, and when it was last asked for.
    values: HashMap<ContentKey, (u64, Arc<[bf16]>)>,
    /// The keys, by when they were last asked for.
    order: BTreeMap<u64, ContentKey>,
    clock: u64,
    hits: u64,
    misses: u64,
    evictions: u64,
}

/// What a [`FeatureCache`] has seen, and holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheCounts {
    /// Times that a value was there.
    pub hits: u64,
    /// Times that none was.
    pub misses: u64,
    /// Values that went to make room.
    pub evictions: u64,
    /// Values held.
    pub entries: usize,
    /// Their bytes.
    pub bytes: usize,
}

impl FeatureCache {
    /// A cache that holds at most `budget` bytes of values; 0 keeps nothing.
    pub fn new(budget: usize) -> Self {
        Self {
            budget,
            bytes: 0,
            values: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            hits: 0,
            misses: 0,
            evictions: 0,
        }
    }

    /// The rows of a picture, if they are here; they are now the last to go.
    pub fn get(&mut self, key: &ContentKey) -> Option<Arc<[bf16]>> {
        let Some((used, value)) = self.values.get_mut(key) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.clock += 1;
        self.order.remove(used);
        self.order.insert(self.clock, *key);
        *used = self.clock;
        Some(value.clone())
    }

    /// Keeps the rows of a picture, in place of what was under its key.
    pub fn insert(&mut self, key: ContentKey, value: Arc<[bf16]>) {
        if let Some((used, old)) = self.values.remove(&key) {
            self.order.remove(&used);
            self.bytes -= size_of_val(&*old);
        }
        let bytes = size_of_val(&*value);
        if bytes > self.budget {
            return;
        }
        while self.bytes > self.budget - bytes {
            let (_, oldest) = self.order.pop_first().expect("bytes belong to values");
            let (_, old) = self.values.remove(&oldest).expect("every key has a value");
            self.bytes -= size_of_val(&*old);
            self.evictions += 1;
        }
        self.clock += 1;
        self.order.insert(self.clock, key);
        self.values.insert(key, (self.clock, value));
        self.bytes += bytes;
    }

    /// What was seen so far.
    pub fn counts(&self) -> CacheCounts {
        CacheCounts {
            hits: self.hits,
            misses: self.misses,
            evictions: self.evictions,
            entries: self.values.len(),
            bytes: self.bytes,
        }
    }
}
