//! Prompts that the model cannot run.

use crate::binary::generate;

#[test]
fn ids_outside_the_vocabulary_are_named_with_their_place() {
    generate(&["--ids", "1,2,2048"]).refused(&["2048", "position 2", "vocabulary of 2048"]);
    generate(&["--ids", "4294967295"]).refused(&["4294967295", "position 0"]);
    generate(&["--ids", "4294967296"]).refused(&["--ids", "4294967296"]);
    let last = generate(&["--ids", "2047", "--max-tokens", "1"]);
    last.good();
}

#[test]
fn an_empty_prompt_is_refused() {
    generate(&["--raw", "--prompt", ""]).refused(&["the prompt is empty"]);
    generate(&["--ids", ""]).refused(&["--ids", "not a token id"]);
}

#[test]
fn a_prompt_over_the_context_is_refused_with_both_numbers() {
    let ids = vec!["7"; 65].join(",");
    generate(&["--ids", &ids, "--context", "64"]).refused(&["65 ids", "context of 64", "--context"]);
    generate(&["--ids", &ids[4..], "--context", "64"]).good();
}
