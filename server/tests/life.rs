//! The life of a server: how it starts, what frees a lane, how it ends, and what an engine's failure looks like from
//! outside. The real binary, but for the failure: that is a planted one, in a server of this process.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use graph::Planted;
use runtime::engine::{self, EngineOptions};
use serde_json::{Value, json};
use server::serve::{Server, Settings};

/// Longer than anything here should take.
const PATIENCE: Duration = Duration::from_secs(30);

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace").join("models/tiny")
}

/// The binary about to serve the demo model, on a free port unless `options` name one, with no settings from the environment.
fn serve(options: &[&str]) -> Command {
    let mut binary = Command::new(env!("CARGO_BIN_EXE_roundhouse"));
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("ROUNDHOUSE_") {
            binary.env_remove(name);
        }
    }
    binary.arg("serve").arg(tiny()).args(["--device", "host"]).args(options);
    if !options.contains(&"--port") {
        binary.args(["--port", "0"]);
    }
    binary.stdout(Stdio::null()).stderr(Stdio::piped());
    binary
}

/// A running server; killed when dropped.
struct Running {
    child: Child,
    address: SocketAddr,
}

impl Running {
    fn ready(options: &[&str]) -> Running {
        let mut child = serve(options).spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let address = lines.find_map(|line| line.ok()?.strip_prefix("listening on http://")?.parse().ok());
        // The pipe must be read on, or the server's notes would block it.
        thread::spawn(move || lines.for_each(drop));
        let running = Running { child, address: address.expect("it says where it listens") };
        until("ready", || get(running.address, "/ready").status == 200);
        running
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([name, &id]).status().expect("kill runs");
        assert!(sent.success());
    }

    fn status(&mut self) -> Option<i32> {
        let mut status = None;
        until("ended", || {
            status = self.child.try_wait().expect("is a child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    fn lanes(&self) -> u64 {
        let text = get(self.address, "/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix("roundhouse_lanes "));
        line.and_then(|value| value.parse().ok()).expect("the lanes are counted")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "not {what} after {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
    start.elapsed()
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    stream
}

fn post(stream: &mut TcpStream, path: &str, body: &Value) {
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).expect("sent");
}

/// Reads an answer with a stated length, or a streamed one to the end of the connection or of its chunks.
fn answer(stream: &mut TcpStream) -> Answer {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(reader.read_line(&mut head).expect("readable"), 0, "closed after {head:?}");
    }
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = Vec::new();
    match length.map(|length| length.parse().expect("a number")) {
        Some(length) => {
            body.resize(length, 0);
            reader.read_exact(&mut body).expect("the whole body");
        }
        None => loop {
            let mut size = String::new();
            reader.read_line(&mut size).expect("readable");
            let size = usize::from_str_radix(size.trim(), 16).expect("the size of a chunk");
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).expect("the whole chunk");
            if size == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..size]);
        },
    }
    Answer { status, head, body: String::from_utf8(body).expect("text") }
}

fn get(address: SocketAddr, path: &str) -> Answer {
    let mut stream = connect(address);
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).expect("sent");
    answer(&mut stream)
}

fn long(stream: bool) -> Value {
    json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": stream})
}

#[test]
fn a_client_that_is_gone_frees_its_lane() {
    let server = Running::ready(&[]);
    for stream in [true, false] {
        for ending in ["closed", "half-closed", "more sent, then half-closed"] {
            let mut client = connect(server.address);
            post(&mut client, "/v1/completions", &long(stream));
            until("running", || server.lanes() == 1);
            match ending {
                "closed" => drop(client),
                _ => {
                    if ending.starts_with("more") {
                        post(&mut client, "/v1/completions", &long(stream));
                    }
                    client.shutdown(Shutdown::Write).expect("shut");
                    let took = until("free", || server.lanes() == 0);
                    assert!(took < Duration::from_secs(3), "{ending}: {took:?}");
                }
            }
            let took = until("free", || server.lanes() == 0);
            assert!(took < Duration::from_secs(3), "{ending}: {took:?}");
        }
    }
}

#[test]
fn a_client_that_reads_no_more_is_cut_off() {
    let server = Running::ready(&["--write-timeout", "0.5"]);
    let mut client = connect(server.address);
    let mut body = long(true);
    body["logprobs"] = 20.into();
    body["max_tokens"] = 30_000.into();
    post(&mut client, "/v1/completions", &body);
    until("running", || server.lanes() == 1);
    until("free", || server.lanes() == 0);
    assert!(
        get(server.address, "/metrics").body.contains("roundhouse_replies_total{outcome=\"cancelled\"} 1")
    );
}

#[test]
fn who_finds_no_place_is_told_at_once_and_may_ask_again() {
    let server = Running::ready(&["--lanes", "1", "--queue", "1"]);
    let mut clients: Vec<TcpStream> = (0..2).map(|_| connect(server.address)).collect();
    clients.iter_mut().for_each(|client| post(client, "/v1/completions", &long(true)));
    until("running", || server.lanes() == 1);
    let mut refused = connect(server.address);
    for _ in 0..3 {
        let start = Instant::now();
        post(&mut refused, "/v1/completions", &long(false));
        let told = answer(&mut refused);
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(told.status, 429, "{}", told.body);
        assert!(told.head.contains("retry-after: "), "{}", told.head);
    }
    drop(clients);
    until("free", || server.lanes() == 0);
    post(&mut refused, "/v1/completions", &json!({"prompt": "Once", "max_tokens": 2}));
    assert_eq!(answer(&mut refused).status, 200);
    post(&mut refused, "/v1/completions", &json!({"prompt": "Once", "n": 3}));
    let told = answer(&mut refused);
    assert_eq!((told.status, told.body.contains("\"param\":\"n\"")), (400, true), "{}", told.body);
}

#[test]
fn the_word_to_stop_lets_running_replies_end() {
    let mut server = Running::ready(&[]);
    let mut running = connect(server.address);
    let mut body = long(true);
    body["max_tokens"] = 200.into();
    post(&mut running, "/v1/completions", &body);
    let mut open = connect(server.address);
    until("running", || server.lanes() == 1);
    server.signal("-TERM");
    until("closed to others", || TcpStream::connect(server.address).is_err());
    post(&mut open, "/v1/completions", &body);
    let refused = answer(&mut open);
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.head.contains("connection: close"), "{}", refused.head);
    let text = answer(&mut running).body;
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"length\""), "{text}");
    assert_eq!(server.status(), Some(0));
}

#[test]
fn what_outlasts_the_drain_dies_with_an_error() {
    let mut server = Running::ready(&["--drain", "0.2"]);
    let mut streamed = connect(server.address);
    let mut whole = connect(server.address);
    post(&mut streamed, "/v1/completions", &long(true));
    post(&mut whole, "/v1/completions", &long(false));
    until("running", || server.lanes() == 2);
    server.signal("-INT");
    let text = answer(&mut streamed).body;
    assert!(text.contains("event: error\ndata: {") && text.contains("stopping"), "{text}");
    assert!(!text.contains("[DONE]") && !text.contains("finish_reason\":\"length"), "{text}");
    assert_eq!(answer(&mut whole).status, 503);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn a_second_signal_ends_the_drain() {
    let mut server = Running::ready(&["--drain", "3600"]);
    let mut client = connect(server.address);
    post(&mut client, "/v1/completions", &long(true));
    until("running", || server.lanes() == 1);
    server.signal("-TERM");
    until("closed to others", || TcpStream::connect(server.address).is_err());
    server.signal("-TERM");
    assert!(answer(&mut client).body.contains("event: error"));
    assert_eq!(server.status(), Some(0));
}

/// Requires that `serve` ends with a status and says all of `words`.
#[track_caller]
fn ends(binary: &mut Command, status: i32, words: &[&str]) {
    let ended = binary.output().expect("the binary starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(status), "{said}");
    words.iter().for_each(|word| assert!(said.contains(word), "{word:?} is not in {said}"));
}

#[test]
fn a_setting_that_is_wrong_is_named_wherever_it_comes_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    std::fs::write(&file, "lanes = 2\nqueu = 3\n").expect("written");
    let config = file.to_str().expect("text");
    ends(&mut serve(&["--config", config]), 2, &["settings.toml", "queu = 3", "no such setting"]);
    ends(serve(&[]).env("ROUNDHOUSE_CONFIG", config), 2, &["settings.toml", "queu"]);
    ends(&mut serve(&["--config", "/nowhere.toml"]), 2, &["/nowhere.toml", "--config"]);
    std::fs::write(&file, "drain = \"soon\"\n").expect("written");
    ends(&mut serve(&["--config", config]), 2, &["settings.toml", "drain = \"soon\"", "not a time"]);
    ends(serve(&[]).env("ROUNDHOUSE_QUEUE", "many"), 2, &["many", "--queue"]);
    ends(serve(&[]).env("ROUNDHOUSE_QUEU", "1"), 2, &["ROUNDHOUSE_QUEU"]);
    ends(&mut serve(&["--cors-origin", "example.org"]), 2, &["example.org", "not an origin"]);
}

#[test]
fn a_port_that_is_taken_shows_before_weights_are_read() {
    let server = Running::ready(&[]);
    let port = server.address.port().to_string();
    let ended = serve(&["--port", &port]).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    assert!(said.contains(&port) && !said.contains("weights"), "{said}");
}

#[test]
fn the_first_reply_must_be_the_one_that_was_asked_for() {
    ends(&mut serve(&["--sanity-sha", "000000000000"]), 1, &["token_sha", "000000000000", "--sanity-sha"]);
}

#[test]
fn a_failed_engine_ends_every_stream_and_then_the_server() {
    let settings =
        Settings { port: 0, lanes: 4, failure_exit: Duration::from_secs(3), ..Settings::default() };
    let server = Server::bind(settings).expect("a free port");
    let address = server.address();
    let life = thread::spawn(move || {
        server.run(|| {
            // Far enough in that the first reply is made before.
            let options =
                EngineOptions { planted: Some(Planted::Launch(40_000)), ..EngineOptions::default() };
            let opened = engine::open(&tiny(), &options, &mut |_| {});
            Ok(opened.unwrap_or_else(|error| panic!("{error}")))
        })
    });
    until("ready", || get(address, "/ready").status == 200);
    let mut streamed = connect(address);
    let mut whole = connect(address);
    post(&mut streamed, "/v1/completions", &long(true));
    post(&mut whole, "/v1/completions", &long(false));
    let text = answer(&mut streamed).body;
    assert!(text.contains("event: error\ndata: {") && text.contains("engine_failed"), "{text}");
    assert!(!text.contains("[DONE]") && !text.contains("\"length\""), "{text}");
    assert_eq!(answer(&mut whole).status, 500);
    let failed = Instant::now();
    until("known", || get(address, "/health").status == 503);
    let health: Value = serde_json::from_str(&get(address, "/health").body).expect("JSON");
    assert_eq!(health["status"], "failed");
    assert_ne!(health["reason"], "");
    assert_eq!(get(address, "/ready").status, 503);
    let mut later = connect(address);
    post(&mut later, "/v1/completions", &long(false));
    assert_eq!(answer(&mut later).status, 503);
    let ended = life.join().expect("the server ends by itself");
    assert!(failed.elapsed() < Duration::from_secs(4), "{:?}", failed.elapsed());
    assert!(matches!(ended, Err(server::Failure::Device(_))), "{ended:?}");
}
