//! Bodies and headers that are too large, too deep, or not what they say: refused, and the next request is fine.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Ask, Connection, Response};
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, with};
use crate::server::Server;

crate::tests! {
    a_body_over_the_limit_is_413_and_the_next_request_is_answered,
    a_body_at_the_limit_is_taken,
    a_length_over_the_limit_is_refused_before_the_body_comes,
    headers_over_the_limit_are_431,
    bodies_that_are_no_json_are_400,
    deep_json_is_refused,
    huge_numbers_are_refused_by_name,
    strange_texts_are_taken_as_they_are;
}

fn hello() -> Value {
    with(chat("Hello!"), json!({"max_tokens": 2}))
}

/// A chat of `bytes` bytes.
fn sized(bytes: usize) -> Vec<u8> {
    let mut body = with(hello(), json!({"user": ""})).to_string();
    let room = bytes - body.len();
    body = body.replace("\"user\":\"\"", &format!("\"user\":\"{}\"", "x".repeat(room)));
    assert_eq!(body.len(), bytes);
    body.into_bytes()
}

/// A refused body is read to its end, or the connection is closed and says so.
#[track_caller]
fn next_is_good(mut connection: Connection, refused: &Response) {
    if refused.head.closes() {
        assert!(
            connection.is_closed_within(Duration::from_secs(5)),
            "it said `connection: close` and stays open"
        );
    } else {
        connection.ask(&Ask::post(CHAT, &hello())).good();
    }
}

fn a_body_over_the_limit_is_413_and_the_next_request_is_answered() {
    let server = Server::start(&["--body-limit", "64K"]);
    for bytes in [(64 << 10) + 1, 70_000, 200_000, 5 << 20] {
        let ask = Ask::raw(CHAT, sized(bytes));
        for sent in [ask.bytes(), ask.chunked(&[8192]), ask.chunked(&[1 << 20])] {
            let mut connection = server.connect();
            // The server may end the connection while the rest is under way.
            let whole = connection.send(&sent);
            match connection.response() {
                Ok(refused) => {
                    let error = refused.error(413);
                    assert!(error["message"].as_str().unwrap().contains("65536"), "{error}");
                    if whole.is_ok() {
                        next_is_good(connection, &refused);
                    }
                }
                Err(error) => assert!(bytes > 1 << 20, "no answer to {bytes} bytes: {error}"),
            }
        }
        server.post(CHAT, &hello()).good();
    }
}

fn a_body_at_the_limit_is_taken() {
    let server = Server::start(&["--body-limit", "64K"]);
    server.ask(&Ask::raw(CHAT, sized(64 << 10))).good();
    let mut connection = server.connect();
    connection.send(&Ask::raw(CHAT, sized(64 << 10)).chunked(&[1000])).unwrap();
    connection.response().unwrap().good();
}

fn a_length_over_the_limit_is_refused_before_the_body_comes() {
    let server = Server::start(&["--body-limit", "64K"]);
    for length in ["9999999999", "9223372036854775807"] {
        let mut connection = server.connect();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        connection.send(head.as_bytes()).unwrap();
        let start = Instant::now();
        let refused = connection.response().unwrap();
        refused.error(413);
        assert!(start.elapsed() < Duration::from_secs(1));
        assert!(refused.head.closes(), "the body never came, so the connection cannot go on");
    }
    for length in ["99999999999999999999999", "-1", "1, 2", "0x10", "+5", ""] {
        let mut connection = server.connect();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        connection.send(head.as_bytes()).unwrap();
        if let Ok(refused) = connection.response() {
            assert!([400, 413].contains(&refused.status()), "{length}: {}", refused.status());
        }
    }
}

fn headers_over_the_limit_are_431() {
    let server = Server::start(&[]);
    let padded = |size: usize| Ask::get("/health").header("x-padding", &"x".repeat(size));
    server.ask(&padded(4 << 10)).good();
    let many =
        |count: usize| (0..count).fold(Ask::get("/health"), |ask, at| ask.header(&format!("x-{at}"), "y"));
    server.ask(&many(40)).good();
    for ask in [padded(100 << 10), padded(2 << 20), many(5000)] {
        let mut connection = server.connect();
        // The server may end the connection while the rest is under way.
        let whole = connection.send(&ask.bytes());
        match connection.response() {
            Ok(refused) => assert_eq!(refused.status(), 431),
            Err(error) => assert!(whole.is_err() || ask.bytes().len() > 1 << 20, "no answer: {error}"),
        }
    }
    let long = Ask::get(&format!("/{}", "x".repeat(100 << 10)));
    let mut connection = server.connect();
    connection.send(&long.bytes()).unwrap();
    let status = connection.response().unwrap().status();
    assert!([404, 414, 431].contains(&status), "{status}");
    server.post(CHAT, &hello()).good();
}

fn bodies_that_are_no_json_are_400() {
    let server = Server::start(&[]);
    let good = hello().to_string();
    let mut connection = server.connect();
    let mut bodies: Vec<Vec<u8>> = [
        "",
        " ",
        "{",
        "}",
        "[]",
        "5",
        "null",
        "\"x\"",
        "true",
        "{}}",
        "{'a':1}",
        "{a:1}",
        "{\"a\":}",
        "{\"model\":\"tiny\",}",
        "nul",
        "{\"temperature\":NaN}",
        "{\"temperature\":Infinity}",
        "{\"temperature\":-Infinity}",
        "{\"temperature\":+1}",
        "{\"temperature\":01}",
        "{\"temperature\":.5}",
        "{\"temperature\":1.}",
        "{\"temperature\":0x1}",
        "{\"model\":\"\u{1}\"}",
        "{\"model\":\"\\x\"}",
        "{\"model\":\"\\ud83d\"}",
        "{\"model\":\"\\udc00\\ud83d\"}",
        "// no\n{}",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    bodies.push([good.as_bytes(), b"x"].concat());
    bodies.push([good.as_bytes(), b"{}"].concat());
    bodies.push([good.as_bytes(), b"\0"].concat());
    bodies.push([b"\xEF\xBB\xBF", good.as_bytes()].concat());
    bodies.push(good.encode_utf16().flat_map(u16::to_le_bytes).collect());
    for bytes in [&b"\xFF"[..], b"\xC3", b"\xF0\x9F\x99", b"\xED\xA0\x80", b"\xC0\x80", b"\xF5\x80\x80\x80"] {
        let (before, after) = good.split_at(good.find("Hello").unwrap());
        bodies.push([before.as_bytes(), bytes, after.as_bytes()].concat());
    }
    for end in (1..good.len()).step_by(7) {
        bodies.push(good.as_bytes()[..end].to_vec());
    }
    for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
        for body in &bodies {
            let refused = connection.ask(&Ask::raw(path, body.clone()));
            assert_eq!(
                refused.status(),
                400,
                "{path} {:?}: {}",
                String::from_utf8_lossy(body),
                refused.text()
            );
            refused.error(400);
        }
    }
    connection.ask(&Ask::post(CHAT, &hello())).good();
}

fn deep_json_is_refused() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    for depth in [130, 1000, 100_000] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let inner = if open == "[" { "" } else { "1" };
            let deep = open.repeat(depth) + inner + &close.repeat(depth);
            let fields = ["user", "messages", "metadata", "stop", "logit_bias", "tools", "unknown"];
            for field in fields {
                let body = format!("{{\"{field}\":{deep},{}", &hello().to_string()[1..]);
                connection.ask(&Ask::raw(CHAT, body)).error(400);
            }
            connection.ask(&Ask::raw(CHAT, deep)).error(400);
            connection.ask(&Ask::raw(CHAT, open.repeat(depth))).error(400);
        }
    }
    connection.ask(&Ask::post(CHAT, &hello())).good();
}

fn huge_numbers_are_refused_by_name() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    for field in [
        "max_tokens",
        "n",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
    ] {
        for number in
            ["1e999", "-1e999", "1e400", "123456789012345678901234567890", "-123456789012345678901234567890"]
        {
            let body = format!(
                "{{\"{field}\":{number},{}",
                &chat("Hello!").to_string()[1..].replace("\"temperature\":0", "\"stream\":false")
            );
            // A temperature and a repetition penalty may be any that 32 bits hold.
            let open = ["temperature", "repetition_penalty"].contains(&field);
            if !(open && number == "123456789012345678901234567890") {
                let refused = connection.ask(&Ask::raw(CHAT, body));
                assert_eq!(refused.status(), 400, "{field} {number}: {}", refused.text());
            }
        }
        let digits = "9".repeat(100_000);
        let body = format!("{{\"{field}\":{digits},{}", &json!({"messages": []}).to_string()[1..]);
        connection.ask(&Ask::raw(CHAT, body)).error(400);
    }
    // Small exponents are numbers.
    let body = hello().to_string().replace("\"temperature\":0", "\"temperature\":1e-400");
    connection.ask(&Ask::raw(CHAT, body)).good();
}

fn strange_texts_are_taken_as_they_are() {
    let server = Server::start(&[]);
    let texts = [
        "\u{0}",
        "\u{FEFF}Hello",
        "\u{202E}olleH",
        "e\u{301}",
        "🏳️‍🌈👨‍👩‍👧",
        "\r\n\t",
        "</s>",
        "{{ messages }}",
        "{% for x in y %}",
        "\u{10FFFF}\u{FFFF}",
        "\u{1b}[31m",
        "%s%n",
        "\u{7f}",
    ];
    for text in texts {
        let reply = server.post(CHAT, &with(chat(text), json!({"max_tokens": 2}))).good();
        let tokens =
            server.post("/tokenize", &json!({"messages": [{"role": "user", "content": text}]})).good();
        assert_eq!(reply["usage"]["prompt_tokens"], tokens["count"], "{text:?}");
        server.post(COMPLETIONS, &with(completion(text), json!({"max_tokens": 2, "stop": text}))).good();
    }
}
