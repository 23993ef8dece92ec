//! `convert`: a model folder in other formats, that runs.

use std::fs;

use crate::binary::{bare, binary, on, run};

#[test]
fn a_converted_model_is_described_and_answers() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("small");
    let mut line = binary("convert");
    line.arg(&out).args(["--experts", "nvfp4", "--table", "fp8", "--file-size", "8M"]);
    let ended = run(&mut line).good();
    let lines: Vec<Vec<&str>> = ended.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = "experts bf16 -> nvfp4 6.00 MiB -> 1.69 MiB error 9.52 %\n\
                    dense bf16 as before 14.7 MiB -> 14.7 MiB exact\n\
                    n-gram table bf16 -> fp8 (one scale) 1.01 MiB -> 516 KiB error 2.64 %\n\
                    the rest copied 10.1 MiB -> 10.1 MiB exact";
    let expected: Vec<Vec<&str>> = expected.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines, expected, "{}", ended.stdout);
    for words in ["converting 31.8 MiB of weights\n", "converted 31.8 MiB of weights in 0", "weight files to"]
    {
        assert!(ended.stderr.contains(words), "{words:?} is not in {}", ended.stderr);
    }
    assert!(out.join("model.safetensors.index.json").is_file());

    let inspected = run(&mut on("inspect", &out)).good().stdout;
    assert!(
        inspected.contains("experts nvfp4, shared expert bf16, dense bf16, head bf16, table fp8"),
        "{inspected}"
    );
    let mut generate = on("generate", &out);
    let answer = run(generate.args(["--prompt", "Spell garden backwards.", "--max-tokens", "30"])).good();
    assert!(answer.stdout.contains("n-e-d-r-a-g"), "{}", answer.stdout);

    // Into the same folder once more.
    run(&mut line).refused(&["small", "holds", "empty"]);
}

#[test]
fn made_weights_need_a_config_alone() {
    let home = tempfile::tempdir().unwrap();
    let (model, out) = (home.path().join("model"), home.path().join("out"));
    fs::create_dir(&model).unwrap();
    fs::copy(crate::binary::tiny().join("config.json"), model.join("config.json")).unwrap();
    run(on("convert", &model).arg(&out).args(["--experts", "fp8"])).refused(&["model.safetensors"]);
    assert!(!out.exists());
    let dummy = ["--load", "dummy", "--layers", "4", "--experts", "fp8", "--dense", "fp8"];
    let ended = run(on("convert", &model).arg(&out).args(dummy)).good();
    assert!(ended.stdout.starts_with("experts       bf16 -> fp8"), "{}", ended.stdout);
    // To be run it needs what text is made with.
    for file in ["tokenizer.json", "chat_template.jinja"] {
        fs::copy(crate::binary::tiny().join(file), out.join(file)).unwrap();
    }
    let logits = home.path().join("logits");
    run(on("logits", &out).args(["--ids", "1,2,3", "--device", "host", "--out"]).arg(&logits)).good();
    assert!(logits.is_file());
}

#[test]
fn what_cannot_be_converted_is_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("out");
    let refused = |options: &[&str], words: &[&str]| {
        run(binary("convert").arg(&out).args(options)).refused(words);
        assert!(!out.exists());
    };
    refused(&[], &["--experts, --table or --dense"]);
    refused(&["--experts", "fp8", "--layers", "2"], &["--layers 2", "--load dummy"]);
    refused(&["--load", "dummy", "--layers", "9"], &["--layers 9", "8 layers"]);
    refused(&["--dense", "nvfp4"], &["--dense", "nvfp4"]);
    run(binary("convert").arg(crate::binary::tiny().join("out")).args(["--experts", "fp8"]))
        .refused(&["models/tiny", "lies in it"]);
    run(bare().arg("convert").arg(&out)).refused(&["<OUT>"]);
}
