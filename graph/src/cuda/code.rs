//! Device code: NVRTC turns a [`Source`] into a cubin, and a folder keeps what it made.
//!
//! Compiling needs no device and no driver, only NVRTC; continuous integration compiles every kernel so.
//! A source is told the size of each argument block that it must take, as `ARGS_BYTES_<symbol>`, and can
//! compare it at compile time (under `#ifdef`: only the kernels being compiled for are told).
//!
//! The cache is the first of `$ROUNDHOUSE_CACHE`, `$XDG_CACHE_HOME/roundhouse` and `~/.cache/roundhouse`. An
//! entry is named by everything that decides its bytes and holds its own digest, so a torn or foreign file
//! is compiled again and replaced.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::nvrtc::sys::{self, nvrtcResult};
use parking_lot::Mutex;

use super::driver::not_found;
use crate::digest::{Digest, Digester};
use crate::error::{Error, Result};
use crate::kernel::{Definition, Source};

/// The environment variable that names the folder of the cache.
pub const FOLDER: &str = "ROUNDHOUSE_CACHE";

/// Code for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// The binary that the driver loads.
    pub cubin: Vec<u8>,
    /// What the compiler said: warnings, then registers and spills of each kernel.
    pub log: String,
    /// Where it came from.
    pub from: Origin,
}

/// Where [`Code`] came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file of the cache.
    Cache(PathBuf),
    /// The compiler, and it is kept in this file now.
    Compiler(PathBuf),
    /// The compiler, and it is not kept: why.
    Unkept(String),
}

/// What a kernel takes of a multiprocessor, as the compiler's log says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub symbol: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of shared memory per block, beside what a launch adds.
    pub shared_bytes: u32,
    /// Bytes of local memory per thread: arrays that are indexed at run time, and spilled registers.
    pub local_bytes: u32,
    /// Bytes of spill stores per thread.
    pub spill_stores: u32,
    /// Bytes of spill loads per thread.
    pub spill_loads: u32,
}

impl Code {
    /// The resources of each kernel, in the log's order.
    pub fn resources(&self) -> Vec<Resources> {
        let mut kernels: Vec<Resources> = Vec::new();
        let before = |line: &str, what: &str| -> Option<u32> {
            line.split(what).next().filter(|head| head.len() < line.len())?.rsplit(' ').next()?.parse().ok()
        };
        for line in self.log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let symbol = rest.split('\'').next().unwrap_or(rest).to_owned();
                kernels.push(Resources { symbol, ..Resources::default() });
            }
            let Some(kernel) = kernels.last_mut() else { continue };
            kernel.registers = before(line, " registers").unwrap_or(kernel.registers);
            kernel.shared_bytes = before(line, " bytes smem").unwrap_or(kernel.shared_bytes);
            kernel.local_bytes = before(line, " bytes stack frame").unwrap_or(kernel.local_bytes);
            kernel.spill_stores = before(line, " bytes spill stores").unwrap_or(kernel.spill_stores);
            kernel.spill_loads = before(line, " bytes spill loads").unwrap_or(kernel.spill_loads);
        }
        kernels
    }
}

/// The architecture to compile for on a device of this compute capability. From 9.0 on it is the one with
/// all features of that very chip.
pub fn architecture((major, minor): (i32, i32)) -> String {
    let all = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{all}")
}

/// The version of NVRTC.
///
/// # Errors
/// It is not installed.
pub fn version() -> Result<(i32, i32)> {
    static VERSION: OnceLock<Result<(i32, i32)>> = OnceLock::new();
    let ask = || {
        let missing = |why| Error::Missing { what: "NVRTC (the CUDA run-time compiler)".into(), why };
        // SAFETY: asks the loader; the library's initialisers are NVRTC's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing(not_found("nvrtc")));
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there; both are written by the call alone.
        let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        done(result).map(|()| (major, minor)).map_err(|says| missing(format!("nvrtcVersion says {says}")))
    };
    VERSION.get_or_init(ask).clone()
}

/// The numbers of the architectures that NVRTC compiles for, such as 90.
///
/// # Errors
/// It is not installed.
pub fn architectures() -> Result<Vec<u32>> {
    version()?;
    let failed = |says| Error::Missing { what: "NVRTC's list of architectures".into(), why: says };
    let mut count = 0;
    // SAFETY: the library is there; `count` is written by the call alone.
    done(unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }).map_err(failed)?;
    let mut numbers = vec![0 as c_int; usize::try_from(count).unwrap_or(0)];
    // SAFETY: `numbers` has the length that NVRTC just asked for.
    done(unsafe { sys::nvrtcGetSupportedArchs(numbers.as_mut_ptr()) }).map_err(failed)?;
    Ok(numbers.into_iter().filter_map(|number| u32::try_from(number).ok()).collect())
}

/// The number of an architecture: 90 for `sm_90a`.
pub fn number(architecture: &str) -> Option<u32> {
    architecture.strip_prefix("sm_")?.trim_end_matches(['a', 'f']).parse().ok()
}

/// The definitions with a twin, by its source: what is compiled together. A source is told the sizes of all its
/// blocks at once, so all of its kernels must be among them.
pub fn by_source<'d>(definitions: &[&'d Definition]) -> Vec<(&'static Source, Vec<&'d Definition>)> {
    let mut sources: Vec<(&'static Source, Digest, Vec<&'d Definition>)> = Vec::new();
    for &definition in definitions {
        let Some(twin) = definition.twin else { continue };
        let key = identity(twin.source);
        match sources.iter_mut().find(|(_, known, _)| *known == key) {
            Some((_, _, siblings)) => siblings.push(definition),
            None => sources.push((twin.source, key, vec![definition])),
        }
    }
    sources.into_iter().map(|(source, _, definitions)| (source, definitions)).collect()
}

/// The code of `source`, from the cache or else from the compiler, which the cache then learns.
///
/// # Errors
/// NVRTC is not installed; or the source does not compile.
pub fn cached(source: &Source, architecture: &str, definitions: &[&Definition]) -> Result<Code> {
    match folder() {
        Some(folder) => cached_in(&folder, source, architecture, definitions),
        None => {
            let why = "neither ROUNDHOUSE_CACHE nor XDG_CACHE_HOME nor HOME is set";
            compile(source, architecture, definitions)
                .map(|code| Code { from: Origin::Unkept(why.into()), ..code })
        }
    }
}

/// As [`cached`], of several sources on all threads of the machine: the code of each, in their order.
pub fn cached_each(sources: &[(&'static Source, Vec<&Definition>)], architecture: &str) -> Vec<Result<Code>> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get()).min(sources.len());
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((source, definitions)) = sources.get(at) else { break };
                    let code = cached(source, architecture, definitions);
                    done.lock().push((at, code));
                }
            });
        }
    });
    let mut done = done.into_inner();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, code)| code).collect()
}

/// As [`cached`], with the cache in `folder`.
pub fn cached_in(
    folder: &Path,
    source: &Source,
    architecture: &str,
    definitions: &[&Definition],
) -> Result<Code> {
    let name = entry_name(source, architecture, &options(architecture, definitions))?;
    let path = folder.join(&name);
    if let Some((cubin, log)) = fs::read(&path).ok().and_then(|entry| open_entry(&name, &entry)) {
        return Ok(Code { cubin, log, from: Origin::Cache(path) });
    }
    let code = compile(source, architecture, definitions)?;
    let from = match keep(folder, &path, &seal_entry(&name, &code)) {
        Ok(()) => Origin::Compiler(path),
        Err(error) => Origin::Unkept(format!("{}: {error}", path.display())),
    };
    Ok(Code { from, ..code })
}

/// Compiles `source` for `architecture` (such as `sm_90a`), telling it the block sizes of `definitions`.
///
/// # Errors
/// NVRTC is not installed; or the source does not compile: the error holds the compiler's log.
pub fn compile(source: &Source, architecture: &str, definitions: &[&Definition]) -> Result<Code> {
    version()?;
    let failed = |why: String| Error::Code {
        source: source.name.into(),
        doing: format!("compile for {architecture}"),
        why,
    };
    let text = |text: &str| CString::new(text).map_err(|_| failed("a text holds a zero byte".into()));
    let program = Program::new(source, &text, &failed)?;
    let mut options = options(architecture, definitions);
    if version()? >= (13, 0) {
        // NVRTC's own cache would answer a second compile without a log; ours keeps code and needs the log.
        options.push("--no-cache".into());
    }
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<CString>>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program lives; the pointers are as many as stated, to texts that end in a zero.
    let result = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
    let log = program.log();
    done(result).map_err(|says| failed(format!("{says}\n{log}")))?;
    let cubin = program.cubin().map_err(failed)?;
    Ok(Code { cubin, log, from: Origin::Unkept("it was only compiled".into()) })
}

/// What a source is: its name and every text that it is made of.
pub(super) fn identity(source: &Source) -> Digest {
    let mut digest = Digester::new();
    digest.text(source.name).text(source.text).number(source.includes.len() as u64);
    for (name, text) in source.includes {
        digest.text(name).text(text);
    }
    digest.finish()
}

fn options(architecture: &str, definitions: &[&Definition]) -> Vec<String> {
    let sizes = definitions.iter().filter_map(|definition| {
        definition.twin.map(|twin| format!("-DARGS_BYTES_{}={}", twin.symbol, definition.args_bytes))
    });
    let mut sizes: Vec<String> = sizes.collect();
    // Instances may share a symbol, and the order of a list is not part of what is compiled.
    sizes.sort();
    sizes.dedup();
    let fixed = [format!("--gpu-architecture={architecture}"), "--std=c++17".into()];
    fixed.into_iter().chain(["--ptxas-options=-v".into()]).chain(sizes).collect()
}

fn done(result: nvrtcResult) -> Result<(), String> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        result => {
            // SAFETY: the result came from the loaded library, which gives a static text for each.
            let says = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
            Err(says.to_string_lossy().into_owned())
        }
    }
}

/// A program being compiled.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(
        source: &Source,
        text: &impl Fn(&str) -> Result<CString>,
        failed: &impl Fn(String) -> Error,
    ) -> Result<Program> {
        let (code, name) = (text(source.text)?, text(source.name)?);
        let names = source.includes.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts = source.includes.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names_at, texts_at) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: the library is there (`compile` asked). Every pointer is to a text that ends in a zero and
        // lives until the call returns; NVRTC copies them. The lists have the stated length.
        let result = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                code.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        done(result).map(|()| Program(program)).map_err(failed)
    }

    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program lives; the size is written by the call alone.
        if done(unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) }).is_err() {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: `log` has the size that NVRTC just asked for.
        if done(unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) }).is_err() {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program lives; the size is written by the call alone.
        done(unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) })?;
        if bytes == 0 {
            return Err("the compiler made no binary; name a real architecture".into());
        }
        let mut cubin = vec![0u8; bytes];
        // SAFETY: `cubin` has the size that NVRTC just asked for.
        done(unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) })?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(FOLDER)
        .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("roundhouse")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/roundhouse")))
}

fn entry_name(source: &Source, architecture: &str, options: &[String]) -> Result<String> {
    let (major, minor) = version()?;
    let mut key = Digester::new();
    key.digest(identity(source)).number(major as u64).number(minor as u64);
    options.iter().for_each(|option| {
        key.text(option);
    });
    let stem = Path::new(source.name).file_stem().unwrap_or_default().to_string_lossy();
    Ok(format!("{stem}-{architecture}-{}.code", key.finish()))
}

/// What every entry begins with.
const MAGIC: &[u8; 16] = b"roundhouse code2";

/// An entry: magic, digest of its name and the rest, length of the log, log, cubin.
fn seal_entry(name: &str, code: &Code) -> Vec<u8> {
    let mut rest = (code.log.len() as u64).to_le_bytes().to_vec();
    rest.extend_from_slice(code.log.as_bytes());
    rest.extend_from_slice(&code.cubin);
    [MAGIC, &seal(name, &rest)[..], &rest].concat()
}

/// The digest that an entry holds. The name says what the code is of and for: an entry under another name is none.
fn seal(name: &str, rest: &[u8]) -> [u8; 16] {
    Digester::new().text(name).bytes(rest).finish().0.to_le_bytes()
}

/// Cubin and log of the entry called `name`; none if it is not whole, or another's.
fn open_entry(name: &str, entry: &[u8]) -> Option<(Vec<u8>, String)> {
    let (digest, rest) = entry.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
    if seal(name, rest) != *digest {
        return None;
    }
    let (bytes, rest) = rest.split_first_chunk::<8>()?;
    let (log, cubin) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*bytes)).ok()?)?;
    Some((cubin.to_vec(), String::from_utf8(log.to_vec()).ok()?))
}

/// Writes an entry beside its place and moves it there, so that no reader ever sees half of one.
fn keep(folder: &Path, path: &Path, entry: &[u8]) -> std::io::Result<()> {
    static TURN: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(folder)?;
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("{}-{turn}.part", std::process::id()));
    let moved = fs::write(&beside, entry).and_then(|()| fs::rename(&beside, path));
    moved.inspect_err(|_| drop(fs::remove_file(&beside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_is_not_whole_is_no_entry() {
        let code =
            Code { cubin: vec![7; 100], log: "4 registers".into(), from: Origin::Unkept(String::new()) };
        let name = "words-sm_90a-0.code";
        let entry = seal_entry(name, &code);
        assert_eq!(open_entry(name, &entry), Some((code.cubin, code.log)));
        assert_eq!(open_entry("words-sm_80-0.code", &entry), None, "another architecture's");
        for end in 0..entry.len() {
            assert_eq!(open_entry(name, &entry[..end]), None, "cut at {end}");
        }
        for at in 0..entry.len() {
            let mut torn = entry.clone();
            torn[at] ^= 1;
            assert_eq!(open_entry(name, &torn), None, "flipped at {at}");
        }
    }

    #[test]
    fn architectures_are_those_of_the_very_chip() {
        let names = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)].map(architecture);
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a"]);
        assert_eq!(
            ["sm_80", "sm_90a", "sm_100f", "hopper"].map(number),
            [Some(80), Some(90), Some(100), None]
        );
    }
}
