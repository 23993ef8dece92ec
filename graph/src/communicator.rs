//! Collectives: two ranks that exchange bytes in the middle of their work, and the end of what they do together.
//!
//! **One sequence.** The n-th collective of one rank meets the n-th of the other, whatever streams and graphs
//! they come from: a gather a gather, a send a receive. What meets anything else is a fault that names both.
//!
//! **Every wait ends.** A collective takes at most the communicator's `wait`. A peer that is gone, too slow or
//! garbled, and [`Communicator::stop`] from any thread, are faults; after one the communicator has ended: every
//! later collective fails at once, and the peer finds its end of the link closed.
//!
//! **Two kinds.** A communicator as it is made is for the host device, over memory or a socket. From such an end both
//! ranks can make one for CUDA ([`Communicator::on_cuda`]). There nothing compares what meets what: ranks that queue
//! different collectives wait for each other until one is stopped.
//!
//! **Two means on CUDA** ([`Exchange`]). NCCL carries everything. Between two devices of one host, gathers of up to a
//! mebibyte of each rank can be pushed over peer memory by a kernel of this crate, which takes less than half of the
//! time for small ones. Which of the two carries a gather depends on its size alone, so it is the same on both ranks,
//! and both bring the same bytes.
//!
//! **What a waiting host must check.** A pushed gather that is given up (after [`Communicator::stop`], the end of the
//! peer, or the wait) ends as work that is done: the stream goes on, later gathers of this communicator do nothing, and
//! what all of them should have brought is void. No call fails for that. So whoever reads the result of work with
//! collectives waits for it first (an event, a synchronisation) and then asks [`Communicator::ended`]: if that is
//! `None`, every gather that the work had was whole; if not, the result is void. The question reads a word of host
//! memory.

use std::fmt;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MappedMutexGuard, Mutex};

mod group;
mod link;
mod measure;
mod proof;
mod setup;
mod wire;

use crate::arena;
use crate::cuda::{self, NcclLibrary};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;
use group::Group;
use link::Link;
pub use measure::GatherTimes;
use wire::{Meeting, Operation};

/// How many ranks there are.
pub const RANKS: usize = 2;

/// The bytes that both ends send each other when they are connected.
const TEST_BYTES: usize = 256;

/// One rank's end of a group of two. Clones are handles to the same end; when the last one goes, the peer finds
/// the link closed.
#[derive(Clone)]
pub struct Communicator(Arc<End>, Exchange);

/// What carries the gathers of a communicator for CUDA devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Exchange {
    /// What is faster: both ranks measure it once, when the communicator is made.
    #[default]
    Auto,
    /// NCCL, as for sends and receives.
    Nccl,
    /// A kernel that pushes over peer memory, for parts of up to a mebibyte; NCCL for larger ones.
    Push,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exchange::Auto => "auto",
            Exchange::Nccl => "nccl",
            Exchange::Push => "push",
        })
    }
}

struct End {
    rank: usize,
    epoch: u64,
    wait: Duration,
    means: Means,
    /// Why there are no more collectives.
    ended: OnceLock<String>,
    /// How many emissions and graphs hold this end, and the news that one let go.
    held: Mutex<usize>,
    let_go: Condvar,
}

/// What carries the bytes.
enum Means {
    /// This process, when the host device runs a collective. `turn` is the number of the next collective; whoever has
    /// it locked is in one.
    Host { link: Link, turn: Mutex<u64> },
    /// NCCL and push, on streams of a CUDA device.
    Cuda(Box<Group>),
}

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank brings its part of a buffer and gets the others'.
    Gather,
    /// Bytes go to the other rank.
    Send,
    /// Bytes come from the other rank.
    Receive,
}

impl Communicator {
    /// Both ends of a group whose ranks are threads of this process, for tests: each with a device of its own,
    /// and each waited for by its own thread.
    pub fn pair(wait: Duration) -> [Communicator; RANKS] {
        let [first, second] = Link::pair();
        [Communicator::new(first, 0, wait, 1), Communicator::new(second, 1, wait, 1)]
    }

    /// The end of `rank` of a group whose other end is behind `stream`, after both have sent each other a test
    /// message. The stream must be fresh, and nothing else may use it.
    ///
    /// # Errors
    /// The ranks are not 0 and 1; the other end is no communicator of this version; or it did not answer within
    /// `wait`.
    pub fn over(stream: TcpStream, rank: usize, wait: Duration) -> Result<Communicator> {
        let refused = |why| Error::Communicator { doing: format!("connect rank {rank} with its peer"), why };
        if rank >= RANKS {
            return Err(refused(format!("there are {RANKS} ranks, so it is 0 or 1")));
        }
        let link = Link::socket(stream)
            .map_err(|error| refused(format!("the socket cannot be set up: {error}; connect a new one")))?;
        let end = Communicator::new(link, rank, wait, 0);
        let pattern = |rank: usize| -> [u8; TEST_BYTES] { std::array::from_fn(|i| (i * 7 + rank) as u8) };
        let mut came = [0; TEST_BYTES];
        end.meet(Operation::Test, &pattern(rank), &mut came).map_err(refused)?;
        match came == pattern(end.peer()) {
            true => Ok(end),
            false => Err(refused("the test message came with other bytes; check what lies between".into())),
        }
    }

    fn new(link: Link, rank: usize, wait: Duration, next: u64) -> Communicator {
        Communicator::with(rank, wait, Means::Host { link, turn: Mutex::new(next) })
    }

    fn with(rank: usize, wait: Duration, means: Means) -> Communicator {
        let end = End {
            rank,
            epoch: arena::next_epoch(),
            wait,
            means,
            ended: OnceLock::new(),
            held: Mutex::new(0),
            let_go: Condvar::new(),
        };
        Communicator(Arc::new(end), Exchange::Auto)
    }

    /// Makes a communicator for `device`, a CUDA device, which this rank alone has, with the peer, who makes one too at
    /// the same time. Its collectives are for one stream: the first that is given some. Gathers are carried by what is
    /// faster ([`Exchange::Auto`]).
    ///
    /// Every step takes at most this end's `wait`; the last are tests of all collectives, launched and replayed, so that
    /// what a first use costs is paid before any capture. This end becomes the new one's side: [`Communicator::stop`]
    /// and the death of a rank reach the peer over it, and nothing else may use it.
    ///
    /// # Errors
    /// `device` is a host device; the environment lacks something ([`nccl_environment`](crate::nccl_environment)); NCCL
    /// is missing, or the ranks have different ones; it could not start, or its test failed; or one of these on the
    /// other rank. This end has ended then.
    pub fn on_cuda(self, device: &Device) -> Result<Communicator> {
        self.on_cuda_with(device, Exchange::Auto)
    }

    /// As [`Communicator::on_cuda`], with gathers carried by `exchange`, which both ranks ask for alike.
    ///
    /// # Errors
    /// As there; the ranks ask for different means; or [`Exchange::Push`] is asked for and cannot be: the error says
    /// why.
    pub fn on_cuda_with(self, device: &Device, exchange: Exchange) -> Result<Communicator> {
        setup::join(self, device, exchange)
    }

    /// What carries the collectives, and why, for people. Both ranks chose the same; where times decided, in the same
    /// words.
    pub fn means(&self) -> &str {
        match &self.0.means {
            Means::Host { .. } => "the host device's own collectives, over its link",
            Means::Cuda(group) => group.means(),
        }
    }

    /// A handle to the same end whose gathers are carried by `exchange`; by what was chosen at the start if that is
    /// [`Exchange::Auto`]. Both ranks queue the same gathers by the same means, or wait for each other until one is
    /// stopped.
    ///
    /// # Errors
    /// It is for a host device; or there is no push between these ranks.
    pub fn carried_by(&self, exchange: Exchange) -> Result<Communicator> {
        let refused = |why: &str| self.refused(why.into());
        match &self.0.means {
            Means::Host { .. } => Err(refused("it is for a host device, which has one means for all")),
            Means::Cuda(group) if exchange == Exchange::Push && group.push().is_none() => {
                Err(refused(&format!("there is no push over peer memory: {}", group.means())))
            }
            Means::Cuda(_) => Ok(Communicator(self.0.clone(), exchange)),
        }
    }

    /// What gathers take on the device by each means that there is, in parts of each of `sizes`: on both ranks at
    /// once, with the same sizes. `stream` is the one that has this communicator's collectives, or will have them.
    ///
    /// # Errors
    /// It is for a host device; or device work failed.
    pub fn measure(&self, stream: &Stream, sizes: &[usize]) -> Result<Vec<GatherTimes>> {
        measure::all(self, stream, sizes)
    }

    /// Has pushed gathers count on from `epoch`: for tests of what happens when epochs start anew. Both ranks do it
    /// while none is under way on either.
    ///
    /// # Errors
    /// There is no push; or the device failed.
    #[doc(hidden)]
    pub fn plant_epochs(&self, epoch: u32) -> Result<()> {
        match self.group().and_then(Group::push) {
            Some(push) => push.plant(epoch),
            None => Err(self.refused("there is no push over peer memory".into())),
        }
    }

    fn group(&self) -> Option<&Group> {
        match &self.0.means {
            Means::Host { .. } => None,
            Means::Cuda(group) => Some(group),
        }
    }

    /// The NCCL library whose collectives these are, if they are for a CUDA device.
    pub fn nccl(&self) -> Option<&NcclLibrary> {
        self.group().map(Group::library)
    }

    /// Why there are no more collectives, once there are none. Whoever has waited for work with collectives on a CUDA
    /// device asks this before using the result: unless this is `None`, the result is void.
    pub fn ended(&self) -> Option<&str> {
        if self.0.ended.get().is_none()
            && let Some(why) = self.group().and_then(Group::failed)
        {
            self.end(why.into());
        }
        self.0.ended.get().map(String::as_str)
    }

    /// This end's rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        RANKS
    }

    /// A number that no other communicator and no arena of this process has.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// The stop word: a collective that waits ends with a fault at once, and so does every later one, here and,
    /// as the link closes, at the peer. The first reason stays.
    ///
    /// On a CUDA device what is queued later is refused, and so are replays; whoever waits for work with collectives is
    /// told, and what it would have left must not be used. What runs in a kernel already and waits for its peer: pushed
    /// gathers give up within milliseconds; NCCL's collectives are ended by [`Communicator::close`] alone.
    pub fn stop(&self, why: &str) {
        self.end(format!("it was stopped: {why}"));
    }

    /// Ends the communicator once no emission and no graph holds it any more.
    ///
    /// One on a CUDA device also ends NCCL's: in order if the peer closes its end too, within half of what is left of
    /// the deadline, else by abort. After a [`Communicator::stop`] or the death of the peer: drop every exec and
    /// emission with its collectives, keep the stream, whose last handle waits for its work, then call this. It aborts at
    /// once, which is what ends kernels that wait for the peer, and returns when the last graph is gone; the device is
    /// fit for use then. NCCL's calls are made on a helper thread, so this returns at the deadline at the latest.
    /// Without this call NCCL's communicator leaks: no destructor ends it. The memory that the ranks map of each other
    /// is given up too; after any end that is not in order, 2 MiB of it stay until the process ends, since the peer's
    /// device may still write them.
    ///
    /// # Errors
    /// Some still hold it at the deadline; unless it was stopped, nothing has ended, and another handle can close it
    /// later. Or NCCL has not ended it by then: another handle can go on to wait, and if that fails too, only the end
    /// of the process ends it.
    pub fn close(self, deadline: Duration) -> Result<()> {
        if let Means::Cuda(group) = &self.0.means {
            return group.close(&self, deadline);
        }
        let started = Instant::now();
        while self.held() > 0 {
            let left = deadline.saturating_sub(started.elapsed());
            if left.is_zero() {
                let doing = format!("close the communicator of rank {} within {deadline:?}", self.rank());
                return Err(Error::Communicator { doing, why: self.still_held() });
            }
            self.wait_for_let_go(left);
        }
        self.end("it was closed".into());
        Ok(())
    }

    /// How many emissions and graphs hold it.
    fn held(&self) -> usize {
        *self.0.held.lock()
    }

    fn still_held(&self) -> String {
        format!("{} graphs or emissions still hold its collectives; drop them first", self.held())
    }

    /// Waits until one of them lets go, or `wait` is over.
    fn wait_for_let_go(&self, wait: Duration) {
        let mut held = self.0.held.lock();
        if *held > 0 {
            self.0.let_go.wait_for(&mut held, wait);
        }
    }

    /// The other rank.
    pub(crate) fn peer(&self) -> usize {
        RANKS - 1 - self.rank()
    }

    /// Ends all collectives, for the first reason given, and lets the peer know.
    pub(crate) fn end(&self, why: String) {
        // The reason comes first: whoever then finds the link closed looks for it.
        let _ = self.0.ended.set(why);
        match &self.0.means {
            Means::Host { link, .. } => link.shut(),
            Means::Cuda(group) => {
                group.stop();
                group.side.end(self.0.ended.get().cloned().unwrap_or_default());
            }
        }
    }

    /// Refuses collectives on a host device if they are for a CUDA device.
    pub(crate) fn admit_host(&self) -> Result<()> {
        match &self.0.means {
            Means::Host { .. } => Ok(()),
            Means::Cuda(_) => {
                Err(self.refused("it is for a CUDA device; use a stream of that, or a host end".into()))
            }
        }
    }

    /// Refuses collectives on a CUDA stream if they are for a host device, have ended, or are for another stream.
    pub(crate) fn admit(&self, queue: &Arc<cuda::Queue>) -> Result<()> {
        let Means::Cuda(group) = &self.0.means else {
            return Err(self.refused("it is for a host device; make one for this device (`on_cuda`)".into()));
        };
        match self.ended() {
            Some(why) => Err(self.refused(format!("it had ended: {why}"))),
            None => {
                group.admit(queue).map_err(|why| self.refused(why))?;
                queue.parties().add(self);
                Ok(())
            }
        }
    }

    /// Refuses to wait on for work with its collectives, which was queued at `since` at the latest: they have ended, or
    /// end now since it takes longer than any may.
    pub(crate) fn still_runs(&self, since: Instant) -> Result<()> {
        if since.elapsed() > self.0.wait {
            let (peer, wait) = (self.peer(), self.0.wait);
            self.end(format!("work with collectives took longer than {wait:?}; see what rank {peer} does"));
        }
        match self.ended() {
            None => Ok(()),
            Some(why) => Err(Error::Communicator {
                doing: format!("wait for work with collectives of rank {}", self.rank()),
                why: why.into(),
            }),
        }
    }

    fn refused(&self, why: String) -> Error {
        Error::Communicator {
            doing: format!("run collectives of the communicator of rank {}", self.rank()),
            why,
        }
    }

    /// The communicator of NCCL, for one call.
    pub(crate) fn handle(&self) -> Result<MappedMutexGuard<'_, cuda::Handle>, String> {
        let ended = || format!("the communicator had ended: {}", self.ended().unwrap_or("it was closed"));
        match &self.0.means {
            Means::Cuda(group) if self.ended().is_none() => group.handle().ok_or_else(ended),
            Means::Cuda(_) => Err(ended()),
            Means::Host { .. } => Err("the communicator is for a host device".into()),
        }
    }

    /// Whether NCCL's communicator has been ended: no work waits in its kernels any more.
    fn is_over(&self) -> bool {
        self.group().is_some_and(Group::is_over)
    }

    /// What pushes this collective over peer memory; if nothing does, it is NCCL's.
    pub(crate) fn push(&self, what: Collective, bytes: usize) -> Option<&cuda::Push> {
        let group = self.group()?;
        let asked = match self.1 {
            Exchange::Auto => group.pushes(),
            exchange => exchange == Exchange::Push,
        };
        let pushed = asked && what == Collective::Gather && bytes <= cuda::MOST_BYTES;
        if pushed { group.push() } else { None }
    }

    /// What carries the gathers of this handle, for digests.
    pub(crate) fn exchange(&self) -> Exchange {
        self.1
    }

    /// Finds out whether the peer has closed its end; of a host end.
    fn look(&self) -> Result<(), String> {
        let Means::Host { link, .. } = &self.0.means else { return Ok(()) };
        link.look().map_err(|why| match self.ended() {
            // This end may have been stopped, by whoever has another handle.
            Some(why) => why.into(),
            None => {
                let peer = self.peer();
                format!("rank {peer} is gone ({why}); see why it ended, then start both ranks again")
            }
        })
    }

    /// Exchanges parts: `own` goes to the peer, the peer's comes into `other`.
    pub(crate) fn gather(&self, own: &[u8], other: &mut [u8]) -> Result<(), String> {
        self.meet(Operation::Gather, own, other)
    }

    /// As [`Communicator::gather`], with a wait of its own.
    fn gather_within(&self, own: &[u8], other: &mut [u8], wait: Duration) -> Result<(), String> {
        self.meet_within(Operation::Gather, own, other, wait)
    }

    /// Sends `bytes` to the peer.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), String> {
        self.meet(Operation::Send, bytes, &mut [])
    }

    /// Receives `into` from the peer.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<(), String> {
        self.meet(Operation::Send, &[], into)
    }

    /// A collective for people.
    pub(crate) fn describe(&self, what: Collective, bytes: usize) -> String {
        match what {
            Collective::Gather => format!("gather {RANKS} x {bytes} bytes as rank {}", self.rank()),
            Collective::Send => format!("send {bytes} bytes to rank {}", self.peer()),
            Collective::Receive => format!("receive {bytes} bytes from rank {}", self.peer()),
        }
    }

    fn meet(&self, operation: Operation, out: &[u8], into: &mut [u8]) -> Result<(), String> {
        self.meet_within(operation, out, into, self.0.wait)
    }

    fn meet_within(
        &self,
        operation: Operation,
        out: &[u8],
        into: &mut [u8],
        wait: Duration,
    ) -> Result<(), String> {
        let End { means, ended, .. } = &*self.0;
        let Means::Host { link, turn } = means else {
            return Err("the communicator is for a CUDA device".into());
        };
        let mut turn = turn.lock();
        if let Some(why) = ended.get() {
            return Err(format!("the communicator had ended: {why}"));
        }
        let meeting = Meeting { link, ended, rank: self.rank(), sequence: *turn, operation };
        meeting.run(out, into, wait).inspect_err(|why| self.end(why.clone()))?;
        *turn += 1;
        Ok(())
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "communicator of rank {} of {RANKS} epoch {}", self.rank(), self.epoch())
    }
}

/// Whose collectives a stream has had.
#[derive(Clone, Default)]
pub(crate) struct Parties(Arc<Mutex<Vec<Weak<End>>>>);

impl Parties {
    fn add(&self, communicator: &Communicator) {
        let mut ends = self.0.lock();
        if !ends.iter().any(|end| std::ptr::eq(end.as_ptr(), Arc::as_ptr(&communicator.0))) {
            ends.retain(|end| end.strong_count() > 0);
            ends.push(Arc::downgrade(&communicator.0));
        }
    }

    /// Those that work may still wait for.
    pub(crate) fn live(&self) -> Vec<Communicator> {
        let ends = self.0.lock();
        let live = ends.iter().filter_map(Weak::upgrade).map(|end| Communicator(end, Exchange::Auto));
        live.filter(|communicator| !communicator.is_over()).collect()
    }
}

/// An emission's hold on a communicator, which [`Communicator::close`] counts.
#[derive(Debug)]
pub(crate) struct Held(Communicator);

impl Held {
    pub(crate) fn new(communicator: &Communicator) -> Held {
        *communicator.0.held.lock() += 1;
        Held(communicator.clone())
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        &self.0
    }
}

impl Clone for Held {
    fn clone(&self) -> Held {
        Held::new(&self.0)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.0.0.held.lock() -= 1;
        self.0.0.let_go.notify_all();
    }
}
