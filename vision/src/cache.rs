//! Features that were computed once: rows of the tower by content, within a budget of bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::ContentKey;

/// Rows of the tower by the key of their picture, wherever they lie. When the budget is spent, those that were asked for
/// longest ago go; what somebody else holds stays, since letting go of it would free nothing.
///
/// A value is found under its own key and no other. One that does not fit beside those that stay is not kept.
#[derive(Debug)]
pub struct FeatureCache<T: ?Sized> {
    budget: usize,
    bytes: usize,
    values: HashMap<ContentKey, Kept<T>>,
    /// The keys, by when they were last asked for.
    order: BTreeMap<u64, ContentKey>,
    clock: u64,
    hits: u64,
    misses: u64,
    evictions: u64,
}

#[derive(Debug)]
struct Kept<T: ?Sized> {
    /// When it was last asked for.
    used: u64,
    bytes: usize,
    value: Arc<T>,
}

/// What a [`FeatureCache`] has seen, and holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

impl<T: ?Sized> FeatureCache<T> {
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

    /// The most bytes that it holds.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// The rows of a picture, if they are here; they are now the last to go.
    pub fn get(&mut self, key: &ContentKey) -> Option<Arc<T>> {
        let Some(kept) = self.values.get_mut(key) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.clock += 1;
        self.order.remove(&kept.used);
        self.order.insert(self.clock, *key);
        kept.used = self.clock;
        Some(kept.value.clone())
    }

    /// Keeps the rows of a picture, which take so many bytes, in place of what was under its key.
    pub fn insert(&mut self, key: ContentKey, value: Arc<T>, bytes: usize) {
        self.remove(&key);
        if !self.make_room(bytes) {
            return;
        }
        self.clock += 1;
        self.order.insert(self.clock, key);
        self.values.insert(key, Kept { used: self.clock, bytes, value });
        self.bytes += bytes;
    }

    /// Makes room for so many bytes; if what somebody else holds leaves less, nothing goes, and it says so.
    pub fn make_room(&mut self, bytes: usize) -> bool {
        if bytes > self.budget - self.held() {
            return false;
        }
        while self.bytes > self.budget - bytes {
            assert!(self.evict(), "what nobody else holds is enough");
        }
        true
    }

    /// Lets go of the value that was asked for longest ago of those that nobody else holds; false if there is none.
    pub fn evict(&mut self) -> bool {
        let Some(oldest) = self.order.values().find(|key| !self.values[key].is_held()).copied() else {
            return false;
        };
        self.remove(&oldest);
        self.evictions += 1;
        true
    }

    /// Bytes of the values that somebody else holds too.
    pub fn held(&self) -> usize {
        self.values.values().filter(|kept| kept.is_held()).map(|kept| kept.bytes).sum()
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

    fn remove(&mut self, key: &ContentKey) {
        if let Some(kept) = self.values.remove(key) {
            self.order.remove(&kept.used);
            self.bytes -= kept.bytes;
        }
    }
}

impl<T: ?Sized> Kept<T> {
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.value) > 1
    }
}
