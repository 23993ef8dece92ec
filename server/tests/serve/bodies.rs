//! Large bodies: how many may be read at once, who may keep a place among them, and for how long.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Ask, Connection};
use crate::prompts::{CHAT, chat, endless, unending, with};
use crate::server::Server;

crate::tests! {
    ;
    a_reply_under_way_holds_no_place_of_its_body,
    who_has_no_key_holds_no_place,
    what_the_head_decides_waits_for_no_body,
    a_wait_for_a_place_is_not_the_fault_of_the_body,
}

/// Large bodies that are read at once.
const PLACES: usize = 64;

/// A chat of more than 64 KiB, which makes its body a large one.
fn large(more: serde_json::Value) -> Ask {
    Ask::post(CHAT, &with(more, json!({"user": "x".repeat(70_000)})))
}

/// A request whose body is large and never comes to its end.
fn unfinished(server: &Server, ask: Ask) -> Connection {
    let bytes = ask.header("content-length", "3000000").body(Vec::new()).bytes();
    let text = String::from_utf8(bytes).unwrap().replace("content-length: 0\r\n", "");
    let mut connection = server.connect();
    connection.send(text.as_bytes()).unwrap();
    connection.send(&[b' '; 66 << 10]).unwrap();
    connection
}

/// A place is given back once the body is parsed, not once it is answered.
fn a_reply_under_way_holds_no_place_of_its_body() {
    let server = Server::start(&["--header-timeout", "5"]);
    let replies: Vec<Connection> = (0..PLACES)
        .map(|_| {
            let mut connection = server.connect();
            connection.send(&large(unending()).bytes()).unwrap();
            connection
        })
        .collect();
    server.reaches(Duration::from_secs(10), |(lanes, waiting, _)| lanes + waiting == PLACES as f64);
    let start = Instant::now();
    server.ask(&large(with(chat("Hello!"), json!({"reasoning_efort": 1})))).error(400);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    drop(replies);
    server.idle_within(Duration::from_secs(5));
}

/// Neither by asking for what needs none, nor by being refused.
fn who_has_no_key_holds_no_place() {
    let server = Server::start(&["--api-key", "k", "--header-timeout", "6"]);
    let keyless: Vec<Connection> = (0..PLACES)
        .flat_map(|_| [Ask::get("/health"), Ask::with("POST", "/ready"), Ask::raw(CHAT, "")])
        .map(|ask| unfinished(&server, ask))
        .collect();
    thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    let asked = large(with(endless(2), json!({}))).header("authorization", "Bearer k");
    server.ask(&asked).good();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    drop(keyless);
}

/// The answer comes once the refused body is dropped, or at its time's end; then the connection ends with it.
fn what_the_head_decides_waits_for_no_body() {
    let server = Server::start(&["--api-key", "k", "--header-timeout", "1", "--body-limit", "64K"]);
    let key = |ask: Ask| ask.header("authorization", "Bearer k");
    let asks = [
        (401, Ask::raw(CHAT, "")),
        (404, key(Ask::raw("/v1/nothing", ""))),
        (405, key(Ask::with("PUT", CHAT))),
        (415, key(Ask::with("POST", CHAT))),
        (200, Ask::get("/health")),
    ];
    for (status, ask) in asks {
        let refused = unfinished(&server, ask.clone()).response().unwrap();
        assert_eq!(refused.status(), status, "{}", refused.text());
        assert!(refused.head.closes(), "{status}: the rest of the body is under way");
        // A length that is never read is not waited for, nor a body that waits for leave.
        let head = |more: &str| {
            let text = String::from_utf8(ask.clone().body("").bytes()).unwrap();
            text.replace("content-length: 0\r\n", more).into_bytes()
        };
        for more in ["content-length: 99999999\r\n", "expect: 100-continue\r\ncontent-length: 5\r\n"] {
            let mut connection = server.connect();
            connection.send(&head(more)).unwrap();
            let start = Instant::now();
            let refused = connection.response().unwrap();
            assert_eq!((refused.status(), refused.head.closes()), (status, true), "{more}");
            assert!(start.elapsed() < Duration::from_millis(700), "{more}: {:?}", start.elapsed());
        }
        // A body that comes whole leaves the connection as it was.
        let mut connection = server.connect();
        for _ in 0..2 {
            let refused = connection.ask(&ask.clone().body(vec![b' '; 200_000]));
            assert_eq!((refused.status(), refused.head.closes()), (status, false));
        }
    }
}

/// Who had to wait for a place has all of its time then; who gets none is told to come again.
fn a_wait_for_a_place_is_not_the_fault_of_the_body() {
    let server = Server::start(&["--header-timeout", "2"]);
    let slow = || (0..PLACES).map(|_| unfinished(&server, Ask::raw(CHAT, ""))).collect::<Vec<_>>();
    let mut first = slow();
    thread::sleep(Duration::from_millis(300));
    // Has a place when the first have lost theirs, after most of its own time.
    server.ask(&large(with(endless(2), json!({})))).good();
    first.iter_mut().for_each(|connection| drop(connection.response().unwrap().error(408)));

    let first = slow();
    thread::sleep(Duration::from_millis(500));
    // These have the places when the first have lost them, for all of their time.
    let second = slow();
    thread::sleep(Duration::from_millis(500));
    let refused = server.ask(&large(endless(2)));
    assert_eq!(refused.error(429)["type"], "rate_limit_error");
    assert!(refused.head.get("retry-after").is_some() && refused.head.closes(), "{:?}", refused.head);
    for mut connection in first.into_iter().chain(second) {
        connection.response().unwrap().error(408);
    }
    server.ask(&large(endless(2))).good();
}
