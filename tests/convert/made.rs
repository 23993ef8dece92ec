//! Made weights on disk: checkpoints of any size from a `config.json` alone.

use std::fs;

use runtime::checkpoint::layout::Format;
use runtime::config::ModelConfig;
use runtime::convert::{ConvertOptions, Source, convert};
use serde_json::Value;

use crate::formats::holds;
use crate::numbers::Numbers;
use crate::{Converted, TABLES, fails, tiny, to};

fn made(layers: Option<usize>) -> ConvertOptions {
    let from = Source::Made { layers, seed: 7 };
    ConvertOptions { from, ..to(Format::Nvfp4, Format::Fp8, Format::Fp8Tensor) }
}

#[test]
fn a_config_is_enough() {
    let home = tempfile::tempdir().expect("a folder");
    fs::copy(tiny().join("config.json"), home.path().join("config.json")).expect("a copy");
    let config = ModelConfig::open(home.path()).expect("it is good");
    for layers in [1, 4, 8] {
        let converted = Converted::new(home.path(), &made(Some(layers)));
        let model = Numbers::open(&converted.path());
        let mut expected = config.clone().first_layers(layers, 1_000_000);
        expected.quantisation = model.0.config.quantisation.clone();
        // Without an n-gram embedding its dimensions say nothing.
        assert_eq!(model.0.config, expected);
        assert_eq!(model.0.layout.formats.experts, Format::Nvfp4);
        assert_eq!(model.0.layout.formats.table, (layers > 1).then_some(Format::Fp8Tensor));
        let again = Converted::new(home.path(), &made(Some(layers)));
        let read = |path: std::path::PathBuf| fs::read(path.join("model.safetensors")).expect("weights");
        assert!(read(converted.path()) == read(again.path()), "equal seeds make equal weights");
    }
    fails(home.path(), &made(Some(9)), &mut |_, _| {}, &["--layers 9", "8 layers"]);
}

/// A table and a head of more numbers than a thread takes at a time.
#[test]
fn what_is_large_is_converted_in_parts() {
    let home = tempfile::tempdir().expect("a folder");
    let text = fs::read_to_string(tiny().join("config.json")).expect("settings");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["text_config"]["ngram_vocab_size_base"] = 20_000.into();
    config["text_config"]["vocab_size"] = 20_480.into();
    fs::write(home.path().join("config.json"), config.to_string()).expect("settings");
    let plain = ConvertOptions { experts: None, dense: None, table: None, ..made(Some(2)) };
    let source = Converted::new(home.path(), &plain);
    let old = Numbers::open(&source.path());
    for table in TABLES {
        let options = to(Format::Bf16, Format::Fp8, table);
        let mut told = (0, 0);
        let out = home.path().join(table.to_string());
        convert(&source.path(), &out, &options, &mut |done, total| {
            assert!(told.0 <= done && done <= total);
            told = (done, total);
        })
        .expect("converted");
        assert_eq!(told.0, told.1, "every byte is told");
        holds(&old, &Numbers::open(&out), &options);
    }
}

#[test]
fn made_weights_are_of_ordinary_size() {
    let options = ConvertOptions { experts: None, dense: None, table: None, ..made(Some(2)) };
    let model = Numbers::open(&Converted::new(&tiny(), &options).path());
    for spec in model.dense() {
        let numbers = model.of(spec);
        let square: f64 = numbers.iter().map(|n| f64::from(n * n)).sum::<f64>() / numbers.len() as f64;
        let scale = 1.0 / (*spec.shape.last().expect("columns") as f64).sqrt();
        let expected = scale / 3f64.sqrt();
        assert!((square.sqrt() / expected - 1.0).abs() < 0.1, "{} {}", spec.name, square.sqrt() / expected);
    }
}
