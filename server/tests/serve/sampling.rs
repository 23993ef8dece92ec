//! Draws: the same seed draws the same on every route, alone or in a crowd; log probabilities are natural ones.

use std::thread;

use serde_json::{Value, json};

use crate::client::Ask;
use crate::prompts::{CHAT, COMPLETIONS, Prompt, chat, completion, endless, every_kind, with};
use crate::server::Server;

crate::tests! {
    a_seed_draws_the_same_on_every_route,
    a_seed_that_was_drawn_is_told_and_repeats_the_reply,
    choices_draw_with_seeds_in_a_row,
    without_a_temperature_it_is_one,
    probabilities_are_natural_and_of_the_model,
    logprobs_name_tokens_and_their_bytes;
    crowded_is_alone,
    equal_requests_together_are_equal,
}

const LOOSE: &str = "Tell me a short story about Mia the fox and the lamp.";

fn loose(more: Value) -> Value {
    with(with(chat(LOOSE), json!({"temperature": 4, "ignore_eos": true, "max_tokens": 30})), more)
}

fn shas(reply: &Value) -> Vec<String> {
    let choices = reply["choices"].as_array().expect("choices");
    choices.iter().map(|choice| choice["token_sha"].as_str().expect("a digest").to_owned()).collect()
}

/// A seed works on one route as on the other.
fn a_seed_draws_the_same_on_every_route() {
    let server = Server::start(&[]);
    let tokens =
        server.post("/tokenize", &json!({"messages": loose(json!({}))["messages"]})).good()["tokens"].clone();
    for seed in [0, 7, u64::MAX] {
        let by_chat = loose(json!({"seed": seed}));
        let mut by_text = with(by_chat.clone(), json!({"prompt": tokens}));
        by_text.as_object_mut().unwrap().remove("messages");
        let expected = shas(&server.post(CHAT, &by_chat).good());
        for (path, body) in [(CHAT, &by_chat), (COMPLETIONS, &by_text)] {
            for _ in 0..2 {
                let reply = server.post(path, body).good();
                assert_eq!((shas(&reply), &reply["seed"]), (expected.clone(), &json!(seed)));
                let stream = server.stream(path, body);
                assert_eq!(
                    (stream.choices[&0].token_sha.as_ref(), stream.seed),
                    (Some(&expected[0]), Some(json!(seed)))
                );
            }
        }
        assert_ne!(shas(&server.post(CHAT, &loose(json!({"seed": seed ^ 1}))).good()), expected);
    }
}

fn a_seed_that_was_drawn_is_told_and_repeats_the_reply() {
    let server = Server::start(&[]);
    for (path, body) in [
        (CHAT, loose(json!({"n": 2}))),
        (COMPLETIONS, with(completion("Once"), json!({"temperature": 1.5, "n": 2}))),
    ] {
        let (one, two) = (server.post(path, &body).good(), server.post(path, &body).good());
        assert_ne!(one["seed"], two["seed"]);
        assert_ne!(shas(&one), shas(&two), "two draws of their own are the same");
        let again = server.post(path, &with(body.clone(), json!({"seed": one["seed"]}))).good();
        assert_eq!(shas(&again), shas(&one));
        let stream = server.stream(path, &body);
        let again = server.post(path, &with(body, json!({"seed": stream.seed}))).good();
        assert_eq!(shas(&again)[0], *stream.choices[&0].token_sha.as_ref().unwrap());
    }
}

fn choices_draw_with_seeds_in_a_row() {
    let server = Server::start(&[]);
    for seed in [5, u64::MAX - 1] {
        let several = shas(&server.post(CHAT, &loose(json!({"seed": seed, "n": 4}))).good());
        let single = |i: u64| {
            shas(&server.post(CHAT, &loose(json!({"seed": seed.wrapping_add(i)}))).good())[0].clone()
        };
        assert_eq!(several, (0..4).map(single).collect::<Vec<_>>());
    }
}

fn without_a_temperature_it_is_one() {
    let server = Server::start(&[]);
    for (path, mut body) in [
        (CHAT, with(loose(json!({"seed": 3})), json!({"max_tokens": 150}))),
        (COMPLETIONS, with(completion("Once"), json!({"seed": 3}))),
    ] {
        body["temperature"] = json!(1.0);
        let one = shas(&server.post(path, &body).good());
        body.as_object_mut().unwrap().remove("temperature");
        assert_eq!(shas(&server.post(path, &body).good()), one);
        body["temperature"] = json!(0);
        assert_ne!(shas(&server.post(path, &body).good()), one);
    }
}

/// In base 10 the sum would be far above one; of logits it would be anything.
fn probabilities_are_natural_and_of_the_model() {
    let server = Server::start(&[]);
    let ask = json!({"logprobs": true, "top_logprobs": 20});
    let content = |body: &Value| {
        let reply = server.post(CHAT, body).good();
        reply["choices"][0]["logprobs"]["content"].as_array().unwrap().clone()
    };
    let probabilities = |token: &Value| -> Vec<f64> {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 20);
        top.iter().map(|top| top["logprob"].as_f64().unwrap().exp()).collect()
    };
    let greedy = content(&with(chat("Spell garden backwards."), ask.clone()));
    assert_eq!(greedy.len(), 8);
    for token in &greedy {
        let all = probabilities(token);
        assert!(all.is_sorted_by(|a, b| a >= b));
        let sum: f64 = all.iter().sum();
        assert!(
            (0.98..1.001).contains(&sum),
            "the 20 likeliest of a sure model have {sum} of the probability"
        );
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"]);
        assert_eq!(token["token"], token["top_logprobs"][0]["token"]);
    }
    // What is reported is the model's, whatever changes the draw.
    let bent = content(&with(
        chat("Spell garden backwards."),
        with(ask, json!({"logit_bias": {"64": 100}, "max_tokens": 1, "temperature": 2, "seed": 1})),
    ));
    assert_eq!(bent[0]["token"], "a");
    assert_eq!(bent[0]["top_logprobs"], greedy[0]["top_logprobs"]);
    assert!(bent[0]["logprob"].as_f64().unwrap() < -3.0, "{}", bent[0]);
}

fn logprobs_name_tokens_and_their_bytes() {
    let server = Server::start(&[]);
    let body = with(chat("Count from 5 to 16."), json!({"logprobs": true, "top_logprobs": 2}));
    let reply = server.post(CHAT, &body).good();
    let content = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, reply["usage"]["completion_tokens"].as_u64().unwrap());
    let mut text = Vec::new();
    for token in content {
        for token in [token, &token["top_logprobs"][1]] {
            let bytes: Vec<u8> =
                token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
            assert_eq!(String::from_utf8_lossy(&bytes), token["token"].as_str().unwrap());
        }
        text.extend(token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    let whole = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(String::from_utf8(text).unwrap().starts_with(whole));
    let plain = server.post(CHAT, &with(chat("Hello!"), json!({"logprobs": false}))).good();
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    let own = server.post(CHAT, &with(chat("Hello!"), json!({"logprobs": true}))).good();
    assert_eq!(own["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

/// Asks for everything at once, on connections of their own; the digests in order.
fn together(server: &Server, prompts: &[Prompt]) -> Vec<Vec<String>> {
    thread::scope(|scope| {
        let ask = |prompt: &Prompt| {
            let prompt = prompt.clone();
            scope.spawn(move || {
                loop {
                    let reply = server.ask(&Ask::post(prompt.path, &prompt.body));
                    if reply.status() != 429 {
                        return shas(&reply.good());
                    }
                    thread::sleep(std::time::Duration::from_millis(50));
                }
            })
        };
        let asked: Vec<_> = prompts.iter().map(ask).collect();
        asked.into_iter().map(|thread| thread.join().expect("a reply came")).collect()
    })
}

fn crowded_is_alone() {
    let server = Server::start(&[]);
    let prompts: Vec<Prompt> = every_kind();
    let alone: Vec<_> =
        prompts.iter().map(|prompt| shas(&server.post(prompt.path, &prompt.body).good())).collect();
    let mut backwards = prompts.clone();
    backwards.reverse();
    for _ in 0..2 {
        assert_eq!(together(&server, &prompts), alone);
        let mut crowded = together(&server, &backwards);
        crowded.reverse();
        assert_eq!(crowded, alone);
    }
}

/// Eight equal greedy requests of each length, alone and together.
fn equal_requests_together_are_equal() {
    let server = Server::start(&[]);
    for tokens in [100, 500, 1500] {
        let body = endless(tokens);
        let alone = shas(&server.post(CHAT, &body).good());
        let eight = vec![Prompt { name: "equal", path: CHAT, body }; 8];
        for crowded in together(&server, &eight) {
            assert_eq!(crowded, alone, "{tokens} tokens");
        }
    }
}
