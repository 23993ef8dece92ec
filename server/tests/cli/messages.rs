//! `generate --messages`: chat files.

use std::fs;

use serde_json::{Value, json};

use crate::binary::{Ended, data, generate};

/// Answers the chat file `chat` in both forms it may have.
fn answer(chat: &str, options: &[&str]) -> Ended {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    fs::write(&file, chat).unwrap();
    generate(&[&["--messages", file.to_str().unwrap()], options].concat())
}

/// A probe of the demo model: a chat file, and the answer to it.
pub(crate) fn probe(id: &str) -> (Value, String) {
    let text = fs::read_to_string(data("probes/tiny.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let probe = all["probes"].as_array().unwrap().iter().find(|probe| probe["id"] == id).unwrap();
    let mut chat = json!({"messages": probe["messages"]});
    for key in ["tools", "enable_thinking"] {
        if let Some(value) = probe.get(key) {
            chat[key] = value.clone();
        }
    }
    (chat, probe["expected"].as_str().unwrap().to_string())
}

#[test]
fn a_list_of_messages_is_a_chat() {
    let (chat, expected) = probe("turns");
    assert!(chat["messages"].as_array().unwrap().len() > 2);
    assert_eq!(answer(&chat["messages"].to_string(), &[]).good().stdout, expected.clone() + "\n");
    assert_eq!(answer(&chat.to_string(), &[]).good().stdout, expected + "\n");
}

#[test]
fn tools_reach_the_template() {
    let (mut chat, expected) = probe("tool_call");
    assert_eq!(answer(&chat.to_string(), &[]).good().stdout, expected + "\n");
    let prompt_tokens = |chat: &Value| {
        let usage =
            answer(&chat.to_string(), &["--json", "--max-tokens", "1"]).good().json()["usage"].clone();
        usage["prompt_tokens"].as_u64().unwrap()
    };
    let with = prompt_tokens(&chat);
    chat.as_object_mut().unwrap().remove("tools");
    // The declaration of even one function is longer than the question.
    assert!(with > 2 * prompt_tokens(&chat));
}

#[test]
fn enable_thinking_reaches_the_template_and_the_option_wins() {
    let (chat, expected) = probe("think_add");
    assert_eq!(chat["enable_thinking"], true);
    assert_eq!(answer(&chat.to_string(), &[]).good().stdout, expected.clone() + "\n");
    assert_ne!(answer(&chat.to_string(), &["--thinking", "off"]).good().stdout, expected + "\n");
}

#[test]
fn parts_of_text_are_a_chat_too() {
    let chat = json!([{"role": "user", "content": [{"type": "text", "text": "Spell garden backwards."}]}]);
    assert_eq!(answer(&chat.to_string(), &[]).good().stdout, "n-e-d-r-a-g.\n");
}

#[test]
fn a_file_that_is_no_chat_is_refused_by_name() {
    answer("{\"messages\": [", &[]).refused(&["chat.json", "line 1"]);
    answer("7", &[]).refused(&["chat.json"]);
    answer("{\"tools\": []}", &[]).refused(&["chat.json", "messages"]);
    answer("{\"messages\": [], \"stream\": true}", &[]).refused(&["chat.json", "stream"]);
    answer("{\"messages\": {}}", &[]).refused(&["chat.json", "messages", "a list"]);
    answer("[]", &[]).refused(&["no messages"]);
    generate(&["--messages", "absent.json"]).refused(&["absent.json", "--messages"]);
}
