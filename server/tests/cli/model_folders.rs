//! Model folders that are refused: status 2, and a message that names the thing.

use std::path::Path;

use serde_json::{Value, json};

use crate::binary::{data, on, run, with_pictures};
use crate::folder::{CONFIG, Folder, INDEX, SHARD};

#[test]
fn a_missing_folder_or_settings_file() {
    run(on("generate", Path::new("absent")).args(["--ids", "1"])).refused(&["absent", "config.json"]);
    run(&mut on("inspect", Path::new("absent"))).refused(&["absent", "config.json"]);
    Folder::new().without(CONFIG).refused(&[CONFIG]);
    Folder::new().without("tokenizer.json").refused(&["tokenizer.json"]);
}

#[test]
fn settings_that_are_no_json_or_hold_what_this_build_cannot_run() {
    Folder::new().with_bytes(CONFIG, |bytes| bytes.truncate(100)).refused(&[CONFIG, "line"]);
    Folder::new().with_bytes(CONFIG, Vec::clear).refused(&[CONFIG]);
    let with = |key: &'static str, value: Value| {
        Folder::new().with_json(CONFIG, |config| *config.pointer_mut(key).unwrap() = value)
    };
    with("/model_type", json!("llama")).refused(&[CONFIG, "model_type", "llama", "qwen4_exp"]);
    with("/text_config/hidden_act", json!("relu")).refused(&[CONFIG, "hidden_act", "relu"]);
    with("/text_config/hidden_size", json!("wide")).refused(&[CONFIG, "hidden_size"]);
    with("/text_config", json!(7)).refused(&[CONFIG, "text_config"]);
}

#[test]
fn settings_and_weights_of_different_exports() {
    let quantised = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    Folder::new().with_json(CONFIG, |config| config["quantization_config"] = quantised).refused(&[
        "quantization_config",
        "NVFP4",
        "experts bf16",
    ]);
    Folder::new()
        .with_json(CONFIG, |config| config["quantization_config"] = json!({"quant_method": "awq"}))
        .refused(&[CONFIG, "quant_method is awq", "fp8 or modelopt or compressed-tensors"]);
    for (folder, formats) in [
        (
            "quant_fp8_block",
            "experts fp8, shared expert fp8, dense fp8 and bf16, head bf16, table fp8 (one scale)",
        ),
        ("quant_nvfp4", "experts nvfp4, shared expert nvfp4, dense nvfp4 and bf16, head bf16, table bf16"),
    ] {
        let dir = data("oracle/checkpoints").join(folder);
        let inspected = run(&mut on("inspect", &dir)).good();
        assert!(inspected.stdout.contains(&format!("formats      {formats}\n")), "{}", inspected.stdout);
        run(on("generate", &dir).args(["--ids", "1,2,3", "--max-tokens", "4"])).good();
        let checked = run(on("check", &dir).args(["--cases", "2"])).good();
        assert_eq!(checked.stdout.matches(" ok: ").count(), 3, "{}", checked.stdout);
        assert_eq!(with_pictures(&checked, 3), 3);
    }
}

#[test]
fn an_index_that_is_no_index_or_is_stale() {
    Folder::new().with_bytes(INDEX, |bytes| bytes.truncate(100)).refused(&[INDEX]);
    Folder::new()
        .with_json(INDEX, |index| index["weight_map"] = json!([]))
        .refused(&[INDEX, "not a usable index"]);
    let moved = Folder::new().with_json(INDEX, |index| {
        let place = index["weight_map"].as_object_mut().unwrap().values_mut().find(|place| *place != SHARD);
        *place.unwrap() = SHARD.into();
    });
    moved.refused(&[INDEX, SHARD, "stale"]);
}

#[test]
fn files_that_are_missing_or_cut() {
    Folder::new().without(SHARD).refused(&[SHARD, "is missing", INDEX]);
    Folder::new().without(INDEX).refused(&[INDEX]);
    let cut = |bytes: usize| Folder::new().with_bytes(SHARD, |file| file.truncate(bytes));
    cut(5_000_000).refused(&[SHARD]);
    cut(100).refused(&[SHARD]);
    cut(0).refused(&[SHARD]);
}

#[test]
fn tensors_of_another_shape_or_type() {
    let with = |edit: fn(&mut Value)| {
        let mut name = String::new();
        let folder = Folder::new().with_header(SHARD, |header| {
            let tensors = header.as_object_mut().unwrap();
            let oblong = |shape: &Value| shape.as_array().is_some_and(|s| s.len() == 2 && s[0] != s[1]);
            let (found, tensor) = tensors.iter_mut().find(|(_, tensor)| oblong(&tensor["shape"])).unwrap();
            name.clone_from(found);
            edit(tensor);
        });
        (folder, name)
    };
    let (turned, name) = with(|tensor| tensor["shape"].as_array_mut().unwrap().reverse());
    turned.refused(&[&name, SHARD, "shape"]);
    let (retyped, name) = with(|tensor| tensor["dtype"] = "F16".into());
    retyped.refused(&[&name, SHARD, "F16"]);
}

#[test]
fn a_template_that_is_missing_or_does_not_parse() {
    const TEMPLATE: &str = "chat_template.jinja";
    Folder::new().with_bytes(TEMPLATE, |text| text.extend(b"{% if")).refused(&[TEMPLATE]);
    let bare = Folder::new().without(TEMPLATE).with_json("tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    bare.refused(&["chat template"]);
}
