//! A server of the demo model: started, watched from outside, and gone when it is dropped.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::{Ask, Connection, PATIENCE, Response};
use crate::events::{Stream, Streamed};
use crate::exposition::Metrics;

/// A running server.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    notes: Notes,
}

/// What the server has said on stderr so far.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<String>>);

/// A thread of the server.
#[derive(Clone, Debug)]
pub(crate) struct Thread {
    pub(crate) name: String,
    pub(crate) cpu: Duration,
}

/// How a command ended and what it said on stderr.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stderr: String,
}

/// Where the demo model lies.
pub(crate) fn tiny() -> PathBuf {
    tests::fixture::repository("models/tiny")
}

/// Where servers run: on the host device, unless `ROUNDHOUSE_TEST_DEVICE` names another.
pub(crate) fn device() -> String {
    env::var("ROUNDHOUSE_TEST_DEVICE").unwrap_or_else(|_| "host".into())
}

/// Tokens of a lone reply that lasts about this long on the device, or somewhat longer.
pub(crate) fn lasting(milliseconds: u32) -> u32 {
    milliseconds * if device() == "host" { 4 } else { 30 } / 10
}

/// Positions of a context: a reply that fills it lasts for seconds, and all lanes have pages for it.
pub(crate) fn context() -> u32 {
    if device() == "host" { 2048 } else { 32_768 }
}

/// The binary with no settings from the environment. A packed test program is told where it lies.
pub(crate) fn bare() -> Command {
    let built = || option_env!("CARGO_BIN_EXE_roundhouse").map(PathBuf::from);
    let path = env::var_os("ROUNDHOUSE_TEST_BINARY").map(PathBuf::from).or_else(built);
    let mut binary = Command::new(path.expect("ROUNDHOUSE_TEST_BINARY says where the binary lies"));
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("ROUNDHOUSE_") {
            binary.env_remove(name);
        }
    }
    let device = device();
    if device == "host" {
        // Every machine shows the same.
        binary.env("CUDA_VISIBLE_DEVICES", "");
    }
    binary.env("ROUNDHOUSE_DEVICE", device);
    binary
}

/// `roundhouse serve` of the demo model on a free port, with [`context`] and pages for all lanes unless `options` say
/// otherwise.
pub(crate) fn serve(options: &[&str]) -> Command {
    let mut command = bare();
    command.arg("serve").arg(tiny()).args(["--port", "0"]).args(options);
    for (option, value) in [("--context", context().to_string()), ("--memory", "5G".into())] {
        if !options.contains(&option) {
            command.args([option, &value]);
        }
    }
    command
}

/// Runs a command to its end, which must come within [`PATIENCE`].
#[track_caller]
pub(crate) fn run(command: &mut Command) -> Ended {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let notes = Notes::default();
    let reader = notes.follow(&mut child);
    let status = wait(&mut child, PATIENCE);
    if status.is_none() {
        // It is about to be reported as running.
        let _ = child.kill();
        let _ = child.wait();
        panic!("{command:?} runs on after {PATIENCE:?}: {}", notes.text());
    }
    reader.join().expect("stderr was read");
    Ended { status: status.and_then(|status| status.code()), stderr: notes.text() }
}

impl Ended {
    /// Requires an exit status, and an error that says all of `words`.
    #[track_caller]
    pub(crate) fn failed(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, Some(status), "{}", self.stderr);
        let (_, error) = self.stderr.split_once("error: ").unwrap_or_else(|| panic!("{}", self.stderr));
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
}

impl Server {
    /// Starts a server and waits until it is ready.
    #[track_caller]
    pub(crate) fn start(options: &[&str]) -> Server {
        Server::ready(serve(options))
    }

    #[track_caller]
    pub(crate) fn ready(command: Command) -> Server {
        let server = Server::bound(command);
        let start = Instant::now();
        while server.ask(&Ask::get("/ready")).status() != 200 {
            assert!(start.elapsed() < PATIENCE, "not ready: {}", server.notes.text());
            thread::sleep(Duration::from_millis(5));
        }
        server
    }

    /// Starts a server and waits until it listens.
    #[track_caller]
    pub(crate) fn bound(mut command: Command) -> Server {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let notes = Notes::default();
        notes.follow(&mut child);
        let start = Instant::now();
        let address = loop {
            let text = notes.text();
            if let Some(line) = text.lines().find_map(|line| line.strip_prefix("listening on http://")) {
                break line.trim().parse().unwrap_or_else(|_| panic!("an address: {line}"));
            }
            let ended = child.try_wait().expect("a child can be asked");
            let early = ended.is_some() || start.elapsed() > PATIENCE;
            if early {
                // It is reported as not listening, whether it still runs or not.
                let _ = child.kill();
                let _ = child.wait();
                panic!("it does not listen ({ended:?}): {}", notes.text());
            }
            thread::sleep(Duration::from_millis(2));
        };
        Server { child, address, notes }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    /// Asks on a connection of its own.
    #[track_caller]
    pub(crate) fn ask(&self, ask: &Ask) -> Response {
        self.connect().ask(ask)
    }

    #[track_caller]
    pub(crate) fn get(&self, path: &str) -> Response {
        self.ask(&Ask::get(path))
    }

    #[track_caller]
    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.ask(&Ask::post(path, body))
    }

    /// Begins a streamed answer.
    #[track_caller]
    pub(crate) fn begin(&self, path: &str, body: &Value) -> Stream {
        let mut connection = self.connect();
        connection.send(&Ask::post(path, &streamed(body)).bytes()).expect("the request is taken");
        Stream::new(connection)
    }

    /// A whole streamed answer, which must end well.
    #[track_caller]
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Streamed {
        self.begin(path, body).whole().good()
    }

    #[track_caller]
    pub(crate) fn metrics(&self) -> Metrics {
        Metrics::of(&self.get("/metrics"))
    }

    /// Lanes, waiting requests, and pages in use.
    #[track_caller]
    pub(crate) fn load(&self) -> (f64, f64, f64) {
        let metrics = self.metrics();
        let used = metrics.value("roundhouse_pages") - metrics.value("roundhouse_pages_free");
        (metrics.value("roundhouse_lanes"), metrics.value("roundhouse_requests_waiting"), used)
    }

    /// Waits until nothing runs, waits or holds pages; how long that took.
    #[track_caller]
    pub(crate) fn idle_within(&self, patience: Duration) -> Duration {
        self.reaches(patience, |load| load == (0.0, 0.0, 0.0))
    }

    /// Waits until the load is as wanted; how long that took.
    #[track_caller]
    pub(crate) fn reaches(&self, patience: Duration, wanted: impl Fn((f64, f64, f64)) -> bool) -> Duration {
        let start = Instant::now();
        loop {
            let load = self.load();
            if wanted(load) {
                return start.elapsed();
            }
            assert!(
                start.elapsed() < patience,
                "after {patience:?} there are (lanes, waiting, pages used) {load:?}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has said `words`; all that it has said. The pipe may be read after an answer.
    #[track_caller]
    pub(crate) fn says(&self, words: &str) -> String {
        let start = Instant::now();
        loop {
            let text = self.notes.text();
            if text.contains(words) {
                return text;
            }
            assert!(start.elapsed() < PATIENCE, "{words:?} is not in {text:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn notes(&self) -> &Notes {
        &self.notes
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, such as `TERM`.
    #[track_caller]
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status();
        assert!(sent.expect("there is a kill command").success());
    }

    /// Waits for its end: the exit status, or nothing if it runs on.
    pub(crate) fn ended_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        wait(&mut self.child, patience)
    }

    /// Bytes of memory that are its own now.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    /// The most bytes of memory that have been its own at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> u64 {
        let status = fs::read_to_string(self.proc("status")).expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a size");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    pub(crate) fn open_files(&self) -> usize {
        fs::read_dir(self.proc("fd")).expect("the server runs").count()
    }

    /// Its threads and the time that each has computed, by number.
    pub(crate) fn threads(&self) -> BTreeMap<u32, Thread> {
        let tasks = fs::read_dir(self.proc("task")).expect("the server runs");
        let thread = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry.ok()?;
            // A thread may end before it is looked at.
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            Some((entry.file_name().to_str()?.parse().ok()?, Thread::parse(&stat)))
        };
        tasks.filter_map(thread).collect()
    }

    fn proc(&self, file: &str) -> PathBuf {
        Path::new("/proc").join(self.pid().to_string()).join(file)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("the server said:\n{}", self.notes.text());
        }
    }
}

impl Thread {
    fn parse(stat: &str) -> Thread {
        let (name, rest) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") ")).expect("a name");
        let fields: Vec<&str> = rest.split(' ').collect();
        // User and system time, in ticks; Linux shows a hundred a second on every machine.
        let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("ticks")).sum();
        Thread { name: name.into(), cpu: Duration::from_millis(10 * ticks) }
    }
}

impl Notes {
    pub(crate) fn text(&self) -> String {
        self.0.lock().expect("the reader of stderr does not panic").clone()
    }

    fn follow(&self, child: &mut Child) -> thread::JoinHandle<()> {
        let stderr = child.stderr.take().expect("stderr is a pipe");
        let notes = self.0.clone();
        thread::spawn(move || {
            let mut reader = BufReader::new(stderr);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                notes.lock().expect("nobody panics here").push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        })
    }
}

fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        let status = child.try_wait().expect("a child can be asked");
        if status.is_some() || start.elapsed() > patience {
            return status;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The same request, to be streamed with its usage.
pub(crate) fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = true.into();
    body["stream_options"] = serde_json::json!({"include_usage": true});
    body
}
