//! Streams and events: order within a stream, edges between streams.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arena::Arena;
use crate::cuda::{self, Cuda};
use crate::device::{CudaDevice, Device, HostDevice};
use crate::emission::Emission;
use crate::error::{Error, Result};
use crate::exec::{Exec, Form};
use crate::host::{self, Host, Target, Work};
use crate::state::StreamId;

/// A queue of work on one device. Work runs in order; on the host device not before something waits for it,
/// on a CUDA device by itself. The last handle to a CUDA stream waits for its work when it goes.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    queue: Queue,
}

#[derive(Clone)]
enum Queue {
    Host(Arc<Host>, Arc<host::Queue>),
    Cuda(Arc<cuda::Queue>),
}

impl Stream {
    pub(crate) fn on_host(host: &Arc<Host>) -> Stream {
        let queue = Queue::Host(host.clone(), Arc::default());
        Stream { device: Device::Host(HostDevice(host.clone())), queue }
    }

    pub(crate) fn on_cuda(cuda: &Arc<Cuda>) -> Stream {
        let queue = Queue::Cuda(Arc::new(cuda::Queue::new(cuda)));
        Stream { device: Device::Cuda(CudaDevice(cuda.clone())), queue }
    }

    /// Queues every entry of `emission`; or, while this stream is being captured, records them.
    /// `keeps` are the arenas it points into: they stay until it has run.
    ///
    /// # Errors
    /// Work failed earlier; or `keeps` are arenas of another device. On a CUDA device also: a kernel has no
    /// twin, or its twin cannot be loaded (in a capture: is not loaded yet). Collectives are refused if their
    /// communicator is for another kind of device, another device or another stream, or has ended on a CUDA device.
    pub fn run(&self, emission: Emission, keeps: &[Arena]) -> Result<()> {
        self.device.state().healthy().inspect_err(|error| emission.give_up(error))?;
        self.device.refuse_foreign("running work", keeps)?;
        self.admit(&emission)
            .inspect_err(|error| self.device.state().break_capture(self.id(), || error.to_string()))?;
        match &self.queue {
            Queue::Host(host, queue) => {
                if !host.state.record(self.id(), &emission, keeps) {
                    queue.push_run(host, Arc::new(emission), keeps.to_vec());
                }
                Ok(())
            }
            Queue::Cuda(queue) => queue.run(self.id(), &emission, keeps),
        }
    }

    /// Queues a replay of `exec`.
    ///
    /// # Errors
    /// This stream is being captured; work failed earlier; `exec` is of another device; or its collectives are refused
    /// as by [`Stream::run`].
    pub fn replay(&self, exec: &Exec) -> Result<()> {
        self.device.state().healthy().inspect_err(|error| exec.emission().give_up(error))?;
        self.device.refuse_other("a replay", exec.device())?;
        self.refuse_in_own_capture("a replay")?;
        self.admit(exec.emission())?;
        match (&self.queue, exec.form()) {
            (Queue::Cuda(queue), Form::Graph(graph)) => queue.replay(exec, graph),
            (Queue::Host(host, queue), Form::List) => {
                queue.push_run(host, exec.emission().clone(), exec.keeps().to_vec());
                Ok(())
            }
            _ => unreachable!("an exec has the form of its device, and the device was compared"),
        }
    }

    /// Marks this point of the stream in `event`.
    ///
    /// # Errors
    /// This stream is being captured; or `event` is of another device.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.device.refuse_other("recording an event", &event.device)?;
        self.refuse_in_own_capture("recording an event")?;
        match (&self.queue, &event.point) {
            (Queue::Cuda(queue), Point::Cuda(marker)) => queue.record(marker),
            (Queue::Host(_, queue), Point::Host(_, target)) => {
                *target.lock() = Some(queue.tail());
                Ok(())
            }
            _ => unreachable!("an event is of its device's kind, and the device was compared"),
        }
    }

    /// Makes later work of this stream wait for the point that `event` marks now.
    ///
    /// # Errors
    /// This stream is being captured; or `event` is of another device.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.refuse_other("waiting for an event", &event.device)?;
        self.refuse_in_own_capture("waiting for an event")?;
        match (&self.queue, &event.point) {
            (Queue::Cuda(queue), Point::Cuda(marker)) => queue.wait(marker),
            (Queue::Host(_, queue), Point::Host(_, target)) => {
                if let Some(target) = target.lock().clone() {
                    queue.push(Work::Wait(target));
                }
                Ok(())
            }
            _ => unreachable!("an event is of its device's kind, and the device was compared"),
        }
    }

    /// Runs everything queued so far, and waits for it. A CUDA device then frees memory that has no owner
    /// any more, for which it waits for its other streams too.
    ///
    /// # Errors
    /// A capture is in progress; or work failed, now or earlier.
    pub fn synchronize(&self) -> Result<()> {
        match &self.queue {
            Queue::Host(host, queue) => {
                host.state.refuse_in_capture("synchronisation")?;
                queue.tail().run(host)
            }
            Queue::Cuda(queue) => queue.synchronize(),
        }
    }

    /// Has everything queued so far run, as on a CUDA device it does by itself: for whoever is about to wait for
    /// another rank, which may wait for this one's part of a collective.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn progress(&self) -> Result<()> {
        match &self.queue {
            Queue::Host(..) => self.synchronize(),
            Queue::Cuda(_) => self.device.state().healthy(),
        }
    }

    /// Runs the next `items` queued items, as a device does that is busy meanwhile: tests of the host device
    /// draw the moment. A CUDA device is busy by itself.
    pub fn advance(&self, items: usize) -> Result<()> {
        match &self.queue {
            Queue::Host(host, queue) => queue.after(items as u64).run(host),
            Queue::Cuda(_) => self.device.state().healthy(),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn id(&self) -> StreamId {
        match &self.queue {
            Queue::Host(_, queue) => StreamId::of(queue),
            Queue::Cuda(queue) => StreamId::of(queue),
        }
    }

    /// Marks this point, to tell how long what comes behind takes; of a CUDA stream.
    pub(crate) fn lap(&self) -> Result<cuda::Lap> {
        match &self.queue {
            Queue::Cuda(queue) => queue.lap(),
            Queue::Host(..) => Err(Error::Missing {
                what: "the clock of a host stream".into(),
                why: "its work runs when something waits for it; time the wait".into(),
            }),
        }
    }

    /// What a capture of `emission` on this stream becomes.
    pub(crate) fn instantiate(&self, label: &str, emission: &Emission) -> Result<Form> {
        match &self.queue {
            Queue::Host(host, _) => match host.state.capture_fails_at(emission.len()) {
                None => Ok(Form::List),
                Some(at) => {
                    let why = format!("a planted fault at entry {at}");
                    Err(Error::CaptureFailed { capture: label.into(), why })
                }
            },
            Queue::Cuda(queue) => queue.capture(label, emission).map(|graph| Form::Graph(Arc::new(graph))),
        }
    }

    /// Refuses collectives that are not for this stream.
    fn admit(&self, emission: &Emission) -> Result<()> {
        emission.communicators().try_for_each(|communicator| match &self.queue {
            Queue::Host(..) => communicator.admit_host(),
            Queue::Cuda(queue) => communicator.admit(queue),
        })
    }

    fn refuse_in_own_capture(&self, call: &'static str) -> Result<()> {
        self.device.state().refuse_in_own_capture(self.id(), call)
    }
}

/// A point in a stream.
pub struct Event {
    device: Device,
    point: Point,
}

enum Point {
    Host(Arc<Host>, Mutex<Option<Target>>),
    Cuda(cuda::Marker),
}

impl Event {
    pub(crate) fn on_host(host: &Arc<Host>) -> Event {
        let point = Point::Host(host.clone(), Mutex::new(None));
        Event { device: Device::Host(HostDevice(host.clone())), point }
    }

    pub(crate) fn on_cuda(cuda: &Arc<Cuda>) -> Event {
        let point = Point::Cuda(cuda::Marker::new(cuda));
        Event { device: Device::Cuda(CudaDevice(cuda.clone())), point }
    }

    /// Whether the marked point has been reached; true for an event never recorded, and after a fault.
    pub fn reached(&self) -> bool {
        match &self.point {
            Point::Host(_, target) => target.lock().as_ref().is_none_or(Target::reached),
            Point::Cuda(marker) => marker.reached(),
        }
    }

    /// Waits until the marked point is reached.
    ///
    /// # Errors
    /// A capture is in progress; or work failed, now or earlier.
    pub fn synchronize(&self) -> Result<()> {
        match &self.point {
            Point::Host(host, target) => {
                host.state.refuse_in_capture("synchronisation")?;
                let target = target.lock().clone();
                target.map_or_else(|| host.state.healthy(), |target| target.run(host))
            }
            Point::Cuda(marker) => marker.synchronize(),
        }
    }
}
