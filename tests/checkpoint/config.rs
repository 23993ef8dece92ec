//! `config.json`: each value is used or refused, and each refusal names the key.

use std::fs;

use runtime::config::{Axis, LayerKind, ModelConfig, OutputGate, StorageDtype};
use serde_json::{Value, json};

use crate::folder::{Folder, oracle};
use crate::scale::flash_next;

fn base() -> Value {
    serde_json::from_slice(&fs::read(oracle("base_bf16").join("config.json")).unwrap()).unwrap()
}

/// The configuration with the value at a path replaced or added; `null` counts as absent.
fn with(path: &str, value: Value) -> Value {
    let mut config = base();
    set(&mut config, path, value);
    config
}

fn set(config: &mut Value, path: &str, value: Value) {
    let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
    let at = section.split('.').filter(|part| !part.is_empty()).fold(config, |at, part| &mut at[part]);
    at[key] = value;
}

#[track_caller]
fn refused(config: &Value, parts: &[&str]) {
    let message = match ModelConfig::from_json(&config.to_string()) {
        Ok(_) => panic!("accepted; expected an error with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

fn accepted(config: &Value) -> ModelConfig {
    ModelConfig::from_json(&config.to_string()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_published_configuration_is_read_whole() {
    let c = accepted(&flash_next());
    assert_eq!(c.dtype, StorageDtype::Bf16);
    assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (248320, 2560, 48));
    let sparse: Vec<usize> = (0..48).filter(|&i| c.layers[i] == LayerKind::SparseAttention).collect();
    assert_eq!(sparse, (3..48).step_by(4).collect::<Vec<_>>());
    assert_eq!((c.attention_width(), c.kv_width(), c.index_width()), (6144, 512, 640));
    assert_eq!((c.linear_key_width(), c.linear_value_width(), c.linear_conv_width()), (2048, 6144, 10240));
    assert_eq!((c.streams_width(), c.hc_lowrank), (10240, 320));
    assert_eq!((c.rotary.width, c.rotary.theta, c.rotary.sections), (64, 1e7, [11, 11, 10]));
    assert_eq!((c.indexer_budget, c.indexer_compress_ratio), (2048, 4));
    assert_eq!((c.output_gate, c.norm_topk_prob, c.rms_norm_eps), (OutputGate::Sigmoid, true, 1e-6));
    let ngram = c.ngram.unwrap();
    assert_eq!((ngram.heads(), ngram.head_width(), ngram.split_parts, ngram.seed), (16, 160, 128, 1234));
    assert_eq!((c.ple[0].layer, c.ple[0].ordinal, c.ple.len()), (1, 0, 1));
    assert_eq!((c.boundary, c.bos_token_id, c.mtp_num_hidden_layers), (248044, Some(248044), 1));
    let vision = c.vision.unwrap();
    assert_eq!((vision.depth, vision.hidden_size, vision.merged_width()), (27, 1152, 4608));
    assert_eq!((vision.tokens.image, vision.tokens.video), (248056, 248057));
    assert_eq!((vision.tokens.start, vision.tokens.end), (248053, 248054));
}

#[test]
fn rotary_axes_interleave() {
    let rotary = accepted(&flash_next()).rotary;
    let word: String = (0..32)
        .map(|i| match rotary.axis(i) {
            Axis::Time => 'T',
            Axis::Height => 'H',
            Axis::Width => 'W',
        })
        .collect();
    assert_eq!(word, "THWTHWTHWTHWTHWTHWTHWTHWTHWTHWTH");
}

#[test]
fn malformed_files_are_refused() {
    for text in ["", "{", "[1]", "nonsense", "{\"model_type\": \"qwen4_exp\""] {
        let folder = Folder::copy_of("no_ple");
        fs::write(folder.path("config.json"), text).unwrap();
        folder.refused(&["config.json", "not a JSON object"]);
    }
}

#[test]
fn a_key_written_twice_is_refused_at_any_depth() {
    let text = base().to_string();
    for (key, twice) in [("tie_word_embeddings", 2), ("hc_count", 1), ("rope_type", 1)] {
        let at = format!("\"{key}\":");
        assert_eq!(text.matches(&at).count(), twice);
        let message =
            ModelConfig::from_json(&text.replace(&at, &format!("\"{key}\":0,{at}"))).unwrap_err().to_string();
        assert!(message.contains(&format!("{key} is there twice")), "{message}");
    }
}

#[test]
fn unknown_keys_are_named_in_every_section() {
    for path in [
        "surprise",
        "text_config.surprise",
        "text_config.intermediate_size",
        "text_config.rope_parameters.surprise",
        "vision_config.surprise",
    ] {
        refused(&with(path, json!(1)), &["unknown settings, 1: ", path]);
    }
    let mut two = with("text_config.alpha", json!(1));
    set(&mut two, "text_config.beta", json!(1));
    refused(&two, &["unknown settings, 2: text_config.alpha, text_config.beta"]);
    refused(&with("text_config.mtp", json!({"surprise": 1})), &["text_config.mtp.surprise"]);
}

/// No value is skipped: nonsense in any key that is not on the list of informative ones is refused by name.
#[test]
fn nonsense_in_any_key_is_refused_by_name() {
    let informative = [
        "transformers_version",
        "initializer_range",
        "attention_dropout",
        "router_aux_loss_coef",
        "output_router_logits",
        "use_cache",
        "pad_token_id",
    ];
    let full = flash_next();
    let mut tried = 0;
    for section in ["", "text_config", "text_config.rope_parameters", "text_config.mtp", "vision_config"] {
        let at = section.split('.').filter(|part| !part.is_empty()).fold(&full, |at, part| &at[part]);
        for key in at.as_object().unwrap().keys() {
            let path = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
            let mut config = full.clone();
            set(&mut config, &path, json!({"non": "sense"}));
            if informative.contains(&key.as_str()) {
                accepted(&config);
            } else {
                refused(&config, &[key]);
            }
            tried += 1;
        }
    }
    assert_eq!(tried, 89);
}

#[test]
fn sizes_that_are_zero_negative_fractional_or_absurd_are_refused_by_name() {
    let full = flash_next();
    let signs =
        |key: &str| key.ends_with("_id") || key.ends_with("_ids") || key == "seed" || key.starts_with("mtp");
    let mut tried = 0;
    for section in ["text_config", "vision_config"] {
        for (key, value) in full[section].as_object().unwrap() {
            if !value.is_u64() || signs(key) {
                continue;
            }
            for bad in [json!(0), json!(-1), json!(u64::MAX), json!(i64::MAX), json!(1.5)] {
                let mut config = full.clone();
                config[section][key] = bad;
                refused(&config, &[key]);
            }
            tried += 1;
        }
    }
    assert!(tried > 35, "{tried}");
}

#[test]
fn sizes_that_multiply_to_something_absurd_are_refused_or_harmless() {
    let wide = 1 << 24;
    for path in
        ["hidden_size", "num_attention_heads", "head_dim", "linear_num_value_heads", "moe_intermediate_size"]
    {
        let mut config = flash_next();
        set(&mut config, &format!("text_config.{path}"), json!(wide));
        // Refused by a rule or not: either way nothing may panic, and the folder check would name a shape.
        if let Ok(config) = ModelConfig::from_json(&config.to_string()) {
            runtime::checkpoint::layout::Layout::plain(&config, true);
        }
    }
    let mut config = flash_next();
    set(&mut config, "text_config.num_experts", json!(4096));
    set(&mut config, "text_config.num_hidden_layers", json!(1024));
    set(&mut config, "text_config.layer_types", Value::Null);
    refused(&config, &["num_experts", "num_hidden_layers"]);
}

#[test]
fn what_this_build_does_not_support_is_refused_with_what_it_does() {
    let cases = [
        ("model_type", json!("qwen3_5"), "this build supports qwen4_exp"),
        ("model_type", json!("qwen3_8_flash_next"), "model_type is qwen3_8_flash_next"),
        ("architectures", json!(["Qwen4ExpForCausalLM"]), "Qwen4ExpForConditionalGeneration"),
        ("tie_word_embeddings", json!(true), "supports false"),
        ("language_model_only", json!(true), "supports false"),
        ("dtype", json!("float16"), "bfloat16 or float32"),
        ("text_config.model_type", json!("qwen3_5_text"), "qwen4_exp_text"),
        ("text_config.dtype", json!("float8_e4m3fn"), "bfloat16 or float32"),
        ("text_config.tie_word_embeddings", json!(true), "supports false"),
        ("text_config.hidden_act", json!("gelu"), "supports silu"),
        ("text_config.attention_bias", json!(true), "supports false"),
        ("text_config.mamba_ssm_dtype", json!("bfloat16"), "float32"),
        ("text_config.indexer_kv_heads", json!(2), "supports 1"),
        ("text_config.output_gate_type", json!("tanh"), "sigmoid or silu"),
        ("text_config.ple_embedding_dtype", json!("float8_e5m2"), "bfloat16 or float32 or float8_e4m3fn"),
        ("text_config.mtp_num_hidden_layers", json!(2), "from 0 to 1"),
        ("text_config.mtp_use_dedicated_embeddings", json!(true), "supports false"),
        (
            "text_config.mtp",
            json!({"mtp_use_hidden_state_from_layer": 3}),
            "mtp_use_hidden_state_from_layer is 3",
        ),
        ("text_config.mtp", json!({"layer_types": ["linear_attention"]}), "mtp.layer_types"),
        ("text_config.mtp", json!({"num_hidden_layers": 0}), "mtp.num_hidden_layers is 0"),
        ("text_config.mtp", json!({"rope_theta": 1}), "mtp.rope_theta"),
        (
            "text_config.rope_parameters.rope_type",
            json!("yarn"),
            "rope_type is yarn; this build supports default",
        ),
        ("text_config.rope_parameters.rope_type", json!("linear"), "rope_type is linear"),
        ("text_config.rope_parameters.mrope_interleaved", json!(false), "mrope_interleaved is false"),
        ("vision_config.model_type", json!("qwen3_vl"), "qwen4_exp or qwen4_exp_vision"),
        ("vision_config.hidden_act", json!("silu"), "gelu_pytorch_tanh"),
        ("vision_config.deepstack_visual_indexes", json!([3]), "deepstack_visual_indexes is [3]"),
    ];
    for (path, value, part) in cases {
        refused(&with(path, value), &[path.rsplit('.').next().unwrap(), part]);
    }
}

#[test]
fn values_that_do_not_go_together_are_refused_with_both() {
    let cases: [(&str, Value, &[&str]); 24] = [
        ("text_config.num_key_value_heads", json!(3), &["num_key_value_heads 3", "num_attention_heads 4"]),
        (
            "text_config.linear_num_key_heads",
            json!(4),
            &["linear_num_key_heads 4", "linear_num_value_heads 6"],
        ),
        ("text_config.indexer_budget", json!(18), &["indexer_compress_ratio 4", "indexer_budget 18"]),
        ("text_config.indexer_compress_ratio", json!(16), &[]),
        ("text_config.indexer_head_dim", json!(4), &["rotary width 8", "indexer_head_dim 4"]),
        ("text_config.num_experts_per_tok", json!(9), &["num_experts_per_tok 9", "num_experts 8"]),
        ("text_config.hc_count", json!(1), &["hc_count is 1"]),
        ("text_config.num_hidden_layers", json!(7), &["layer_types has 8", "num_hidden_layers 7"]),
        ("text_config.layer_types", json!(vec!["sliding_attention"; 8]), &["sliding_attention"]),
        ("text_config.ple_layer_ids", json!([4]), &["layer 4", "linear_attention"]),
        ("text_config.ple_layer_ids", json!([0]), &["ple_layer_ids is 0"]),
        ("text_config.ple_layer_ids", json!([9]), &["ple_layer_ids is 9"]),
        ("text_config.ple_layer_ids", json!([2, 2]), &["layer 2 twice"]),
        ("text_config.ple_embed_dim", json!(66), &["n-gram heads 4", "ple_embed_dim 66"]),
        ("text_config.split_ngram_parts", json!(7), &["split_ngram_parts 7", "layer 1, 2064"]),
        ("text_config.partial_rotary_factor", json!(0.5), &["partial_rotary_factor is 0.5", "0.25"]),
        (
            "text_config.rope_parameters.mrope_section",
            json!([2, 1, 2]),
            &["mrope_section [2, 1, 2]", "sum 4"],
        ),
        ("text_config.rope_parameters.mrope_section", json!([2, 2]), &["mrope_section [2, 2]"]),
        ("text_config.eos_token_id", json!(1056), &["eos_token_id is 1056"]),
        ("text_config.eos_token_id", json!([]), &["eos_token_id is missing"]),
        ("image_token_id", json!(1056), &["image_token_id is 1056"]),
        ("vision_config.out_hidden_size", json!(63), &["out_hidden_size 63", "hidden_size 64"]),
        ("vision_config.num_position_embeddings", json!(63), &["num_position_embeddings 63", "square"]),
        ("vision_config.num_heads", json!(16), &["hidden_size 32", "num_heads 16"]),
    ];
    for (path, value, parts) in cases {
        if parts.is_empty() {
            accepted(&with(path, value));
        } else {
            refused(&with(path, value), parts);
        }
    }
    let mut config = with("text_config.indexer_compress_ratio", json!(12));
    set(&mut config, "text_config.indexer_budget", json!(24));
    refused(&config, &["indexer_compress_ratio 12", "page of 64"]);
}

#[test]
fn absent_keys_are_named_or_have_a_stated_meaning() {
    for path in [
        "model_type",
        "text_config",
        "image_token_id",
        "text_config.dtype",
        "text_config.hidden_size",
        "text_config.eos_token_id",
        "text_config.hidden_act",
        "text_config.rope_parameters",
        "text_config.rope_parameters.rope_theta",
        "text_config.rope_parameters.mrope_section",
        "text_config.ngram_size",
        "text_config.split_ngram_parts",
        "vision_config.depth",
    ] {
        refused(&with(path, Value::Null), &[path, "is missing"]);
    }
    let mut no_layers = with("text_config.layer_types", Value::Null);
    assert_eq!(accepted(&no_layers).layers, accepted(&base()).layers, "by full_attention_interval");
    set(&mut no_layers, "text_config.full_attention_interval", Value::Null);
    refused(&no_layers, &["layer_types is missing"]);

    assert!(accepted(&with("text_config.norm_topk_prob", Value::Null)).norm_topk_prob);
    assert!(!accepted(&with("text_config.norm_topk_prob", json!(false))).norm_topk_prob);
    assert_eq!(accepted(&with("text_config.output_gate_type", Value::Null)).output_gate, OutputGate::Silu);
    assert!(accepted(&with("vision_config", Value::Null)).vision.is_none());
    assert_eq!(accepted(&with("text_config.partial_rotary_factor", Value::Null)).rotary.width, 8);
    let mut outer = with("text_config.dtype", Value::Null);
    set(&mut outer, "dtype", json!("float32"));
    assert_eq!(accepted(&outer).dtype, StorageDtype::F32);
}
