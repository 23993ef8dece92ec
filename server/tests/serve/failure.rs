//! The engine fails: every reply under way is told so, nothing looks finished, and the process ends in time.

use std::env;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use graph::Planted;
use runtime::engine::{self, EngineOptions, Place};
use serde_json::json;
use server::Failure;
use server::serve::Settings;

use crate::client::{Ask, error_object};
use crate::prompts::{CHAT, chat, unending, with};
use crate::server::{Server, device, tiny};

crate::tests! {
    streams_end_with_an_error_and_the_process_with_status_3,
    health_and_readiness_tell_until_the_end,
    failed_replies_leave_a_trace_for_the_operator,
    a_signal_ends_a_failed_server_at_once;
}

/// Says to a process of this program that it is a server whose engine will fail, and when it may end, in seconds.
const DOOMED: &str = "SERVE_TESTS_DOOMED";

/// A server whose engine fails in the midst of replies. The binary cannot be told to fail, so it is this program.
fn doomed(exit_seconds: &str) -> Server {
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command.env(DOOMED, exit_seconds);
    Server::ready(command)
}

/// What a process is and how it ends that was started as [`doomed`]; nothing in any other.
pub(crate) fn child() -> Option<ExitCode> {
    let seconds: u64 = env::var(DOOMED).ok()?.parse().expect("seconds");
    let failure_exit = Duration::from_secs(seconds);
    let settings = Settings { port: 0, served_name: "tiny".into(), failure_exit, ..Settings::default() };
    let server = server::serve::Server::bind(settings).expect("a free port");
    eprintln!("listening on http://{}", server.address());
    // Far enough in that the first reply is made before, and that requests have come. To a CUDA device a replay is one
    // launch, and takes less than a millisecond.
    let (place, launches) = if device() == "host" { (Place::Host, 40_000) } else { (Place::Cuda(0), 12_000) };
    let options =
        EngineOptions { place, planted: Some(Planted::Launch(launches)), ..EngineOptions::default() };
    let ended = server.run(move || {
        engine::open(&tiny(), &options, &mut |_| {}).map_err(|error| Failure::Device(error.to_string()))
    });
    // As the command line does.
    Some(match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(if matches!(failure, Failure::Device(_)) { 3 } else { 1 })
        }
    })
}

/// An error event, then the end of the connection; no finish reason, no `[DONE]`.
fn streams_end_with_an_error_and_the_process_with_status_3() {
    let mut server = doomed("2");
    let mut streams: Vec<_> = (0..3).map(|_| server.begin(CHAT, &unending())).collect();
    streams.push(server.begin(CHAT, &with(unending(), json!({"n": 2}))));
    let mut whole = server.connect();
    whole.send(&Ask::post(CHAT, &unending()).bytes()).unwrap();
    for mut stream in streams {
        let ended = stream.rest_of().unwrap();
        assert_eq!(ended.dead()["type"], "server_error");
        assert!(!ended.chunks.is_empty());
        assert!(stream.connection.is_closed_within(Duration::from_secs(5)));
    }
    let failed = whole.response().unwrap();
    assert_eq!(failed.error(500)["type"], "server_error");
    let start = Instant::now();
    let status = server.ended_within(Duration::from_secs(5)).expect("a server without an engine ends");
    assert_eq!(status.code(), Some(3), "{}", server.notes().text());
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(server.notes().text().contains("error: "), "{}", server.notes().text());
}

/// An engine that is dead is not fine.
fn health_and_readiness_tell_until_the_end() {
    let mut server = doomed("4");
    server.begin(CHAT, &unending()).rest_of().unwrap().dead();
    let start = Instant::now();
    // Streams and /health learn of it from two threads.
    while server.get("/health").status() == 200 && start.elapsed() < Duration::from_millis(500) {}
    let health = server.get("/health");
    assert_eq!((health.status(), &health.json()["status"]), (503, &json!("failed")));
    assert!(health.text().len() > 40, "it says why: {}", health.text());
    let ready = server.get("/ready");
    assert_eq!((ready.status(), &ready.json()["status"]), (503, &json!("failed")));
    let refused = server.post(CHAT, &chat("Hello!"));
    assert_eq!(refused.status(), 503);
    error_object(&refused.json());
    server.metrics();
    let status = server.ended_within(Duration::from_secs(8)).expect("a server without an engine ends");
    assert_eq!(status.code(), Some(3));
    assert!(
        (Duration::from_millis(500)..Duration::from_secs(6)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
}

/// A number and a reason: clients know what happened to them, and so must who runs the server.
fn failed_replies_leave_a_trace_for_the_operator() {
    let server = doomed("20");
    server.begin(CHAT, &with(unending(), json!({"n": 2}))).rest_of().unwrap().dead();
    let metrics = server.metrics();
    let ended = |outcome: &str| metrics.sum("roundhouse_replies_total", &[("outcome", outcome)]);
    assert_eq!(["failed", "cancelled", "stop"].map(ended), [2.0, 0.0, 0.0]);
    server.says("a request failed with 2 of its replies open: ");
}

/// Whoever sends it has seen enough. The status still tells of the failure.
fn a_signal_ends_a_failed_server_at_once() {
    let mut server = doomed("600");
    server.begin(CHAT, &unending()).rest_of().unwrap().dead();
    let start = Instant::now();
    while server.get("/health").status() == 200 && start.elapsed() < Duration::from_secs(2) {}
    assert_eq!(server.get("/health").status(), 503);
    server.signal("TERM");
    let status = server.ended_within(Duration::from_secs(3)).expect("a signal ends it");
    assert_eq!(status.code(), Some(3), "{}", server.notes().text());
}
