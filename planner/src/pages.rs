//! Page pools, one per cache class, and leases that must be given back.
//!
//! A pool counts two things. *Reserved* is what admitted lanes may need over their whole lives; it is
//! raised at admission and never exceeds the pool, so a lane that was admitted always finds its next page.
//! *Leased* are the pages that lanes really hold: the lowest free page first, when a round needs it.
//!
//! ```text
//! 0 ───── leased ───── reserved ───── total
//! ```

use crate::ids::PageId;

/// How much of a pool is spoken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// Pages of the pool.
    pub total: u32,
    /// Pages that admitted lanes may hold at most.
    pub reserved: u32,
    /// Pages that no lane holds.
    pub free: u32,
}

/// The pages of one cache class.
#[derive(Debug)]
pub(crate) struct Pool {
    total: u32,
    reserved: u32,
    free: u32,
    /// One bit a page, set while the page is free.
    bits: Vec<u64>,
    /// No word before this one has a free page.
    first: usize,
}

/// What one lane may hold, and holds. It is consumed by giving it back.
#[derive(Debug)]
pub(crate) struct Lease {
    reserved: u32,
    pages: Vec<PageId>,
}

impl Pool {
    pub(crate) fn new(total: u32) -> Self {
        let words = (total as usize).div_ceil(64);
        let mut bits = vec![u64::MAX; words];
        if !total.is_multiple_of(64) {
            bits[words - 1] = (1 << (total % 64)) - 1;
        }
        Self { total, reserved: 0, free: total, bits, first: 0 }
    }

    pub(crate) fn count(&self) -> PoolUse {
        PoolUse { total: self.total, reserved: self.reserved, free: self.free }
    }

    /// Pages that are promised to nobody.
    pub(crate) fn unreserved(&self) -> u32 {
        self.total - self.reserved
    }

    /// Promises `pages` pages to a lane, without choosing them.
    pub(crate) fn reserve(&mut self, pages: u32) -> Lease {
        assert!(
            pages <= self.unreserved(),
            "{pages} pages reserved beside {} of {}",
            self.reserved,
            self.total
        );
        self.reserved += pages;
        Lease { reserved: pages, pages: Vec::with_capacity(pages as usize) }
    }

    /// The lowest free page that is not below `from`.
    pub(crate) fn next_free(&self, from: u32) -> Option<PageId> {
        let mut word = (from as usize / 64).max(self.first);
        let mut bits = *self.bits.get(word)?;
        if word == from as usize / 64 {
            bits &= u64::MAX << (from % 64);
        }
        while bits == 0 {
            word += 1;
            bits = *self.bits.get(word)?;
        }
        Some(PageId(word as u32 * 64 + bits.trailing_zeros()))
    }

    /// Moves a free page into a lease, as its next page.
    pub(crate) fn take(&mut self, page: PageId, lease: &mut Lease) {
        let word = page.0 as usize / 64;
        let bit = 1 << (page.0 % 64);
        assert!(self.bits[word] & bit != 0, "{page} is leased already");
        assert!(
            lease.pages.len() < lease.reserved as usize,
            "{page} is more than the {} reserved",
            lease.reserved
        );
        self.bits[word] &= !bit;
        self.free -= 1;
        while self.first + 1 < self.bits.len() && self.bits[self.first] == 0 {
            self.first += 1;
        }
        lease.pages.push(page);
    }

    /// Frees every page of a lease and its reservation; returns how many pages it held.
    pub(crate) fn give_back(&mut self, mut lease: Lease) -> u32 {
        for page in &lease.pages {
            let word = page.0 as usize / 64;
            self.bits[word] |= 1 << (page.0 % 64);
            self.first = self.first.min(word);
        }
        let held = lease.pages.len() as u32;
        self.free += held;
        self.reserved -= lease.reserved;
        lease.pages.clear();
        lease.reserved = 0;
        held
    }
}

impl Lease {
    pub(crate) fn pages(&self) -> &[PageId] {
        &self.pages
    }

    pub(crate) fn reserved(&self) -> u32 {
        self.reserved
    }
}

impl Drop for Lease {
    /// Silent while another assertion unwinds, which would abort before that one is told.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(
                self.pages.is_empty() && self.reserved == 0,
                "a lease was dropped with {} pages held and {} reserved; give it back to its pool",
                self.pages.len(),
                self.reserved
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_page_comes_first_and_returns_first() {
        let mut pool = Pool::new(130);
        let mut long = pool.reserve(129);
        for expected in 0..129 {
            let page = pool.next_free(0).unwrap();
            assert_eq!(page, PageId(expected));
            pool.take(page, &mut long);
        }
        assert_eq!(pool.next_free(0), Some(PageId(129)));
        assert_eq!(pool.next_free(130), None);
        assert_eq!(pool.count(), PoolUse { total: 130, reserved: 129, free: 1 });
        assert_eq!(pool.give_back(long), 129);
        assert_eq!(pool.next_free(0), Some(PageId(0)));
        assert_eq!(pool.next_free(64), Some(PageId(64)));
        assert_eq!(pool.count(), PoolUse { total: 130, reserved: 0, free: 130 });
    }

    #[test]
    #[should_panic(expected = "dropped with 1 pages held and 2 reserved")]
    fn a_lease_dropped_while_holding_pages_asserts() {
        let mut pool = Pool::new(4);
        let mut lease = pool.reserve(2);
        pool.take(PageId(3), &mut lease);
        drop(lease);
    }

    #[test]
    #[should_panic(expected = "p1 is leased already")]
    fn a_page_cannot_be_taken_twice() {
        let mut pool = Pool::new(4);
        let mut one = pool.reserve(2);
        pool.take(PageId(1), &mut one);
        pool.take(PageId(1), &mut one);
    }

    #[test]
    #[should_panic(expected = "p2 is more than the 1 reserved")]
    fn a_lease_cannot_outgrow_its_reservation() {
        let mut pool = Pool::new(4);
        let mut one = pool.reserve(1);
        pool.take(PageId(1), &mut one);
        pool.take(PageId(2), &mut one);
    }
}
