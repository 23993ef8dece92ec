//! What settings say about quantised weights is read in full and compared with what is stored.

use runtime::checkpoint::Dtype;
use runtime::config::ModelConfig;
use serde_json::{Value, json};

use crate::folder::Folder;
use crate::sketch::{Sketch, TABLE, TEXT};

const METHODS: &str = "fp8 or modelopt or compressed-tensors";

/// Requires that a sketch opens as it is, and not with a changed `quantization_config`.
#[track_caller]
fn refused(mut sketch: Sketch, path: &str, value: Value, parts: &[&str]) {
    if let Err(error) = ModelConfig::from_json(&sketch.config.to_string()) {
        panic!("{error}");
    }
    let mut at = &mut sketch.config["quantization_config"];
    for key in path.split('/').filter(|key| !key.is_empty()) {
        at = &mut at[key];
    }
    *at = value;
    let message = ModelConfig::from_json(&sketch.config.to_string()).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn methods_and_algorithms_that_are_not_known_are_refused_with_those_that_are() {
    for method in ["awq", "gptq", "bitsandbytes", "mxfp4"] {
        let at = "quantization_config.quant_method";
        refused(Sketch::nvfp4(), "quant_method", json!(method), &[at, method, METHODS]);
    }
    refused(Sketch::nvfp4(), "", json!({}), &["quant_method is absent", METHODS]);
    refused(Sketch::nvfp4(), "", json!({"bits": 4, "group_size": 64}), &["quant_method is absent", METHODS]);
    let algorithms = "NVFP4 or FP8 or FP8_PB_WO or FP8_BLOCK_SCALES";
    refused(Sketch::nvfp4(), "quant_algo", json!("W4A8_AWQ"), &["quant_algo is W4A8_AWQ", algorithms]);
    refused(Sketch::nvfp4(), "quant_algo", Value::Null, &["quantization_config.quant_algo is missing"]);
    let layers = format!("quantized_layers/{TABLE}/quant_algo");
    let at = format!("quantized_layers.{TABLE}.quant_algo is INT8");
    refused(Sketch::mixed("FP8"), &layers, json!("INT8"), &[&at, algorithms]);
    refused(Sketch::mixed("FP8"), "quantized_layers", json!({}), &["quantized_layers", "no layer"]);
    refused(Sketch::mixed("FP8"), "quantized_layers", Value::Null, &["quantized_layers is missing"]);
    refused(
        Sketch::packed(),
        "format",
        json!("pack-quantized"),
        &["format is pack-quantized", "nvfp4-pack-quantized"],
    );
    let mut mlx = Sketch::bf16();
    mlx.config["quantization"] = json!({"group_size": 64, "bits": 4});
    mlx.folder().refused(&["config.json", "quantization is", METHODS]);
}

#[test]
fn numbers_of_a_format_that_are_not_supported_are_refused() {
    let blocks = json!([64, 128]);
    refused(
        Sketch::fp8(Dtype::F32),
        "weight_block_size",
        blocks,
        &["weight_block_size is [64,128]", "[128,128]"],
    );
    refused(Sketch::fp8(Dtype::F32), "fmt", json!("e5m2"), &["fmt is e5m2", "e4m3"]);
    refused(Sketch::nvfp4(), "group_size", json!(32), &["group_size is 32", "16 for nvfp4"]);
    refused(Sketch::nvfp4(), "pre_quant_scale", json!(true), &["pre_quant_scale is true"]);
    let layer = format!("quantized_layers/{TEXT}0.mlp.experts/group_size");
    refused(Sketch::mixed("FP8"), &layer, json!(32), &["group_size is 32"]);
    let weights = |key: &str| format!("config_groups/group_0/weights/{key}");
    for (key, value) in [
        ("num_bits", json!(3)),
        ("type", json!("int")),
        ("group_size", json!(32)),
        ("symmetric", json!(false)),
        ("strategy", json!("channel")),
    ] {
        refused(Sketch::packed(), &weights(key), value, &[&format!("group_0.weights.{key} is ")]);
    }
    refused(Sketch::packed(), "sparsity_config", json!({"format": "24"}), &["sparsity_config"]);
}

#[test]
fn keys_that_are_not_known_are_refused_in_every_section() {
    for (sketch, path) in [
        (Sketch::fp8(Dtype::F32), "surprise"),
        (Sketch::nvfp4(), "surprise"),
        (Sketch::packed(), "surprise"),
        (Sketch::packed(), "config_groups/group_0/surprise"),
        (Sketch::packed(), "config_groups/group_0/weights/surprise"),
    ] {
        let name = format!("quantization_config.{}", path.replace('/', "."));
        refused(sketch, path, json!(1), &["unknown settings, 1: ", &name]);
    }
    let mixed = format!("quantized_layers/{TABLE}/surprise");
    refused(Sketch::mixed("FP8"), &mixed, json!(1), &["unknown settings, 1: ", "surprise"]);
}

#[test]
fn a_format_of_which_nothing_is_stored_is_named_with_what_is() {
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let plain = Sketch::bf16().saying(fp8.clone()).folder();
    plain.refused(&["quantization_config says fp8", "no fp8 weights", "experts bf16", "table bf16", "fetch"]);
    let mut other = Sketch::packed();
    other.config["quantization_config"] = fp8;
    other.folder().refused(&["says fp8", "no fp8 weights", "experts nvfp4"]);
    let mixed = Sketch::mixed("FP8_PB_WO").config;
    let mut partly = Sketch::packed();
    partly.config = mixed;
    partly.folder().refused(&[
        "says modelopt MIXED_PRECISION",
        "FP8_PB_WO",
        "no fp8 weights",
        "experts nvfp4",
    ]);
    let hinted = |sketch: Sketch| {
        let folder = sketch.folder();
        folder.edit_json("config.json", |config| {
            config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn".into();
        });
        folder
    };
    hinted(Sketch::bf16()).refused(&["text_config.ple_embedding_dtype says float8_e4m3fn", "table bf16"]);
    hinted(Sketch::packed()).refused(&["text_config.ple_embedding_dtype says float8_e4m3fn", "table bf16"]);
}

#[test]
fn quantised_weights_of_which_the_settings_say_nothing_are_named() {
    for (sketch, format) in [(Sketch::nvfp4(), "nvfp4"), (Sketch::fp8(Dtype::F32), "fp8")] {
        let folder = sketch.folder();
        folder.edit_json("config.json", |config| config["quantization_config"] = Value::Null);
        let name = format!("tensor {TEXT}0.mlp.experts.0.gate_proj.weight in model-1.safetensors");
        folder.refused(&[
            &name,
            &format!("stored as {format}"),
            "no quantization_config",
            "hf_quant_config.json",
        ]);
    }
    let other = Sketch::nvfp4().saying(json!({"quant_method": "modelopt", "quant_algo": "FP8"})).folder();
    other.refused(&["experts.0.gate_proj.weight", "stored as nvfp4", "no quantization_config", "table fp8"]);
    // The hint speaks of the table, and so it is enough for the table alone.
    let mut table = Sketch::bf16();
    table.fp8_table();
    table.folder().refused(&[&format!("{TABLE}.shard_0.weight"), "no quantization_config"]);
    table.config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn".into();
    table.folder().open();
    // A table that was converted later is used under any word of quantisation.
    let mut later = Sketch::packed();
    later.fp8_table();
    later.folder().open();
}

#[test]
fn a_file_beside_the_settings_is_held_against_the_weights_too() {
    let with = |value: Value| -> Folder {
        let folder = Sketch::packed().folder();
        folder.write_json("hf_quant_config.json", &value);
        folder
    };
    let good =
        json!({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}});
    with(good).open();
    let fp8 = json!({"producer": {}, "quantization": {"quant_algo": "FP8"}});
    with(fp8).refused(&["hf_quant_config.json says modelopt FP8", "no fp8 weights", "experts nvfp4"]);
    with(json!({})).refused(&["hf_quant_config.json", "quantization is missing"]);
    with(json!({"quantization": {"quant_algo": "INT4_AWQ"}})).refused(&[
        "hf_quant_config.json",
        "INT4_AWQ",
        "NVFP4",
    ]);
    with(json!({"quantization": {"quant_algo": "NVFP4"}, "more": 1}))
        .refused(&["hf_quant_config.json", "more"]);
}
