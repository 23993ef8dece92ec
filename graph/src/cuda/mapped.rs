//! A mapped file that the device reads: through the page tables of the process, where the device can, or else
//! registered with the driver, which keeps its pages in memory.

use std::ptr::NonNull;
use std::sync::Arc;

use super::driver::Context;
use super::{Cuda, Release};
use crate::error::{Error, Result};
use crate::file::FileMap;

/// A mapped file with an owner.
pub(crate) struct MappedFile {
    cuda: Arc<Cuda>,
    /// Taken when it is released.
    map: Option<FileMap>,
    address: u64,
    registered: bool,
}

/// How a device can read a mapped file.
enum Way {
    /// As the process does: it shares its page tables.
    Shared,
    /// Once it is registered with the driver.
    Registered,
}

impl MappedFile {
    pub(crate) fn new(cuda: &Arc<Cuda>, label: &str, map: FileMap) -> Result<MappedFile> {
        let (start, bytes) = (map.start(), map.mapped_bytes());
        let (base, registered) = match way(cuda)? {
            Way::Shared => (start.as_ptr() as u64, false),
            Way::Registered => {
                let at = cuda.context().register_read_only(start, bytes).map_err(|failure| {
                    let (name, says) = failure.words();
                    let why = format!("{bytes} bytes of a file for `{label}`: {name} ({says})");
                    Error::Missing { what: "registering a mapped file with the CUDA driver".into(), why }
                })?;
                (at, true)
            }
        };
        let address = base + map.lead() as u64;
        Ok(MappedFile { cuda: cuda.clone(), map: Some(map), address, registered })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_ref().expect("it is taken when its owner goes").bytes()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if let Some(map) = self.map.take() {
            self.cuda.release(Release::File(map, self.registered));
        }
    }
}

/// Ends what [`MappedFile::new`] began, once nothing on the device reads the map any more.
pub(super) fn end(context: &Context, map: FileMap, registered: bool) {
    if registered {
        let start: NonNull<u8> = map.start();
        // SAFETY: registered once, by `new`; its owner is gone, and the device was waited for. After a fault the
        // call fails, and the registration goes with the context.
        let _ = unsafe { context.unregister(start) };
    }
    drop(map);
}

/// Whether the device can read mapped files.
///
/// # Errors
/// It cannot; the error says what it would need.
pub(super) fn supported(cuda: &Cuda) -> Result<()> {
    way(cuda).map(drop)
}

fn way(cuda: &Cuda) -> Result<Way> {
    let can = cuda.context().file_access().map_err(|failure| cuda.fail(failure, "asking for attributes"))?;
    match can {
        (true, _) => Ok(Way::Shared),
        (false, true) => Ok(Way::Registered),
        (false, false) => Err(Error::Missing {
            what: "a mapped file as memory of this CUDA device".into(),
            why: "it can neither share the page tables of a process (PAGEABLE_MEMORY_ACCESS) nor register memory \
                  that is only read (READ_ONLY_HOST_REGISTER_SUPPORTED)"
                .into(),
        }),
    }
}
