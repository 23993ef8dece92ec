//! The queue has an end: who does not fit is told so at once, and when to come again.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Ask, Connection};
use crate::events::Stream;
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, endless, unending, with};
use crate::server::{Server, lasting, streamed};

crate::tests! {
    ;
    a_full_queue_is_429_with_a_time,
    a_refused_request_is_answered_in_under_50_ms_under_load,
    several_choices_enter_together_or_not_at_all,
    waiting_requests_are_served_in_turn,
    health_answers_in_a_burst,
}

/// Fills lanes and queue with streams that go on.
fn fill(server: &Server, lanes: usize, waiting: usize) -> (Vec<Stream>, Vec<Connection>) {
    let mut running: Vec<Stream> = (0..lanes).map(|_| server.begin(CHAT, &unending())).collect();
    running.iter_mut().for_each(|stream| stream.read(2));
    let waits = (0..waiting).map(|_| {
        let mut connection = server.connect();
        connection.send(&Ask::post(CHAT, &streamed(&chat("Spell garden backwards."))).bytes()).unwrap();
        connection
    });
    let waits = waits.collect();
    server.reaches(Duration::from_secs(5), |load| (load.0, load.1) == (lanes as f64, waiting as f64));
    (running, waits)
}

/// Bounded, with a hint, and never a 500.
fn a_full_queue_is_429_with_a_time() {
    let server = Server::start(&["--lanes", "2", "--queue", "3"]);
    let (running, waits) = fill(&server, 2, 3);
    let mut connection = server.connect();
    for (path, body) in [(CHAT, chat("Hello!")), (COMPLETIONS, completion("Hello"))] {
        for body in [body.clone(), streamed(&body)] {
            let full = connection.ask(&Ask::post(path, &body));
            let error = full.error(429);
            assert_eq!(error["type"], "rate_limit_error");
            let seconds: u32 = full.head.get("retry-after").expect("a time").parse().expect("seconds");
            assert!((1..=600).contains(&seconds));
            assert!(!full.head.closes());
        }
    }
    drop(running);
    for wait in waits {
        assert_eq!(Stream::new(wait).whole().good().choices[&0].text, "n-e-d-r-a-g.");
    }
    connection.ask(&Ask::post(CHAT, &chat("Hello!"))).good();
    server.idle_within(Duration::from_secs(5));
    let counted = server.metrics().sum("roundhouse_requests_total", &[("status", "429")]);
    assert_eq!(counted, 4.0);
}

fn a_refused_request_is_answered_in_under_50_ms_under_load() {
    let server = Server::start(&["--lanes", "16", "--queue", "1"]);
    let (running, _) = fill(&server, 16, 0);
    // The streams are read, as clients do.
    let readers: Vec<_> =
        running.into_iter().map(|mut stream| thread::spawn(move || drop(stream.rest_of()))).collect();
    let bad = [
        (400, Ask::post(CHAT, &with(chat("Hello!"), json!({"reasoning_efort": "low"})))),
        (404, Ask::post(CHAT, &with(chat("Hello!"), json!({"model": "x"})))),
        (400, Ask::raw(CHAT, "{")),
    ];
    let mut took = refusal_times(&server, &bad);
    let mut waits = server.connect();
    waits.send(&Ask::post(CHAT, &chat("Hello!")).bytes()).unwrap();
    server.reaches(Duration::from_secs(2), |(_, waiting, _)| waiting == 1.0);
    let full = [(429, Ask::post(CHAT, &chat("Hello!"))), (429, Ask::post(CHAT, &streamed(&chat("Hello!"))))];
    took.extend(refusal_times(&server, &full));
    assert_eq!(server.load().0, 16.0, "the load has lasted");
    took.sort();
    let (middle, slowest) = (took[took.len() / 2], took[took.len() - 1]);
    println!("refused under 16 streams in {middle:?} (median), {slowest:?} (slowest of {})", took.len());
    assert!(slowest < Duration::from_millis(50), "{:?}", &took[took.len() - 5..]);
    drop((server, waits));
    readers.into_iter().for_each(|reader| reader.join().expect("a reader"));
}

/// How long each refusal takes, on a connection that is kept and on new ones.
fn refusal_times(server: &Server, refusals: &[(u16, Ask)]) -> Vec<Duration> {
    let mut kept = server.connect();
    let mut took = Vec::new();
    for turn in 0..30 {
        for (status, ask) in refusals {
            let start = Instant::now();
            let response = if turn % 2 == 0 { kept.ask(ask) } else { server.ask(ask) };
            took.push(start.elapsed());
            response.error(*status);
        }
        thread::sleep(Duration::from_millis(20));
    }
    took
}

fn several_choices_enter_together_or_not_at_all() {
    let server = Server::start(&["--lanes", "2", "--queue", "2"]);
    let (running, waits) = fill(&server, 2, 1);
    server.post(CHAT, &with(chat("Hello!"), json!({"n": 2}))).error(429);
    server.post(COMPLETIONS, &with(completion(""), json!({"prompt": ["a", "b"]}))).error(429);
    server.reaches(Duration::from_secs(1), |(_, waiting, _)| waiting == 1.0);
    drop((running, waits));
    server.idle_within(Duration::from_secs(3));
    server.post(CHAT, &with(chat("Hello!"), json!({"n": 4}))).good();
    // More than lanes and queue ever hold is refused, not waited for.
    let never = server.post(CHAT, &with(chat("Hello!"), json!({"n": 5}))).status();
    assert!([400, 429].contains(&never), "{never}");
    server.idle_within(Duration::from_secs(3));
}

fn waiting_requests_are_served_in_turn() {
    let server = Server::start(&["--lanes", "1", "--queue", "8"]);
    let mut first = server.begin(CHAT, &endless(lasting(500)));
    first.read(1);
    let waits: Vec<_> = (0..6)
        .map(|at| {
            let mut connection = server.connect();
            connection.send(&Ask::post(CHAT, &endless(10)).bytes()).unwrap();
            server.reaches(Duration::from_secs(2), |(_, waiting, _)| waiting == f64::from(at + 1));
            thread::spawn(move || {
                connection.response().unwrap().good();
                Instant::now()
            })
        })
        .collect();
    first.rest_of().unwrap().good();
    let ends: Vec<Instant> = waits.into_iter().map(|wait| wait.join().expect("a reply")).collect();
    assert!(ends.is_sorted(), "{ends:?}");
}

/// Health is not behind the requests.
fn health_answers_in_a_burst() {
    let server = Server::start(&["--queue", "64"]);
    let burst: Vec<Connection> = (0..400)
        .map(|at| {
            let mut connection = server.connect();
            let body = with(endless(lasting(250)), json!({"stream": at % 2 == 0}));
            connection.send(&Ask::post(CHAT, &body).bytes()).unwrap();
            connection
        })
        .collect();
    let mut slowest = Duration::ZERO;
    for _ in 0..100 {
        for path in ["/health", "/ready", "/metrics"] {
            let start = Instant::now();
            assert_eq!(server.get(path).status(), 200);
            slowest = slowest.max(start.elapsed());
        }
    }
    println!("slowest of 300 looks in a burst of {}: {slowest:?}", burst.len());
    assert!(slowest < Duration::from_millis(250), "{slowest:?}");
    drop(burst);
    server.idle_within(Duration::from_secs(5));
}
