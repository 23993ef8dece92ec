//! Options outside their limits: status 2, and the option by name.

use crate::binary::{Ended, binary, generate, generate_json, run};

fn with(option: &str, value: &str) -> Ended {
    generate(&["--ids", "5,6,7", "--max-tokens", "2", "--json", option, value])
}

#[test]
fn sampling_options_outside_their_limits_are_named() {
    let refused = |option: &str, values: &[&str]| {
        values.iter().for_each(|value| with(option, value).refused(&[option]));
    };
    refused("--temperature", &["nan", "-1", "-0.5", "inf", "-inf", "warm", "1e39"]);
    refused("--top-p", &["0", "-0.1", "1.01", "nan", "inf"]);
    refused("--top-k", &["-1", "1.5", "nan"]);
    refused("--min-p", &["-0.1", "1.1", "nan"]);
    refused("--presence-penalty", &["2.1", "-2.1", "nan"]);
    refused("--frequency-penalty", &["2.1", "-2.1", "nan"]);
    refused("--repetition-penalty", &["0", "-1", "nan", "inf"]);
    refused("--seed", &["-1", "18446744073709551616", "x"]);
    refused("--logprobs", &["-1", "1000", "x"]);
    refused("--logit-bias", &["5", "5=", "=3", "5=101", "5=-101", "5=nan", "5=1,5=2", "2048=1", "-1=2"]);
    refused("--stop", &[""]);
    refused("--stop-id", &["-1", "x", ""]);
    with("--stop-id", "2048").refused(&["stop id 2048", "vocabulary of 2048"]);
}

#[test]
fn the_ends_of_the_limits_are_good() {
    for (option, value) in [
        ("--temperature", "3e38"),
        ("--top-p", "1"),
        ("--top-k", "4294967295"),
        ("--min-p", "1"),
        ("--presence-penalty", "-2"),
        ("--frequency-penalty", "2"),
        ("--repetition-penalty", "0.001"),
        ("--logit-bias", "2047=100"),
    ] {
        with(option, value).good();
    }
}

#[test]
fn engine_options_outside_their_limits_are_named() {
    let refused = |option: &str, values: &[&str]| {
        values.iter().for_each(|value| with(option, value).refused(&[option]));
    };
    refused("--lanes", &["0", "-1", "1025", "many"]);
    refused("--memory", &["0", "-1", "1K", "1.5G", "lots", "1GB", "99999999T"]);
    refused("--audit", &["-1", "x"]);
    refused("--context", &["0", "-1", "32769"]);
    refused("--graphs", &["yes"]);
    refused("--table", &["disk", "host"]);
}

#[test]
fn a_prompt_that_no_page_is_left_for_is_refused_with_both_numbers() {
    // Two pages hold 128 positions.
    let line = |tokens| ["--ids", "5,6,7", "--ignore-eos", "--memory", "528K", "--max-tokens", tokens];
    generate(&line("126")).refused(&["3 pages", "has 2"]);
    assert_eq!(generate_json(&line("125"))["usage"]["total_tokens"], 128);
}

#[test]
fn the_memory_plan_follows_the_options() {
    let plan =
        |options: &[&str]| generate(&[&["--ids", "1", "--max-tokens", "1"], options].concat()).good().stderr;
    let small = plan(&["--lanes", "2", "--memory", "1M"]);
    assert!(small.contains("2 of 2471936 bytes (--lanes)"), "{small}");
    assert!(small.contains("3 of 270336 bytes, 64 positions each (--memory)"), "{small}");
    // No more pages than the lanes can use.
    let enough = plan(&["--lanes", "2", "--memory", "1T", "--context", "128"]);
    assert!(enough.contains("4 of 270336 bytes"), "{enough}");
}

#[test]
fn audited_rounds_are_counted_and_pick_the_same_tokens() {
    let line = ["--prompt", "Count from 5 to 16."];
    let (plain, audited) = (generate_json(&line), generate_json(&[&line[..], &["--audit", "4"]].concat()));
    assert_eq!(plain["token_sha"], audited["token_sha"]);
    assert!(audited["rounds"]["eager"]["audit"].as_u64().unwrap() > 2, "{}", audited["rounds"]);
}

#[test]
fn tables_live_anywhere_and_tokens_are_the_same() {
    let line = |table| ["--prompt", "Count from 5 to 16.", "--table", table];
    let sha = |table| generate_json(&line(table))["token_sha"].clone();
    let here = sha("device");
    for (table, words) in
        [("pinned", "in pinned host memory"), ("mmap", "mapped from the checkpoint's files")]
    {
        assert_eq!(sha(table), here, "{table}");
        let told = generate(&line(table)).good().stderr;
        assert!(told.contains(words), "{words:?} is not in: {told}");
    }
    let wide = [&line("mmap")[..], &["--dtype", "f32"]].concat();
    generate(&wide).refused(&["--table mmap", "shard_0.weight", "f32", "--table device"]);
    generate(&["--ids", "1", "--load", "dummy", "--table", "mmap"]).refused(&[
        "--table mmap",
        "--load dummy",
        "--table pinned",
    ]);
}

#[test]
fn every_engine_option_is_a_setting_too() {
    for (setting, value) in [
        ("LANES", "0"),
        ("MEMORY", "none"),
        ("AUDIT", "-1"),
        ("GRAPHS", "maybe"),
        ("CONTEXT", "x"),
        ("TABLE", "disk"),
    ] {
        let mut line = binary("generate");
        let ended = run(line.args(["--ids", "1"]).env(format!("ROUNDHOUSE_{setting}"), value));
        ended.refused(&[&format!("--{}", setting.to_lowercase()), value]);
    }
}
