//! What is in a converted folder: weight files and their index, settings, and everything else.

use std::fs;

use runtime::checkpoint::layout::Format;
use runtime::convert::ConvertOptions;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::numbers::Numbers;
use crate::{Converted, oracle, tiny, to};

#[test]
fn small_files_have_an_index() {
    let whole = to(Format::Nvfp4, Format::Fp8, Format::Fp8Tensor);
    let one = Converted::new(&tiny(), &whole);
    let many = Converted::new(&tiny(), &ConvertOptions { file_bytes: 3 << 20, ..whole });
    assert!((one.summary.files, many.summary.files > 4) == (1, true), "{}", many.summary.files);
    let [one, other] = [&one, &many].map(|model| Numbers::open(&model.path()));
    assert_eq!(one.0.len(), other.0.len());
    for spec in one.0.layout.specs() {
        let Some(entry) = other.0.entry(&spec.name) else { continue };
        assert!(one.bytes(&spec.name) == other.bytes(&spec.name), "{}", spec.name);
        let element = entry.dtype.bitsize() as u64 / 8;
        assert!(entry.range.start.is_multiple_of(element), "{} lies at {:?}", spec.name, entry.range);
    }
    let index: Value = serde_json::from_slice(
        &fs::read(many.path().join("model.safetensors.index.json")).expect("an index"),
    )
    .expect("JSON");
    let last = format!("model-{0:05}-of-{0:05}.safetensors", many.summary.files);
    assert!(index["weight_map"].as_object().expect("a map").values().any(|file| *file == *last));
    let mut sum = 0;
    for file in 1..=many.summary.files {
        let name = format!("model-{file:05}-of-{:05}.safetensors", many.summary.files);
        let bytes = fs::read(many.path().join(&name)).expect("a file");
        let tensors = SafeTensors::deserialize(&bytes).expect("the format's own library reads it");
        let data: usize = tensors.iter().map(|(_, view)| view.data().len()).sum();
        assert!(data <= 3 << 20 || tensors.len() == 1, "{name} has {data} bytes");
        sum += data;
    }
    assert_eq!(index["metadata"]["total_size"], sum);
}

#[test]
fn the_rest_of_the_folder_comes_along() {
    let converted = Converted::new(&tiny(), &to(Format::Nvfp4, Format::Bf16, Format::Bf16));
    for file in
        ["tokenizer.json", "chat_template.jinja", "generation_config.json", "preprocessor_config.json"]
    {
        let [before, after] =
            [tiny(), converted.path()].map(|dir| fs::read(dir.join(file)).expect("the file is there"));
        assert!(before == after, "{file}");
    }
    let mut names: Vec<String> = fs::read_dir(converted.path())
        .expect("a folder")
        .map(|item| item.expect("a file").file_name().to_string_lossy().into_owned())
        .collect();
    names.retain(|name| name.contains("safetensors") || name.contains("config.json"));
    names.sort();
    let expected = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    ];
    assert_eq!(names, expected);
}

/// What the settings say is what their first exporters say, and true.
#[test]
fn settings_speak_a_published_dialect() {
    let said = |source: &str, options| -> Value {
        let converted = Converted::new(&oracle(source), &options);
        let text = fs::read(converted.path().join("config.json")).expect("settings");
        serde_json::from_slice(&text).expect("JSON")
    };
    let base = |experts, dense, table| said("base_bf16", to(experts, dense, table));
    let plain = base(Format::Bf16, Format::Bf16, Format::Bf16);
    assert!(plain.get("quantization_config").is_none());
    let back = said("quant_nvfp4", to(Format::Bf16, Format::Bf16, Format::Bf16));
    assert!(back.get("quantization_config").is_none(), "{back}");

    let hinted = base(Format::Bf16, Format::Bf16, Format::Fp8Tensor);
    assert!(hinted.get("quantization_config").is_none());
    assert_eq!(hinted["text_config"]["ple_embedding_dtype"], "float8_e4m3fn");

    let blocks = &base(Format::Fp8, Format::Bf16, Format::Fp8Tensor)["quantization_config"];
    assert_eq!((&blocks["quant_method"], &blocks["weight_block_size"][1]), (&"fp8".into(), &128.into()));
    assert_eq!(blocks["modules_to_convert"][0], "ple.ple_embedding.ngram_embedding");
    let plain = blocks["modules_to_not_convert"].as_array().expect("a list");
    for name in [
        "lm_head",
        "model.visual",
        "model.language_model.layers.0.linear_attn.in_proj_qkv",
        "model.language_model.layers.7.mlp.shared_expert.up_proj",
        "model.language_model.layers.7.mlp.gate",
        "mtp.layers.0.mlp.experts",
    ] {
        assert!(plain.contains(&name.into()), "{name}");
    }
    assert!(
        plain
            .iter()
            .all(|name| !name.as_str().expect("a name").starts_with("model.language_model.layers.7.mlp.exp"))
    );

    let codes = &base(Format::Nvfp4, Format::Bf16, Format::Bf16)["quantization_config"];
    assert_eq!((&codes["quant_method"], &codes["quant_algo"]), (&"modelopt".into(), &"NVFP4".into()));
    let ignored = codes["ignore"].as_array().expect("a list");
    assert!(ignored.contains(&"model.language_model.layers.*.self_attn.q_proj".into()), "{ignored:?}");

    let mixed = &base(Format::Nvfp4, Format::Fp8, Format::Fp8Tensor)["quantization_config"];
    assert_eq!(mixed["quant_algo"], "MIXED_PRECISION");
    let layers = &mixed["quantized_layers"];
    for (name, algorithm) in [
        ("model.language_model.layers.5.mlp.experts", "NVFP4"),
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding", "FP8"),
        ("model.language_model.layers.3.self_attn.indexer.index_qk_proj", "FP8_PB_WO"),
        ("lm_head", "FP8_PB_WO"),
    ] {
        assert_eq!(layers[name]["quant_algo"], algorithm, "{name}");
    }
}
