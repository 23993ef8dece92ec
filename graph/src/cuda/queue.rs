//! A stream with the owners of what its pending work points to, and the markers that events are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::Cuda;
use super::driver::{EventHandle, Failure, Function, Graph, NODE_BYTES, Outcome, StreamHandle, Submission};
use super::modules::twin;
use crate::arena::Arena;
use crate::communicator::{self, Parties};
use crate::emission::{Emission, Entry};
use crate::error::{Error, Fault, FaultKind, Result};
use crate::exec::Exec;
use crate::kernel::Definition;
use crate::state::StreamId;

/// One stream.
pub(crate) struct Queue {
    pub(crate) cuda: Arc<Cuda>,
    stream: StreamHandle,
    held: Mutex<Held>,
    /// Whose collectives it has had.
    parties: Parties,
}

/// Owners that wait for their work.
#[derive(Default)]
struct Held {
    /// What the newest work points into; no event marks its end yet.
    unmarked: Vec<Keeps>,
    /// What goes once its event is reached, oldest first.
    retiring: VecDeque<(EventHandle, Vec<Keeps>)>,
    /// Events to use again.
    spare: Vec<EventHandle>,
}

/// Runs of work that share an event: recording and asking for one costs the host about a microsecond, and a
/// round is three of them.
const MARKED_TOGETHER: usize = 16;

/// What pending work points into.
#[expect(dead_code, reason = "they are held, not looked at")]
enum Keeps {
    Run(Vec<Arena>, Vec<communicator::Held>),
    Exec(Exec),
}

/// Why an entry was not queued.
enum Refusal {
    Driver(Failure),
    Collective(String),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal::Driver(failure)
    }
}

impl Refusal {
    fn fault(self, work: String) -> Fault {
        match self {
            Refusal::Driver(failure) => failure.fault(work),
            Refusal::Collective(why) => Fault { work, kind: FaultKind::Peer(why) },
        }
    }
}

impl Queue {
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Queue {
        let stream = cuda.or_fault(StreamHandle::new(cuda.context()), "making a stream", StreamHandle::none);
        Queue { cuda: cuda.clone(), stream, held: Mutex::default(), parties: Parties::default() }
    }

    /// Whose collectives it has had: a wait for its work ends with them.
    pub(crate) fn parties(&self) -> &Parties {
        &self.parties
    }

    /// Queues every entry of `emission`, or records them while this stream, `id`, is being captured.
    pub(crate) fn run(&self, id: StreamId, emission: &Emission, keeps: &[Arena]) -> Result<()> {
        let state = &self.cuda.state;
        let functions = self.functions(id, emission);
        let functions = functions.inspect_err(|error| state.break_capture(id, || error.to_string()))?;
        if state.record(id, emission, keeps) {
            return Ok(());
        }
        let mut held = self.held.lock();
        let fails = state.launch_fails_at(emission.len());
        let planted = |index| if fails == Some(index) { Err(Failure::planted()) } else { Ok(()) };
        self.submit(emission, &functions, planted).map_err(|(index, refusal)| {
            let fault = refusal.fault(format!("queueing {}", describe(emission, index)));
            let error = self.cuda.state.fail(fault);
            // The peer must not wait for the part of this work that is not queued.
            emission.give_up(&error);
            error
        })?;
        self.hold(&mut held, keeps.to_vec(), emission.holds().to_vec())
    }

    /// Queues a replay.
    pub(crate) fn replay(&self, exec: &Exec, graph: &Graph) -> Result<()> {
        let mut held = self.held.lock();
        let launched = match self.cuda.state.launch_fails_at(1) {
            None => self.stream.launch_graph(graph),
            Some(_) => Err(Failure::planted()),
        };
        launched.map_err(|failure| {
            let error = self.cuda.fail(failure, format!("replaying `{}`", exec.label()));
            exec.emission().give_up(&error);
            error
        })?;
        self.retire(&mut held, Keeps::Exec(exec.clone()))
    }

    /// Captures an emission and makes a graph of it. A failure is the capture's alone: the stream and the
    /// device are as they were, unless the driver says otherwise at the next wait.
    pub(crate) fn capture(&self, label: &str, emission: &Emission) -> Result<Graph> {
        let failed = |why| Error::CaptureFailed { capture: label.into(), why };
        let functions = self.cuda.modules.find(emission);
        let functions = functions.ok_or_else(|| failed("a kernel was not loaded".into()))?;
        // Nothing else may reach the stream between begin and end, and no memory may be freed.
        let (_held, _gate) = (self.held.lock(), self.cuda.gate());
        let mut stopped = None;
        let fails = self.cuda.state.capture_fails_at(emission.len());
        // The driver refuses to wait for a stream that it captures, and gives the capture up.
        let planted = |index| if fails == Some(index) { self.stream.synchronize() } else { Ok(()) };
        let captured = self.stream.capture(|| {
            self.submit(emission, &functions, planted).map_err(|(index, refusal)| {
                let (failure, why) = match refusal {
                    Refusal::Driver(failure) => (failure, None),
                    // The capture ends as for any failure; the words are NCCL's.
                    Refusal::Collective(why) => (Failure::planted(), Some(why)),
                };
                stopped = Some((index, why));
                failure
            })
        });
        captured.map_err(|failure| {
            let (index, why) = stopped.unzip();
            let at = index.map_or("the graph".into(), |index| describe(emission, index));
            match why.flatten() {
                Some(why) => failed(format!("{at}: {why}")),
                None if failure.out_of_memory() => {
                    self.cuda.out_of_memory(label, emission.len() * NODE_BYTES)
                }
                None => {
                    let (name, says) = failure.words();
                    failed(format!("{at}: {name} ({says})"))
                }
            }
        })
    }

    pub(crate) fn record(&self, marker: &Marker) -> Result<()> {
        self.cuda.state.healthy()?;
        self.stream.record(&marker.event).map_err(|failure| self.cuda.fail(failure, "recording an event"))?;
        *marker.parties.lock() = self.parties.clone();
        Ok(())
    }

    /// Marks this point, to tell how long what comes behind takes.
    pub(crate) fn lap(&self) -> Result<Lap> {
        self.cuda.ready("timing")?;
        let lap = EventHandle::timed(self.cuda.context()).and_then(|event| {
            self.stream.record(&event)?;
            Ok(Lap { cuda: self.cuda.clone(), event })
        });
        lap.map_err(|failure| self.cuda.fail(failure, "recording an event"))
    }

    pub(crate) fn wait(&self, marker: &Marker) -> Result<()> {
        self.cuda.state.healthy()?;
        self.stream.wait(&marker.event).map_err(|failure| self.cuda.fail(failure, "waiting for an event"))
    }

    /// Waits for everything queued, and frees what nobody owns any more.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.cuda.state.refuse_in_capture("synchronisation")?;
        self.cuda.state.healthy()?;
        // Marked before the wait, so that every mark is reached after it.
        self.mark(&mut self.held.lock());
        let waited = await_point(&self.parties, || self.stream.reached(), || self.stream.synchronize())?;
        waited.map_err(|failure| self.cuda.fail(failure, "work queued before a synchronisation"))?;
        self.reap(&mut self.held.lock());
        self.cuda.free_released();
        Ok(())
    }

    /// The function of each launch. What is not loaded yet is loaded, unless that would be in a capture.
    fn functions(&self, id: StreamId, emission: &Emission) -> Result<Vec<Function>> {
        let modules = &self.cuda.modules;
        if let Some(functions) = modules.find(emission) {
            return Ok(functions);
        }
        let definitions = launched(emission)?;
        self.cuda.state.refuse_in_own_capture(id, "loading a kernel")?;
        modules.prepare(self.cuda.context(), &definitions)?;
        Ok(modules.find(emission).expect("every kernel of the emission was just loaded"))
    }

    /// Hands every entry to the driver, after asking `planted` for a fault in its place; on a failure says at
    /// which.
    fn submit(
        &self,
        emission: &Emission,
        functions: &[Function],
        planted: impl Fn(usize) -> Outcome,
    ) -> Result<(), (usize, Refusal)> {
        self.cuda.context().bind().map_err(|failure| (0, failure.into()))?;
        let mut functions = functions.iter();
        for (index, entry) in emission.entries().iter().enumerate() {
            planted(index).map_err(|failure| (index, failure.into()))?;
            let args;
            let submission = match *entry {
                Entry::Launch { kernel, grid, block } => {
                    let function = *functions.next().expect("one function was found for each launch");
                    Submission::Launch { function, grid, block: emission.block(kernel, block) }
                }
                Entry::Copy { to, from, bytes } => {
                    Submission::Copy { to: to.address(), from: from.address(), bytes }
                }
                Entry::Fill { to, bytes, value } => Submission::Fill { to: to.address(), bytes, value },
                Entry::Collective { communicator, what, at, bytes } => {
                    let refused = |why| (index, Refusal::Collective(why));
                    let end = emission.communicator(communicator);
                    let handle = end.handle().map_err(refused)?;
                    let Some(push) = end.push(what, bytes) else {
                        // SAFETY: as below; and the communicator is of this stream's device (`Stream::admit`).
                        let queued = unsafe { handle.queue(what, at.address(), bytes, &self.stream) };
                        queued.map_err(refused)?;
                        continue;
                    };
                    // What it names beside the caller's memory is held by the communicator, as whoever queues this
                    // holds that (`hold`, `Exec`).
                    let (grid, launch) = push.launch(end.rank(), at.address(), bytes);
                    args = launch;
                    Submission::Launch { function: push.function(), grid, block: bytemuck::bytes_of(&args) }
                }
            };
            // SAFETY: the emission's arenas are held until its work has run (`hold`, `Exec`), and released
            // memory is freed only after the device is idle. That its addresses lie in them, and that
            // pinned memory is fenced, is the emission's contract, which the host device checks. The
            // function takes a block of the kernel's size (`Modules` compared them).
            unsafe { self.stream.submit(&submission) }.map_err(|failure| (index, failure.into()))?;
        }
        Ok(())
    }

    fn hold(&self, held: &mut Held, arenas: Vec<Arena>, ends: Vec<communicator::Held>) -> Result<()> {
        match arenas.is_empty() && ends.is_empty() {
            true => Ok(()),
            false => self.retire(held, Keeps::Run(arenas, ends)),
        }
    }

    /// Lets go of what has run by now, unless work is being queued: for whoever waits for what is held.
    pub(crate) fn let_go(&self) {
        if let Some(mut held) = self.held.try_lock() {
            self.mark(&mut held);
            self.reap(&mut held);
        }
    }

    /// Holds `keeps` until everything queued so far has run. What has run goes when the next few runs are marked,
    /// or at a synchronisation.
    fn retire(&self, held: &mut Held, keeps: Keeps) -> Result<()> {
        held.unmarked.push(keeps);
        if held.unmarked.len() >= MARKED_TOGETHER {
            self.mark(held);
            self.reap(held);
        }
        self.cuda.state.healthy()
    }

    /// Marks the end of what has no event yet.
    fn mark(&self, held: &mut Held) {
        if held.unmarked.is_empty() {
            return;
        }
        let event = held.spare.pop().map_or_else(|| EventHandle::new(self.cuda.context()), Ok);
        let recorded = event.and_then(|event| self.stream.record(&event).map(|()| event));
        let event = recorded.unwrap_or_else(|failure| {
            self.cuda.fail(failure, "marking the end of queued work");
            EventHandle::none(self.cuda.context())
        });
        let keeps = std::mem::take(&mut held.unmarked);
        held.retiring.push_back((event, keeps));
    }

    /// Lets go of what has run. After a fault nothing runs, and nothing is held.
    fn reap(&self, held: &mut Held) {
        while let Some((event, _)) = held.retiring.front() {
            match event.reached() {
                Ok(false) => return,
                Ok(true) => {}
                Err(failure) => drop(self.cuda.fail(failure, "queued work")),
            }
            let (event, _gone) = held.retiring.pop_front().expect("there is a front");
            held.spare.push(event);
        }
    }
}

/// What pending work points to must not go before it has run: the last handle of a stream waits.
impl Drop for Queue {
    fn drop(&mut self) {
        let held = self.held.get_mut();
        if !held.retiring.is_empty() || !held.unmarked.is_empty() {
            // A failure means that nothing runs any more.
            let _ = self.stream.synchronize();
        }
    }
}

/// A point in a stream whose time is kept.
pub(crate) struct Lap {
    cuda: Arc<Cuda>,
    event: EventHandle,
}

impl Lap {
    /// Microseconds from `earlier` on, once both were reached.
    pub(crate) fn microseconds_since(&self, earlier: &Lap) -> Result<f64> {
        let milliseconds = self.event.milliseconds_since(&earlier.event);
        let milliseconds = milliseconds.map_err(|failure| self.cuda.fail(failure, "timed work"))?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

/// An event: a point in a stream.
pub(crate) struct Marker {
    pub(crate) cuda: Arc<Cuda>,
    event: EventHandle,
    /// Those of the stream that it was last recorded in.
    parties: Mutex<Parties>,
}

impl Marker {
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Marker {
        let event = cuda.or_fault(EventHandle::new(cuda.context()), "making an event", EventHandle::none);
        Marker { cuda: cuda.clone(), event, parties: Mutex::default() }
    }

    /// Whether the marked point has been reached; true too after a fault, which the next call reports.
    pub(crate) fn reached(&self) -> bool {
        self.event.reached().unwrap_or_else(|failure| {
            self.cuda.fail(failure, "queued work");
            true
        })
    }

    /// Waits until the marked point is reached.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.cuda.state.refuse_in_capture("synchronisation")?;
        self.cuda.state.healthy()?;
        let parties = self.parties.lock().clone();
        let waited = await_point(&parties, || self.event.reached(), || self.event.synchronize())?;
        waited.map_err(|failure| self.cuda.fail(failure, "work queued before an event"))
    }
}

/// Waits until a point of a stream is reached. The driver would wait for ever for work that waits for a rank which is
/// gone: with collectives it is asked again and again instead.
fn await_point(
    parties: &Parties,
    reached: impl Fn() -> Outcome<bool>,
    wait: impl FnOnce() -> Outcome,
) -> Result<Outcome> {
    let (live, began) = (parties.live(), Instant::now());
    if live.is_empty() {
        return Ok(wait());
    }
    loop {
        match reached() {
            Ok(false) => live.iter().try_for_each(|communicator| communicator.still_runs(began))?,
            reached => return Ok(reached.map(drop)),
        }
        std::hint::spin_loop();
    }
}

/// The kernels that an emission launches, each of which must have a twin.
fn launched(emission: &Emission) -> Result<Vec<&'static Definition>> {
    let launches = emission.entries().iter().filter_map(|entry| match *entry {
        Entry::Launch { kernel, .. } => Some(twin(kernel).map(|_| kernel)),
        _ => None,
    });
    launches.collect()
}

/// An entry, for people.
fn describe(emission: &Emission, index: usize) -> String {
    match emission.entries().get(index) {
        Some(Entry::Launch { kernel, grid, .. }) => format!("entry {index}, {kernel:?} on {grid:?}"),
        Some(Entry::Copy { bytes, .. }) => format!("entry {index}, copy of {bytes} bytes"),
        Some(Entry::Fill { bytes, .. }) => format!("entry {index}, fill of {bytes} bytes"),
        Some(&Entry::Collective { communicator, what, bytes, .. }) => {
            format!("entry {index}, {}", emission.communicator(communicator).describe(what, bytes))
        }
        None => "nothing".into(),
    }
}
