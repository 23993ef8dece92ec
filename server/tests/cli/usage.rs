//! Lines and environments that are no order.

use crate::binary::{bare, binary, generate, run};

#[test]
fn settings_that_do_not_parse_are_named_with_their_value() {
    let refused = |option: &str, value: &str, words: &[&str]| {
        generate(&["--ids", "1", option, value]).refused(&[&[option, value], words].concat());
    };
    refused("--dtype", "fp64", &["f32", "bf16"]);
    refused("--context", "-1", &[]);
    refused("--context", "0", &[]);
    refused("--context", "many", &[]);
    refused("--max-tokens", "0", &[]);
    refused("--max-tokens", "-1", &[]);
    refused("--max-tokens", "1.5", &[]);
    refused("--graphs", "maybe", &["on", "off"]);
    refused("--ids", "1,x", &["`x`"]);
    refused("--ids", "1,,2", &["not a token id"]);
    refused("--device", "tpu", &["host", "cuda:N"]);
    refused("--device", "cuda:", &["cuda:N"]);
}

#[test]
fn a_cuda_device_that_is_not_there_is_a_device_failure() {
    // No driver at all, or one that shows nothing: the reason differs, the status does not.
    let words = ["is not usable", "CUDA"];
    generate(&["--ids", "1", "--device", "cuda:7"]).failed(3, &words);
    for command in ["demo", "check"] {
        run(binary(command).args(["--device", "cuda"])).failed(3, &words);
    }
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("logits.safetensors");
    run(binary("logits").args(["--ids", "1", "--device", "cuda", "--out"]).arg(out)).failed(3, &words);
}

#[test]
fn f32_on_cuda_is_refused_before_the_device_is_looked_for() {
    let line = ["--ids", "1", "--device", "cuda", "--dtype", "f32"];
    generate(&line).refused(&["--dtype f32", "--device cuda:0", "--device host"]);
}

#[test]
fn without_a_cuda_device_auto_is_the_host_and_says_why() {
    let auto = generate(&["--ids", "1", "--max-tokens", "1"]).good();
    assert!(auto.stderr.contains("on the host device in bf16 (auto: "), "{}", auto.stderr);
    assert!(auto.stderr.contains("CUDA driver"), "{}", auto.stderr);
    let wide = generate(&["--ids", "1", "--max-tokens", "1", "--dtype", "f32"]).good();
    assert!(wide.stderr.contains("(auto: f32 runs on the host device only)"), "{}", wide.stderr);
}

#[test]
fn the_folder_of_compiled_kernels_is_a_setting() {
    run(binary("inspect").env("ROUNDHOUSE_CACHE", "anywhere")).good();
    run(binary("inspect").env("ROUNDHOUSE_CACHES", "anywhere")).refused(&["ROUNDHOUSE_CACHES"]);
}

#[test]
fn a_context_longer_than_the_model_is_refused_with_both_numbers() {
    generate(&["--ids", "1", "--context", "32769"]).refused(&["--context 32769", "32768"]);
}

#[test]
fn lines_without_a_prompt_or_with_two_kinds_are_refused() {
    generate(&[]).refused(&["--prompt", "--ids", "--messages"]);
    generate(&["--ids", "1", "--prompt", "a"]).refused(&["--ids", "--prompt", "cannot be used with"]);
    generate(&["--ids", "1", "--raw"]).refused(&["--raw"]);
    generate(&["--ids", "1", "--drafts", "2"]).refused(&["--drafts"]);
}

#[test]
fn an_unknown_setting_in_the_environment_is_named() {
    let mut one = binary("inspect");
    run(one.env("ROUNDHOUSE_DTYPES", "f32")).refused(&["ROUNDHOUSE_DTYPES"]);
    for line in [&["demo"][..], &["plan", "-"], &["check", "absent"]] {
        run(bare().args(line).env("ROUNDHOUSE_LANE", "4")).refused(&["ROUNDHOUSE_LANE"]);
    }
}

#[test]
fn a_setting_of_the_environment_that_does_not_parse_is_named() {
    let ended = run(binary("generate").args(["--ids", "1"]).env("ROUNDHOUSE_DTYPE", "fp64"));
    assert!(ended.stderr.contains("the environment sets ROUNDHOUSE_DTYPE"), "{}", ended.stderr);
    ended.refused(&["--dtype", "fp64"]);
}

#[test]
fn help_and_version_are_good_ends() {
    let help = run(binary("generate").arg("--help")).good();
    for word in ["--prompt", "--max-tokens", "ROUNDHOUSE_DTYPE", "[default: bf16]"] {
        assert!(help.stdout.contains(word), "{word} is not in {}", help.stdout);
    }
    let version = run(bare().arg("--version")).good();
    assert_eq!(version.stdout, format!("roundhouse {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn dummy_weights_need_no_weight_file_and_layers_need_dummy_weights() {
    generate(&["--ids", "1", "--layers", "2"]).refused(&["--layers 2", "--load dummy"]);
    generate(&["--ids", "1", "--load", "nothing"]).refused(&["--load", "nothing", "checkpoint", "dummy"]);
    generate(&["--ids", "1", "--load", "dummy", "--layers", "9"]).refused(&["--layers 9", "8 layers"]);
    let line = ["--ids", "1,2,3", "--max-tokens", "4", "--ignore-eos", "--load", "dummy"];
    let some = generate(&[&line[..], &["--layers", "2"]].concat()).good();
    assert!(some.stderr.contains("random weights for 2 of 8 layers"), "{}", some.stderr);
    let mut one = binary("generate");
    let set = run(one.args(line).env("ROUNDHOUSE_LAYERS", "2")).good();
    assert_eq!(set.stdout, some.stdout);
}
