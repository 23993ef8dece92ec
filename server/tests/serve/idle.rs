//! Connections on which nobody asks: how long they stay, how they end, and how many there may be.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Ask, Connection};
use crate::prompts::{CHAT, chat, with};
use crate::server::{Server, serve, streamed};

crate::tests! {
    ;
    an_idle_connection_ends_in_silence,
    an_idle_connection_outlives_the_limit_on_heads,
    a_head_that_was_begun_on_an_old_connection_is_408,
    open_files_bound_the_connections,
}

fn hello() -> serde_json::Value {
    with(chat("Hello!"), json!({"max_tokens": 2}))
}

/// Sends the head of a request, and then its body.
fn in_two_writes(connection: &mut Connection, ask: &Ask) {
    let bytes = ask.bytes();
    let (head, body) = bytes.split_at(bytes.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4);
    connection.send(head).unwrap();
    thread::sleep(Duration::from_millis(50));
    connection.send(body).unwrap();
}

/// Nothing was asked, so nothing is answered: whatever stands there would be the answer to the next request.
fn an_idle_connection_ends_in_silence() {
    let server = Server::start(&["--header-timeout", "0.5", "--idle-timeout", "2"]);
    for body in [hello(), streamed(&hello())] {
        let mut connection = server.connect();
        in_two_writes(&mut connection, &Ask::post(CHAT, &body));
        connection.response().unwrap();
        let start = Instant::now();
        assert!(connection.is_closed_within(Duration::from_secs(5)), "it stays open, or says something");
        assert!(start.elapsed() > Duration::from_millis(1500), "{:?}", start.elapsed());
    }
    let start = Instant::now();
    assert!(server.connect().is_closed_within(Duration::from_secs(2)), "a new connection owes a request");
    assert!(start.elapsed() > Duration::from_millis(400), "{:?}", start.elapsed());
}

fn an_idle_connection_outlives_the_limit_on_heads() {
    let server = Server::start(&["--header-timeout", "0.5"]);
    let mut connection = server.connect();
    for _ in 0..3 {
        in_two_writes(&mut connection, &Ask::post(CHAT, &hello()));
        connection.response().unwrap().good();
        thread::sleep(Duration::from_millis(1200));
    }
    connection.ask(&Ask::get("/health")).good();
}

fn a_head_that_was_begun_on_an_old_connection_is_408() {
    let server = Server::start(&["--header-timeout", "1"]);
    let mut connection = server.connect();
    in_two_writes(&mut connection, &Ask::post(CHAT, &hello()));
    connection.response().unwrap().good();
    thread::sleep(Duration::from_millis(1500));
    let start = Instant::now();
    connection.send(b"GET /health HTTP/1.1\r\nhost: ").unwrap();
    connection.response().unwrap().error(408);
    assert!(start.elapsed() > Duration::from_millis(900), "{:?}", start.elapsed());
    assert!(connection.is_closed_within(Duration::from_secs(5)));
}

/// The same command with limits on its open files.
fn limited(command: &Command, soft: u32, hard: u32) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$@\""), "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// As many as are allowed at most, not as a shell allows at first; one more waits and is served in its turn.
fn open_files_bound_the_connections() {
    let server = Server::ready(limited(&serve(&[]), 100, 200));
    assert!(server.notes().text().contains("at most 136 connections"), "{}", server.notes().text());
    thread::sleep(Duration::from_millis(500));
    let mut open: Vec<Connection> = (0..136).map(|_| server.connect()).collect();
    open.iter_mut().for_each(|connection| drop(connection.ask(&Ask::get("/health")).good()));
    let mut more = server.connect();
    more.send(&Ask::get("/health").bytes()).unwrap();
    more.patience(Duration::from_millis(500));
    assert!(more.response().is_err(), "more than 136 are served at once");
    open.truncate(130);
    more.patience(Duration::from_secs(10));
    more.response().unwrap().good();
    drop((open, more));
    server.post(CHAT, &hello()).good();
    let said = server.notes().text();
    assert!(!said.contains("cannot accept"), "{said}");
}
