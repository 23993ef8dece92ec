//! Clients that are gone, in every way and in every phase: their lanes and pages are free within a round or a piece.
//!
//! A reply that nobody calls off would run for much longer than the limit that is stated here.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Ask, Connection};
use crate::events::Stream;
use crate::prompts::{CHAT, COMPLETIONS, chat, endless, unending, with};
use crate::server::{Server, context, device, lasting, streamed};

crate::tests! {
    ;
    a_stream_whose_client_closed_is_freed,
    a_stream_whose_client_half_closed_is_freed,
    a_whole_reply_whose_client_closed_is_freed,
    a_whole_reply_whose_client_half_closed_is_freed,
    a_client_that_sent_more_and_half_closed_is_freed,
    several_choices_are_freed_together,
    a_prompt_whose_client_closed_is_freed_within_a_piece,
    a_waiting_request_whose_client_closed_is_forgotten,
    a_client_that_stopped_reading_is_freed_after_the_write_timeout,
    a_slow_reader_gets_all_of_its_reply,
    retries_do_not_queue_behind_the_gone,
    a_cancelled_reply_leaves_no_trace_in_the_next,
}

/// A round takes milliseconds here; the rest is the machine's.
const SOON: Duration = Duration::from_millis(1500);
/// The pieces that were queued, each a third of a second or somewhat more.
const PIECES: Duration = Duration::from_millis(3000);

/// Sends a request and waits until it runs.
fn running(server: &Server, body: &Value) -> Connection {
    let mut connection = server.connect();
    connection.send(&Ask::post(CHAT, body).bytes()).unwrap();
    server.reaches(Duration::from_secs(5), |(lanes, _, pages)| lanes > 0.0 && pages > 0.0);
    connection
}

/// The stream's way. Once with all that was sent read, which ends politely, and once without, which resets.
fn a_stream_whose_client_closed_is_freed() {
    let server = Server::start(&[]);
    for tokens in [0, 1, 50] {
        let mut stream = server.begin(CHAT, &unending());
        stream.read(tokens);
        drop(stream);
        server.idle_within(SOON);
    }
    let connection = running(&server, &streamed(&unending()));
    thread::sleep(Duration::from_millis(200));
    drop(connection);
    server.idle_within(SOON);
}

fn a_stream_whose_client_half_closed_is_freed() {
    let server = Server::start(&[]);
    let mut stream = server.begin(CHAT, &unending());
    stream.read(5);
    stream.connection.half_close();
    server.idle_within(SOON);
    assert!(stream.connection.closed_after(Duration::from_secs(5)).is_some());
}

/// The other way.
fn a_whole_reply_whose_client_closed_is_freed() {
    let server = Server::start(&[]);
    drop(running(&server, &unending()));
    server.idle_within(SOON);
}

fn a_whole_reply_whose_client_half_closed_is_freed() {
    let server = Server::start(&[]);
    let mut connection = running(&server, &unending());
    connection.half_close();
    server.idle_within(SOON);
    assert!(connection.closed_after(Duration::from_secs(5)).is_some());
}

/// The end of what it sends stands behind a request that nobody reads yet.
fn a_client_that_sent_more_and_half_closed_is_freed() {
    let server = Server::start(&[]);
    for body in [unending(), streamed(&unending())] {
        let mut connection = running(&server, &body);
        connection.send(&Ask::post(CHAT, &body).bytes()).unwrap();
        connection.half_close();
        server.idle_within(SOON);
    }
}

fn several_choices_are_freed_together() {
    let server = Server::start(&[]);
    for body in [with(unending(), json!({"n": 16})), streamed(&with(unending(), json!({"n": 16})))] {
        let connection = running(&server, &body);
        server.reaches(Duration::from_secs(5), |(lanes, _, _)| lanes == 16.0);
        drop(connection);
        server.idle_within(SOON);
    }
    let stops = with(unending(), json!({"n": 4, "seed": 3, "temperature": 1, "stop": "e"}));
    server.post(CHAT, &stops).good();
    server.idle_within(SOON);
}

/// Seen while the prompt is computed, before there is a token to write.
fn a_prompt_whose_client_closed_is_freed_within_a_piece() {
    let server = Server::start(&["--context", "32768"]);
    let prompt: Vec<u32> = (0..30_000).map(|at| 256 + at % 1700).collect();
    for streams in [false, true] {
        for half in [false, true] {
            let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 100, "stream": streams});
            let mut connection = server.connect();
            connection.send(&Ask::post(COMPLETIONS, &body).bytes()).unwrap();
            server.reaches(Duration::from_secs(5), |(lanes, _, _)| lanes == 1.0);
            // A prompt takes seconds on the host device, and a tenth of one on CUDA.
            thread::sleep(Duration::from_millis(if device() == "host" { 500 } else { 10 }));
            assert_eq!(server.load().0, 1.0, "the prompt takes longer than that");
            if half {
                connection.half_close();
                server.idle_within(PIECES);
            } else {
                drop(connection);
                server.idle_within(PIECES);
            }
        }
    }
    let reply = server.post(CHAT, &chat("Spell garden backwards.")).good();
    assert_eq!(reply["choices"][0]["token_sha"], "f4c8f07e9377");
}

fn a_waiting_request_whose_client_closed_is_forgotten() {
    let server = Server::start(&["--lanes", "1", "--queue", "4"]);
    let mut first = server.begin(CHAT, &endless(lasting(1500)));
    first.read(2);
    for streams in [false, true] {
        let mut waits = server.connect();
        waits.send(&Ask::post(CHAT, &with(unending(), json!({"stream": streams}))).bytes()).unwrap();
        server.reaches(SOON, |(_, waiting, _)| waiting == 1.0);
        drop(waits);
        server.reaches(SOON, |(_, waiting, _)| waiting == 0.0);
    }
    first.rest_of().unwrap().good();
    server.idle_within(SOON);
}

/// Its own buffers and the kernel's fill first; then the time-out runs.
fn a_client_that_stopped_reading_is_freed_after_the_write_timeout() {
    let server = Server::start(&["--write-timeout", "1"]);
    let wide = with(unending(), json!({"n": 16, "logprobs": true, "top_logprobs": 20}));
    let mut stream = server.begin(CHAT, &wide);
    stream.read(20);
    let stopped = Instant::now();
    let before = server.resident_bytes();
    server.idle_within(Duration::from_secs(20));
    let took = stopped.elapsed();
    assert!(took > Duration::from_millis(900), "{took:?}");
    let completed = server.metrics().value("roundhouse_completion_tokens_total");
    assert!(completed < 16.0 * f64::from(context() - 150), "all of {completed} tokens were made for nobody");
    println!(
        "freed after {took:?} and {completed} tokens; {} bytes more",
        server.resident_bytes().saturating_sub(before)
    );
    // What arrives in the end is cut, not complete.
    let read = stream.rest_of();
    assert!(!read.is_ok_and(|streamed| streamed.done));
}

fn a_slow_reader_gets_all_of_its_reply() {
    let server = Server::start(&["--write-timeout", "2"]);
    let body = with(endless(120), json!({"logprobs": true, "top_logprobs": 20}));
    let expected = server.post(CHAT, &body).good()["choices"][0]["token_sha"].clone();
    let mut stream = server.begin(CHAT, &body);
    for _ in 0..40 {
        stream.read(1);
        thread::sleep(Duration::from_millis(50));
    }
    let rest = stream.rest_of().unwrap();
    assert!(rest.done && rest.error.is_none());
    assert_eq!(json!(rest.choices[&0].token_sha), expected);
    server.idle_within(SOON);
}

fn retries_do_not_queue_behind_the_gone() {
    let server = Server::start(&["--context", "32768", "--lanes", "2", "--queue", "2"]);
    let prompt: Vec<u32> = (0..20_000).map(|at| 256 + at % 1700).collect();
    for _ in 0..6 {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1000, "stream": true});
        let mut connection = server.connect();
        connection.send(&Ask::post(COMPLETIONS, &body).bytes()).unwrap();
        thread::sleep(Duration::from_millis(300));
    }
    let start = Instant::now();
    let idle = server.idle_within(PIECES);
    server.post(CHAT, &with(chat("Hello!"), json!({"max_tokens": 20}))).good();
    println!("idle after {idle:?}, answered after {:?}", start.elapsed());
    // One of the six prompts alone takes longer than that.
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}

/// Called off at any moment, also at once with the server's own end of it; the next reply is as ever.
fn a_cancelled_reply_leaves_no_trace_in_the_next() {
    let server = Server::start(&["--lanes", "2"]);
    let body = with(endless(60), json!({"temperature": 1, "seed": 9}));
    let expected = server.post(CHAT, &body).good()["choices"][0]["token_sha"].clone();
    for tokens in 0..30 {
        let mut connection = server.connect();
        connection.send(&Ask::post(CHAT, &streamed(&endless(30))).bytes()).unwrap();
        let mut stream = Stream::new(connection);
        stream.read(tokens);
        drop(stream);
        if tokens % 3 == 0 {
            assert_eq!(server.post(CHAT, &body).good()["choices"][0]["token_sha"], expected);
        }
    }
    server.idle_within(SOON);
    assert_eq!(server.post(CHAT, &body).good()["choices"][0]["token_sha"], expected);
}
