//! The queue behind a host stream: work that runs when something waits for it.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Access, Host, Memory};
use crate::Ptr;
use crate::communicator::{Collective, Communicator};
use crate::emission::{Emission, Entry};
use crate::error::{Fault, FaultKind, Result};

/// A point in a queue: reached when that many items have run.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) queue: Arc<Queue>,
    pub(crate) ticket: u64,
}

/// One queued item.
pub(crate) enum Work {
    /// Runs an emission. `pinned` are the pinned sources of its copies and collectives with their write counts.
    Run { emission: Arc<Emission>, pinned: Vec<(u64, u64)>, keeps: Vec<crate::Arena> },
    /// Waits for another queue.
    Wait(Target),
}

#[derive(Default)]
pub(crate) struct Queue {
    pending: Mutex<VecDeque<Work>>,
    queued: AtomicU64,
    done: AtomicU64,
}

impl Queue {
    /// The point after everything queued so far.
    pub(crate) fn tail(self: &Arc<Self>) -> Target {
        Target { queue: self.clone(), ticket: self.queued.load(Ordering::Acquire) }
    }

    /// The point after the next `items` items that have not run.
    pub(crate) fn after(self: &Arc<Self>, items: u64) -> Target {
        let tail = self.tail();
        let ticket = tail.ticket.min(self.done.load(Ordering::Acquire).saturating_add(items));
        Target { ticket, ..tail }
    }

    pub(crate) fn push(&self, work: Work) {
        let mut pending = self.pending.lock();
        pending.push_back(work);
        self.queued.fetch_add(1, Ordering::Release);
    }

    /// Queues an emission, noting the state of the pinned memory that it will read.
    pub(crate) fn push_run(&self, host: &Host, emission: Arc<Emission>, keeps: Vec<crate::Arena>) {
        let memory = host.memory();
        let sources = emission.entries().iter().filter_map(|entry| match entry {
            Entry::Copy { from, .. }
            | Entry::Collective { what: Collective::Gather | Collective::Send, at: from, .. } => {
                memory.pinned(from.address()).map(|(base, version, _)| (base, version))
            }
            _ => None,
        });
        let pinned = sources.collect();
        drop(memory);
        self.push(Work::Run { emission, pinned, keeps });
    }
}

impl Target {
    /// Whether everything before this point has run.
    pub(crate) fn reached(&self) -> bool {
        self.queue.done.load(Ordering::Acquire) >= self.ticket
    }

    /// Runs queued work until this point is reached.
    pub(crate) fn run(&self, host: &Host) -> Result<()> {
        if !self.reached() {
            let mut memory = host.memory();
            drain(host, &mut memory, self);
        }
        host.state.healthy()
    }
}

/// Runs items of the target's queue up to its ticket. After a fault, items are dropped instead of run: the
/// queue still moves, so that nobody waits for ever.
fn drain(host: &Host, memory: &mut Memory, target: &Target) {
    while !target.reached() {
        let Some(work) = target.queue.pending.lock().pop_front() else { return };
        match work {
            Work::Wait(other) => drain(host, memory, &other),
            Work::Run { emission, pinned, keeps } => {
                if host.state.healthy().is_ok()
                    && let Err(fault) = execute(host, memory, &emission, &pinned)
                {
                    host.state.fail(fault);
                }
                if let Err(error) = host.state.healthy() {
                    emission.give_up(&error);
                }
                drop(keeps);
                // Later work of this very drain must not find memory that nobody owns any more.
                host.free_released(memory);
            }
        }
        target.queue.done.fetch_add(1, Ordering::Release);
    }
}

fn execute(
    host: &Host,
    memory: &mut Memory,
    emission: &Emission,
    pinned: &[(u64, u64)],
) -> Result<(), Fault> {
    let planted = host.state.launch_fails_at(emission.len());
    for (index, entry) in emission.entries().iter().enumerate() {
        if planted == Some(index) {
            let kind = FaultKind::Domain("a planted fault".into());
            return Err(Fault { work: format!("entry {index}"), kind });
        }
        match *entry {
            Entry::Launch { kernel, block, .. } => {
                let access = Access::new(memory, kernel.name);
                // A panic must not unwind through the queue: the item would never count as done. Nothing
                // half-written is looked at afterwards, because the fault stays.
                catch_unwind(AssertUnwindSafe(|| (kernel.host)(emission.block(kernel, block), &access)))
                    .unwrap_or_else(|panic| Err(panicked(kernel.name, &*panic)))?;
            }
            Entry::Copy { to, from, bytes } => {
                let fault = |kind| Fault { work: format!("copy of {bytes} bytes"), kind };
                unchanged(memory, pinned, from).map_err(fault)?;
                memory.copy(to.address(), from.address(), bytes).map_err(fault)?;
            }
            Entry::Fill { to, bytes, value } => {
                let fault = |kind| Fault { work: format!("fill of {bytes} bytes"), kind };
                memory.bytes_mut(to.address(), bytes).map_err(fault)?.fill(value);
            }
            Entry::Collective { communicator, what, at, bytes } => {
                let end = emission.communicator(communicator);
                let fault = |kind| Fault { work: end.describe(what, bytes), kind };
                unchanged(memory, pinned, at).map_err(fault)?;
                collective(memory, end, what, at, bytes).map_err(fault)?;
            }
        }
    }
    Ok(())
}

/// Finds pinned memory that was written since the work that reads it was queued.
fn unchanged(memory: &Memory, pinned: &[(u64, u64)], from: Ptr<u8>) -> Result<(), FaultKind> {
    match memory.pinned(from.address()) {
        Some((base, version, label)) if pinned.iter().any(|&(b, v)| b == base && v != version) => {
            Err(FaultKind::Overwritten { label: label.into() })
        }
        _ => Ok(()),
    }
}

/// Does this rank's part of a collective, and waits for the other's.
fn collective(
    memory: &mut Memory,
    end: &Communicator,
    what: Collective,
    at: Ptr<u8>,
    bytes: usize,
) -> Result<(), FaultKind> {
    let at = at.address();
    let met = match what {
        Collective::Gather => {
            let (first, second) = memory.bytes_mut(at, bytes * end.ranks())?.split_at_mut(bytes);
            match end.rank() {
                0 => end.gather(first, second),
                _ => end.gather(second, first),
            }
        }
        Collective::Send => end.send(memory.bytes(at, bytes)?),
        Collective::Receive => end.receive(memory.bytes_mut(at, bytes)?),
    };
    met.map_err(FaultKind::Peer)
}

fn panicked(kernel: &str, payload: &(dyn Any + Send)) -> Fault {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Fault { work: kernel.into(), kind: FaultKind::Panicked(text.unwrap_or("no message").into()) }
}
