//! The server against the command line: every option means the same on either.

use std::collections::HashSet;
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
    // Loose draws, on which every option shows.
    let seeded =
        ["--seed", "12345678901234567890", "--temperature", "4", "--max-tokens", "40", "--ignore-eos"];
    let fields =
        json!({"seed": 12345678901234567890u64, "temperature": 4, "max_tokens": 40, "ignore_eos": true});
    let greedy: [(&[&str], Value); 7] = [
        (&[], json!({})),
        (&["--max-tokens", "9"], json!({"max_tokens": 9})),
        (&["--stop", "was old, and"], json!({"stop": "was old, and"})),
        (&["--stop", "Mia lived", "--stop", "forest"], json!({"stop": ["forest", "Mia lived"]})),
        (&["--stop-id", "13"], json!({"stop_token_ids": [13]})),
        (&["--thinking", "on"], json!({"enable_thinking": true})),
        (&["--ignore-eos", "--max-tokens", "100"], json!({"ignore_eos": true, "max_tokens": 100})),
    ];
    let drawn: [(&[&str], Value); 8] = [
        (&[], json!({})),
        (&["--top-k", "20", "--frequency-penalty", "2"], json!({"top_k": 20, "frequency_penalty": 2})),
        (&["--top-k", "20", "--presence-penalty", "-2"], json!({"top_k": 20, "presence_penalty": -2})),
        (&["--top-k", "20", "--repetition-penalty", "1.5"], json!({"top_k": 20, "repetition_penalty": 1.5})),
        (&["--logit-bias", "64=30,2016=-100"], json!({"logit_bias": {"64": 30, "2016": -100}})),
        (&["--top-k", "3"], json!({"top_k": 3})),
        (&["--top-p", "0.6"], json!({"top_p": 0.6})),
        (&["--min-p", "0.02"], json!({"min_p": 0.02})),
    ];
    let greedy = greedy.into_iter().map(|(options, more)| (options.to_vec(), more));
    let drawn =
        drawn.into_iter().map(|(options, more)| ([&seeded, options].concat(), with(fields.clone(), more)));
    let mut seen = Vec::new();
    for (options, more) in greedy.chain(drawn) {
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
        seen.push(choice["token_sha"].to_string());
    }
    // Each option changes the reply, or the comparison would say nothing of it.
    let different: HashSet<&String> = seen.iter().collect();
    assert_eq!(different.len(), seen.len(), "{seen:?}");
}
