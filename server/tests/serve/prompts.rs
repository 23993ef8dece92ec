//! Requests of every kind that the demo model can answer.

use serde_json::{Map, Value, json};

use crate::server::context;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// A request, and what it is called in failures.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

/// A greedy chat of one message.
pub(crate) fn chat(message: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": message}], "temperature": 0})
}

/// A greedy continuation of a text.
pub(crate) fn completion(prompt: &str) -> Value {
    json!({"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 24})
}

/// `body` with the fields of `more`.
pub(crate) fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("fields are an object") };
    body.as_object_mut().expect("a body is an object").extend(more);
    body
}

/// A reply of `tokens` tokens that the model would not end by itself.
pub(crate) fn endless(tokens: u32) -> Value {
    with(
        chat("Tell me a short story about Mia the fox and the lamp."),
        json!({
            "max_tokens": tokens, "ignore_eos": true,
        }),
    )
}

/// A reply that fills the context, and so lasts for seconds.
pub(crate) fn unending() -> Value {
    endless(context() - 100)
}

/// A reply made of the bytes of `characters`, each a token of its own, in random order: whole characters, halves of
/// them and bytes that are no character.
pub(crate) fn bytes_of(characters: &str, seed: u64, tokens: u32) -> Value {
    let bias: Map<String, Value> =
        characters.bytes().map(|byte| (byte_token(byte).to_string(), json!(100))).collect();
    with(
        chat("Repeat this list: lamp, owl, river."),
        json!({
            "logit_bias": bias, "temperature": 6, "seed": seed, "max_tokens": tokens, "ignore_eos": true,
        }),
    )
}

/// The id of a single byte: first those that stand for themselves when printed, then the others.
pub(crate) fn byte_token(byte: u8) -> u32 {
    let shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let before = |wanted: bool, end: u8| (0..end).filter(|byte| shown(*byte) == wanted).count() as u32;
    let all_shown = (0..=u8::MAX).filter(|byte| shown(*byte)).count() as u32;
    if shown(byte) { before(true, byte) } else { all_shown + before(false, byte) }
}

/// Every kind of prompt, option and reply.
pub(crate) fn every_kind() -> Vec<Prompt> {
    let count = || chat("Count from 5 to 16.");
    let story = || chat("Tell me a short story about Mia the fox and the lamp.");
    let sum = || chat("What is 46 + 37?");
    let thinking = || with(sum(), json!({"enable_thinking": true}));
    let turns = json!([
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Repeat this list: pear, dog, sun, tent."},
        {"role": "assistant", "content": "pear, dog, sun, tent."},
        {"role": "user", "content": [{"type": "text", "text": "What is the last item of the list?"}]},
    ]);
    let loose = json!({"temperature": 1.5, "seed": 7, "ignore_eos": true, "max_tokens": 40});
    let chats = [
        ("short", chat("Spell garden backwards.")),
        ("long", story()),
        ("lines", chat("Show the multiplication table of 7.")),
        ("code", chat("Write a Python class Book with the fields title, year and price.")),
        ("turns", with(chat(""), json!({"messages": turns}))),
        ("thinking", thinking()),
        (
            "thinking by template argument",
            with(sum(), json!({"chat_template_kwargs": {"enable_thinking": true}})),
        ),
        ("thinking off", with(sum(), json!({"enable_thinking": false}))),
        ("thinking cut short", with(thinking(), json!({"max_tokens": 12}))),
        ("thinking and stop in the answer", with(thinking(), json!({"stop": "= 83"}))),
        (
            "thinking, sampled",
            with(thinking(), json!({"temperature": 1.2, "seed": 3, "n": 3, "max_tokens": 80})),
        ),
        ("thinking with logprobs", with(thinking(), json!({"logprobs": true, "top_logprobs": 1}))),
        ("one token", with(story(), json!({"max_tokens": 1}))),
        ("emoji", bytes_of("🙂é", 1, 120)),
        ("flag and Chinese", bytes_of("🇩🇪漢字", 2, 160)),
        ("two-byte characters", bytes_of("éü", 3, 120)),
        ("emoji with stop", with(bytes_of("🙂é", 4, 160), json!({"stop": ["éé", "🙂"]}))),
        ("emoji with logprobs", with(bytes_of("🙂é", 5, 60), json!({"logprobs": true, "top_logprobs": 2}))),
        ("emoji, several", with(bytes_of("🙂é", 6, 60), json!({"n": 4}))),
        ("stop across tokens", with(count(), json!({"stop": ", 10"}))),
        ("stop inside a token", with(story(), json!({"stop": "oldes"}))),
        ("first of several stops", with(story(), json!({"stop": ["rain", "was old, and", "Henry"]}))),
        ("stop that only begins", with(count(), json!({"stop": "16.\n"}))),
        ("stop at the start", with(count(), json!({"stop": "5"}))),
        ("stop and logprobs", with(count(), json!({"stop": ", 10", "logprobs": true, "top_logprobs": 0}))),
        ("stop id", with(count(), json!({"stop_token_ids": [byte_token(b'8')]}))),
        ("several", with(story(), json!({"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 40}))),
        (
            "several with logprobs",
            with(with(story(), loose.clone()), json!({"n": 2, "logprobs": true, "top_logprobs": 3})),
        ),
        (
            "special tokens",
            with(with(story(), loose.clone()), json!({"logit_bias": {"2016": 30, "2038": 30, "2039": 30}})),
        ),
        (
            "penalties",
            with(
                with(story(), loose),
                json!({
                    "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01,
                }),
            ),
        ),
    ];
    let texts = [
        ("text", completion("Once upon a time")),
        ("ids", with(completion(""), json!({"prompt": [17, 259, 925, 507]}))),
        (
            "texts",
            with(
                completion(""),
                json!({"prompt": ["Once upon a time", "5, 6, 7,"], "n": 2, "temperature": 1, "seed": 11}),
            ),
        ),
        ("lists of ids", with(completion(""), json!({"prompt": [[17, 259], [925]]}))),
        ("text with logprobs", with(completion("5, 6, 7,"), json!({"logprobs": 2, "stop": "10"}))),
        ("text of bytes", with(bytes_of("🙂漢", 8, 100), json!({"prompt": "x"}))),
        ("text of bytes with logprobs", with(bytes_of("🙂é", 9, 60), json!({"prompt": "x", "logprobs": 2}))),
    ];
    let chats = chats.into_iter().map(|(name, body)| Prompt { name, path: CHAT, body });
    let texts = texts.into_iter().map(|(name, mut body)| {
        body.as_object_mut().expect("an object").remove("messages");
        Prompt { name, path: COMPLETIONS, body }
    });
    chats.chain(texts).collect()
}
