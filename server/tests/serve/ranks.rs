//! A server of two ranks, each a process: it answers as one does, and when one of them dies, stops or is killed, every
//! stream ends with an error, both processes are gone in time, and the next start finds nothing in its way.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::Ask;
use crate::pictures::{gray, parts, picture};
use crate::prompts::{CHAT, chat, endless, unending, with};
use crate::server::{Server, device, lasting};

crate::tests! {
    two_ranks_answer_as_one,
    ;
    signals_to_both_let_replies_end,
    a_killed_follower_ends_streams_and_the_server,
    a_killed_follower_of_an_idle_server_is_noticed,
    a_follower_killed_while_both_start_ends_the_server,
    a_follower_killed_during_an_encoding_ends_the_server,
    a_stopped_follower_ends_streams_in_time,
    a_killed_leader_leaves_no_follower_behind,
}

/// What one rank may still do after the other has died.
const SOON: Duration = Duration::from_secs(10);
/// A stopped process keeps its connections: it is noticed by its silence, which is ten seconds.
const SILENT: Duration = Duration::from_secs(14);

/// What two ranks lack where the tests run: with CUDA each has a device of its own.
pub(crate) fn lacks() -> Option<String> {
    if !device().starts_with("cuda") {
        return None;
    }
    match graph::Device::cuda_count() {
        Ok(count) if count < 2 => Some(format!("two ranks need 2 CUDA devices and there are {count}")),
        Ok(_) => graph::nccl_library().err().map(|_| "NCCL is not usable".into()),
        Err(_) => Some("the CUDA driver is not usable".into()),
    }
}

fn start() -> Server {
    Server::start(&["--tp", "2"])
}

/// The process that a server of two ranks has started.
fn follower(server: &Server) -> u32 {
    let started = Instant::now();
    loop {
        let children = server.threads().into_keys().find_map(|thread| {
            let file = format!("/proc/{}/task/{thread}/children", server.pid());
            fs::read_to_string(file).ok()?.split_whitespace().next()?.parse().ok()
        });
        if let Some(child) = children {
            return child;
        }
        assert!(started.elapsed() < SOON, "it has no child");
    }
}

fn signal(name: &str, process: u32) {
    let sent = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(sent.expect("there is a kill command").success());
}

/// Whether a process runs, stopped or not: one that nobody has waited for does not.
fn runs(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn gone_within(process: u32, patience: Duration) {
    let started = Instant::now();
    while runs(process) {
        assert!(started.elapsed() < patience, "process {process} runs on after {patience:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn two_ranks_answer_as_one() {
    let (one, two) = (Server::start(&[]), start());
    // What the library of collectives reads when it is loaded.
    for process in [two.pid(), follower(&two)] {
        let environment = fs::read(format!("/proc/{process}/environ")).expect("it runs");
        let set: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
        for wanted in ["NCCL_GRAPH_MIXING_SUPPORT=0", "NCCL_NVLS_ENABLE=0"] {
            assert!(set.contains(&wanted.as_bytes()), "process {process} lacks {wanted}");
        }
    }
    let ask = |server: &Server| {
        let reply = server.post(CHAT, &chat("Spell garden backwards.")).good();
        (reply["choices"][0]["message"]["content"].clone(), reply["usage"]["completion_tokens"].clone())
    };
    assert_eq!(ask(&two), ask(&one));
    let streamed = |server: &Server| server.stream(CHAT, &chat("What is 27 + 58?")).choices;
    assert_eq!(format!("{:?}", streamed(&two)), format!("{:?}", streamed(&one)));
    // Clients that go away are called off on both ranks, or the next replies would not be right.
    for _ in 0..3 {
        let mut stream = two.begin(CHAT, &unending());
        stream.read(5);
        drop(stream);
        assert_eq!(ask(&two), ask(&one));
    }
    two.idle_within(Duration::from_secs(3));
}

/// Streams that run while `harm` comes to the follower: each ends with an error, in time, and so does the server.
fn streams_end(harm: &str, within: Duration) {
    let mut server = start();
    let mut streams: Vec<_> = (0..3).map(|_| server.begin(CHAT, &unending())).collect();
    streams.iter_mut().for_each(|stream| stream.read(3));
    let (follower, started) = (follower(&server), Instant::now());
    signal(harm, follower);
    for mut stream in streams {
        assert_eq!(stream.rest_of().expect("it is read").dead()["type"], "server_error");
    }
    assert!(started.elapsed() < within, "{:?}", started.elapsed());
    let status = server.ended_within(SOON).expect("a server without its other rank ends");
    assert_eq!(status.code(), Some(3), "{}", server.notes().text());
    gone_within(follower, SOON);
    assert!(server.notes().text().contains("rank 1"), "{}", server.notes().text());
    // Nothing is in the way of the next start.
    start().post(CHAT, &chat("Hello!")).good();
}

fn a_killed_follower_ends_streams_and_the_server() {
    streams_end("KILL", SOON);
}

fn a_stopped_follower_ends_streams_in_time() {
    streams_end("STOP", SILENT);
}

fn a_killed_follower_of_an_idle_server_is_noticed() {
    let mut server = start();
    signal("KILL", follower(&server));
    let status = server.ended_within(SOON).expect("it notices");
    assert_eq!(status.code(), Some(3), "{}", server.notes().text());
}

/// While they meet, load, capture their first graphs, or make the first reply.
fn a_follower_killed_while_both_start_ends_the_server() {
    for step in 0..8 {
        let mut server = Server::bound(crate::server::serve(&["--tp", "2"]));
        let follower = follower(&server);
        thread::sleep(step * Duration::from_millis(60));
        signal("KILL", follower);
        let status = server.ended_within(SOON).expect("it notices");
        assert_eq!(status.code(), Some(3), "{}", server.notes().text());
        assert!(server.notes().text().contains("rank 1"), "{}", server.notes().text());
    }
}

/// The leader encodes a picture for many seconds on the host device, and the other rank has no part in it.
fn a_follower_killed_during_an_encoding_ends_the_server() {
    let mut server = start();
    let mut client = server.connect();
    let ask = Ask::post(CHAT, &with(parts(&[picture(&gray(1344, 1344))]), json!({"max_tokens": 1})));
    client.send(&ask.bytes()).expect("it listens");
    thread::sleep(Duration::from_secs(1));
    signal("KILL", follower(&server));
    let reply = client.response().expect("an answer");
    // On a quick device it had its answer before.
    assert!(reply.status() == 500 || device() != "host", "{}", reply.text());
    let status = server.ended_within(SOON).expect("it notices");
    assert_eq!(status.code(), Some(3), "{}", server.notes().text());
}

/// As a terminal sends them, or a service manager, to all processes at once.
fn signals_to_both_let_replies_end() {
    for name in ["INT", "TERM"] {
        let mut server = start();
        let mut stream = server.begin(CHAT, &endless(lasting(400)));
        stream.read(3);
        let follower = follower(&server);
        signal(name, follower);
        server.signal(name);
        stream.rest_of().expect("it is read").good();
        let status = server.ended_within(SOON).expect("it ends when its replies have");
        assert_eq!(status.code(), Some(0), "{}", server.notes().text());
        gone_within(follower, SOON);
    }
}

/// While it works, and while it has nothing to do.
fn a_killed_leader_leaves_no_follower_behind() {
    for busy in [true, false] {
        let server = start();
        let mut stream = server.begin(CHAT, &unending());
        stream.read(3);
        if !busy {
            drop(stream);
            server.idle_within(SOON);
        }
        let follower = follower(&server);
        server.signal("KILL");
        gone_within(follower, SOON);
    }
}
