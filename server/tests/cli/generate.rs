//! `generate`: from each kind of prompt to text.

use crate::binary::{Ended, binary, generate, generate_json, run};

const GARDEN: &str = "Spell garden backwards.";
const SUM: &str = "What is 27 + 58?";

#[test]
fn a_prompt_goes_through_the_chat_template() {
    let answer = generate(&["--prompt", GARDEN]).good();
    assert_eq!(answer.stdout, "n-e-d-r-a-g.\n");
    let note = answer.stderr.lines().last().unwrap();
    assert!(
        note.starts_with("stop after 8 tokens, prompt of 19, token_sha f4c8f07e9377, rounds: captured 0, replayed 7, eager 1 (prompt pass)"),
        "{note}"
    );
}

#[test]
fn a_raw_prompt_is_the_text_that_the_template_would_make() {
    let text =
        format!("<|im_start|>user\n{GARDEN}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    let raw = generate_json(&["--raw", "--prompt", &text]);
    assert_eq!(raw, generate_json(&["--prompt", GARDEN]));
    assert_ne!(raw["ids"], generate_json(&["--raw", "--prompt", GARDEN, "--max-tokens", "8"])["ids"]);
}

#[test]
fn thinking_can_be_asked_for() {
    let answer = generate(&["--prompt", "What is 46 + 37?", "--thinking", "on"]).good();
    assert!(answer.stdout.ends_with("</think>\n\n46 + 37 = 83.\n"), "{}", answer.stdout);
    let answer = generate(&["--prompt", "What is 46 + 37?", "--thinking", "off"]).good();
    assert_eq!(answer.stdout, "46 + 37 = 83.\n");
}

#[test]
fn repeated_prompts_are_answered_in_order() {
    let answers = generate(&["--prompt", GARDEN, "--prompt", SUM]).good();
    assert_eq!(answers.stdout, "n-e-d-r-a-g.\n27 + 58 = 85.\n");
    let answers = generate_json(&["--prompt", SUM, "--prompt", GARDEN]);
    let texts: Vec<&str> =
        answers.as_array().unwrap().iter().map(|one| one["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["27 + 58 = 85.", "n-e-d-r-a-g."]);
}

#[test]
fn an_answer_does_not_depend_on_the_prompt_before_it() {
    let together = generate_json(&["--prompt", GARDEN, "--prompt", SUM]);
    for (place, prompt) in [GARDEN, SUM].iter().enumerate() {
        let alone = generate_json(&["--prompt", prompt]);
        for field in ["ids", "text", "finish_reason", "token_sha", "usage"] {
            assert_eq!(together[place][field], alone[field], "{field} of {prompt}");
        }
    }
}

#[test]
fn replayed_rounds_and_eager_rounds_pick_the_same_tokens() {
    for dtype in ["f32", "bf16"] {
        let with = |graphs| {
            let options = ["--prompt", "Count from 5 to 16.", "--dtype", dtype, "--graphs", graphs];
            generate_json(&options)
        };
        let (on, off) = (with("on"), with("off"));
        let decoded = on["ids"].as_array().unwrap().len() - 1;
        assert_eq!(on["token_sha"], off["token_sha"], "{dtype}");
        assert_eq!(on["ids"], off["ids"], "{dtype}");
        // The ladder was captured before the prompt came.
        assert_eq!(on["rounds"]["captured"], 0);
        assert_eq!(on["rounds"]["replayed"], decoded);
        assert_eq!(on["rounds"]["eager"], serde_json::json!({"prompt pass": 1}));
        assert_eq!(off["rounds"]["captured"], 0);
        assert_eq!(off["rounds"]["replayed"], 0);
        assert_eq!(off["rounds"]["eager"], serde_json::json!({"prompt pass": 1, "graphs off": decoded}));
    }
}

#[test]
fn both_precisions_answer_and_say_which_they_are() {
    for dtype in ["f32", "bf16"] {
        let answer = generate(&["--prompt", GARDEN, "--dtype", dtype]).good();
        assert_eq!(answer.stdout, "n-e-d-r-a-g.\n");
        assert!(answer.stderr.contains(&format!("host device in {dtype}")), "{}", answer.stderr);
    }
}

#[test]
fn settings_come_from_the_environment_and_options_win() {
    let with = |options: &[&str]| -> Ended {
        let mut binary = binary("generate");
        binary.args(["--prompt", GARDEN]).args(options);
        run(binary.env("ROUNDHOUSE_DTYPE", "f32").env("ROUNDHOUSE_CONTEXT", "64"))
    };
    let set = with(&[]).good();
    assert!(set.stderr.contains(" in f32"), "{}", set.stderr);
    assert!(
        set.stderr.contains("16 of 540672 bytes"),
        "16 lanes of 64 positions have a page each: {}",
        set.stderr
    );
    let won = with(&["--dtype", "bf16"]).good();
    assert!(won.stderr.contains(" in bf16"), "{}", won.stderr);
}
