//! The life of the process: bind, load, be ready; stop when told, and leave nothing behind.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Ask, error_object};
use crate::prompts::{CHAT, chat, endless, unending, with};
use crate::server::{Server, lasting, run, serve};

crate::tests! {
    a_port_in_use_is_told_before_loading,
    it_listens_before_it_loads_and_is_ready_when_a_token_can_be_made,
    the_start_tells_what_it_does,
    what_does_not_fit_is_told_before_loading,
    the_first_reply_is_compared,
    a_signal_lets_replies_end_and_takes_no_more,
    a_signal_with_nothing_to_do_ends_at_once,
    replies_that_outlast_the_drain_are_cut_with_an_error,
    the_process_is_gone_when_the_drain_is_over,
    a_quick_start_runs_several_replies_and_says_how_many_fit,
    a_second_signal_ends_at_once,
    a_signal_while_loading_ends,
    a_kill_leaves_nothing_behind;
}

/// Found at once, not after minutes of loading.
fn a_port_in_use_is_told_before_loading() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let mut command = crate::server::bare();
    command.arg("serve").arg(crate::server::tiny()).args(["--port", &port]);
    let start = Instant::now();
    let ended = run(&mut command);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    ended.failed(2, &[&port]);
    for word in ["listening", "reading", "memory plan", "ready after"] {
        assert!(!ended.stderr.contains(word), "{word} before the port was known: {}", ended.stderr);
    }
    let one = Server::start(&[]);
    let mut command = crate::server::bare();
    command.arg("serve").arg(crate::server::tiny()).args(["--port", &one.address.port().to_string()]);
    assert_eq!(run(&mut command).status, Some(2));
    one.get("/health").good();
}

/// The model list may be there early; readiness is a token.
fn it_listens_before_it_loads_and_is_ready_when_a_token_can_be_made() {
    for _ in 0..5 {
        let server = Server::bound(serve(&[]));
        let mut states = Vec::new();
        loop {
            let ready = server.get("/ready");
            assert_eq!(server.get("/health").status(), 200);
            if ready.status() == 200 {
                break;
            }
            assert_eq!(ready.status(), 503);
            let state = ready.json()["status"].as_str().unwrap().to_owned();
            assert!(["loading", "warming"].contains(&state.as_str()), "{state}");
            if states.last() != Some(&state) {
                states.push(state);
            }
            let asked = server.post(CHAT, &chat("Hello!"));
            if asked.status() != 200 {
                assert_eq!(asked.error(503)["type"], "not_ready");
                assert!(asked.head.get("retry-after").is_some_and(|seconds| seconds.parse::<u32>().is_ok()));
            }
        }
        assert!(states.is_sorted(), "{states:?}");
        server.post(CHAT, &chat("Spell garden backwards.")).good();
        server.says("ready after ");
        let text = server.notes().text();
        let [listening, reading] = ["listening on ", "reading "].map(|words| text.find(words));
        assert!(listening.is_some() && listening < reading, "{text}");
    }
}

/// Device and why, the plan, the reading, and that it is ready.
fn the_start_tells_what_it_does() {
    let server = Server::start(&[]);
    let text = server.says("ready after ");
    let mut rest = text.as_str();
    for words in ["listening on http://127.0.0.1:", "device", "memory plan", "of weights", "ready after "] {
        rest = rest
            .split_once(words)
            .unwrap_or_else(|| panic!("{words:?} is not there, or not in order: {text}"))
            .1;
    }
    assert!(!text.contains("panicked"), "{text}");
}

fn what_does_not_fit_is_told_before_loading() {
    for (options, words) in
        [(&["--memory", "1K"][..], &["--memory"][..]), (&["--context", "99999999"], &["--context"])]
    {
        let mut command = serve(options);
        command.env_remove("ROUNDHOUSE_CONTEXT");
        let ended = run(&mut command);
        assert_eq!(ended.status, Some(2), "{options:?}: {}", ended.stderr);
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{}", ended.stderr);
        assert!(!ended.stderr.contains("reading"), "{}", ended.stderr);
    }
}

/// The sanity reply is told, and compared if its digest was given.
fn the_first_reply_is_compared() {
    let server = Server::start(&[]);
    let text = server.says("ready after ");
    let is_sha = |word: &&str| {
        word.len() == 12 && word.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let line =
        text.lines().find(|line| line.contains("token_sha")).unwrap_or_else(|| panic!("no digest: {text}"));
    let sha = line
        .split(|c: char| !c.is_ascii_alphanumeric())
        .find(is_sha)
        .unwrap_or_else(|| panic!("no digest: {line}"));
    Server::start(&["--sanity-sha", sha]).post(CHAT, &chat("Hello!")).good();
    let other = if sha == "000000000000" { "000000000001" } else { "000000000000" };
    let ended = run(&mut serve(&["--sanity-sha", other]));
    ended.failed(1, &[sha, other]);
    assert!(!ended.stderr.contains("ready after"), "{}", ended.stderr);
}

fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err()
}

fn a_signal_lets_replies_end_and_takes_no_more() {
    let tokens = lasting(500);
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&["--drain", "60"]);
        let mut streams: Vec<_> = (0..4).map(|_| server.begin(CHAT, &endless(tokens))).collect();
        streams.iter_mut().for_each(|stream| stream.read(3));
        let mut open = server.connect();
        open.ask(&Ask::get("/health")).good();
        let mut whole = server.connect();
        whole.send(&Ask::post(CHAT, &endless(tokens)).bytes()).unwrap();
        server.reaches(Duration::from_secs(5), |(lanes, _, _)| lanes == 5.0);
        server.signal(signal);
        thread::sleep(Duration::from_millis(100));
        let refused = open.ask(&Ask::post(CHAT, &chat("Hello!")));
        assert_eq!(refused.error(503)["type"], "not_ready");
        assert!(refused.head.closes() && refused.head.get("retry-after").is_some(), "{:?}", refused.head);
        assert!(is_refused(server.address), "the listener is open");
        for mut stream in streams {
            assert_eq!(stream.rest_of().unwrap().good().usage.unwrap()["completion_tokens"], tokens);
        }
        assert_eq!(whole.response().unwrap().good()["usage"]["completion_tokens"], tokens);
        let status = server.ended_within(Duration::from_secs(5)).expect("all replies are done, so it ends");
        assert_eq!(status.code(), Some(0), "{}", server.notes().text());
    }
}

fn a_signal_with_nothing_to_do_ends_at_once() {
    let mut server = Server::start(&["--drain", "60"]);
    let _idle: Vec<_> = (0..5).map(|_| server.connect()).collect();
    let mut kept = server.connect();
    kept.ask(&Ask::get("/health")).good();
    server.signal("TERM");
    let status = server.ended_within(Duration::from_secs(3)).expect("idle connections hold nobody");
    assert_eq!(status.code(), Some(0), "{}", server.notes().text());
}

fn replies_that_outlast_the_drain_are_cut_with_an_error() {
    let mut server = Server::start(&["--drain", "1"]);
    let mut stream = server.begin(CHAT, &unending());
    stream.read(3);
    let mut whole = server.connect();
    whole.send(&Ask::post(CHAT, &unending()).bytes()).unwrap();
    server.reaches(Duration::from_secs(5), |(lanes, _, _)| lanes == 2.0);
    let start = Instant::now();
    server.signal("TERM");
    stream.rest_of().unwrap().dead();
    assert!(
        start.elapsed() > Duration::from_millis(700),
        "cut before the drain was over: {:?}",
        start.elapsed()
    );
    let cut = whole.response().unwrap();
    assert!([500, 503].contains(&cut.status()), "{} {}", cut.status(), cut.text());
    error_object(&cut.json());
    let status = server.ended_within(Duration::from_secs(3)).expect("the drain has an end");
    assert_eq!(status.code(), Some(0), "{}", server.notes().text());
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

/// Whoever gives a time kills what is still there after it. Nobody is left without an answer who can have one.
fn the_process_is_gone_when_the_drain_is_over() {
    let mut server = Server::start(&["--drain", "3"]);
    let mut stream = server.begin(CHAT, &unending());
    stream.read(3);
    let body = Ask::post(CHAT, &chat("Hello!")).bytes();
    let mut half = server.connect();
    half.send(&body[..body.len() - 5]).unwrap();
    let mut idle = server.connect();
    idle.ask(&Ask::get("/health")).good();
    let start = Instant::now();
    server.signal("TERM");
    stream.rest_of().unwrap().dead();
    assert!(start.elapsed() > Duration::from_secs(2), "{:?}", start.elapsed());
    let status = server.ended_within(Duration::from_secs(6)).expect("the drain has an end");
    assert!(start.elapsed() < Duration::from_millis(3100), "{:?}", start.elapsed());
    assert_eq!(status.code(), Some(0), "{}", server.notes().text());
    // Half a body: an answer, or the end of the connection, but no wait.
    if let Ok(told) = half.response() {
        told.error(503);
    }
    assert!(half.is_closed_within(Duration::from_secs(1)) && idle.is_closed_within(Duration::from_secs(1)));
}

/// A request that does not say how much it wants does not take all there is, and who starts a server with room for few
/// hears of it.
fn a_quick_start_runs_several_replies_and_says_how_many_fit() {
    let mut command = crate::server::bare();
    command.arg("serve").arg(crate::server::tiny()).args(["--port", "0"]);
    if crate::server::device() != "host" {
        command.args(["--memory", "256M"]);
    }
    let server = Server::ready(command);
    let open = with(unending(), json!({"max_tokens": null}));
    let mut streams: Vec<_> = (0..3).map(|_| server.begin(CHAT, &open)).collect();
    streams.iter_mut().for_each(|stream| stream.read(3));
    assert_eq!(server.load().0, 3.0);
    let said = server.says("ready after ");
    let line = said.lines().find(|line| line.starts_with("warning: ")).unwrap_or_else(|| panic!("{said}"));
    for words in
        ["whole contexts of 32768 fit", "4096 tokens", "--max-tokens-default", "--memory", "--context"]
    {
        assert!(line.contains(words), "{words:?} is not in {line:?}");
    }
    let said = Server::start(&[]).says("ready after ");
    assert!(said.contains(" whole contexts of ") && !said.contains("warning"), "{said}");
}

fn a_second_signal_ends_at_once() {
    let mut server = Server::start(&["--drain", "60"]);
    let mut stream = server.begin(CHAT, &unending());
    stream.read(3);
    server.signal("TERM");
    thread::sleep(Duration::from_millis(300));
    assert!(server.ended_within(Duration::ZERO).is_none(), "the first signal waits");
    server.signal("TERM");
    assert!(server.ended_within(Duration::from_secs(2)).is_some(), "the second does not");
}

fn a_signal_while_loading_ends() {
    for delay in [0, 5, 20, 40, 80] {
        let mut server = Server::bound(serve(&[]));
        thread::sleep(Duration::from_millis(delay));
        server.signal("TERM");
        let status = server.ended_within(Duration::from_secs(5));
        let status = status
            .unwrap_or_else(|| panic!("runs on, {delay} ms after it listened: {}", server.notes().text()));
        assert_eq!(status.code(), Some(0), "{delay} ms: {}", server.notes().text());
    }
}

/// No worker outlives the process, and the port is free for the next.
fn a_kill_leaves_nothing_behind() {
    let mut server = Server::start(&[]);
    let mut stream = server.begin(CHAT, &with(unending(), json!({"n": 2})));
    stream.read(3);
    for thread in server.threads().keys() {
        let children = fs::read_to_string(format!("/proc/{}/task/{thread}/children", server.pid()));
        assert_eq!(children.unwrap_or_default().trim(), "", "it has processes of its own");
    }
    let address = server.address;
    server.signal("KILL");
    assert!(server.ended_within(Duration::from_secs(2)).is_some());
    assert!(stream.rest_of().is_err(), "a stream that was cut does not look complete");
    let mut command = crate::server::bare();
    command.arg("serve").arg(crate::server::tiny()).args([
        "--context",
        "2048",
        "--port",
        &address.port().to_string(),
    ]);
    let again = Server::ready(command);
    assert_eq!(again.address, address);
    again.post(CHAT, &chat("Hello!")).good();
}
