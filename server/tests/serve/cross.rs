//! The server against the command line: every option means the same on either.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::prompts::{CHAT, chat, with};
use crate::server::{Server, bare, tiny};

crate::tests! {
    every_option_means_what_it_means_on_the_line;
}

const PROMPT: &str = "Tell me a short story about Mia the fox and the lamp.";

/// `roundhouse generate --json` of the prompt with options.
fn line(options: &[&str]) -> Value {
    let mut command = bare();
    command.arg("generate").arg(tiny()).args(["--prompt", PROMPT, "--json"]).args(options);
    let output = command.stderr(Stdio::inherit()).output().expect("the binary starts");
    assert!(output.status.success(), "{options:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn every_option_means_what_it_means_on_the_line() {
    let server = Server::start(&[]);
    let seeded =
        json!({"temperature": 1.3, "seed": 12345678901234567890u64, "max_tokens": 40, "ignore_eos": true});
    let cases: &[(&[&str], Value)] = &[
        (&[], json!({})),
        (&["--max-tokens", "9"], json!({"max_tokens": 9})),
        (&["--stop", "was old, and"], json!({"stop": "was old, and"})),
        (&["--stop", "Mia lived", "--stop", "forest"], json!({"stop": ["forest", "Mia lived"]})),
        (&["--stop-id", "13"], json!({"stop_token_ids": [13]})),
        (&["--thinking", "on"], json!({"enable_thinking": true})),
        (&["--frequency-penalty", "1.5"], json!({"frequency_penalty": 1.5})),
        (&["--presence-penalty", "-1"], json!({"presence_penalty": -1})),
        (&["--repetition-penalty", "1.3"], json!({"repetition_penalty": 1.3})),
        (
            &["--logit-bias", "64=4,2016=-100", "--max-tokens", "90"],
            json!({"logit_bias": {"64": 4, "2016": -100}, "max_tokens": 90}),
        ),
        (&["--seed", "12345678901234567890"], seeded.clone()),
        (&["--seed", "12345678901234567890", "--top-k", "3"], with(seeded.clone(), json!({"top_k": 3}))),
        (&["--seed", "12345678901234567890", "--top-p", "0.6"], with(seeded.clone(), json!({"top_p": 0.6}))),
        (&["--seed", "12345678901234567890", "--min-p", "0.2"], with(seeded, json!({"min_p": 0.2}))),
    ];
    let mut seen = Vec::new();
    for (options, more) in cases {
        let mut options = options.to_vec();
        if options.contains(&"--seed") {
            options.extend(["--temperature", "1.3", "--max-tokens", "40", "--ignore-eos"]);
        }
        let expected = line(&options);
        let reply = server.post(CHAT, &with(chat(PROMPT), more.clone())).good();
        let choice = &reply["choices"][0];
        assert_eq!(choice["token_sha"], expected["token_sha"], "{more}");
        assert_eq!(choice["finish_reason"], expected["finish_reason"], "{more}");
        for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(reply["usage"][field], expected["usage"][field], "{more}");
        }
        if more.get("enable_thinking").is_none() {
            let text = choice["message"]["content"].as_str().unwrap();
            assert_eq!(text, expected["text"].as_str().unwrap(), "{more}");
        }
        seen.push(choice["token_sha"].clone());
    }
    // Each option changes the reply, or the comparison would say nothing of it.
    let plain = seen[0].clone();
    assert!(seen[1..].iter().all(|sha| *sha != plain), "{seen:?}");
}
