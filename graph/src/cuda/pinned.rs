//! Pinned host memory: bytes that the host reaches through a slice and the device at the same address.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Cuda, Release};
use crate::error::{Error, Result};

/// Pinned memory with an owner.
pub(crate) struct PinnedMemory {
    cuda: Arc<Cuda>,
    pages: Pages,
    bytes: usize,
}

/// Where pinned memory starts.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    pub(super) start: NonNull<u8>,
}

// SAFETY: the pages are host memory with one owner at a time, first `PinnedMemory`, then the release list.
unsafe impl Send for Pages {}
// SAFETY: a shared `Pages` gives its address and nothing else.
unsafe impl Sync for Pages {}

impl PinnedMemory {
    pub(crate) fn new(cuda: &Arc<Cuda>, label: &str, bytes: usize) -> Result<PinnedMemory> {
        cuda.state.refuse_in_capture("pinned allocation")?;
        cuda.state.healthy()?;
        cuda.free_released();
        let start = cuda.context().allocate_pinned(bytes).map_err(|failure| {
            let doing = format!("pinned allocation of {bytes} bytes for `{label}`");
            match failure.out_of_memory() {
                true => Error::Size {
                    call: "pinned allocation",
                    why: format!("this machine cannot pin {bytes} bytes for `{label}`; ask for less"),
                },
                false => cuda.fail(failure, doing),
            }
        })?;
        // SAFETY: just allocated with this size. From here on no slice shows uninitialised bytes.
        unsafe { start.as_ptr().write_bytes(cuda.fresh_byte(), bytes) };
        Ok(PinnedMemory { cuda: cuda.clone(), pages: Pages { start }, bytes })
    }

    pub(crate) fn address(&self) -> u64 {
        self.pages.start.as_ptr() as u64
    }

    /// The bytes. Whoever queued a copy to them waits for it first.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: initialised, live as long as `self`, and `&self` excludes the host's own writes. The
        // device writes only what a caller queued, who waits for an event before looking (`Staging` and
        // the engine's outcomes do), as for any memory shared with a device.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr(), self.bytes) }
    }

    /// The bytes, to write. Whoever queued a copy from or to them waits for it first.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.cuda.release(Release::Pinned(self.pages));
    }
}
