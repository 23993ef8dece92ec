//! `generate --json`: the object, and the ends of an answer that it tells apart.

use runtime::sha::token_sha;
use serde_json::{Value, json};

use crate::binary::generate_json;

const GARDEN: &[&str] = &["--prompt", "Spell garden backwards."];

#[test]
fn one_prompt_gives_exactly_this_object() {
    assert_eq!(
        generate_json(GARDEN),
        json!({
            "ids": [77, 1307, 1747, 1479, 1454, 1855, 13, 2016],
            "text": "n-e-d-r-a-g.",
            "finish_reason": "stop",
            "token_sha": "f4c8f07e9377",
            "usage": {"prompt_tokens": 19, "completion_tokens": 8, "total_tokens": 27},
            "rounds": {"captured": 0, "replayed": 7, "eager": {"prompt pass": 1}},
        })
    );
}

#[test]
fn ids_give_the_same_object_as_the_text_they_stand_for() {
    let probes: Value = serde_json::from_str(include_str!("../../../tests/probes/tiny.json")).unwrap();
    let probe = probes["probes"].as_array().unwrap().iter().find(|probe| probe["id"] == "add").unwrap();
    let prompt: Vec<String> = ids(&probe["prompt_ids"]).iter().map(u32::to_string).collect();
    let answer = generate_json(&["--ids", &prompt.join(",")]);
    assert_eq!(answer["ids"], probe["bf16"]["ids"]);
    assert_eq!(answer, generate_json(&["--prompt", "What is 27 + 58?"]));
}

#[test]
fn several_lists_of_ids_give_an_array_in_order() {
    let answers = generate_json(&["--ids", "5,6,7", "--ids", "8", "--max-tokens", "3", "--ignore-eos"]);
    let answers = answers.as_array().unwrap();
    let sizes: Vec<&Value> = answers.iter().map(|answer| &answer["usage"]["prompt_tokens"]).collect();
    assert_eq!(sizes, [3, 1]);
    for answer in answers {
        assert_eq!(answer["token_sha"], token_sha(&ids(&answer["ids"])));
        assert_eq!(answer["usage"]["completion_tokens"], 3);
    }
}

#[test]
fn max_tokens_ends_an_answer_early() {
    let whole = generate_json(GARDEN);
    let cut = generate_json(&[GARDEN, &["--max-tokens", "3"]].concat());
    assert_eq!(ids(&cut["ids"]), ids(&whole["ids"])[..3]);
    assert_eq!(cut["finish_reason"], "length");
    assert_eq!(cut["text"], "n-e-d");
    assert_eq!(cut["usage"], json!({"prompt_tokens": 19, "completion_tokens": 3, "total_tokens": 22}));

    let one = generate_json(&[GARDEN, &["--max-tokens", "1"]].concat());
    assert_eq!(one["rounds"], json!({"captured": 0, "replayed": 0, "eager": {"prompt pass": 1}}));
    let exact = generate_json(&[GARDEN, &["--max-tokens", "8"]].concat());
    assert_eq!(exact["finish_reason"], "stop");
}

#[test]
fn ignore_eos_goes_on_after_the_stop_token() {
    let whole = generate_json(GARDEN);
    let more = generate_json(&[GARDEN, &["--ignore-eos", "--max-tokens", "12"]].concat());
    assert_eq!(ids(&more["ids"])[..8], ids(&whole["ids"]));
    assert_eq!(ids(&more["ids"]).len(), 12);
    assert_eq!(more["finish_reason"], "length");
}

#[test]
fn the_end_of_the_context_ends_an_answer() {
    let full = generate_json(&[GARDEN, &["--ignore-eos", "--context", "64"]].concat());
    assert_eq!(full["finish_reason"], "length");
    assert_eq!(full["usage"]["total_tokens"], 64);
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
