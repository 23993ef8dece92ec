//! Random and mutated bodies: a good answer, or an error that names a field or says that it is no JSON. Never a
//! panic, never silence.

use runtime::receipts::Random;
use serde_json::{Value, json};

use crate::client::{Ask, Connection, error_object};
use crate::prompts::{CHAT, COMPLETIONS, byte_token, every_kind, with};
use crate::server::Server;

crate::tests! {
    mutated_values_are_answered_or_refused_by_name,
    mutated_bytes_are_answered_or_refused,
    random_objects_are_answered_or_refused_by_name;
}

const PATHS: [&str; 4] = [CHAT, COMPLETIONS, "/tokenize", "/detokenize"];

/// Bodies that are good, small, and of every wire.
fn seeds() -> Vec<(&'static str, Value)> {
    let small = json!({"max_tokens": 1, "n": 1});
    let mut seeds: Vec<_> =
        every_kind().into_iter().map(|prompt| (prompt.path, with(prompt.body, small.clone()))).collect();
    let frame = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
    let parts = json!([
        {"type": "image_url", "image_url": {"url": frame, "detail": "auto"}},
        {"type": "video", "video": [frame, frame, frame], "fps": 2},
        {"type": "text", "text": "Describe them."},
    ]);
    let seen = json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 1});
    seeds.extend([(CHAT, seen.clone()), ("/tokenize", json!({"messages": seen["messages"]}))]);
    seeds.push(("/tokenize", json!({"prompt": "Spell garden backwards."})));
    seeds.push(("/tokenize", json!({"messages": [{"role": "user", "content": "Hello!"}]})));
    seeds.push(("/detokenize", json!({"tokens": [17, 259, byte_token(b'a')]})));
    seeds
}

fn server() -> Server {
    Server::start(&["--context", "128", "--max-tokens-default", "2", "--max-n", "4"])
}

/// Asks, and requires one of the answers that are allowed; whether it was a refusal that names a field.
fn answered(server: &Server, connection: &mut Connection, path: &str, body: &[u8]) -> Option<String> {
    let ask = Ask::raw(path, body);
    let shown = || format!("{path} {}", String::from_utf8_lossy(body));
    let response = match connection.try_ask(&ask) {
        Ok(response) => response,
        Err(error) => panic!("{error}: {}", shown()),
    };
    if response.head.closes() {
        *connection = server.connect();
    }
    if response.status() == 200 {
        if response.head.get("content-type") != Some("text/event-stream") {
            response.json();
        }
        return None;
    }
    assert!(
        [400, 404, 413, 429].contains(&response.status()),
        "{} {}: {}",
        response.status(),
        response.text(),
        shown()
    );
    let error = error_object(&response.json());
    error["param"].as_str().map(str::to_owned)
}

fn pick<T>(random: &mut Random, list: &[T]) -> usize {
    random.below(list.len() as u32) as usize
}

/// A value of some kind, not deep.
fn value(random: &mut Random, depth: u32) -> Value {
    let texts = [
        "",
        "x",
        "none",
        "text",
        "user",
        "assistant",
        "🙂",
        "\u{0}",
        "-1",
        "1e999",
        "low",
        "tiny",
        "</think>",
    ];
    let numbers = [
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(0.5),
        json!(1e300),
        json!(-1e-300),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(2047),
        json!(2048),
    ];
    match random.below(if depth == 0 { 5 } else { 8 }) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2 | 3 => numbers[pick(random, &numbers)].clone(),
        4 => json!(texts[pick(random, &texts)]),
        5 | 6 => (0..random.below(4)).map(|_| value(random, depth - 1)).collect(),
        _ => {
            let keys = ["type", "text", "role", "content", "include_usage", "enable_thinking", "5", "a"];
            (0..random.below(4))
                .map(|_| (keys[pick(random, &keys)].to_owned(), value(random, depth - 1)))
                .collect()
        }
    }
}

/// Changes one place somewhere in `body`.
fn change(random: &mut Random, body: &mut Value) {
    match body {
        Value::Object(object) if !object.is_empty() && random.below(4) > 0 => {
            let keys: Vec<String> = object.keys().cloned().collect();
            let key = &keys[pick(random, &keys)];
            match random.below(8) {
                0 => {
                    object.remove(key);
                }
                1 => {
                    let moved = object.remove(key).expect("a key");
                    object.insert(format!("{key}_"), moved);
                }
                _ => change(random, &mut object[key]),
            }
        }
        Value::Array(list) if !list.is_empty() && random.below(4) > 0 => {
            let at = pick(random, list);
            match random.below(6) {
                0 => {
                    list.remove(at);
                }
                1 => list.insert(at, list[at].clone()),
                _ => change(random, &mut list[at]),
            }
        }
        other => *other = value(random, 3),
    }
}

fn mutated_values_are_answered_or_refused_by_name() {
    let server = server();
    let mut connection = server.connect();
    let (mut random, seeds) = (Random::new(1), seeds());
    let mut named = std::collections::BTreeSet::new();
    for _ in 0..4000 {
        let (path, mut body) = seeds[pick(&mut random, &seeds)].clone();
        for _ in 0..=random.below(2) {
            change(&mut random, &mut body);
        }
        if !body.is_object() {
            continue;
        }
        named.extend(answered(&server, &mut connection, path, body.to_string().as_bytes()));
    }
    // The mutations reach most fields.
    assert!(named.len() > 30, "{named:?}");
    server.idle_within(std::time::Duration::from_secs(5));
}

fn mutated_bytes_are_answered_or_refused() {
    let server = server();
    let mut connection = server.connect();
    let (mut random, seeds) = (Random::new(2), seeds());
    let words: [&[u8]; 12] =
        [b"{", b"}", b"[", b"]", b"\"", b":", b",", b"\\u0000", b"1e9", b"null", b"\xFF", b"\xF0\x9F"];
    for _ in 0..4000 {
        let (path, body) = &seeds[pick(&mut random, &seeds)];
        let mut body = body.to_string().into_bytes();
        for _ in 0..=random.below(3) {
            if body.is_empty() {
                break;
            }
            let at = pick(&mut random, &body);
            match random.below(4) {
                0 => body[at] = random.below(256) as u8,
                1 => {
                    body.remove(at);
                }
                2 => {
                    let word = words[pick(&mut random, &words)];
                    body.splice(at..at, word.iter().copied());
                }
                _ => body.truncate(at + 1),
            }
        }
        answered(&server, &mut connection, path, &body);
    }
    server.idle_within(std::time::Duration::from_secs(5));
}

fn random_objects_are_answered_or_refused_by_name() {
    let server = server();
    let mut connection = server.connect();
    let mut random = Random::new(3);
    let names: std::collections::BTreeSet<String> =
        seeds().iter().flat_map(|(_, body)| body.as_object().expect("an object").keys().cloned()).collect();
    let names: Vec<String> = names.into_iter().collect();
    for _ in 0..4000 {
        let path = PATHS[pick(&mut random, &PATHS)];
        let body: serde_json::Map<String, Value> = (0..random.below(5))
            .map(|_| (names[pick(&mut random, &names)].clone(), value(&mut random, 3)))
            .collect();
        let body = Value::Object(body);
        let named = answered(&server, &mut connection, path, body.to_string().as_bytes());
        // Each of these is an object, so each refusal has a field to name.
        let fine = named.is_some() || connection.ask(&Ask::post(path, &body)).status() != 400;
        assert!(fine, "{path} {body}: a refusal that names nothing");
    }
}
