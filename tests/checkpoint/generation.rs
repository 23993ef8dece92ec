//! `generation_config.json`: stop ids and sampling defaults.

use std::fs;

use runtime::config::{GenerationConfig, ModelConfig};

use crate::folder::{Folder, oracle};

fn read(json: &str) -> Result<GenerationConfig, String> {
    let model = ModelConfig::open(&oracle("two_ple")).unwrap();
    GenerationConfig::from_json(json, &model).map_err(|error| error.to_string())
}

#[test]
fn everything_in_the_file_is_read() {
    let json = r#"{"bos_token_id": 400, "do_sample": true, "eos_token_id": [402, 400], "pad_token_id": 400,
        "temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05,
        "transformers_version": "5.24.0", "_from_model_config": true}"#;
    let expected = GenerationConfig {
        stop: vec![402, 400],
        do_sample: Some(true),
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.95),
        min_p: Some(0.0),
        repetition_penalty: Some(1.05),
    };
    assert_eq!(read(json), Ok(expected));
}

#[test]
fn stop_ids_may_be_one_number_or_absent() {
    assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().stop, [7]);
    for absent in ["{}", r#"{"eos_token_id": null}"#, r#"{"eos_token_id": []}"#] {
        let generation = read(absent).unwrap();
        assert_eq!(generation.stop, [400], "the boundary id");
        assert_eq!((generation.do_sample, generation.temperature, generation.top_k), (None, None, None));
    }
    let folder = Folder::copy_of("no_ple");
    fs::remove_file(folder.path("generation_config.json")).unwrap();
    assert_eq!(folder.open().generation.stop, [400]);
}

#[test]
fn bad_values_are_named() {
    let cases = [
        (r#"{"eos_token_id": 448}"#, "eos_token_id is 448"),
        (r#"{"eos_token_id": [1, "x"]}"#, "eos_token_id must be a whole number"),
        (r#"{"eos_token_id": 1.5}"#, "eos_token_id must be a whole number"),
        (r#"{"bos_token_id": -1}"#, "bos_token_id is -1"),
        (r#"{"temperature": -0.1}"#, "temperature is -0.1"),
        (r#"{"top_p": 1.5}"#, "top_p is 1.5"),
        (r#"{"top_k": "many"}"#, "top_k must be a whole number"),
        (r#"{"do_sample": 1}"#, "do_sample must be true or false"),
        (r#"{"num_beams": 4, "top_k": 2}"#, "unknown settings, 1: num_beams"),
        ("[]", "not a JSON object"),
    ];
    for (json, part) in cases {
        let message = read(json).unwrap_err();
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    let folder = Folder::copy_of("no_ple");
    fs::write(folder.path("generation_config.json"), "{\"top_q\": 1}").unwrap();
    folder.refused(&["generation_config.json", "top_q"]);
}
