//! Encoding and decoding against the oracle and against the library's own decoder.

use std::time::{Duration, Instant};

use runtime::tokenizer::Tokenizer;

use crate::{ids, json, list, oracle, text, tiny};

const RECORDED: &str = "tests/oracle/expected/base_bf16/tokenizer.json";

#[test]
fn encodings_are_the_recorded_ones() {
    let tokenizer = Tokenizer::open(&oracle()).unwrap();
    for case in list(&json(RECORDED), "encode") {
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text(&case["text"])).unwrap(), expected, "{case}");
        assert_eq!(tokenizer.decode(&expected, false), text(&case["decoded"]), "{case}");
        assert_eq!(tokenizer.decode(&expected, true), text(&case["decoded_skip_special"]), "{case}");
        assert_eq!(streamed(&tokenizer, &expected, true), text(&case["decoded_skip_special"]), "{case}");
    }
}

#[test]
fn every_prefix_of_random_ids_decodes_as_recorded() {
    let tokenizer = Tokenizer::open(&oracle()).unwrap();
    for case in list(&json(RECORDED), "decode_random") {
        let ids = ids(&case["ids"]);
        assert_eq!(tokenizer.decode(&ids, false), text(&case["decoded"]));
        let prefixes = list(case, "prefixes");
        assert_eq!(prefixes.len(), ids.len());
        for (i, prefix) in prefixes.iter().enumerate() {
            assert_eq!(tokenizer.decode(&ids[..=i], false), text(prefix));
            assert_eq!(streamed(&tokenizer, &ids[..=i], false), text(prefix));
        }
    }
}

#[test]
fn recorded_answers_decode_with_and_without_special_tokens() {
    let tokenizer = Tokenizer::open(&oracle()).unwrap();
    let chats = json("tests/oracle/expected/base_bf16/chat_greedy.json");
    let chats = chats.as_array().unwrap();
    assert!(!chats.is_empty());
    for chat in chats {
        let tokens = ids(&chat["tokens"]);
        assert_eq!(tokenizer.decode(&tokens, true), text(&chat["text"]));
        assert_eq!(tokenizer.decode(&tokens, false), text(&chat["text_with_special"]));
    }
}

#[test]
fn decoding_agrees_with_the_library_on_every_id_and_on_random_runs() {
    for dir in [tiny(), oracle()] {
        let ours = Tokenizer::open(&dir).unwrap();
        let library = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
        let last = ours.last_text_id();
        assert_eq!(ours.vocab_size(), library.get_vocab_size(true));
        let check = |ids: &[u32]| {
            for skip_special in [false, true] {
                let expected = library.decode(ids, skip_special).unwrap();
                assert_eq!(ours.decode(ids, skip_special), expected, "{ids:?}");
                assert_eq!(streamed(&ours, ids, skip_special), expected, "{ids:?}");
            }
        };
        for id in 0..last + 40 {
            check(&[id]);
            assert_eq!(ours.has_text(id), library.id_to_token(id).is_some(), "{id}");
        }
        let mut draw = 1u64;
        for _ in 0..2000 {
            let run: Vec<u32> = (0..12)
                .map(|_| {
                    draw = draw.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // The first 256 ids are single bytes: half of the draws make broken characters.
                    let below = if draw >> 63 == 0 { 256 } else { u64::from(last) + 4 };
                    ((draw >> 33) % below) as u32
                })
                .collect();
            check(&run);
        }
    }
}

#[test]
fn a_stream_gives_a_character_as_soon_as_it_is_whole_and_not_before() {
    let tokenizer = Tokenizer::open(&tiny()).unwrap();
    let ids = tokenizer.encode("a🙂b").unwrap();
    assert!(ids.len() > 3, "the picture must take several tokens for this test: {ids:?}");
    let mut stream = tokenizer.detokenizer(false);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces[ids.len() - 2], "🙂");
    assert_eq!(pieces.concat() + &stream.finish(), "a🙂b");

    let mut cut = tokenizer.detokenizer(false);
    let given: String = ids[..ids.len() - 2].iter().map(|&id| cut.push(id)).collect();
    assert_eq!((given.as_str(), cut.finish().as_str()), ("a", "\u{fffd}"));
}

#[test]
fn a_long_stream_of_broken_bytes_costs_linear_time() {
    let tokenizer = Tokenizer::open(&tiny()).unwrap();
    // The last byte of a character, over and over: a decoder that looks back is quadratic here.
    let lone = (0..=tokenizer.last_text_id())
        .find(|&id| tokenizer.has_text(id) && tokenizer.decode(&[id], false) == "\u{fffd}")
        .unwrap();
    let mut stream = tokenizer.detokenizer(false);
    let start = Instant::now();
    let mut chars = 0;
    for _ in 0..1_000_000 {
        chars += stream.push(lone).chars().count();
    }
    chars += stream.finish().chars().count();
    assert_eq!(chars, 1_000_000);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn think_and_tool_tokens_survive_where_special_ones_do_not() {
    let tokenizer = Tokenizer::open(&tiny()).unwrap();
    let marked = "<think>x</think><tool_call>y</tool_call><tool_response>z</tool_response>";
    let ids = tokenizer.encode(&format!("<|im_start|>{marked}<|im_end|>")).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), marked);
    let start = tokenizer.token_id("<|im_start|>").unwrap();
    assert_eq!(ids[0], start);
    assert!(tokenizer.special_ids().contains(&start));
    assert!(tokenizer.special_ids().is_sorted());
    assert!(!tokenizer.special_ids().contains(&tokenizer.token_id("</think>").unwrap()));
    assert_eq!(tokenizer.token_id("<|no_such_token|>"), None);
    assert!(!tokenizer.has_text(tokenizer.last_text_id() + 1));
    assert!(!tokenizer.has_text(u32::MAX));
}

#[test]
fn a_long_run_of_one_kind_is_split_to_its_end() {
    // A regex engine that gave up in the middle would leave the rest unsplit, without an error.
    let tokenizer = Tokenizer::open(&tiny()).unwrap();
    for unit in [" ", "\n ", "a", "-"] {
        let text = format!("x{}b 1 2", unit.repeat(1_500_000));
        let ids = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
        assert!(ids.ends_with(&tokenizer.encode(" 1 2").unwrap()), "{unit:?}");
    }
}

#[test]
fn an_unusable_tokenizer_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Tokenizer::open(dir.path()).err().unwrap().to_string();
    assert!(error().contains("tokenizer.json"), "{}", error());
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert!(error().contains("is not a tokenizer file"), "{}", error());

    let source = std::fs::read_to_string(tiny().join("tokenizer.json")).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&source).unwrap();
    other["decoder"] = serde_json::json!({"type": "Fuse"});
    std::fs::write(dir.path().join("tokenizer.json"), other.to_string()).unwrap();
    assert!(error().contains("ByteLevel"), "{}", error());
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.detokenizer(skip_special);
    let pushed: String = ids.iter().map(|&id| stream.push(id)).collect();
    pushed + &stream.finish()
}

#[test]
fn tokenizers_that_would_change_a_text_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let plain: serde_json::Value = crate::json("models/tiny/tokenizer.json");
    let refused = |change: &dyn Fn(&mut serde_json::Value), word: &str| {
        let mut tokenizer = plain.clone();
        change(&mut tokenizer);
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let error = Tokenizer::open(dir.path()).err().expect("refused").to_string();
        assert!(error.contains(word), "{error}");
    };
    let truncation =
        serde_json::json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    refused(&|tokenizer| tokenizer["truncation"] = truncation.clone(), "truncation");
    let padding = serde_json::json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    refused(&|tokenizer| tokenizer["padding"] = padding.clone(), "padding");
    refused(&|tokenizer| tokenizer["model"]["dropout"] = 0.5.into(), "dropout");
}
