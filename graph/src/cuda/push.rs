//! Gathers over peer memory: the buffers of two ranks, each mapped by the other, and the kernel that pushes between
//! them (`graph/cuda/exchange.cu`, where it is argued why it is right).
//!
//! A rank's buffer is written by the other rank's device. So it is freed only when both have unmapped the other's
//! ([`Push::part`]); a communicator that ends otherwise leaves its buffer to the end of the process.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use parking_lot::Mutex;

use super::driver::{Failure, Function};
use super::pinned::PinnedMemory;
use super::{Cuda, Release};
use crate::error::{Fault, FaultKind};
use crate::kernel::{Definition, Grid, Source, Twin};

/// Bytes of what names a buffer to another process.
pub(crate) const HANDLE_BYTES: usize = 64;

/// The largest part that is pushed.
pub(crate) const MOST_BYTES: usize = 1 << 20;

/// Threads of a block, units of one that cross at once, bytes of data of a unit, and bytes that it crosses as.
const THREADS: usize = 256;
const HELD: usize = 4;
const DATA_BYTES: usize = 8;
const UNIT_BYTES: usize = 16;
/// Units of a slot.
const PIECE: usize = THREADS * HELD;
/// Blocks are cut where warps are.
const WARP: usize = 32;
/// The most blocks, each of which has two slots of the buffer: 2 MiB, which the driver shares with no other allocation.
const MOST_BLOCKS: usize = 64;
const BUFFER_BYTES: usize = MOST_BLOCKS * 2 * PIECE * UNIT_BYTES;
/// Where the epochs of blocks begin among the words of the device, behind the error word.
const EPOCHS: usize = 32;
const WORDS_BYTES: usize = 4 * (EPOCHS + MOST_BLOCKS);
/// Where the host is told of errors, behind its stop word: in another line of memory.
const FAILED: usize = 16;
const HOST_BYTES: usize = 4 * (FAILED + 16);
/// What the kernel tells: the stop word was set; the limit was reached.
const STOPPED: u32 = 1;
const LATE: u32 = 2;

static SOURCE: Source =
    Source { name: "exchange.cu", text: include_str!("../../cuda/exchange.cu"), includes: &[] };

/// The kernel. Collectives launch it; no emission names it.
pub static EXCHANGE: Definition = Definition {
    name: "exchange",
    element: "",
    args_bytes: size_of::<Args>(),
    twin: Some(Twin {
        source: &SOURCE,
        symbol: "exchange",
        block: THREADS as u32,
        shared_bytes: 0,
        overlaps: true,
    }),
    host: |_, _| {
        let why = "two CUDA devices exchange with it; the host device has collectives of its own";
        Err(Fault { work: "exchange".into(), kind: FaultKind::Domain(why.into()) })
    },
    describe: |bytes, f| write!(f, "{:?}", bytemuck::pod_read_unaligned::<Args>(bytes)),
};

/// The argument block: see the source.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct Args {
    own: u64,
    other: u64,
    to: u64,
    from: u64,
    words: u64,
    host: u64,
    limit: u64,
    bytes: u64,
    share: u32,
    whole: u32,
}

/// How a gather is cut: a function of its size and of what both ranks agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    blocks: usize,
    /// Units of each block but the last, which has fewer.
    share: usize,
}

impl Cut {
    fn of(bytes: usize, most_blocks: usize) -> Cut {
        let units = bytes.div_ceil(DATA_BYTES);
        let blocks = units.div_ceil(THREADS).clamp(1, most_blocks);
        let share = units.div_ceil(blocks).next_multiple_of(WARP);
        Cut { blocks: units.div_ceil(share), share }
    }
}

/// This rank's half, before the other's is known.
pub(crate) struct Inbox {
    cuda: Arc<Cuda>,
    function: Function,
    most_blocks: usize,
    /// The buffer, until it is freed.
    buffer: Mutex<Option<u64>>,
    address: u64,
    /// Error word and epochs.
    words: u64,
    /// Stop word, and the error as the host is told it.
    host: PinnedMemory,
}

/// The other rank's buffer, mapped until it is unmapped.
pub(crate) struct Outbox {
    cuda: Arc<Cuda>,
    mapped: Mutex<Option<u64>>,
    address: u64,
}

/// Both halves. Launches of it name addresses of it: whoever queues or captures one holds the communicator.
pub(crate) struct Push {
    inbox: Inbox,
    outbox: Outbox,
    most_blocks: usize,
    limit: AtomicU64,
}

impl Inbox {
    /// Allocates a buffer and loads the kernel.
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Result<Inbox, String> {
        let said = |error: crate::Error| error.to_string();
        cuda.prepare(&[&EXCHANGE]).map_err(said)?;
        let function = cuda.modules.function(&EXCHANGE).ok_or("the exchange kernel was not loaded")?;
        let blocks =
            cuda.context().multiprocessors().map_err(|failure| told("asking for attributes", failure))?;
        let host = PinnedMemory::new(cuda, "stop word of gathers", HOST_BYTES).map_err(said)?;
        let words = cuda.allocate("epochs of gathers", WORDS_BYTES).map_err(said)?;
        let address = cuda.allocate("peer buffer", BUFFER_BYTES).inspect_err(|_| {
            cuda.release(Release::Device(words, WORDS_BYTES));
        });
        let address = address.map_err(said)?;
        let most_blocks = blocks.min(MOST_BLOCKS);
        let buffer = Mutex::new(Some(address));
        let inbox = Inbox { cuda: cuda.clone(), function, most_blocks, buffer, address, words, host };
        [0, FAILED].iter().for_each(|&at| inbox.word(at).store(0, Ordering::Relaxed));
        // No epoch is 0, whatever fresh memory is filled with.
        let zeros = |at, bytes| cuda.write(at, &vec![0; bytes]).map_err(said);
        zeros(words, WORDS_BYTES)
            .and_then(|()| zeros(address, BUFFER_BYTES))
            .inspect_err(|_| inbox.free())?;
        Ok(inbox)
    }

    /// What names the buffer to the other rank.
    pub(crate) fn handle(&self) -> Result<[u8; HANDLE_BYTES], String> {
        let exported = self.cuda.context().export(self.address);
        let exported = exported.map_err(|failure| told("cuIpcGetMemHandle", failure))?;
        Ok(exported.map(|byte| byte as u8))
    }

    /// Maps the buffer of the other rank, which has this handle.
    pub(crate) fn outbox(&self, handle: [u8; HANDLE_BYTES]) -> Result<Outbox, String> {
        // A capture of this device would be broken by it, or break it.
        let _gate = self.cuda.gate();
        let address = self.cuda.context().import(handle.map(|byte| byte as c_char));
        let address = address.map_err(|failure| told("cuIpcOpenMemHandle", failure))?;
        Ok(Outbox { cuda: self.cuda.clone(), mapped: Mutex::new(Some(address)), address })
    }

    /// The most blocks that this device lets run at once.
    pub(crate) fn most_blocks(&self) -> usize {
        self.most_blocks
    }

    /// Frees the buffer, which nobody has mapped.
    pub(crate) fn free(&self) {
        if let Some(address) = self.buffer.lock().take() {
            self.cuda.release(Release::Device(address, BUFFER_BYTES));
        }
    }

    /// A word of the host that kernels read or write.
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the pages are pinned, larger than this, aligned, and live as long as `self`. Host and device use these
        // words by atomic accesses alone: nobody takes a slice of these pages.
        unsafe { AtomicU32::from_ptr((self.host.address() as *mut u32).add(at)) }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.cuda.release(Release::Device(self.words, WORDS_BYTES));
        // The other rank's device may still write a buffer that is not freed by now. It stays, and with it the context.
        if self.buffer.get_mut().is_some() {
            std::mem::forget(self.cuda.context().clone());
        }
    }
}

impl Push {
    /// No launch of either rank has more than `most_blocks`.
    pub(crate) fn new(inbox: Inbox, outbox: Outbox, most_blocks: usize, limit: Duration) -> Push {
        let most_blocks = most_blocks.clamp(1, inbox.most_blocks);
        Push { inbox, outbox, most_blocks, limit: AtomicU64::new(nanoseconds(limit)) }
    }

    /// What later launches may wait.
    pub(crate) fn wait_at_most(&self, limit: Duration) {
        self.limit.store(nanoseconds(limit), Ordering::Relaxed);
    }

    pub(super) fn function(&self) -> Function {
        self.inbox.function
    }

    /// The launch of a gather of `bytes` bytes of each rank at `at`, as `rank`.
    pub(super) fn launch(&self, rank: usize, at: u64, bytes: usize) -> (Grid, Args) {
        let part = |rank: usize| at + (rank * bytes) as u64;
        let Cut { blocks, share } = Cut::of(bytes, self.most_blocks);
        let whole = at.is_multiple_of(DATA_BYTES as u64) && bytes.is_multiple_of(DATA_BYTES);
        let args = Args {
            own: part(rank),
            other: part(1 - rank),
            to: self.outbox.address,
            from: self.inbox.address,
            words: self.inbox.words,
            host: self.inbox.host.address(),
            limit: self.limit.load(Ordering::Relaxed),
            bytes: bytes as u64,
            share: share as u32,
            whole: whole.into(),
        };
        (Grid::line(blocks), args)
    }

    /// Tells kernels that wait to give up.
    pub(crate) fn stop(&self) {
        self.inbox.word(0).store(1, Ordering::Release);
    }

    /// Why a kernel gave up, if one did: what gathers wrote from then on is void.
    pub(crate) fn failed(&self) -> Option<&'static str> {
        match self.inbox.word(FAILED).load(Ordering::Acquire) {
            0 => None,
            STOPPED => Some("a gather that waited on the device was stopped"),
            LATE => Some("a gather waited on the device for longer than this communicator waits"),
            _ => Some("a gather gave up on the device for a reason that this program does not know"),
        }
    }

    /// Unmaps the other rank's buffer; then, if `both` says that the other rank has unmapped this one's, frees that.
    /// Everything queued has run on both ranks.
    pub(crate) fn part(&self, both: impl FnOnce() -> bool) {
        self.outbox.unmap();
        if both() {
            self.inbox.free();
        }
    }

    /// Has every block count on from `epoch`: for tests of what happens when epochs start anew. Nothing is under way
    /// on either rank, and both do it.
    pub(crate) fn plant(&self, epoch: u32) -> crate::Result<()> {
        let epochs = [epoch; MOST_BLOCKS];
        self.inbox.cuda.write(self.inbox.words + 4 * EPOCHS as u64, bytemuck::cast_slice(&epochs))
    }
}

impl Outbox {
    /// Unmaps the buffer, once everything on this device has run.
    pub(crate) fn unmap(&self) {
        self.release();
        self.cuda.free_released();
    }

    fn release(&self) {
        if let Some(address) = self.mapped.lock().take() {
            self.cuda.release(Release::Peer(address));
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        // Nothing queued or captured names it any more; the device is waited for before it goes.
        self.release();
    }
}

fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)
}

fn told(call: &str, failure: Failure) -> String {
    let (name, says) = failure.words();
    format!("{call} says {name} ({says})")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel makes of a cut: the units of each block, in pieces.
    fn pieces(bytes: usize, cut: Cut) -> Vec<Vec<usize>> {
        let units = bytes.div_ceil(DATA_BYTES);
        let blocks = (0..cut.blocks).map(|block| {
            let range = block * cut.share..units.min((block + 1) * cut.share);
            range.clone().step_by(PIECE).map(|at| PIECE.min(range.end - at)).collect()
        });
        blocks.collect()
    }

    #[test]
    fn every_unit_is_in_one_block_and_no_block_is_empty() {
        for most in [1, 2, 7, 30, MOST_BLOCKS] {
            for bytes in (1..5000).chain([10_240, 163_840, 500_000, 999_999, MOST_BYTES - 1, MOST_BYTES]) {
                let cut = Cut::of(bytes, most);
                assert!((1..=most).contains(&cut.blocks), "{bytes} bytes, {most}: {cut:?}");
                let pieces = pieces(bytes, cut);
                let units: usize = pieces.iter().flatten().sum();
                assert_eq!(units, bytes.div_ceil(DATA_BYTES), "{bytes} bytes, {most}: {cut:?}");
                assert!(pieces.iter().all(|pieces| !pieces.is_empty()), "{bytes} bytes, {most}: {cut:?}");
            }
        }
    }

    #[test]
    fn cuts_are_those_that_were_planned() {
        let cut = |bytes| Cut::of(bytes, MOST_BLOCKS);
        assert_eq!(cut(4), Cut { blocks: 1, share: 32 });
        assert_eq!(cut(2048), Cut { blocks: 1, share: 256 });
        assert_eq!(cut(10_240), Cut { blocks: 5, share: 256 });
        assert_eq!(cut(163_840), Cut { blocks: 64, share: 320 });
        // One piece of each block up to half a mebibyte, then two.
        assert_eq!(pieces(512 << 10, cut(512 << 10)), vec![vec![PIECE]; MOST_BLOCKS]);
        assert_eq!(pieces(MOST_BYTES, cut(MOST_BYTES)), vec![vec![PIECE; 2]; MOST_BLOCKS]);
        assert_eq!(BUFFER_BYTES, 2 << 20);
    }

    #[test]
    fn numbers_are_those_of_the_source() {
        let text = SOURCE.text;
        for line in [
            format!("constexpr u32 THREADS = {THREADS};"),
            format!("constexpr u32 HELD = {HELD};"),
            format!("constexpr u32 EPOCHS = {EPOCHS};"),
            format!("constexpr u32 FAILED = {FAILED};"),
            format!("constexpr u32 STOPPED = {STOPPED};"),
            format!("constexpr u32 LATE = {LATE};"),
        ] {
            assert!(text.contains(&line), "{line}");
        }
    }
}
