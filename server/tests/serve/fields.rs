//! Fields: every one of either wire with good and bad values; nothing unknown goes through.

use serde_json::{Value, json};

use crate::client::{Ask, Response, is_of};
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, with};
use crate::server::Server;

crate::tests! {
    good_values_are_taken,
    bad_values_are_refused_by_name,
    every_field_meets_every_type_of_value,
    unknown_fields_are_refused_by_name_wherever_they_are,
    each_wire_has_fields_of_its_own,
    a_field_written_twice_is_refused,
    absent_and_null_are_the_same,
    messages_that_are_none_are_refused_with_their_place,
    prompts_that_are_none_are_refused,
    no_choices_streamed_is_an_error_and_an_end;
}

/// A field, and values of it. What a list needs beside it is in [`company`].
struct Field {
    name: &'static str,
    wire: Wire,
    good: fn() -> Vec<Value>,
    bad: fn() -> Vec<Value>,
}

#[derive(Clone, Copy, PartialEq)]
enum Wire {
    Both,
    Chat,
    Text,
}

macro_rules! field {
    ($name:literal, $wire:ident, good $good:tt, bad $bad:tt) => {
        Field { name: $name, wire: Wire::$wire, good: || values(json!($good)), bad: || values(json!($bad)) }
    };
}

fn values(list: Value) -> Vec<Value> {
    list.as_array().expect("a list of values").clone()
}

const FIELDS: &[Field] = &[
    field!("max_tokens", Both, good [1, 5, 1000000, null], bad [0, -1, 1.5, "5", true, [], {}, 1e30, -9223372036854775808i64]),
    field!("max_completion_tokens", Chat, good [1, 5, 1000000, null], bad [0, -1, 1.5, "5", true, [], {}]),
    field!("temperature", Both, good [0, 0.0, 1, 0.7, 2, null], bad [-0.1, "1", true, [], {}, 1e39, -1]),
    field!("top_p", Both, good [1, 0.5, 1e-3, null], bad [-0.1, 1.01, "1", true, [], {}, 0]),
    field!("top_k", Both, good [0, 1, 50, 2048, null], bad [-2, 1.5, "5", true, [], {}]),
    field!("min_p", Both, good [0, 0.5, 1, null], bad [-0.1, 1.1, "0", true, [], {}]),
    field!("n", Both, good [1, 2, 16, null], bad [0, -1, 17, 1.5, "2", true, [], {}, 4294967297i64]),
    field!("stream", Both, good [false, null], bad ["true", 1, 0, [], {}]),
    field!("stream_options", Both, good [null, {}, {"include_usage": true}, {"include_usage": false}], bad [5, [], "x", true, {"include_usage": 1}, {"include_usage": "yes"}, {"other": true}]),
    field!("stop", Both, good ["x", ["x"], ["x", "yz"], [], null], bad [5, [5], "", ["x", ""], {}, true, [["x"]], ["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p","q"]]),
    field!("stop_token_ids", Both, good [[], [5], [5, 6, 2047], null], bad [5, "5", ["5"], [-1], [2048], [1.5], {}, [[5]], [4294967301i64]]),
    field!("seed", Both, good [0, 1, 18446744073709551615u64, null], bad [1.5, "1", true, [], {}, 1e30]),
    field!("presence_penalty", Both, good [0, -2, 2, 1.5, null], bad [2.1, -2.1, "0", true, [], {}]),
    field!("frequency_penalty", Both, good [0, -2, 2, 1.5, null], bad [2.1, -2.1, "0", true, [], {}]),
    field!("repetition_penalty", Both, good [1, 1.5, 0.5, null], bad [0, -1, "1", true, [], {}]),
    field!("logit_bias", Both, good [{}, {"5": 1}, {"5": -100, "2047": 100}, null], bad [[], 5, "x", true, {"x": 1}, {"5": 101}, {"5": -101}, {"2048": 1}, {"-1": 1}, {"5": "1"}, {"5": null}, {"1.5": 1}, {"": 1}]),
    field!("logprobs", Chat, good [true, false, null], bad [5, "true", [], {}]),
    field!("logprobs", Text, good [0, 1, 20, null], bad [true, -1, 21, 1.5, "1", [], {}]),
    field!("top_logprobs", Chat, good [0, 1, 20, null], bad [-1, 21, 1.5, "1", true, [], {}]),
    field!("ignore_eos", Both, good [true, false, null], bad [1, "true", [], {}]),
    field!("reasoning_effort", Chat, good ["none", "low", "medium", "high", null], bad ["huge", "", 5, true, [], {}]),
    field!("enable_thinking", Chat, good [true, false, null], bad [1, "on", [], {}]),
    field!("chat_template_kwargs", Chat, good [{}, {"enable_thinking": true}, {"enable_thinking": true, "reasoning_effort": "low"}, {"enable_thinking": false, "reasoning_effort": "none"}, null], bad [5, [], "x", {"enable_thinking": 1}, {"reasoning_effort": 5}, {"other": 1}]),
    field!("response_format", Chat, good [{"type": "text"}, null], bad [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {"type": "text", "extra": 1}, {}, 5, "text", []]),
    field!("tools", Chat, good [[], null], bad [[{"type": "function", "function": {"name": "f", "parameters": {}}}], {}, 5, "x"]),
    field!("tool_choice", Chat, good ["none", null], bad ["auto", "required", {"type": "function", "function": {"name": "f"}}, 5, [], "any"]),
    field!("suffix", Text, good [null], bad ["x", 5, [], {}]),
    field!("echo", Text, good [false, null], bad [true, 1, "x", [], {}]),
    field!("best_of", Text, good [1, null], bad [2, 0, "1", -1, 1.5, [], {}]),
];

/// A small request of either wire.
fn plain(path: &str) -> Value {
    let small = json!({"max_tokens": 1});
    if path == CHAT { with(chat("Hello!"), small) } else { with(completion("Hello"), small) }
}

/// The request that has `field`, and what the field needs beside it.
fn company(path: &str, field: &str, value: &Value) -> Value {
    let mut body = plain(path);
    match field {
        "top_logprobs" => body["logprobs"] = true.into(),
        "stream_options" => body["stream"] = true.into(),
        "max_completion_tokens" => {
            body.as_object_mut().unwrap().remove("max_tokens");
        }
        _ => {}
    }
    body[field] = value.clone();
    body
}

fn each(mut check: impl FnMut(&str, &Field)) {
    for field in FIELDS {
        for (path, other) in [(CHAT, Wire::Text), (COMPLETIONS, Wire::Chat)] {
            if field.wire != other {
                check(path, field);
            }
        }
    }
}

fn good_values_are_taken() {
    let server = Server::start(&["--context", "128"]);
    let mut connection = server.connect();
    each(|path, field| {
        for value in (field.good)() {
            let reply = connection.ask(&Ask::post(path, &company(path, field.name, &value)));
            assert_eq!(reply.status(), 200, "{path} {} {value}: {}", field.name, reply.text());
        }
    });
}

fn bad_values_are_refused_by_name() {
    let server = Server::start(&["--context", "128"]);
    let mut connection = server.connect();
    let mut wrong = Vec::new();
    each(|path, field| {
        for value in (field.bad)() {
            let reply = connection.ask(&Ask::post(path, &company(path, field.name, &value)));
            let named = is_refused_by_name(&reply, field.name);
            if !named {
                wrong.push(format!("{path} {} {value}: {} {}", field.name, reply.status(), reply.text()));
            }
        }
    });
    assert!(wrong.is_empty(), "{} not refused by name:\n{}", wrong.len(), wrong.join("\n"));
}

fn is_refused_by_name(reply: &Response, field: &str) -> bool {
    reply.status() == 400 && is_of(reply.error(400)["param"].as_str().unwrap_or_default(), field)
}

/// Whatever is put in a field: a good answer, or a 400 that names it.
fn every_field_meets_every_type_of_value() {
    let server = Server::start(&["--context", "128", "--max-tokens-default", "2"]);
    let mut connection = server.connect();
    let kinds = values(json!([
        null, true, false, 0, 1, -1, 0.5, 1e300, -1e300, 18446744073709551615u64, "", "x", "🙂\u{0}", [], [null], [1], ["x"],
        [[]], [{}], {}, {"": null}, {"a": 1}, {"type": "text"},
    ]));
    let names = FIELDS
        .iter()
        .map(|field| field.name)
        .chain(["model", "messages", "prompt", "messages", "user", "metadata"]);
    for name in names {
        for path in [CHAT, COMPLETIONS] {
            for value in &kinds {
                let reply = connection.ask(&Ask::post(path, &company(path, name, value)));
                match reply.status() {
                    200 => {}
                    404 if name == "model" => {}
                    _ => assert!(
                        is_refused_by_name(&reply, name),
                        "{path} {name} {value}: {} {}",
                        reply.status(),
                        reply.text()
                    ),
                }
            }
        }
    }
}

/// A misspelt field does nothing anywhere, so it is refused.
fn unknown_fields_are_refused_by_name_wherever_they_are() {
    let server = Server::start(&[]);
    let unknown = [
        "reasoning_efort",
        "Temperature",
        "max_token",
        "top-p",
        "extra_body",
        "functions",
        "",
        " n",
        "n ",
        "é",
        "audio",
    ];
    for path in [CHAT, COMPLETIONS] {
        for name in unknown {
            let error = server.post(path, &with(plain(path), json!({name: 1}))).error(400);
            assert_eq!(error["param"], name);
        }
        let nested =
            with(plain(path), json!({"stream": true, "stream_options": {"include_usage": true, "foo": 1}}));
        assert_eq!(server.post(path, &nested).error(400)["param"], "stream_options.foo");
    }
    let nested = |more: Value| {
        server.post(CHAT, &with(plain(CHAT), more)).error(400)["param"].as_str().unwrap().to_owned()
    };
    assert_eq!(nested(json!({"chat_template_kwargs": {"thinking": true}})), "chat_template_kwargs.thinking");
    let second = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "foo": 1}, {"role": "user", "content": "c"}]});
    assert_eq!(nested(second), "messages[1].foo");
    let part = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}]});
    assert_eq!(nested(part), "messages[0].content[0].foo");
    assert_eq!(nested(json!({"response_format": {"type": "text", "foo": 1}})), "response_format.foo");
}

fn each_wire_has_fields_of_its_own() {
    let server = Server::start(&[]);
    let on = |path: &str, more: Value, name: &str| {
        assert_eq!(server.post(path, &with(plain(path), more)).error(400)["param"], name);
    };
    on(CHAT, json!({"prompt": "a"}), "prompt");
    on(CHAT, json!({"best_of": 1}), "best_of");
    on(CHAT, json!({"echo": false}), "echo");
    on(COMPLETIONS, json!({"messages": []}), "messages");
    on(COMPLETIONS, json!({"top_logprobs": 1}), "top_logprobs");
    on(COMPLETIONS, json!({"tools": []}), "tools");
    on(COMPLETIONS, json!({"enable_thinking": true}), "enable_thinking");
    // What only means something beside another field is refused without it.
    on(CHAT, json!({"top_logprobs": 1}), "top_logprobs");
    on(CHAT, json!({"top_logprobs": 1, "logprobs": false}), "top_logprobs");
}

fn a_field_written_twice_is_refused() {
    let server = Server::start(&[]);
    let twice = |path: &str, field: &str, value: &str| {
        let body = plain(path).to_string();
        let body = format!("{{\"{field}\":{value},{}", &body[1..]);
        server.ask(&Ask::raw(path, body)).error(400)
    };
    assert_eq!(twice(CHAT, "temperature", "1")["param"], "temperature");
    assert_eq!(twice(CHAT, "messages", "[]")["param"], "messages");
    assert_eq!(twice(COMPLETIONS, "prompt", "\"a\"")["param"], "prompt");
    assert_eq!(twice(CHAT, "max\\u005ftokens", "1")["param"], "max_tokens");
    let nested = |field: &str, value: &str| {
        let body = plain(CHAT).to_string();
        let error = server.ask(&Ask::raw(CHAT, format!("{{\"{field}\":{value},{}", &body[1..]))).error(400);
        assert!(is_of(error["param"].as_str().unwrap_or_default(), field), "{error}");
    };
    nested("logit_bias", "{\"5\":1,\"5\":2}");
    nested("stream_options", "{\"include_usage\":true,\"include_usage\":false}");
    let message = json!({"max_tokens": 1}).to_string();
    let body = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\",\"role\":\"system\"}}],{}",
        &message[1..]
    );
    server.ask(&Ask::raw(CHAT, body)).names("messages");
}

fn absent_and_null_are_the_same() {
    let server = Server::start(&[]);
    for path in [CHAT, COMPLETIONS] {
        let plain =
            with(plain(path), json!({"seed": 5, "temperature": 1, "max_tokens": 12, "ignore_eos": true}));
        let expected = server.post(path, &plain).good()["choices"].clone();
        let mut nulls = plain;
        each(|of, field| {
            if of == path && nulls[field.name].is_null() {
                nulls[field.name] = Value::Null;
            }
        });
        assert_eq!(server.post(path, &nulls).good()["choices"], expected);
    }
}

fn messages_that_are_none_are_refused_with_their_place() {
    let server = Server::start(&[]);
    let refused = |messages: Value, place: &str| {
        let error = server.post(CHAT, &with(plain(CHAT), json!({"messages": messages}))).error(400);
        assert!(
            is_of(error["param"].as_str().unwrap_or_default(), place),
            "{messages}: {place} and not {error}"
        );
    };
    for messages in [json!(null), json!([]), json!({}), json!("x"), json!(5)] {
        refused(messages, "messages");
    }
    let user = json!({"role": "user", "content": "a"});
    refused(json!([user, 5]), "messages[1]");
    refused(json!([{}]), "messages[0]");
    refused(json!([user, {"content": "a"}]), "messages[1].role");
    refused(json!([{"role": "user"}]), "messages[0].content");
    refused(json!([{"role": "user", "content": null}]), "messages[0].content");
    refused(json!([{"role": "user", "content": 5}]), "messages[0].content");
    refused(json!([{"role": "user", "content": {}}]), "messages[0].content");
    refused(json!([{"role": "wizard", "content": "a"}]), "messages[0].role");
    refused(json!([{"role": 5, "content": "a"}]), "messages[0].role");
    refused(json!([user, {"role": "system", "content": "late"}]), "messages");
    refused(json!([user, {"role": "user", "content": [user]}]), "messages[1].content[0]");
    refused(json!([{"role": "user", "content": [5]}]), "messages[0].content[0]");
    refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0]");
    for kind in ["image_url", "input_audio", "video_url", "file"] {
        refused(
            json!([user, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:,"}}]}]),
            "messages[1].content[1]",
        );
    }
    let missing = json!({"model": "tiny"});
    server.post(CHAT, &missing).names("messages");
}

fn prompts_that_are_none_are_refused() {
    let server = Server::start(&[]);
    for prompt in [
        json!(null),
        json!(5),
        json!([]),
        json!(""),
        json!({}),
        json!([[]]),
        json!([17, "x"]),
        json!([-1]),
        json!([2048]),
        json!([1.5]),
        json!(true),
        json!([true]),
        json!([[1], "x"]),
        json!(["x", [1]]),
        json!(["x", ""]),
        json!([[1], []]),
        json!([[[1]]]),
        json!([4294967296i64 + 17]),
    ] {
        server
            .post(COMPLETIONS, &json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}))
            .names("prompt");
    }
    server.post(COMPLETIONS, &json!({"model": "tiny"})).names("prompt");
    // So many prompts that no queue holds them are a refusal, not a pile.
    let many = vec!["a"; 100_000];
    let reply = server.post(COMPLETIONS, &json!({"model": "tiny", "prompt": many, "max_tokens": 1}));
    assert!([400, 413, 429].contains(&reply.status()), "{} {}", reply.status(), reply.text());
}

/// `n: 0`, streamed, is a 400 and not an event and an open socket.
fn no_choices_streamed_is_an_error_and_an_end() {
    let server = Server::start(&[]);
    for path in [CHAT, COMPLETIONS] {
        for n in [0, 17] {
            let mut connection = server.connect();
            let refused =
                connection.ask(&Ask::post(path, &with(plain(path), json!({"n": n, "stream": true}))));
            refused.names("n");
            connection.ask(&Ask::post(path, &plain(path))).good();
        }
    }
    let two = Server::start(&["--max-n", "2"]);
    two.post(CHAT, &with(plain(CHAT), json!({"n": 3}))).names("n");
    two.post(CHAT, &with(plain(CHAT), json!({"n": 2}))).good();
}
