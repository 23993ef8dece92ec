//! Checked slices for one launch: what a host kernel sees of device memory.

use std::cell::RefCell;

use bytemuck::Pod;

use super::{Memory, memory::ALIGN};
use crate::Ptr;
use crate::error::{Fault, FaultKind};

/// The memory of one running launch. It turns (address, length) into slices and sees to it that no slice
/// that may be written overlaps any other slice of the same launch, so kernels need no unsafe code.
pub struct Access<'m> {
    memory: &'m Memory,
    work: &'static str,
    reads: RefCell<Vec<(u64, u64)>>,
    writes: RefCell<Vec<(u64, u64)>>,
}

impl<'m> Access<'m> {
    /// Opens the memory for one launch. `&mut` proves that nothing else looks at it meanwhile.
    pub(super) fn new(memory: &'m mut Memory, work: &'static str) -> Self {
        Access { memory, work, reads: RefCell::default(), writes: RefCell::default() }
    }

    /// `len` values at `ptr`, to read.
    pub fn read<T: Pod>(&self, ptr: Ptr<T>, len: usize) -> Result<&[T], Fault> {
        let (address, bytes) = self.place(ptr, len)?;
        let data = self.memory.locate(address, bytes).map_err(|kind| self.fault(kind))?.cast();
        let range = (address, address + bytes as u64);
        if self.writes.borrow().iter().any(|held| overlap(*held, range)) {
            return Err(self.overlap(range));
        }
        self.reads.borrow_mut().push(range);
        // SAFETY: the range is live, aligned and initialised, T is plain old data, and no `&mut` slice of
        // this launch overlaps it (checked above, and by `write` for later ones).
        Ok(unsafe { std::slice::from_raw_parts(data, len) })
    }

    /// `len` values at `ptr`, to read and write. It must not overlap anything else that this launch holds.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the overlap check, like a RefCell per range")]
    pub fn write<T: Pod>(&self, ptr: Ptr<T>, len: usize) -> Result<&mut [T], Fault> {
        let (address, bytes) = self.place(ptr, len)?;
        let data = self.memory.locate_mut(address, bytes).map_err(|kind| self.fault(kind))?.cast();
        let range = (address, address + bytes as u64);
        let held = |list: &RefCell<Vec<(u64, u64)>>| list.borrow().iter().any(|held| overlap(*held, range));
        if held(&self.writes) || held(&self.reads) {
            return Err(self.overlap(range));
        }
        self.writes.borrow_mut().push(range);
        // SAFETY: as in `read`, and no other slice of this launch overlaps the range.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
    }

    /// A fault of this launch: a value that the kernel's domain excludes.
    pub fn domain(&self, why: impl Into<String>) -> Fault {
        self.fault(FaultKind::Domain(why.into()))
    }

    /// Where `len` values at `ptr` lie: their first address, and their bytes.
    fn place<T: Pod>(&self, ptr: Ptr<T>, len: usize) -> Result<(u64, usize), Fault> {
        const { assert!(align_of::<T>() <= ALIGN, "device addresses are not aligned this much") };
        let address = ptr.address();
        if !address.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.fault(FaultKind::Alignment { address, align: align_of::<T>() }));
        }
        Ok((address, len.saturating_mul(size_of::<T>())))
    }

    fn overlap(&self, (start, end): (u64, u64)) -> Fault {
        self.fault(FaultKind::Overlap { address: start, bytes: (end - start) as usize })
    }

    fn fault(&self, kind: FaultKind) -> Fault {
        Fault { work: self.work.into(), kind }
    }
}

/// Whether two ranges share a byte; an empty range shares none.
fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0.max(b.0) < a.1.min(b.1)
}
