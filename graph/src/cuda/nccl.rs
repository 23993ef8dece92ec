//! NCCL: the library, loaded when it is first asked for, and the calls on one of its communicators. The only file
//! that calls it.
//!
//! Codes are plain integers here, as in C: a code that this program does not know is still a code. No destructor
//! calls NCCL: ending a communicator waits for graphs and for the device, so it is a call with a deadline of its own
//! ([`Handle::end`] on a helper thread), and a handle that goes without it leaks.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::Cuda;
use super::driver::StreamHandle;
use crate::communicator::{Collective, RANKS};
use crate::digest::{Digest, Digester};
use crate::error::{Error, Result};

/// What must be in the environment before a process calls NCCL for the first time, and why it must:
///
/// * captured collectives of a communicator never overlap others of it here (one stream, one owner); saying so
///   leaves the graph nothing but kernels, which makes its launch many times cheaper;
/// * NVLink multicast is left off.
const ENVIRONMENT: [(&str, &str); 2] = [("NCCL_GRAPH_MIXING_SUPPORT", "0"), ("NCCL_NVLS_ENABLE", "0")];

/// The names under which the loader is asked for the library, in order.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest version that is used: 2.25, the first that was made for CUDA 12.8, as the oldest driver is.
const OLDEST: c_int = 22_500;
/// Bytes of the number by which ranks find each other.
pub(crate) const ID_BYTES: usize = 128;
/// NCCL's number for bytes (`ncclUint8`).
const BYTES: c_int = 1;
/// NCCL's number for success.
const SUCCESS: c_int = 0;

/// The variables that must be set for NCCL and are not, with their values.
///
/// NCCL reads them once, and a process with threads cannot set them soundly. So a program that makes NCCL
/// communicators starts with them: its `main` asks this first and, if it gets some, starts itself again with them
/// (`std::os::unix::process::CommandExt::exec`), or starts its ranks with them (`std::process::Command::envs`).
/// [`Communicator::on_cuda`](crate::Communicator::on_cuda) refuses to go on without.
pub fn nccl_environment() -> Vec<(&'static str, &'static str)> {
    let lacks = |&(name, value): &(&str, &str)| std::env::var_os(name).is_none_or(|is| is != value);
    ENVIRONMENT.into_iter().filter(lacks).collect()
}

/// The NCCL library of this process, which is loaded if it is not yet.
///
/// # Errors
/// It is missing, too old, or lacks a call.
pub fn nccl_library() -> Result<NcclLibrary> {
    Nccl::get().map(|nccl| nccl.library.clone())
}

/// Which NCCL library a process uses. Ranks must use the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclLibrary {
    /// Its version, such as `2.28.9`.
    pub version: String,
    /// The file that the loader chose.
    pub path: PathBuf,
    /// The digest of that file.
    pub digest: Digest,
}

impl fmt::Display for NcclLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {}", self.identity(), self.path.display())
    }
}

impl NcclLibrary {
    /// What both ranks must have alike.
    pub(crate) fn identity(&self) -> String {
        format!("NCCL {} with digest {}", self.version, self.digest)
    }
}

/// A communicator of NCCL.
type Raw = *mut c_void;

/// The number by which ranks find each other, as NCCL passes it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; ID_BYTES]);

/// The loaded library. It is never unloaded.
pub(crate) struct Nccl {
    pub(crate) library: NcclLibrary,
    calls: Calls,
    _loaded: Library,
}

/// The calls that are used, each with NCCL's signature.
struct Calls {
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: unsafe extern "C" fn(Raw) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Raw, c_int, Id, c_int) -> c_int,
    comm_destroy: unsafe extern "C" fn(Raw) -> c_int,
    comm_abort: unsafe extern "C" fn(Raw) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Raw, CUstream) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Raw, CUstream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Raw, CUstream) -> c_int,
}

impl Nccl {
    /// The library, loaded at the first call.
    pub(crate) fn get() -> Result<&'static Nccl> {
        static LOADED: OnceLock<Result<Nccl>> = OnceLock::new();
        let load = || Nccl::load().map_err(|why| Error::Missing { what: "NCCL".into(), why });
        LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Nccl, String> {
        let loaded = find()?;
        type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: each name is that of the call whose signature, in NCCL 2, the target type is. The pointers are kept
        // beside the library, which stays loaded.
        let (get_version, calls) = unsafe {
            let get_version: GetVersion = symbol(&loaded, "ncclGetVersion")?;
            let calls = Calls {
                get_error_string: symbol(&loaded, "ncclGetErrorString")?,
                get_last_error: symbol(&loaded, "ncclGetLastError")?,
                get_unique_id: symbol(&loaded, "ncclGetUniqueId")?,
                comm_init_rank: symbol(&loaded, "ncclCommInitRank")?,
                comm_destroy: symbol(&loaded, "ncclCommDestroy")?,
                comm_abort: symbol(&loaded, "ncclCommAbort")?,
                all_gather: symbol(&loaded, "ncclAllGather")?,
                send: symbol(&loaded, "ncclSend")?,
                recv: symbol(&loaded, "ncclRecv")?,
            };
            (get_version, calls)
        };
        let mut version = 0;
        // SAFETY: the library is loaded; `version` is written by the call alone.
        let code = unsafe { get_version(&mut version) };
        if code != SUCCESS {
            return Err(format!("ncclGetVersion says code {code}; install another build of NCCL"));
        }
        let path = holder(get_version as usize).map_err(|error| {
            format!("the file that the loader chose is not to be found in /proc/self/maps: {error}")
        })?;
        let text = version_text(version);
        if version < OLDEST {
            let (least, path) = (version_text(OLDEST), path.display());
            return Err(format!("{path} is NCCL {text} and {least} or newer is needed; install a newer one"));
        }
        let digest = digest(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Ok(Nccl { library: NcclLibrary { version: text, path, digest }, calls, _loaded: loaded })
    }

    /// A number by which the ranks of one new group find each other. It serves one group.
    pub(crate) fn unique_id(&self) -> Result<[u8; ID_BYTES], String> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: the library is loaded; `id` is written by the call alone and has NCCL's size.
        self.done("ncclGetUniqueId", unsafe { (self.calls.get_unique_id)(&mut id) })?;
        Ok(id.0)
    }

    /// Success, or NCCL's own words for a code.
    fn done(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: for any code the call gives a static text, and for no communicator the text of the last failure of
        // the process: a buffer that stays, and whose last byte is always zero.
        let [says, last] = unsafe {
            [(self.calls.get_error_string)(code), (self.calls.get_last_error)(null_mut())].map(|text| {
                match text.is_null() {
                    true => String::new(),
                    false => CStr::from_ptr(text).to_string_lossy().trim().to_owned(),
                }
            })
        };
        let last = if last.is_empty() { "nothing more; NCCL_DEBUG=INFO tells more".into() } else { last };
        Err(format!("{call} says code {code} ({says}), and then: {last}"))
    }
}

/// A communicator of NCCL on one device, which it keeps.
pub(crate) struct Handle {
    raw: Raw,
    rank: usize,
    nccl: &'static Nccl,
    cuda: Arc<Cuda>,
}

// SAFETY: NCCL's communicators may be used from any thread, one call at a time; whoever has the handle sees to that
// (a lock), and ending one takes it.
unsafe impl Send for Handle {}

impl Handle {
    /// Meets the other ranks that have `id`. Takes as long as they do: for a helper thread.
    pub(crate) fn new(
        nccl: &'static Nccl,
        cuda: &Arc<Cuda>,
        rank: usize,
        id: [u8; ID_BYTES],
    ) -> Result<Handle, String> {
        bind(cuda)?;
        let mut raw = null_mut();
        // SAFETY: the context of the device is current, which NCCL takes as its device; `raw` is written by the call
        // alone.
        let code = unsafe { (nccl.calls.comm_init_rank)(&mut raw, RANKS as c_int, Id(id), rank as c_int) };
        nccl.done("ncclCommInitRank", code)?;
        match raw.is_null() {
            true => Err("ncclCommInitRank gave no communicator".into()),
            false => Ok(Handle { raw, rank, nccl, cuda: cuda.clone() }),
        }
    }

    /// The library.
    pub(crate) fn library(&self) -> &'static NcclLibrary {
        &self.nccl.library
    }

    /// Queues one collective, or records it in the capture of `stream`. The context must be current.
    ///
    /// # Safety
    /// `at` and the bytes after it, `bytes` or for a gather as many for each rank, lie in memory that stays allocated
    /// until the work has run (or, in a capture, for as long as the graph lives). `stream` is of the device of this
    /// communicator.
    pub(super) unsafe fn queue(
        &self,
        what: Collective,
        at: u64,
        bytes: usize,
        stream: &StreamHandle,
    ) -> Result<(), String> {
        let Calls { all_gather, send, recv, .. } = self.nccl.calls;
        let (raw, stream, peer) = (self.raw, stream.raw(), (RANKS - 1 - self.rank) as c_int);
        let to = at as *mut c_void;
        match what {
            Collective::Gather => {
                // In place: each rank sends from where its part will be.
                let from = (at + (self.rank * bytes) as u64) as *const c_void;
                // SAFETY: the communicator lives, and so does the stream; the ranges are the caller's promise.
                self.nccl.done("ncclAllGather", unsafe { all_gather(from, to, bytes, BYTES, raw, stream) })
            }
            Collective::Send => {
                // SAFETY: as above.
                self.nccl.done("ncclSend", unsafe { send(to, bytes, BYTES, peer, raw, stream) })
            }
            Collective::Receive => {
                // SAFETY: as above.
                self.nccl.done("ncclRecv", unsafe { recv(to, bytes, BYTES, peer, raw, stream) })
            }
        }
    }

    /// Ends the communicator: in order, which both ranks do at once, or by abort, which also ends kernels that wait
    /// for a peer. Either returns only after every graph that captured its collectives was destroyed, exec and graph:
    /// for a helper thread.
    pub(crate) fn end(mut self, abort: bool) -> Result<(), String> {
        bind(&self.cuda)?;
        let raw = std::mem::replace(&mut self.raw, null_mut());
        let (name, call) = match abort {
            true => ("ncclCommAbort", self.nccl.calls.comm_abort),
            false => ("ncclCommDestroy", self.nccl.calls.comm_destroy),
        };
        // SAFETY: the communicator was made once and, as `self` is taken, is ended once, and no call on it is under
        // way: those borrow the handle.
        self.nccl.done(name, unsafe { call(raw) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // To end a communicator here would wait, maybe for ever, for graphs that whoever drops this still has. So it
        // leaks until the process ends, and with it the context that its threads use.
        if !self.raw.is_null() {
            std::mem::forget(self.cuda.clone());
        }
    }
}

fn bind(cuda: &Cuda) -> Result<(), String> {
    cuda.context().bind().map_err(|failure| {
        let (name, says) = failure.words();
        format!("the device's context cannot be made current: {name} ({says})")
    })
}

/// Loads the first library that the loader finds.
fn find() -> Result<Library, String> {
    let mut said = Vec::new();
    for name in NAMES {
        // SAFETY: the library's initialisers are NCCL's own, and need nothing.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => said.push(words(&error)),
        }
    }
    Err(format!(
        "the loader says: {}; install NCCL {} or newer for this CUDA version (the package libnccl2, or nvidia-nccl-cu13 \
         for Python), and put its folder on LD_LIBRARY_PATH",
        said.join("; "),
        version_text(OLDEST)
    ))
}

/// The loader's own sentence.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// # Safety
/// `F` is the type of a pointer to the function `name`, and is not used once the library is gone.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name) };
    found.map(|symbol| *symbol).map_err(|error| format!("{}; install a newer NCCL", words(&error)))
}

/// The version as people write it.
fn version_text(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The file that the code at `address` was mapped from.
fn holder(address: usize) -> io::Result<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let found = maps.lines().find_map(|line| mapped_at(line, address));
    found.ok_or_else(|| io::Error::other(format!("no file is mapped at {address:#x}")))
}

/// The file of one line of a list of mappings, if the mapping holds `address`.
fn mapped_at(line: &str, address: usize) -> Option<PathBuf> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let bound = |text| usize::from_str_radix(text, 16).ok();
    let path = &rest[rest.find('/')?..];
    (bound(start)?..bound(end)?).contains(&address).then(|| PathBuf::from(path))
}

/// The digest of a file, read in parts: it has hundreds of megabytes.
fn digest(path: &Path) -> io::Result<Digest> {
    const PART: u64 = 4 << 20;
    let (mut file, mut digester, mut part) = (File::open(path)?, Digester::new(), Vec::new());
    loop {
        part.clear();
        if Read::by_ref(&mut file).take(PART).read_to_end(&mut part)? == 0 {
            return Ok(digester.finish());
        }
        digester.bytes(&part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mappings_gives_its_file_for_addresses_inside() {
        let line = "7f00a000-7f00c000 r-xp 00001000 fd:01 1234    /opt/with space/libnccl.so.2.28.9";
        let file = Some(PathBuf::from("/opt/with space/libnccl.so.2.28.9"));
        assert_eq!(mapped_at(line, 0x7f00a000), file);
        assert_eq!(mapped_at(line, 0x7f00bfff), file);
        assert_eq!(mapped_at(line, 0x7f00c000), None);
        assert_eq!(mapped_at("7f00a000-7f00c000 rw-p 00000000 00:00 0 ", 0x7f00a000), None);
    }

    #[test]
    fn the_code_of_this_program_is_in_its_file() {
        let program = std::env::current_exe().and_then(fs::canonicalize).unwrap();
        assert_eq!(holder(version_text as *const () as usize).unwrap(), program);
    }

    #[test]
    fn a_digest_covers_the_whole_file() {
        let path = std::env::temp_dir().join(format!("nccl-digest-{}", std::process::id()));
        let mut bytes = vec![7; (4 << 20) + 3];
        let digests = [None, Some(0), Some((4 << 20) + 2)].map(|changed| {
            changed.into_iter().for_each(|at: usize| bytes[at] ^= 1);
            fs::write(&path, &bytes).unwrap();
            digest(&path).unwrap()
        });
        fs::remove_file(&path).unwrap();
        assert!(digests[0] != digests[1] && digests[1] != digests[2]);
    }

    #[test]
    fn what_is_missing_is_said_in_the_words_of_the_loader() {
        // On a machine that has NCCL, its version and file are told instead.
        match nccl_library() {
            Ok(library) => assert!(library.path.exists() && library.version.starts_with("2."), "{library}"),
            Err(error) => {
                let said = error.to_string();
                let parts = [
                    "NCCL is not usable: the loader says: libnccl.so.2: ",
                    "; libnccl.so: ",
                    "LD_LIBRARY_PATH",
                ];
                parts.iter().for_each(|part| assert!(said.contains(part), "{said}"));
            }
        }
    }

    #[test]
    fn versions_are_written_as_people_do() {
        assert_eq!([22_809, 22_500, 23_001].map(version_text), ["2.28.9", "2.25.0", "2.30.1"]);
    }
}
