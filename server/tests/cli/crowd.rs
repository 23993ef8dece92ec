//! `generate` with many prompts: all at once, each as if it were alone.

use std::time::{Duration, Instant};

use crate::binary::{generate, generate_json};

const PROMPTS: [&str; 8] = [
    "Spell garden backwards.",
    "What is 27 + 58?",
    "Count from 5 to 16.",
    "Repeat this list: lamp, owl, river.",
    "Tell me a short story about Mia the fox and the lamp.",
    "What is 46 + 37?",
    "What color is the sky?",
    "Write a Python class Book with the fields title, year and price.",
];

fn together(options: &[&str]) -> Vec<serde_json::Value> {
    let prompts = PROMPTS.iter().flat_map(|prompt| ["--prompt", prompt]);
    let line: Vec<&str> = prompts.chain(options.iter().copied()).collect();
    generate_json(&line).as_array().unwrap().clone()
}

#[test]
fn many_at_once_equal_one_by_one() {
    let sampled = ["--temperature", "1.5", "--seed", "11", "--presence-penalty", "0.5", "--logprobs", "2"];
    for options in [&["--max-tokens", "24"][..], &[&["--max-tokens", "24"], &sampled[..]].concat()] {
        let crowd = together(options);
        // Two lanes: the other prompts wait, and lanes are used again.
        let few = together(&[options, &["--lanes", "2"]].concat());
        for (place, prompt) in PROMPTS.iter().enumerate() {
            let alone = generate_json(&[&["--prompt", *prompt], options].concat());
            for field in ["ids", "text", "finish_reason", "token_sha", "usage", "logprobs"] {
                assert_eq!(crowd[place][field], alone[field], "{field} of {prompt}");
                assert_eq!(few[place][field], alone[field], "{field} of {prompt} in two lanes");
            }
        }
    }
}

#[test]
fn they_share_rounds() {
    let answers = together(&["--max-tokens", "24"]);
    let decoded: u64 = answers.iter().map(|one| one["rounds"]["replayed"].as_u64().unwrap()).sum();
    let longest = answers.iter().map(|one| one["rounds"]["replayed"].as_u64().unwrap()).max().unwrap();
    assert!(decoded > 3 * longest, "{decoded} rows of at most {longest} rounds each");
    let made: u64 = answers.iter().map(|one| one["usage"]["completion_tokens"].as_u64().unwrap()).sum();
    assert_eq!(made, decoded + PROMPTS.len() as u64, "a round gives each of its lanes one token");
}

#[test]
fn text_comes_whole_and_in_order() {
    // The first answer is the last to be complete.
    let answers = generate(&["--prompt", PROMPTS[2], "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]).good();
    let lines: Vec<&str> = answers.stdout.lines().collect();
    assert!(lines[0].starts_with("5, 6, 7, 8"), "{lines:?}");
    assert_eq!(lines[1..], ["n-e-d-r-a-g.", "27 + 58 = 85."]);
    assert_eq!(answers.stderr.matches("token_sha").count(), 3);
}

#[test]
fn as_many_as_may_wait_are_answered_and_one_more_is_refused() {
    let many = |count: usize| {
        let mut line = vec!["--max-tokens", "1"];
        line.extend(["--ids", "7"].repeat(count));
        generate(&line)
    };
    many(1025).refused(&["1025 prompts", "1024", "--ids"]);
    assert_eq!(many(1024).good().stdout.lines().count(), 1024);
}

#[test]
fn when_one_prompt_cannot_run_none_does() {
    let started = Instant::now();
    let long = ["--ids", "5,6,7", "--ids", "5,2048", "--ignore-eos", "--max-tokens", "30000"];
    generate(&long).refused(&["prompt 2", "2048", "position 1"]);
    assert!(started.elapsed() < Duration::from_secs(20), "the other prompt was answered to its end");
}
