//! Rendered chats against the oracle, the probes, and Python's ways of writing values.

use std::fs;

use runtime::chat::{ChatError, ChatRequest, ChatTemplate};
use runtime::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::{ids, list, oracle, text, tiny};

#[test]
fn recorded_chats_render_exactly() {
    let template = ChatTemplate::open(&oracle()).unwrap();
    let tokenizer = Tokenizer::open(&oracle()).unwrap();
    let recorded = crate::json("tests/oracle/expected/base_bf16/tokenizer.json");
    for case in list(&recorded, "chat") {
        let prompt = template.render(&request(case)).unwrap();
        assert_eq!(prompt, text(&case["text"]), "{}", case["name"]);
        assert_eq!(tokenizer.encode(&prompt).unwrap(), ids(&case["ids"]), "{}", case["name"]);
    }
    let greedy = crate::json("tests/oracle/expected/base_bf16/chat_greedy.json");
    let greedy = json!({ "chats": greedy });
    for case in list(&greedy, "chats") {
        let prompt = template.render(&request(case)).unwrap();
        assert_eq!(prompt, text(&case["prompt_text"]), "{}", case["name"]);
        assert_eq!(tokenizer.encode(&prompt).unwrap(), ids(&case["prompt_ids"]), "{}", case["name"]);
    }
}

#[test]
fn probes_without_pictures_render_to_their_recorded_ids() {
    let template = ChatTemplate::open(&tiny()).unwrap();
    let tokenizer = Tokenizer::open(&tiny()).unwrap();
    let mut checked = 0;
    for probe in list(&crate::json("tests/probes/tiny.json"), "probes") {
        let prompt = template.render(&request(probe)).unwrap();
        // Each picture or clip is one pad token here; the vision code makes the run longer.
        if prompt.contains("<|vision_start|>") {
            continue;
        }
        checked += 1;
        assert_eq!(tokenizer.encode(&prompt).unwrap(), ids(&probe["prompt_ids"]), "{}", probe["id"]);
    }
    assert!(checked >= 20, "only {checked} probes are text");
}

#[test]
fn the_templates_own_refusal_is_reported_in_its_own_words() {
    let template = ChatTemplate::open(&tiny()).unwrap();
    for (messages, words) in [
        (json!([]), "no messages"),
        (json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]), "must come first"),
        (json!([{"role": "wizard", "content": "a"}]), "unknown role wizard"),
        (json!([{"role": "user", "content": [{"type": "smell"}]}]), "unknown content part"),
    ] {
        match template.render(&ChatRequest::new(messages)) {
            Err(ChatError::Refused { message }) => assert!(message.contains(words), "{message}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_failing_template_is_told_from_a_refusing_one() {
    let error = template("{{ messages[0].content.nothing.at_all }}").render(&ChatRequest::user("a"));
    assert!(matches!(error, Err(ChatError::Render { .. })), "{error:?}");
}

#[test]
fn variables_that_were_not_given_are_undefined() {
    let template = template(
        "{{ enable_thinking is defined }} {{ reasoning_effort is defined }} {{ tools is none }} {{ preserve_thinking is defined }}",
    );
    let mut request = ChatRequest::user("a");
    assert_eq!(template.render(&request).unwrap(), "False False True False");
    request.enable_thinking = Some(false);
    request.reasoning_effort = Some("low".to_string());
    request.tools = Some(json!([]));
    request.extra.insert("preserve_thinking".to_string(), json!(true));
    assert_eq!(template.render(&request).unwrap(), "True True False True");
    request.extra.insert("messages".to_string(), json!([]));
    assert!(matches!(template.render(&request), Err(ChatError::Reserved { name }) if name == "messages"));
}

#[test]
fn values_are_written_as_python_writes_them() {
    let value = json!({"b": [1, -2.0, 1e16, 1.5e-5, 0.0001, 1e22, true, null], "a": "é<\"\\\n\u{1}🙂", "e": {}, "l": []});
    let mut request = ChatRequest::user("a");
    request.extra.insert("value".to_string(), value);
    let rendered = |source: &str| template(source).render(&request).unwrap();
    assert_eq!(
        rendered("{{ value | tojson }}"),
        r#"{"b": [1, -2.0, 1e+16, 1.5e-05, 0.0001, 1e+22, true, null], "a": "é<\"\\\n\u0001🙂", "e": {}, "l": []}"#
    );
    assert_eq!(
        rendered("{{ value | tojson(sort_keys=true, ensure_ascii=true, separators=[',', ':']) }}"),
        r#"{"a":"\u00e9<\"\\\n\u0001\ud83d\ude42","b":[1,-2.0,1e+16,1.5e-05,0.0001,1e+22,true,null],"e":{},"l":[]}"#
    );
    assert_eq!(
        rendered("{{ {'a': [1, {'b': 2}], 'c': []} | tojson(indent=2) }}"),
        "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": []\n}"
    );
    assert_eq!(
        rendered("{{ value.b }} {{ true }} {{ none }} {{ 2.0 }}{{ nothing }}"),
        "[1, -2.0, 1e+16, 1.5e-05, 0.0001, 1e+22, True, None] True None 2.0"
    );
    assert_eq!(rendered("{{ true | string + 'x' }} {{ ['it\\'s', 'b'] }}"), "Truex [\"it's\", 'b']");
    assert!(template("{{ nothing | tojson }}").render(&request).is_err());
}

#[test]
fn blocks_are_trimmed_and_loops_can_be_left() {
    let source = "{% for i in range(9) %}\n  {% if i == 1 %}{% continue %}{% endif %}\n  {% if i == 3 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}\n{{ 'a b'.split()[-1].upper() }}\n";
    // Line breaks after a tag and blanks before one go; the rest stays, as in Python's Jinja.
    assert_eq!(template(source).render(&ChatRequest::user("a")).unwrap(), "0\n2\nB");
}

#[test]
fn the_template_file_wins_over_the_tokenizer_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let open = || ChatTemplate::open(dir.path());
    assert!(matches!(open(), Err(ChatError::Missing { .. })));
    let config = json!({"chat_template": "inside {{ eos_token }}{{ bos_token }}", "bos_token": null, "eos_token": {"content": "<e>"}});
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let render = || open().unwrap().render(&ChatRequest::user("a")).unwrap();
    assert_eq!(render(), "inside <e>");
    fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(render(), "file");
    fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    assert!(matches!(open(), Err(ChatError::Syntax { .. })));
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}";
    let error = template(endless).render(&ChatRequest::user("hi")).unwrap_err();
    assert!(error.to_string().contains("fuel"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ 1".to_owned() + &"+1".repeat(200_000) + " }}")
        .unwrap();
    let error = ChatTemplate::open(dir.path()).err().expect("refused");
    assert!(error.to_string().contains("262144"), "{error}");
}

#[test]
fn chat_files_are_lists_or_objects_and_nothing_unknown() {
    let messages = json!([{"role": "user", "content": "a"}]);
    let plain = ChatRequest::from_json(&messages.to_string()).unwrap();
    assert_eq!(plain, ChatRequest::user("a"));
    let object =
        json!({"messages": messages, "tools": [], "enable_thinking": false, "reasoning_effort": "low"});
    let request = ChatRequest::from_json(&object.to_string()).unwrap();
    assert_eq!((request.tools, request.enable_thinking), (Some(json!([])), Some(false)));
    assert_eq!(request.reasoning_effort.as_deref(), Some("low"));
    assert!(request.add_generation_prompt);
    for (file, words) in [
        (r#"{"messages": [], "temperature": 1, "stop": []}"#, "temperature, stop"),
        (r#"{"tools": []}"#, "`messages`"),
        (r#"{"messages": "hello"}"#, "`messages`"),
        (r#"{"messages": [], "enable_thinking": "yes"}"#, "`enable_thinking`"),
        (r#"{"messages": [], "reasoning_effort": null}"#, "`reasoning_effort`"),
        (r#""hello""#, "neither"),
        ("[", "not JSON"),
    ] {
        let error = ChatRequest::from_json(file).unwrap_err().to_string();
        assert!(error.contains(words), "{file}: {error}");
    }
}

/// The request that a recorded case describes.
fn request(case: &Value) -> ChatRequest {
    ChatRequest {
        messages: case["messages"].clone(),
        tools: case.get("tools").cloned(),
        enable_thinking: case.get("enable_thinking").and_then(Value::as_bool),
        add_generation_prompt: case.get("add_generation_prompt").is_none_or(|on| on == true),
        ..ChatRequest::default()
    }
}

/// A checkpoint folder's template with the given source.
fn template(source: &str) -> ChatTemplate {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    ChatTemplate::open(dir.path()).unwrap()
}
