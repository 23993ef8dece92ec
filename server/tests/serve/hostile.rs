//! Clients that are slow, cut, broken or mean: each gets what it deserves, and nobody else notices.

use std::thread;
use std::time::{Duration, Instant};

use runtime::receipts::Random;
use serde_json::{Value, json};

use crate::client::{Ask, Connection};
use crate::events::Stream;
use crate::prompts::{CHAT, chat, endless, with};
use crate::server::{Server, lasting, streamed};

crate::tests! {
    requests_sent_byte_by_byte_are_the_whole_requests,
    requests_cut_anywhere_are_the_whole_requests,
    chunked_bodies_are_bodies,
    broken_chunks_are_refused,
    slow_headers_end,
    slow_bodies_are_408,
    idle_connections_cost_nothing_and_go,
    pipelined_requests_are_answered_in_order,
    a_request_after_an_error_is_answered,
    a_length_and_chunks_at_once_are_not_two_requests,
    garbage_ends_its_connection_only,
    a_client_that_asks_before_it_sends_is_told_to_go_on,
    old_and_odd_versions_are_answered,
    closed_before_the_answer_harms_nobody;
}

fn hello() -> Value {
    with(chat("Spell garden backwards."), json!({"user": "é🙂漢"}))
}

fn is_hello(connection: &mut Connection) {
    assert_eq!(connection.response().unwrap().good()["choices"][0]["message"]["content"], "n-e-d-r-a-g.");
}

fn requests_sent_byte_by_byte_are_the_whole_requests() {
    let server = Server::start(&[]);
    let ask = Ask::post(CHAT, &hello());
    for bytes in [ask.bytes(), ask.chunked(&[1]), ask.chunked(&[3, 1, 7])] {
        let mut connection = server.connect();
        bytes.iter().for_each(|byte| connection.send(&[*byte]).unwrap());
        is_hello(&mut connection);
    }
    let mut connection = server.connect();
    let body = streamed(&hello());
    Ask::post(CHAT, &body).bytes().iter().for_each(|byte| connection.send(&[*byte]).unwrap());
    assert_eq!(Stream::new(connection).whole().good().choices[&0].text, "n-e-d-r-a-g.");
}

fn requests_cut_anywhere_are_the_whole_requests() {
    let server = Server::start(&[]);
    let mut random = Random::new(11);
    let mut connection = server.connect();
    for turn in 0..40 {
        let ask = Ask::post(CHAT, &hello());
        let bytes =
            if turn % 2 == 0 { ask.bytes() } else { ask.chunked(&[1 + random.below(60) as usize, 5]) };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (part, more) = rest.split_at((1 + random.below(80) as usize).min(rest.len()));
            connection.send(part).unwrap();
            rest = more;
            if random.below(4) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        is_hello(&mut connection);
    }
}

fn chunked_bodies_are_bodies() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    for sizes in [&[1][..], &[2, 3], &[1000], &[10, 1]] {
        connection.send(&Ask::post(CHAT, &hello()).chunked(sizes)).unwrap();
        is_hello(&mut connection);
    }
    let body = hello().to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    for (extension, trailer) in [(";name=value", ""), (" ", ""), ("", "x-trailer: y\r\n")] {
        let sent = format!("{head}{:X}{extension}\r\n{body}\r\n0\r\n{trailer}\r\n", body.len());
        connection.send(sent.as_bytes()).unwrap();
        is_hello(&mut connection);
    }
}

fn broken_chunks_are_refused() {
    let server = Server::start(&["--header-timeout", "1"]);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    for chunk in [
        "x\r\n",
        "-1\r\n{}\r\n",
        "5\r\n{}\r\n0\r\n\r\n",
        "FFFFFFFFFFFFFFFFF\r\n{}",
        "2\r\n{}x\r\n0\r\n\r\n",
        "\r\n\r\n",
    ] {
        let mut connection = server.connect();
        connection.send(format!("{head}{chunk}").as_bytes()).unwrap();
        connection.patience(Duration::from_secs(10));
        if let Ok(refused) = connection.response() {
            assert!((400..500).contains(&refused.status()), "{chunk:?}: {}", refused.status());
        }
        assert!(
            connection.is_closed_within(Duration::from_secs(10)),
            "{chunk:?} leaves nothing to go on with"
        );
    }
    server.post(CHAT, &hello()).good();
}

/// The time limit counts from the beginning: a byte now and then does not stretch it.
fn slow_headers_end() {
    let server = Server::start(&["--header-timeout", "1"]);
    let start = Instant::now();
    let mut silent = server.connect();
    let mut cut = server.connect();
    cut.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-slow: ").unwrap();
    let mut dripping = server.connect();
    dripping.send(b"GET /health HTTP/1.1\r\nx: ").unwrap();
    let mut dripped = 0;
    while start.elapsed() < Duration::from_secs(8) && dripping.send(b"y").is_ok() {
        dripped += 1;
        thread::sleep(Duration::from_millis(50));
        if start.elapsed() < Duration::from_secs(1) {
            server.get("/health").good();
        }
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "a header of {dripped} slow bytes was taken for {took:?}");
    for connection in [&mut cut, &mut silent] {
        let took = connection.closed_after(Duration::from_secs(5));
        assert!(took.is_some(), "half a header holds its connection");
    }
    server.post(CHAT, &hello()).good();
}

fn slow_bodies_are_408() {
    let server = Server::start(&["--header-timeout", "1"]);
    let bytes = Ask::post(CHAT, &hello()).bytes();
    let mut cut = server.connect();
    cut.send(&bytes[..bytes.len() - 5]).unwrap();
    let start = Instant::now();
    cut.response().unwrap().error(408);
    assert!(
        (Duration::from_millis(500)..Duration::from_secs(5)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    assert!(cut.is_closed_within(Duration::from_secs(5)));

    let mut dripping = server.connect();
    dripping.send(&bytes[..bytes.len() - 200]).unwrap();
    let start = Instant::now();
    for byte in &bytes[bytes.len() - 200..] {
        if dripping.send(&[*byte]).is_err() || start.elapsed() > Duration::from_secs(8) {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "a dripping body was taken for {:?}", start.elapsed());
    server.post(CHAT, &hello()).good();
}

fn idle_connections_cost_nothing_and_go() {
    let server = Server::start(&[]);
    let threads = server.threads().len();
    let idle: Vec<Connection> = (0..200).map(|_| server.connect()).collect();
    server.post(CHAT, &hello()).good();
    assert!(server.threads().len() <= threads + 8, "a connection is not a thread");
    let open = server.open_files();
    assert!(open > 200);
    drop(idle);
    let start = Instant::now();
    while server.open_files() > open - 190 {
        assert!(start.elapsed() < Duration::from_secs(5), "{} files are open", server.open_files());
        thread::sleep(Duration::from_millis(20));
    }
}

fn pipelined_requests_are_answered_in_order() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    let asks = [
        Ask::post(CHAT, &hello()),
        Ask::get("/health"),
        Ask::post(CHAT, &chat("Hello!")),
        Ask::get("/nothing"),
        Ask::get("/v1/models"),
    ];
    let bytes: Vec<u8> = asks.iter().flat_map(Ask::bytes).collect();
    connection.send(&bytes).unwrap();
    is_hello(&mut connection);
    assert_eq!(connection.response().unwrap().good()["status"], "ok");
    assert!(
        connection.response().unwrap().good()["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .starts_with("Hello!")
    );
    connection.response().unwrap().error(404);
    assert_eq!(connection.response().unwrap().good()["object"], "list");

    // A stream, and a request behind it.
    let mut connection = server.connect();
    let bytes = [Ask::post(CHAT, &streamed(&hello())).bytes(), Ask::get("/health").bytes()].concat();
    connection.send(&bytes).unwrap();
    let mut stream = Stream::new(connection);
    assert_eq!(stream.rest_of().unwrap().good().choices[&0].text, "n-e-d-r-a-g.");
    stream.connection.response().unwrap().good();
}

/// Every refusal that can be made with the connection intact, and a good request right behind it.
fn a_request_after_an_error_is_answered() {
    let server = Server::start(&["--api-key", "k"]);
    let key = |ask: Ask| ask.header("authorization", "Bearer k");
    let refused = [
        (401, Ask::post(CHAT, &hello())),
        (400, key(Ask::raw(CHAT, "{"))),
        (400, key(Ask::post(CHAT, &with(hello(), json!({"reasoning_efort": "low"}))))),
        (400, key(Ask::post(CHAT, &with(hello(), json!({"n": 0, "stream": true}))))),
        (404, key(Ask::post(CHAT, &with(hello(), json!({"model": "x"}))))),
        (404, key(Ask::post("/v1/nothing", &hello()))),
        (405, key(Ask::with("PUT", CHAT).body("something"))),
        (415, key(Ask::raw(CHAT, hello().to_string()).header("content-type", "text/plain"))),
    ];
    for (status, ask) in refused {
        for pipelined in [false, true] {
            let mut connection = server.connect();
            let good = key(Ask::post(CHAT, &hello())).bytes();
            if pipelined {
                connection.send(&[ask.bytes(), good.clone()].concat()).unwrap();
            } else {
                connection.send(&ask.bytes()).unwrap();
            }
            let response = connection.response().unwrap();
            response.error(status);
            assert!(!response.head.closes(), "{status} ends the connection");
            if !pipelined {
                connection.send(&good).unwrap();
            }
            is_hello(&mut connection);
        }
    }
}

fn a_length_and_chunks_at_once_are_not_two_requests() {
    let server = Server::start(&["--header-timeout", "1"]);
    let inner = String::from_utf8(Ask::get("/v1/models").bytes()).unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let mut connection = server.connect();
    connection.send(format!("{head}{:x}\r\n{inner}\r\n0\r\n\r\n", inner.len()).as_bytes()).unwrap();
    let mut answers = Vec::new();
    connection.patience(Duration::from_secs(3));
    while let Ok(response) = connection.response() {
        answers.push(response.status());
    }
    assert!(answers.iter().all(|status| *status == 400), "{answers:?}");
    let twice = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\ncontent-length: 50\r\n\r\n{{}}{inner}"
    );
    let mut connection = server.connect();
    connection.send(twice.as_bytes()).unwrap();
    connection.patience(Duration::from_secs(3));
    if let Ok(response) = connection.response() {
        assert!([400, 408].contains(&response.status()), "{}", response.status());
    }
}

fn garbage_ends_its_connection_only() {
    let server = Server::start(&["--header-timeout", "1"]);
    let mut running = server.begin(CHAT, &endless(lasting(1000)));
    let mut random = Random::new(5);
    let noise: Vec<u8> = (0..4096).map(|_| random.below(256) as u8).collect();
    let garbage: [&[u8]; 8] = [
        &noise,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET  /health  HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx\0y: z\r\n\r\n",
        b"\r\n\r\n\r\n\r\n",
    ];
    for bytes in garbage {
        let mut connection = server.connect();
        connection.send(bytes).unwrap();
        connection.patience(Duration::from_secs(5));
        if let Ok(response) = connection.response() {
            assert!((400..=505).contains(&response.status()), "{bytes:?}: {}", response.status());
        }
        assert!(connection.closed_after(Duration::from_secs(5)).is_some(), "{bytes:?} holds its connection");
    }
    assert_eq!(running.rest_of().unwrap().good().usage.unwrap()["completion_tokens"], lasting(1000));
}

fn a_client_that_asks_before_it_sends_is_told_to_go_on() {
    let server = Server::start(&["--body-limit", "64K"]);
    let bytes = Ask::post(CHAT, &hello()).header("expect", "100-continue").bytes();
    let body = bytes.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    let mut connection = server.connect();
    connection.send(&bytes[..body]).unwrap();
    assert_eq!(connection.head().unwrap().0.status, 100);
    connection.send(&bytes[body..]).unwrap();
    is_hello(&mut connection);
    let mut connection = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    );
    connection.send(head.as_bytes()).unwrap();
    connection.response().unwrap().error(413);
}

fn old_and_odd_versions_are_answered() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    connection.send(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
    // The head of such an answer has the older version; it ends by closing.
    assert!(connection.closed_after(Duration::from_secs(5)).is_some());
    let mut connection = server.connect();
    connection.send(&Ask::get("/health").header("connection", "close").bytes()).unwrap();
    connection.response().unwrap().good();
    assert!(connection.is_closed_within(Duration::from_secs(5)));
    let mut connection = server.connect();
    let body = streamed(&hello());
    connection.send(&Ask::post(CHAT, &body).header("connection", "close").bytes()).unwrap();
    let mut stream = Stream::new(connection);
    stream.rest_of().unwrap().good();
    assert!(stream.connection.is_closed_within(Duration::from_secs(5)));
}

fn closed_before_the_answer_harms_nobody() {
    let server = Server::start(&[]);
    let bytes = Ask::post(CHAT, &hello()).bytes();
    for cut in (0..bytes.len()).step_by(9) {
        let mut connection = server.connect();
        connection.send(&bytes[..cut]).unwrap();
    }
    for _ in 0..50 {
        let mut connection = server.connect();
        connection.send(&bytes).unwrap();
    }
    server.post(CHAT, &hello()).good();
    server.idle_within(Duration::from_secs(5));
}
