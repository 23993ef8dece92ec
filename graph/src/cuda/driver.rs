//! The driver's handles, each with one owner: context, stream, event, module, graph. The only file that
//! calls the driver, so the only one of this folder, beside `code.rs`, `pinned.rs`, `mapped.rs`, `nccl.rs` and
//! `push.rs`,
//! with unsafe code.
//!
//! What every call is owed, and how it is paid:
//!
//! * *the library is loaded*: a [`Context`] exists only after [`load`] succeeded, and every handle holds one;
//! * *the context is current*: each method binds it first, except [`StreamHandle::submit`]'s caller, who
//!   binds once for a whole emission;
//! * *handles live*: a handle is destroyed in its owner's `Drop` and nowhere else, and holds its context.
//!
//! cudarc's own safe layer is not used: its event tracking fails inside captures, and its slices and graphs
//! keep nothing alive. Only its loader and its bindings are.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};
use parking_lot::Mutex;

use super::push::HANDLE_BYTES;
use crate::error::{Error, Fault, FaultKind, Result};
use crate::exec::Times;
use crate::kernel::{Grid, Twin};

/// The oldest driver that has every symbol used here: CUDA 12.8.
const OLDEST_DRIVER: i32 = 12_080;
/// The oldest compute capability that the kernels are written for.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

/// What a graph takes beside what it points to, per node: 1.6 to 3 KB were measured for graphs of 100 to
/// 1000 nodes.
pub(super) const NODE_BYTES: usize = 3 << 10;

/// A code that the driver returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure(CUresult);

pub(super) type Outcome<T = ()> = std::result::Result<T, Failure>;

fn done(code: CUresult) -> Outcome {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Failure(code)),
    }
}

/// Whether what was asked for has come.
fn ready(code: CUresult) -> Outcome<bool> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => done(code).map(|()| true),
    }
}

impl Failure {
    /// What a launch that went wrong would give, for a planted fault.
    pub(super) fn planted() -> Failure {
        Failure(CUresult::CUDA_ERROR_LAUNCH_FAILED)
    }

    pub(super) fn out_of_memory(self) -> bool {
        self.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// The driver's name and sentence for the code.
    pub(super) fn words(self) -> (String, String) {
        let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
            let mut text = std::ptr::null();
            // SAFETY: a failure comes from a loaded driver; `text` receives a static string or stays null.
            unsafe {
                match ask(self.0, &mut text) {
                    CUresult::CUDA_SUCCESS if !text.is_null() => {
                        CStr::from_ptr(text).to_string_lossy().into_owned()
                    }
                    _ => format!("{:?}", self.0),
                }
            }
        };
        (text(sys::cuGetErrorName), text(sys::cuGetErrorString))
    }

    /// The failure as a fault of `work`.
    pub(super) fn fault(self, work: impl Into<String>) -> Fault {
        let (name, says) = self.words();
        Fault { work: work.into(), kind: FaultKind::Driver { name, says } }
    }

    fn missing(self, what: &str, call: &str) -> Error {
        let (name, says) = self.words();
        Error::Missing { what: what.into(), why: format!("{call} says {name} ({says})") }
    }
}

/// The sentence for a library that the loader did not find.
pub(super) fn not_found(library: &str) -> String {
    let mut tried = cudarc::get_lib_name_candidates(library);
    tried.dedup();
    let tried = tried.join(", ");
    format!("the loader found none of {tried}; put its folder on LD_LIBRARY_PATH or install it")
}

/// Loads the driver and starts it, once. `Ok(false)` if it runs and has no device.
fn load() -> Result<bool> {
    static LOADED: OnceLock<Result<bool>> = OnceLock::new();
    let start = || {
        const WHAT: &str = "the CUDA driver";
        // SAFETY: asks the loader; the library's initialisers are the driver's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Missing { what: WHAT.into(), why: not_found("cuda") });
        }
        // SAFETY: the library is there.
        match done(unsafe { sys::cuInit(0) }) {
            Err(Failure(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(false),
            outcome => outcome.map_err(|failure| failure.missing(WHAT, "cuInit"))?,
        }
        let version = driver_version().map_err(|failure| failure.missing(WHAT, "cuDriverGetVersion"))?;
        if version < OLDEST_DRIVER {
            let (is, least) = (version_text(version), version_text(OLDEST_DRIVER));
            let why = format!("it runs CUDA {is} and this program needs {least} or newer; update the driver");
            return Err(Error::Missing { what: WHAT.into(), why });
        }
        Ok(true)
    };
    LOADED.get_or_init(start).clone()
}

fn driver_version() -> Outcome<i32> {
    let mut version = 0;
    // SAFETY: the library is there; `version` is written by the call alone.
    done(unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// How many devices the driver has.
pub(super) fn count() -> Result<usize> {
    if !load()? {
        return Ok(0);
    }
    let mut count = 0;
    // SAFETY: the driver is loaded and started.
    let outcome = done(unsafe { sys::cuDeviceGetCount(&mut count) });
    outcome.map_err(|failure| failure.missing("the list of CUDA devices", "cuDeviceGetCount"))?;
    Ok(count as usize)
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Outcome<i32> {
    let mut value = 0;
    // SAFETY: who has a device has a started driver; `value` is written by the call alone.
    done(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }).map(|()| value)
}

/// The primary context of one device, and what the device is.
pub(super) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    pub(super) name: String,
    /// Compute capability.
    pub(super) capability: (i32, i32),
    pub(super) total_bytes: usize,
    /// The CUDA version of the driver, such as `13.0`.
    pub(super) driver: String,
}

// SAFETY: the driver's contexts may be used from any thread; the handle is only a name for one.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens device `ordinal`.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Context>> {
        let (what, devices) = (format!("CUDA device {ordinal}"), count()?);
        if ordinal >= devices {
            return Err(Error::Missing {
                what,
                why: format!(
                    "the driver shows {devices} of them; name one from 0 on, and see CUDA_VISIBLE_DEVICES"
                ),
            });
        }
        let context = Self::retain(ordinal).map_err(|failure| failure.missing(&what, "the driver"))?;
        let (major, minor) = context.capability;
        if context.capability < OLDEST_CAPABILITY {
            let why = format!(
                "it is a {} of compute capability {major}.{minor} and 8.0 or newer is needed; use another device",
                context.name
            );
            return Err(Error::Missing { what, why });
        }
        Ok(Arc::new(context))
    }

    fn retain(ordinal: usize) -> Outcome<Context> {
        let (mut device, mut raw, mut total_bytes) = (0, null_mut(), 0);
        let mut name = [0; 256];
        let driver = version_text(driver_version()?);
        // SAFETY: the driver is started, every out-pointer is a live local of the type that the call writes,
        // and the length of `name` is its own.
        unsafe {
            done(sys::cuDeviceGet(&mut device, ordinal as c_int))?;
            done(sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
            done(sys::cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        }
        use sys::CUdevice_attribute as A;
        let major = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        // SAFETY: as above. The retained context is released in `Drop`.
        done(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })?;
        let name = name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect::<Vec<u8>>();
        let name = String::from_utf8_lossy(&name).into_owned();
        Ok(Context { device, raw, name, capability: (major, minor), total_bytes, driver })
    }

    /// Makes the context current on this thread. It costs about 0.03 us.
    pub(super) fn bind(&self) -> Outcome {
        // SAFETY: `raw` is retained as long as `self` lives.
        done(unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Waits for everything on the device.
    pub(super) fn synchronize(&self) -> Outcome {
        self.bind()?;
        // SAFETY: the context is current.
        done(unsafe { sys::cuCtxSynchronize() })
    }

    /// Free and total bytes of device memory.
    pub(super) fn memory(&self) -> Outcome<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both are written by the call alone.
        done(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Allocates device memory: plain, not from a pool, so that peers could map it.
    pub(super) fn allocate(&self, bytes: usize) -> Outcome<u64> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the context is current. The driver refuses an empty allocation, so one byte is the least.
        done(unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) })?;
        Ok(address)
    }

    /// Frees what [`Context::allocate`] gave.
    ///
    /// # Safety
    /// Nothing uses the memory any more, and it is freed once.
    pub(super) unsafe fn free(&self, address: u64) -> Outcome {
        self.bind()?;
        // SAFETY: the caller's promise; the context is current.
        done(unsafe { sys::cuMemFree_v2(address) })
    }

    /// Allocates pinned host memory that every device can read and write at the same address. Not
    /// write-combined: the host reads it too.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Outcome<NonNull<u8>> {
        self.bind()?;
        let (mut data, mut address) = (null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the pointer is written by the call alone.
        done(unsafe { sys::cuMemHostAlloc(&mut data, bytes.max(1), flags) })?;
        let start = NonNull::new(data.cast()).expect("a successful allocation is not null");
        // SAFETY: `data` was just allocated with the flag that maps it.
        let mapped = done(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, data, 0) });
        if mapped.is_err() || address != start.as_ptr() as u64 {
            // SAFETY: just allocated, and nobody else knows of it.
            unsafe { self.free_pinned(start)? };
            return Err(mapped.err().unwrap_or(Failure(CUresult::CUDA_ERROR_NOT_SUPPORTED)));
        }
        Ok(start)
    }

    /// Whether the device reads pageable host memory, mapped files included, as the process does; and whether it
    /// can register host memory that is only read.
    pub(super) fn file_access(&self) -> Outcome<(bool, bool)> {
        use sys::CUdevice_attribute as A;
        let pageable = attribute(self.device, A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)?;
        let register = attribute(self.device, A::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)?;
        Ok((pageable != 0, register != 0))
    }

    /// Registers host memory for the device to read; gives the address at which it does.
    pub(super) fn register_read_only(&self, start: NonNull<u8>, bytes: usize) -> Outcome<u64> {
        self.bind()?;
        let (data, mut address) = (start.as_ptr().cast(), 0);
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the context is current; the driver itself checks that the range is mapped.
        done(unsafe { sys::cuMemHostRegister_v2(data, bytes, flags) })?;
        // SAFETY: `data` was just registered with the flag that maps it.
        let mapped = done(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, data, 0) });
        mapped.map(|()| address).inspect_err(|_| {
            // SAFETY: just registered, and nobody else knows of it.
            let _ = unsafe { self.unregister(start) };
        })
    }

    /// Ends what [`Context::register_read_only`] began.
    ///
    /// # Safety
    /// Nothing on the device reads the memory any more, and it is unregistered once, while it is mapped.
    pub(super) unsafe fn unregister(&self, start: NonNull<u8>) -> Outcome {
        self.bind()?;
        // SAFETY: the caller's promise; the context is current.
        done(unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()) })
    }

    /// How many blocks run at once whatever they take.
    pub(super) fn multiprocessors(&self) -> Outcome<usize> {
        let count =
            attribute(self.device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(usize::try_from(count).unwrap_or(0).max(1))
    }

    /// What names memory that [`Context::allocate`] gave to another process.
    pub(super) fn export(&self, address: u64) -> Outcome<[c_char; HANDLE_BYTES]> {
        self.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the context is current; `handle` is written by the call alone, which checks the address.
        done(unsafe { sys::cuIpcGetMemHandle(&mut handle, address) })?;
        Ok(handle.reserved)
    }

    /// Maps memory of another process, whose device this one can reach; gives its address here.
    pub(super) fn import(&self, handle: [c_char; HANDLE_BYTES]) -> Outcome<u64> {
        self.bind()?;
        let (mut address, handle) = (0, sys::CUipcMemHandle { reserved: handle });
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        // SAFETY: the context is current; `address` is written by the call alone, which checks the handle.
        done(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) })?;
        Ok(address)
    }

    /// Ends what [`Context::import`] began.
    ///
    /// # Safety
    /// Nothing on the device uses the memory any more, and it is unmapped once.
    pub(super) unsafe fn unimport(&self, address: u64) -> Outcome {
        self.bind()?;
        // SAFETY: the caller's promise; the context is current.
        done(unsafe { sys::cuIpcCloseMemHandle(address) })
    }

    /// Frees what [`Context::allocate_pinned`] gave.
    ///
    /// # Safety
    /// Nothing uses the memory any more, and it is freed once.
    pub(super) unsafe fn free_pinned(&self, data: NonNull<u8>) -> Outcome {
        self.bind()?;
        // SAFETY: the caller's promise; the context is current.
        done(unsafe { sys::cuMemFreeHost(data.as_ptr().cast()) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; every handle made in it holds the context and is gone.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A stream. It does not wait for the legacy default stream.
pub(super) struct StreamHandle {
    raw: sys::CUstream,
    pub(super) context: Arc<Context>,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

/// One thing for a stream to do, with everything resolved.
pub(super) enum Submission<'a> {
    Launch { function: Function, grid: Grid, block: &'a [u8] },
    Copy { to: u64, from: u64, bytes: usize },
    Fill { to: u64, bytes: usize, value: u8 },
}

impl StreamHandle {
    pub(super) fn new(context: &Arc<Context>) -> Outcome<StreamHandle> {
        context.bind()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the context is current.
        done(unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(StreamHandle { raw, context: context.clone() })
    }

    /// A handle that stands for a stream that could not be made. Its owner never gets as far as using it:
    /// the device has a fault by then.
    pub(super) fn none(context: &Arc<Context>) -> StreamHandle {
        StreamHandle { raw: null_mut(), context: context.clone() }
    }

    /// The driver's own handle, for NCCL.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits for everything on the stream.
    pub(super) fn synchronize(&self) -> Outcome {
        self.context.bind()?;
        // SAFETY: the stream lives, its context is current.
        done(unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Whether everything queued has run.
    pub(super) fn reached(&self) -> Outcome<bool> {
        self.context.bind()?;
        // SAFETY: the stream lives, its context is current.
        ready(unsafe { sys::cuStreamQuery(self.raw) })
    }

    pub(super) fn record(&self, event: &EventHandle) -> Outcome {
        self.context.bind()?;
        // SAFETY: both live, and the context, which is that of both, is current.
        done(unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    pub(super) fn wait(&self, event: &EventHandle) -> Outcome {
        self.context.bind()?;
        // SAFETY: both live, and the context is current. No flag is defined.
        done(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    pub(super) fn launch_graph(&self, graph: &Graph) -> Outcome {
        self.context.bind()?;
        let _one_at_a_time = graph.launching.lock();
        // SAFETY: both live, the context is current, and no other thread uses the exec meanwhile. What the
        // graph points to is its owner's care.
        done(unsafe { sys::cuGraphLaunch(graph.exec, self.raw) })
    }

    /// Queues one launch, copy or fill. The context must be current.
    ///
    /// # Safety
    /// Every address lies in memory that stays allocated until the work has run (or, in a capture, for as
    /// long as the graph lives), and host memory among it is pinned and not touched by the host meanwhile.
    /// A launch's block has the size that its function takes.
    pub(super) unsafe fn submit(&self, submission: &Submission<'_>) -> Outcome {
        match *submission {
            // CUDA calls an empty copy or fill an error or a node, depending on the call.
            Submission::Copy { bytes: 0, .. } | Submission::Fill { bytes: 0, .. } => Ok(()),
            Submission::Copy { to, from, bytes } => {
                // SAFETY: the caller's promise.
                done(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.raw) })
            }
            Submission::Fill { to, bytes, value } => {
                // SAFETY: the caller's promise.
                done(unsafe { sys::cuMemsetD8Async(to, value, bytes, self.raw) })
            }
            Submission::Launch { function, grid: Grid([x, y, z]), block } => {
                let mut parameters = [block.as_ptr().cast_mut().cast::<c_void>()];
                let mut overlap = sys::CUlaunchAttribute {
                    id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                    pad: [0; 4],
                    value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
                };
                let config = sys::CUlaunchConfig {
                    gridDimX: x,
                    gridDimY: y,
                    gridDimZ: z,
                    blockDimX: function.threads,
                    blockDimY: 1,
                    blockDimZ: 1,
                    sharedMemBytes: function.shared_bytes,
                    hStream: self.raw,
                    attrs: &mut overlap,
                    numAttrs: function.overlaps.into(),
                };
                // SAFETY: the function takes one parameter of the block's size (checked when it was loaded),
                // and the driver copies it before the call returns; the rest is the caller's promise.
                done(unsafe {
                    sys::cuLaunchKernelEx(&config, function.raw, parameters.as_mut_ptr(), null_mut())
                })
            }
        }
    }

    /// Copies host bytes to the device and waits for that copy.
    ///
    /// # Safety
    /// `to` and the bytes after it, as many as `from` has, are allocated.
    pub(super) unsafe fn write(&self, to: u64, from: &[u8]) -> Outcome {
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller's promise for `to`; `from` lives until the wait is over.
        done(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.raw) })?;
        self.synchronize()
    }

    /// Copies device bytes to the host and waits for that copy.
    ///
    /// # Safety
    /// `from` and the bytes after it, as many as `to` has, are allocated.
    pub(super) unsafe fn read(&self, to: &mut [u8], from: u64) -> Outcome {
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the caller's promise for `from`; `to` is borrowed until the wait is over.
        done(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.raw) })?;
        self.synchronize()
    }

    /// Captures what `body` submits to this stream and makes a graph of it. However `body` ends, so does the
    /// capture. The mode is thread-local: other threads may do as they like meanwhile, and begin and end are
    /// one call so that they happen on one thread.
    pub(super) fn capture(&self, body: impl FnOnce() -> Outcome) -> Outcome<Graph> {
        self.context.bind()?;
        let mut graph = Graph::none(&self.context);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let mut clock = Clock(Instant::now());
        // SAFETY: the stream lives and its context is current.
        done(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) })?;
        let body = body();
        // SAFETY: the capture was begun by this thread; the graph it gives is owned by `graph`.
        let ended = done(unsafe { sys::cuStreamEndCapture(self.raw, &mut graph.raw) });
        // What the body met says more than that the capture was invalidated by it.
        body.and(ended)?;
        graph.times.capture = clock.lap();
        // SAFETY: the graph is complete and ours. With no list of nodes the call writes their number alone.
        unsafe {
            done(sys::cuGraphGetNodes(graph.raw, null_mut(), &mut graph.nodes))?;
            done(sys::cuGraphInstantiateWithFlags(&mut graph.exec, graph.raw, 0))?;
            graph.times.instantiate = clock.lap();
            if graph.nodes > 0 {
                done(sys::cuGraphUpload(graph.exec, self.raw))?;
            }
        }
        graph.times.upload = clock.lap();
        Ok(graph)
    }
}

/// Time since it was last asked.
struct Clock(Instant);

impl Clock {
    fn lap(&mut self) -> Duration {
        let before = std::mem::replace(&mut self.0, Instant::now());
        self.0 - before
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.context.bind().is_ok() {
            // SAFETY: made by `new`, destroyed once. The driver lets pending work end by itself.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// An event, without timing unless it was made for it. One that could not be made is null and counts as reached.
pub(super) struct EventHandle {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for EventHandle {}
// SAFETY: as above.
unsafe impl Sync for EventHandle {}

impl EventHandle {
    pub(super) fn new(context: &Arc<Context>) -> Outcome<EventHandle> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// One that keeps the time at which it was reached.
    pub(super) fn timed(context: &Arc<Context>) -> Outcome<EventHandle> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Outcome<EventHandle> {
        context.bind()?;
        let mut raw = null_mut();
        // SAFETY: the context is current.
        done(unsafe { sys::cuEventCreate(&mut raw, flags as c_uint) })?;
        Ok(EventHandle { raw, context: context.clone() })
    }

    /// Milliseconds from `earlier` on; both are timed, and were reached.
    pub(super) fn milliseconds_since(&self, earlier: &EventHandle) -> Outcome<f32> {
        self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both live, and the context, which is that of both, is current.
        done(unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.raw, self.raw) })?;
        Ok(milliseconds)
    }

    /// A handle that stands for an event that could not be made.
    pub(super) fn none(context: &Arc<Context>) -> EventHandle {
        EventHandle { raw: null_mut(), context: context.clone() }
    }

    /// Whether the recorded point has been reached; true before the first record.
    pub(super) fn reached(&self) -> Outcome<bool> {
        if self.raw.is_null() {
            return Ok(true);
        }
        self.context.bind()?;
        // SAFETY: the event lives and its context is current.
        ready(unsafe { sys::cuEventQuery(self.raw) })
    }

    /// Waits, spinning, for the recorded point.
    pub(super) fn synchronize(&self) -> Outcome {
        self.context.bind()?;
        // SAFETY: the event lives and its context is current.
        done(unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.context.bind().is_ok() {
            // SAFETY: made by `new`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// Loaded device code.
pub(super) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: the driver's modules may be used from any thread.
unsafe impl Send for Module {}

/// A kernel of a module, ready to launch. Good for as long as its module is loaded.
#[derive(Clone, Copy)]
pub(super) struct Function {
    raw: sys::CUfunction,
    threads: u32,
    shared_bytes: u32,
    overlaps: bool,
}

// SAFETY: a name for a kernel; the driver's functions may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads a cubin.
    pub(super) fn load(context: &Arc<Context>, cubin: &[u8]) -> Outcome<Module> {
        context.bind()?;
        let mut raw = null_mut();
        // SAFETY: the context is current. `cubin` is what NVRTC made, whole: the cache compares digests.
        done(unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) })?;
        Ok(Module { raw, context: context.clone() })
    }

    /// Finds a kernel, loads its code and allows it its shared memory.
    pub(super) fn function(&self, twin: &Twin) -> Outcome<Function> {
        let Twin { symbol, block: threads, shared_bytes, overlaps, .. } = *twin;
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        self.context.bind()?;
        let symbol = CString::new(symbol).map_err(|_| Failure(CUresult::CUDA_ERROR_NOT_FOUND))?;
        let (mut raw, mut allowed) = (null_mut(), 0);
        // SAFETY: the module lives, its context is current, the name ends in a zero, and each out-pointer is
        // a local of the type that the call writes.
        unsafe {
            done(sys::cuModuleGetFunction(&mut raw, self.raw, symbol.as_ptr()))?;
            // Loading is lazy by default; a capture must not be the first use.
            done(sys::cuFuncLoad(raw))?;
            done(sys::cuFuncGetAttribute(&mut allowed, SHARED, raw))?;
            // Instances may share a symbol and differ in this: it only ever grows.
            if i64::from(shared_bytes) > i64::from(allowed) {
                done(sys::cuFuncSetAttribute(raw, SHARED, shared_bytes as c_int))?;
            }
        }
        // The launch attribute exists from this generation on.
        let overlaps = overlaps && self.context.capability.0 >= 9;
        Ok(Function { raw, threads, shared_bytes, overlaps })
    }

    /// The sizes of a function's parameters, in order.
    pub(super) fn parameters(&self, function: Function) -> Outcome<Vec<usize>> {
        self.context.bind()?;
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function's module is loaded; both are written by the call alone.
            let info = unsafe { sys::cuFuncGetParamInfo(function.raw, sizes.len(), &mut offset, &mut bytes) };
            match info {
                CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
                code => done(code)?,
            }
            sizes.push(bytes);
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded once, unloaded once; its functions live in the same registry and go with it.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// An instantiated graph. The exec goes before the graph, and both before anything that they point to: an
/// exec alone is not enough, since user objects (a communicator's, say) hang on the graph.
pub(crate) struct Graph {
    exec: sys::CUgraphExec,
    raw: sys::CUgraph,
    nodes: usize,
    times: Times,
    /// The driver does not lock graphs: launches of one exec take turns.
    launching: Mutex<()>,
    context: Arc<Context>,
}

// SAFETY: the driver's graphs may be used from any thread, one call at a time.
unsafe impl Send for Graph {}
// SAFETY: as above; the only use of a shared graph is its launch, which takes the lock.
unsafe impl Sync for Graph {}

impl Graph {
    fn none(context: &Arc<Context>) -> Graph {
        let (exec, raw, launching) = (null_mut(), null_mut(), Mutex::default());
        Graph { exec, raw, nodes: 0, times: Times::default(), launching, context: context.clone() }
    }

    pub(crate) fn nodes(&self) -> usize {
        self.nodes
    }

    /// How long it took to make.
    pub(crate) fn times(&self) -> Times {
        self.times
    }

    /// An estimate of what the driver keeps for it.
    pub(crate) fn bytes(&self) -> usize {
        self.nodes * NODE_BYTES
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        // SAFETY: each was made once and is destroyed once. The driver lets a running exec end by itself.
        unsafe {
            if !self.exec.is_null() {
                sys::cuGraphExecDestroy(self.exec);
            }
            if !self.raw.is_null() {
                sys::cuGraphDestroy(self.raw);
            }
        }
    }
}
