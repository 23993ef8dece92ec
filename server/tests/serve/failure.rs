//! The engine fails: every reply under way is told so, nothing looks finished, and the process ends in time.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Ask, error_object};
use crate::prompts::{CHAT, chat, endless, with};
use crate::server::Server;

crate::tests! {
    streams_end_with_an_error_and_the_process_with_status_3,
    health_and_readiness_tell_until_the_end;
}

/// A server whose engine fails in the midst of replies.
fn doomed(exit: &str) -> Server {
    Server::start(&["--fail-after", "120", "--failure-exit", exit])
}

/// R28, R32: an error event, then the end of the connection; no finish reason, no `[DONE]`.
fn streams_end_with_an_error_and_the_process_with_status_3() {
    let mut server = doomed("2");
    let mut streams: Vec<_> = (0..3).map(|_| server.begin(CHAT, &endless(1500))).collect();
    streams.push(server.begin(CHAT, &with(endless(1500), json!({"n": 2}))));
    let mut whole = server.connect();
    whole.send(&Ask::post(CHAT, &endless(1500)).bytes()).unwrap();
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

/// R23: an engine that is dead is not fine.
fn health_and_readiness_tell_until_the_end() {
    let mut server = doomed("4");
    server.begin(CHAT, &endless(1500)).rest_of().unwrap().dead();
    let start = Instant::now();
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
