//! Texts and names of a size that nobody means: refused soon, and not repeated.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Ask;
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, with};
use crate::server::Server;

crate::tests! {
    giant_texts_are_refused_for_their_length,
    giant_names_are_not_repeated_whole;
}

fn hello() -> Value {
    with(chat("Hello!"), json!({"max_tokens": 2}))
}

fn giant_texts_are_refused_for_their_length() {
    let server = Server::start(&[]);
    let giant = "lamp ".repeat(150_000);
    let start = Instant::now();
    server.post(CHAT, &chat(&giant)).names("messages");
    server.post(COMPLETIONS, &completion(&giant)).names("prompt");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    // What is far too long is not tokenised first.
    let start = Instant::now();
    let far = "lamp ".repeat(800_000);
    for (path, body, field) in [(CHAT, chat(&far), "messages"), (COMPLETIONS, completion(&far), "prompt")] {
        server.post(path, &body).names(field);
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    // Without a space, which some tokenizers cannot cut.
    server.post(COMPLETIONS, &completion(&"x".repeat(500_000))).names("prompt");
    server.post(CHAT, &with(hello(), json!({"model": giant}))).error(404);
    server.post(CHAT, &with(hello(), json!({"stop": giant}))).names("stop");
    server.post(CHAT, &with(hello(), json!({giant.as_str(): 1}))).error(400);
    let error = server.post(CHAT, &with(hello(), json!({"reasoning_effort": giant}))).error(400);
    assert!(error.to_string().len() < 4000, "a refusal does not repeat all that it refuses");
}

fn giant_names_are_not_repeated_whole() {
    let server = Server::start(&[]);
    let giant = "a".repeat(1 << 20);
    for body in [format!("{{\"{giant}\":1,\"{giant}\":2}}"), format!("{{\"{giant}\":1e999}}")] {
        let refused = server.ask(&Ask::raw(CHAT, body));
        assert!(refused.text().len() < 1000, "{} bytes", refused.text().len());
        let message = refused.error(400)["message"].as_str().unwrap().to_owned();
        assert!(message.contains("line 1 column "), "{message}");
    }
    let path = format!("/{}", "a".repeat(30_000));
    for ask in [Ask::get(&path), Ask::with("PUT", &format!("/v1/models{path}"))] {
        let refused = server.ask(&ask);
        assert!([404, 405].contains(&refused.status()), "{}", refused.status());
        assert!(refused.text().len() < 1000, "{} bytes", refused.text().len());
    }
}
