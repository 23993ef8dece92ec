//! Text in and out: the tokenizer, the chat template and the digest, against recorded answers.

mod chat;
mod tokenizer;

use std::path::PathBuf;

use serde_json::Value;
use tests::fixture::repository;

fn tiny() -> PathBuf {
    repository("models/tiny")
}

fn oracle() -> PathBuf {
    repository("tests/oracle/checkpoints/base_bf16")
}

fn json(path: &str) -> Value {
    let text = std::fs::read_to_string(repository(path)).expect("the file is in the repository");
    serde_json::from_str(&text).expect("the file is JSON")
}

/// The list `value[key]`, which must not be empty: an empty list of cases tests nothing.
fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    let list = value[key].as_array().unwrap_or_else(|| panic!("`{key}` is not a list"));
    assert!(!list.is_empty(), "`{key}` is empty");
    list
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("ids are a list").iter();
    ids.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).expect("an id")).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

#[test]
fn token_sha_is_the_start_of_sha256_over_little_endian_ids() {
    assert_eq!(runtime::sha::token_sha(&[]), "e3b0c44298fc");
    assert_eq!(runtime::sha::token_sha(&[1, 2, 248_046]), "b2634c361b27");
}
