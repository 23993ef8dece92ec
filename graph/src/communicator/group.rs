//! What a communicator over NCCL is beside NCCL's own: which stream it is for, what tells of the peer, and its end.
//!
//! **One stream.** NCCL is told (`nccl_environment`) that collectives of one communicator never overlap, captured or
//! not. So the first stream that is given some owns them all, and any other is refused.
//!
//! **Pushed gathers** need no owner of the stream: their order is the stream's. But a stream that had one has them all,
//! since a gather that is too large for it is NCCL's.
//!
//! **The side.** NCCL says nothing when a peer dies: kernels spin, and no call fails. The host end by which both ranks
//! found each other stays for that: when the peer's is closed, by its end or by its death, this one ends too.
//!
//! **The end.** NCCL keeps count of the graphs that captured its collectives, and a call that ends a communicator
//! returns only after the last of them is gone, exec and graph. Work that waits in a kernel for a dead peer is ended
//! by an abort alone. So for a communicator that was stopped: begin the abort, on a thread of its own; the kernels see
//! it and the stream drains; the stream lets go of the execs that it held for the work; with the caller's own gone the
//! graphs go; and the abort returns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use super::{Communicator, Exchange, Means};
use crate::cuda::{Cuda, Handle, NcclLibrary, Push, Queue};
use crate::error::{Error, Result};

/// How often the side is looked at, and a wait looks at what it waits for.
const NAP: Duration = Duration::from_millis(5);

/// The CUDA part of one rank's end.
pub(super) struct Group {
    /// The host end.
    pub(super) side: Communicator,
    library: &'static NcclLibrary,
    pub(super) cuda: Arc<Cuda>,
    state: Mutex<State>,
    /// The stream that all collectives are for, once there is one. A weak handle keeps its address from being used
    /// again, so what it names cannot change.
    owner: Mutex<Option<Weak<Queue>>>,
    /// The peer may leave: this end is leaving too.
    leaving: AtomicBool,
    /// Gathers over peer memory, where both ranks can.
    push: OnceLock<Push>,
    /// What carries gathers; until it is decided, NCCL.
    choice: OnceLock<Choice>,
}

/// What both ranks decided.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    /// Gathers are pushed unless a handle says otherwise.
    pub(super) pushes: bool,
    /// There is a push that works.
    pub(super) works: bool,
    /// For people.
    pub(super) text: String,
}

enum State {
    Live(Handle),
    /// A helper thread ends it, and this is where it will say how that went.
    Ending(Receiver<Result<(), String>>),
    Ended(Result<(), String>),
    /// Another handle waits for the helper.
    Awaited,
}

impl Group {
    pub(super) fn new(side: Communicator, cuda: Arc<Cuda>, handle: Handle) -> Group {
        let (library, state) = (handle.library(), Mutex::new(State::Live(handle)));
        let (push, choice) = (OnceLock::new(), OnceLock::new());
        let (owner, leaving) = (Mutex::default(), AtomicBool::new(false));
        Group { side, library, cuda, state, owner, leaving, push, choice }
    }

    /// Adds gathers over peer memory, once, before the choice.
    pub(super) fn add(&self, push: Push) {
        let _ = self.push.set(push);
    }

    /// Settles what carries gathers, once.
    pub(super) fn choose(&self, choice: Choice) {
        let _ = self.choice.set(choice);
    }

    /// Gathers over peer memory, unless they were found not to work.
    pub(super) fn push(&self) -> Option<&Push> {
        self.push.get().filter(|_| self.choice.get().is_none_or(|choice| choice.works))
    }

    /// Whether gathers are pushed unless a handle says otherwise.
    pub(super) fn pushes(&self) -> bool {
        self.choice.get().is_some_and(|choice| choice.pushes)
    }

    /// What carries gathers and why.
    pub(super) fn means(&self) -> &str {
        self.choice.get().map_or("NCCL, while it is tried", |choice| &choice.text)
    }

    /// Why a pushed gather gave up, if one did.
    pub(super) fn failed(&self) -> Option<&'static str> {
        // While it is tried, a failure only decides against it.
        self.choice.get().and_then(|_| self.push()).and_then(Push::failed)
    }

    /// Tells pushed gathers that wait to give up.
    pub(super) fn stop(&self) {
        self.push.get().into_iter().for_each(Push::stop);
    }

    pub(super) fn library(&self) -> &'static NcclLibrary {
        self.library
    }

    /// Lets a stream have collectives of this communicator: the first one, and no other.
    pub(super) fn admit(&self, queue: &Arc<Queue>) -> Result<(), String> {
        if !Arc::ptr_eq(&queue.cuda, &self.cuda) {
            return Err("it was made for another device; use a stream of that one".into());
        }
        let mut owner = self.owner.lock();
        let owner = owner.get_or_insert_with(|| Arc::downgrade(queue));
        match std::ptr::eq(owner.as_ptr(), Arc::as_ptr(queue)) {
            true => Ok(()),
            false => {
                let why =
                    "all its collectives are for the stream that had the first, and this is another stream";
                Err(format!("{why}; use that one"))
            }
        }
    }

    /// Forgets the stream: everything on it has run, and the next one may be another.
    pub(super) fn disown(&self) {
        *self.owner.lock() = None;
    }

    /// The communicator of NCCL, for one call.
    pub(super) fn handle(&self) -> Option<MappedMutexGuard<'_, Handle>> {
        MutexGuard::try_map(self.state.lock(), |state| match state {
            State::Live(handle) => Some(handle),
            _ => None,
        })
        .ok()
    }

    /// Watches the side from a thread of its own, for as long as there is something to end.
    pub(super) fn watch(communicator: &Communicator) -> Result<(), String> {
        let end = Arc::downgrade(&communicator.0);
        let watch = move || {
            loop {
                thread::sleep(NAP);
                let Some(end) = end.upgrade() else { return };
                let communicator = Communicator(end, Exchange::Auto);
                let Means::Cuda(group) = &communicator.0.means else { return };
                if communicator.ended().is_some() || group.leaving.load(Ordering::Acquire) {
                    return;
                }
                if let Err(why) = group.side.look() {
                    return communicator.end(why);
                }
            }
        };
        spawn("nccl-watch", watch)
    }

    /// Ends the communicator, as [`Communicator::close`] says.
    pub(super) fn close(&self, communicator: &Communicator, deadline: Duration) -> Result<()> {
        let started = Instant::now();
        let left = || deadline.saturating_sub(started.elapsed());
        let refused = |why| {
            let doing =
                format!("close the NCCL communicator of rank {} within {deadline:?}", communicator.rank());
            Error::Communicator { doing, why }
        };
        // One that was stopped is not waited for: work that its peer left alone ends by the abort.
        while communicator.ended().is_none() && communicator.held() > 0 {
            if left().is_zero() {
                return Err(refused(communicator.still_held()));
            }
            self.let_go();
            communicator.wait_for_let_go(left().min(NAP));
        }
        let orderly = communicator.0.ended.set("it was closed".into()).is_ok() && self.meet(left() / 2);
        // From here on nothing is queued any more: that this end has ended is looked at first.
        let Some(mut state) = self.state.try_lock_for(left()) else {
            let why = "a thread is still inside a call that queues a collective; only the end of the process ends it";
            return Err(refused(why.into()));
        };
        let ending = match std::mem::replace(&mut *state, State::Awaited) {
            State::Live(handle) => {
                let (tell, told) = mpsc::channel();
                let (communicator, wait) = (communicator.clone(), left() / 2);
                let end = move || {
                    let Means::Cuda(group) = &communicator.0.means else { unreachable!("it has a group") };
                    if orderly {
                        group.part(wait);
                    }
                    // The peer learns of it now: of an orderly end it knows already, and does not look any more.
                    group.side.end("it was closed".into());
                    // Nobody listens any more if the deadline was missed and no other handle came to close it.
                    drop(tell.send(handle.end(!orderly)));
                };
                spawn("nccl-end", end).map_err(refused)?;
                told
            }
            State::Ending(told) => told,
            State::Ended(how) => {
                *state = State::Ended(how.clone());
                return how.map_err(refused);
            }
            State::Awaited => return Err(refused("another handle is closing it".into())),
        };
        drop(state);
        loop {
            self.let_go();
            match ending.recv_timeout(left().min(NAP)) {
                Ok(how) => {
                    *self.state.lock() = State::Ended(how.clone());
                    return how.map_err(refused);
                }
                Err(RecvTimeoutError::Timeout) if !left().is_zero() => {}
                Err(RecvTimeoutError::Timeout) => {
                    *self.state.lock() = State::Ending(ending);
                    let why = match communicator.held() {
                        0 => "no graph holds it; end the process".into(),
                        _ => communicator.still_held(),
                    };
                    return Err(refused(format!("NCCL has not ended it: {why}")));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let how = Err("the thread that ended it is gone".to_owned());
                    *self.state.lock() = State::Ended(how.clone());
                    return how.map_err(refused);
                }
            }
        }
    }

    /// Whether NCCL's communicator has been ended.
    pub(super) fn is_over(&self) -> bool {
        self.state.try_lock().is_some_and(|state| matches!(*state, State::Ended(_)))
    }

    /// Waits until the peer closes its end too: whether it does.
    fn meet(&self, wait: Duration) -> bool {
        self.leaving.store(true, Ordering::Release);
        self.side.gather_within(&[0; 8], &mut [0; 8], wait).is_ok()
    }

    /// Gives up the memory of the peer, and then what the peer had mapped: nothing is under way on either rank.
    fn part(&self, wait: Duration) {
        if let Some(push) = self.push.get() {
            push.part(|| self.side.gather_within(&[1; 8], &mut [0; 8], wait).is_ok());
        }
    }

    /// Has the stream let go of what its finished work held.
    fn let_go(&self) {
        let owner = self.owner.lock().as_ref().and_then(Weak::upgrade);
        if let Some(queue) = owner {
            queue.let_go();
        }
    }
}

/// Starts a helper thread.
pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let spawned = thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|error| format!("the thread {name} cannot be started: {error}"))
}

/// What `work` gives, done by a helper thread within `wait`. A helper that takes longer is left to itself.
pub(super) fn within<T: Send + 'static>(
    wait: Duration,
    name: &str,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let (tell, told) = mpsc::channel();
    // Nobody listens any more once the wait is over.
    spawn(name, move || drop(tell.send(work())))?;
    told.recv_timeout(wait).unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => {
            Err(format!("it took longer than {wait:?}; see what the other rank does"))
        }
        RecvTimeoutError::Disconnected => Err(format!("the thread {name} panicked")),
    })
}
