//! Replies: streamed = whole, in every kind; what stops, what thinks, what is counted.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Ask, Connection};
use crate::events::Choice;
use crate::prompts::{CHAT, COMPLETIONS, Prompt, bytes_of, chat, completion, endless, every_kind, with};
use crate::server::{Server, device};

crate::tests! {
    streamed_is_whole_for_every_kind_of_prompt,
    equal_requests_get_equal_replies_also_on_one_connection,
    a_reply_has_exactly_these_fields,
    a_stream_has_exactly_these_chunks,
    usage_comes_only_when_it_is_asked_for,
    characters_are_never_split,
    stop_texts_never_leak,
    nothing_follows_a_stop_text,
    thinking_has_a_field_of_its_own,
    short_questions_do_not_think_unless_asked,
    finish_reasons_are_true,
    choices_of_several_prompts_are_in_order,
    legacy_logprobs_line_up_with_the_text,
    legacy_offsets_count_whole_characters,
    a_silent_stream_is_kept_alive;
    whole_logprobs_take_little_memory_and_hold_nobody_up,
}

/// A whole reply and the same one streamed.
#[track_caller]
fn both_ways(server: &Server, prompt: &Prompt) -> Vec<Choice> {
    let name = prompt.name;
    let whole = server.post(prompt.path, &prompt.body).good();
    let choices: Vec<Choice> = whole["choices"].as_array().expect("choices").iter().map(Choice::of).collect();
    let stream = server.stream(prompt.path, &prompt.body);
    assert_eq!(
        stream.choices.keys().copied().collect::<Vec<_>>(),
        (0..choices.len() as u64).collect::<Vec<_>>()
    );
    for (choice, streamed) in choices.iter().zip(stream.choices.values()) {
        assert_eq!(choice.text, streamed.text, "{name}");
        assert_eq!(
            choice.reasoning.as_deref().unwrap_or_default(),
            streamed.reasoning.as_deref().unwrap_or_default(),
            "{name}"
        );
        assert_eq!(choice.finish_reason, streamed.finish_reason, "{name}");
        assert_eq!(choice.token_sha, streamed.token_sha, "{name}");
        assert_eq!(choice.logprobs, streamed.logprobs, "{name}");
    }
    assert_eq!(Some(&whole["usage"]), stream.usage.as_ref(), "{name}");
    if !prompt.body["seed"].is_null() {
        assert_eq!(whole["seed"], prompt.body["seed"], "{name}");
        assert_eq!(stream.seed.as_ref(), Some(&whole["seed"]), "{name}");
    }
    choices
}

fn streamed_is_whole_for_every_kind_of_prompt() {
    let server = Server::start(&[]);
    for prompt in every_kind() {
        let choices = both_ways(&server, &prompt);
        assert_eq!(
            choices.len() as u64,
            prompt.body["n"].as_u64().unwrap_or(1) * lists(&prompt.body["prompt"]),
            "{}",
            prompt.name
        );
    }
}

/// How many prompts there are in a `prompt` field.
fn lists(prompt: &Value) -> u64 {
    match prompt.as_array() {
        Some(list) if !list[0].is_number() => list.len() as u64,
        _ => 1,
    }
}

fn equal_requests_get_equal_replies_also_on_one_connection() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    for prompt in every_kind().iter().step_by(3) {
        let ask = Ask::post(prompt.path, &prompt.body);
        let choices = |connection: &mut Connection| connection.ask(&ask).good()["choices"].clone();
        assert_eq!(choices(&mut connection), choices(&mut connection), "{}", prompt.name);
    }
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

fn a_reply_has_exactly_these_fields() {
    let server = Server::start(&[]);
    let reply = server.post(CHAT, &chat("Spell garden backwards.")).good();
    let mut names = keys(&reply);
    names.sort_unstable();
    assert_eq!(names, ["choices", "created", "id", "model", "object", "seed", "usage"]);
    assert_eq!(reply["object"], "chat.completion");
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(reply["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(reply["model"], "tiny");
    assert_eq!(
        reply["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "n-e-d-r-a-g.", "reasoning_content": null, "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
            "token_sha": "f4c8f07e9377",
        }])
    );
    let usage = json!({
        "prompt_tokens": 19, "completion_tokens": 8, "total_tokens": 27,
        "completion_tokens_details": {"reasoning_tokens": 0},
    });
    assert_eq!(reply["usage"], usage);
    let other = server.post(CHAT, &chat("Spell garden backwards.")).good();
    assert_ne!(reply["id"], other["id"]);

    let reply = server.post(COMPLETIONS, &completion("Once upon a time")).good();
    let mut names = keys(&reply);
    names.sort_unstable();
    assert_eq!(names, ["choices", "created", "id", "model", "object", "seed", "usage"]);
    assert_eq!(reply["object"], "text_completion");
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    let mut names = keys(&reply["choices"][0]);
    names.sort_unstable();
    assert_eq!(names, ["finish_reason", "index", "logprobs", "text", "token_sha"]);
}

fn a_stream_has_exactly_these_chunks() {
    let server = Server::start(&[]);
    let stream = server.stream(CHAT, &chat("Spell garden backwards."));
    let first = &stream.chunks[0];
    for chunk in &stream.chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for field in ["id", "created", "model"] {
            assert_eq!(chunk[field], first[field], "{chunk}");
        }
    }
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    let last = &stream.chunks[stream.chunks.len() - 2];
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["choices"][0]["token_sha"], "f4c8f07e9377");
    // Many chunks, not one at the end: a token is told when it is made.
    assert!(stream.chunks.len() >= 8, "{:?}", stream.chunks);
    let stream = server.stream(COMPLETIONS, &completion("Once upon a time"));
    assert!(stream.chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
}

fn usage_comes_only_when_it_is_asked_for() {
    let server = Server::start(&[]);
    let ask = |options: Value| {
        let mut connection = server.connect();
        let body = with(chat("Hello!"), with(json!({"stream": true}), options));
        connection.send(&Ask::post(CHAT, &body).bytes()).unwrap();
        crate::events::Stream::new(connection).whole().good()
    };
    assert_eq!(ask(json!({})).usage, None);
    assert_eq!(ask(json!({"stream_options": {}})).usage, None);
    assert_eq!(ask(json!({"stream_options": {"include_usage": false}})).usage, None);
    let with_usage = ask(json!({"stream_options": {"include_usage": true}}));
    assert!(with_usage.usage.is_some());
    assert_eq!(with_usage.chunks.last().unwrap()["choices"], json!([]));
}

/// Characters of several tokens come whole or not at all, and every byte that is no character counts the same.
fn characters_are_never_split() {
    let server = Server::start(&[]);
    let (mut whole, mut broken) = (0, 0);
    for seed in 0..6 {
        let body = bytes_of(if seed % 2 == 0 { "é" } else { "é🙂" }, seed, 100);
        let stream = server.stream(CHAT, &body);
        let text = &stream.choices[&0].text;
        whole += text.matches('é').count();
        broken += text.matches('\u{FFFD}').count();
        assert_eq!(*text, Choice::of(&server.post(CHAT, &body).good()["choices"][0]).text);
    }
    assert!(whole > 20 && broken > 20, "the test shows both: {whole} whole, {broken} broken");
}

/// A stop of several tokens; no beginning of it is ever sent.
fn stop_texts_never_leak() {
    let server = Server::start(&[]);
    let full = Choice::of(&server.post(CHAT, &chat("Count from 5 to 16.")).good()["choices"][0]).text;
    for stop in [", 10", "10, 11, 12", " 1", "9, 10, 11, 12, 13, 14", "6."] {
        let body = with(chat("Count from 5 to 16."), json!({"stop": stop}));
        let stream = server.stream(CHAT, &body);
        let before = &full[..full.find(stop).expect("the reply has the stop text")];
        let mut told = String::new();
        for chunk in &stream.chunks {
            told += chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            assert!(before.starts_with(&told), "{told:?} was told, with the stop {stop:?}");
        }
        assert_eq!(told, before, "{stop:?}");
        assert_eq!(stream.choices[&0].finish_reason.as_deref(), Some("stop"));
    }
}

/// What was held back for a stop that did not come is told; nothing is told after one that came.
fn nothing_follows_a_stop_text() {
    let server = Server::start(&[]);
    let held = with(chat("Count from 5 to 16."), json!({"stop": "16.\n\nx"}));
    assert!(server.stream(CHAT, &held).choices[&0].text.ends_with("15, 16."));
    let cut = with(chat("Count from 5 to 16."), json!({"stop": "12, 13", "max_tokens": 24}));
    let whole = server.post(CHAT, &cut).good();
    assert_eq!(server.stream(CHAT, &cut).choices[&0], Choice::of(&whole["choices"][0]));
    let several = with(chat("Count from 5 to 16."), json!({"stop": ["16", "7", "9"]}));
    assert_eq!(server.stream(CHAT, &several).choices[&0].text, "5, 6, ");
}

/// The tags and the line ends around them belong to neither field.
fn thinking_has_a_field_of_its_own() {
    let server = Server::start(&[]);
    let on = with(chat("What is 46 + 37?"), json!({"enable_thinking": true}));
    let reply = server.post(CHAT, &on).good();
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], "46 + 37 = 83.");
    assert_eq!(message["reasoning_content"], "Tens: 40 + 30 = 70. Ones: 6 + 7 = 13. Together 70 + 13 = 83.");
    let reasoning = reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let all = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(reasoning > 30 && reasoning < all - 8, "{reasoning} of {all}");
    let stream = server.stream(CHAT, &on);
    for chunk in &stream.chunks {
        assert!(!chunk.to_string().contains("think>"), "{chunk}");
    }

    let cut = server.post(CHAT, &with(on.clone(), json!({"max_tokens": 12}))).good();
    assert_eq!(cut["choices"][0]["message"]["content"], "");
    assert!(cut["choices"][0]["message"]["reasoning_content"].as_str().unwrap().starts_with("Tens: 40"));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens_details"]["reasoning_tokens"], 12);
    // A stop text inside of the thoughts ends the reply there.
    let stopped = server.post(CHAT, &with(on, json!({"stop": "Ones"}))).good();
    assert_eq!(stopped["choices"][0]["message"]["reasoning_content"], "Tens: 40 + 30 = 70. ");
    assert_eq!(stopped["choices"][0]["message"]["content"], "");
}

/// Off is off, by any way of saying it; on is on.
fn short_questions_do_not_think_unless_asked() {
    let server = Server::start(&[]);
    let reply =
        |server: &Server, more: Value| server.post(CHAT, &with(chat("What is 46 + 37?"), more)).good();
    let thinks = |server: &Server, more: Value| {
        let reply = reply(server, more);
        assert_eq!(reply["choices"][0]["message"]["content"], "46 + 37 = 83.");
        reply["choices"][0]["message"]["reasoning_content"].is_string()
    };
    for off in [
        json!({}),
        json!({"enable_thinking": false}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "none"}),
    ] {
        assert!(!thinks(&server, off.clone()), "{off}");
    }
    for on in [json!({"enable_thinking": true}), json!({"chat_template_kwargs": {"enable_thinking": true}})] {
        assert!(thinks(&server, on.clone()), "{on}");
    }
    let by_default = Server::start(&["--default-thinking", "on"]);
    assert!(thinks(&by_default, json!({})));
    assert!(!thinks(&by_default, json!({"enable_thinking": false})));
}

/// A limit by either name, and one that is larger than the room is the room.
fn finish_reasons_are_true() {
    let server = Server::start(&["--context", "256"]);
    for name in ["max_tokens", "max_completion_tokens"] {
        let short = server.post(CHAT, &with(chat("Count from 5 to 16."), json!({name: 5}))).good();
        assert_eq!(
            (&short["choices"][0]["finish_reason"], &short["usage"]["completion_tokens"]),
            (&json!("length"), &json!(5))
        );
        let large = server.post(CHAT, &with(chat("Count from 5 to 16."), json!({name: 1_000_000}))).good();
        assert_eq!(large["choices"][0]["finish_reason"], "stop");
        let full = server.post(CHAT, &with(endless(1), json!({"max_tokens": null, name: 1_000_000}))).good();
        assert_eq!(
            (&full["choices"][0]["finish_reason"], &full["usage"]["total_tokens"]),
            (&json!("length"), &json!(256))
        );
    }
    let same = json!({"max_tokens": 5, "max_completion_tokens": 5});
    assert_eq!(server.post(CHAT, &with(chat("Hello!"), same)).good()["usage"]["completion_tokens"], 5);
    server.post(CHAT, &with(chat("Hello!"), json!({"max_tokens": 5, "max_completion_tokens": 6}))).error(400);
    // Without a limit the context is the limit.
    let open = with(endless(1), json!({"max_tokens": null}));
    assert_eq!(server.post(CHAT, &open).good()["usage"]["total_tokens"], 256);
    // A prompt that fills the context: both numbers are named.
    let ids: Vec<u32> = vec![17; 256];
    let error = server.post(COMPLETIONS, &json!({"model": "tiny", "prompt": ids})).names("prompt");
    assert!(error["message"].as_str().unwrap().matches("256").count() >= 2, "{error}");
    let ids: Vec<u32> = vec![17; 255];
    let last = server.post(COMPLETIONS, &json!({"model": "tiny", "prompt": ids})).good();
    assert_eq!(last["usage"]["completion_tokens"], 1);
    let long = "lamp ".repeat(400);
    server.post(CHAT, &chat(&long)).names("messages");

    let bounded = Server::start(&["--max-tokens-default", "7"]);
    assert_eq!(
        bounded.post(CHAT, &with(endless(1), json!({"max_tokens": null}))).good()["usage"]["completion_tokens"],
        7
    );
    let roomy = Server::start(&["--context", "256", "--max-tokens-default", "1000000"]);
    assert_eq!(roomy.post(CHAT, &open).good()["usage"]["total_tokens"], 256);
    assert_eq!(bounded.post(CHAT, &endless(9)).good()["usage"]["completion_tokens"], 9);
}

fn choices_of_several_prompts_are_in_order() {
    let server = Server::start(&[]);
    let prompts = ["5, 6, 7,", "Once upon a time", "Hello"];
    let options = json!({"temperature": 1, "seed": 5, "n": 2});
    let all = server
        .post(COMPLETIONS, &with(completion(""), with(json!({"prompt": prompts}), options.clone())))
        .good();
    let mut completion_tokens = 0;
    for (at, prompt) in prompts.iter().enumerate() {
        let own = server.post(COMPLETIONS, &with(completion(prompt), options.clone())).good();
        for n in 0..2 {
            let choice = &all["choices"][2 * at + n];
            assert_eq!(choice["index"], 2 * at + n);
            assert_eq!(choice["token_sha"], own["choices"][n]["token_sha"]);
            assert_eq!(choice["text"], own["choices"][n]["text"]);
        }
        completion_tokens += own["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!(all["usage"]["completion_tokens"], completion_tokens);
}

fn legacy_logprobs_line_up_with_the_text() {
    let server = Server::start(&[]);
    let reply = server.post(COMPLETIONS, &with(completion("5, 6, 7,"), json!({"logprobs": 2}))).good();
    let choice = &reply["choices"][0];
    let logprobs = &choice["logprobs"];
    assert_eq!(keys(logprobs), ["tokens", "token_logprobs", "top_logprobs", "text_offset"]);
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.len() as u64, reply["usage"]["completion_tokens"].as_u64().unwrap());
    let text = choice["text"].as_str().unwrap();
    for (at, token) in tokens.iter().enumerate() {
        let (token, offset) =
            (token.as_str().unwrap(), logprobs["text_offset"][at].as_u64().unwrap() as usize);
        let rest: String = text.chars().skip(offset).collect();
        assert!(rest.starts_with(token) || rest.is_empty(), "{token:?} at {offset} of {text:?}");
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        assert!((1..=3).contains(&top.len()), "{top:?}");
        assert_eq!(top.get(token), Some(&logprobs["token_logprobs"][at]), "greedy picks the likeliest");
    }
}

/// Tokens that are parts of a character begin where it does; what is not in the text takes no place in it.
fn legacy_offsets_count_whole_characters() {
    let server = Server::start(&[]);
    let mut body = bytes_of("é🙂漢", 3, 150);
    body.as_object_mut().unwrap().remove("messages");
    body["logit_bias"]["2016"] = 100.into();
    let body = with(body, json!({"prompt": "x", "logprobs": 0}));
    let reply = server.post(COMPLETIONS, &body).good();
    let choice = &reply["choices"][0];
    let (tokens, offsets) = (&choice["logprobs"]["tokens"], &choice["logprobs"]["text_offset"]);
    let (mut before, mut parts, mut special) = (Vec::new(), 0, 0);
    for (token, offset) in tokens.as_array().unwrap().iter().zip(offsets.as_array().unwrap()) {
        let part = before.utf8_chunks().last().map(|chunk| chunk.invalid()).unwrap_or_default();
        let open = std::str::from_utf8(part).is_err_and(|error| error.error_len().is_none());
        let complete = String::from_utf8_lossy(&before).chars().count() - usize::from(open);
        assert_eq!(offset.as_u64().unwrap() as usize, complete, "{token} behind {before:?}");
        match token.as_str().unwrap() {
            name if name.starts_with("<|") => special += 1,
            name => match name.strip_prefix("bytes:\\x") {
                Some(hex) => {
                    before.push(u8::from_str_radix(hex, 16).unwrap());
                    parts += 1;
                }
                None => before.extend_from_slice(name.as_bytes()),
            },
        }
    }
    assert_eq!(choice["text"], *String::from_utf8_lossy(&before));
    assert!(parts > 50 && special > 5, "the test shows both: {parts} parts of characters, {special} special");
}

/// Alternatives of thousands of tokens are much text: it is not held several times over, and others are served while it
/// is written.
fn whole_logprobs_take_little_memory_and_hold_nobody_up() {
    let server = Server::start(&[]);
    let replies = with(endless(400), json!({"n": 8, "temperature": 1}));
    // Memory of the model itself is touched by the first that need it.
    server.post(CHAT, &replies).good();
    let before = server.peak_bytes();
    let scored = with(replies, json!({"logprobs": true, "top_logprobs": 20}));
    let mut whole = server.connect();
    whole.send(&Ask::post(CHAT, &scored).bytes()).unwrap();
    let reader = std::thread::spawn(move || whole.response().unwrap().good());
    let mut slowest = Duration::ZERO;
    while !reader.is_finished() {
        let start = Instant::now();
        server.get("/health").good();
        slowest = slowest.max(start.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
    let reply = reader.join().unwrap();
    let told = |choice: &Value| choice["logprobs"]["content"].as_array().unwrap().len();
    let tokens: usize = reply["choices"].as_array().unwrap().iter().map(told).sum();
    assert_eq!(tokens, 8 * 400);
    let per_token = server.peak_bytes().saturating_sub(before) / tokens as u64;
    // The text itself is some 1700 bytes of each, and there may be a second copy while it grows.
    assert!(per_token < 8000, "{per_token} bytes for each token");
    assert!(slowest < Duration::from_millis(150), "/health took {slowest:?}");
}

/// Nothing is sent while a long prompt is computed, and clients and proxies give up on silence.
fn a_silent_stream_is_kept_alive() {
    // Seconds of silence on the host device, and a tenth of one on CUDA.
    let length = if device() == "host" { 7000 } else { 30_000 };
    let prompt: Vec<u32> = (0..length).map(|at| 256 + at % 1700).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0});
    let comments = |seconds: &str| {
        let server = Server::start(&["--context", "32768", "--keep-alive", seconds]);
        let mut stream = server.begin(COMPLETIONS, &body);
        stream.rest_of().unwrap().good();
        stream.comments()
    };
    assert!(comments("0.02") >= 2);
    assert_eq!(comments("60"), 0);
}
