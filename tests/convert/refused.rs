//! What is not converted, and that nothing is left of it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use runtime::checkpoint::Checkpoint;
use runtime::checkpoint::layout::Format;
use runtime::convert::{ConvertOptions, convert};
use tempfile::TempDir;

use crate::{Converted, fails, oracle, to};

fn nvfp4() -> ConvertOptions {
    to(Format::Nvfp4, Format::Fp8, Format::Nvfp4)
}

fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(oracle(name)).expect("the folder is there") {
        let file = file.expect("a file");
        fs::copy(file.path(), copy.path().join(file.file_name())).expect("a copy");
    }
    copy
}

fn weights(dir: &Path) -> fs::File {
    OpenOptions::new().write(true).open(dir.join("model.safetensors")).expect("weights")
}

#[test]
fn a_folder_that_is_in_use() {
    let refused = |source: &Path, out: &Path, words: &[&str]| {
        let message =
            convert(source, out, &nvfp4(), &mut |_, _| {}).map(drop).expect_err("refused").to_string();
        words.iter().for_each(|word| assert!(message.contains(word), "{word} is not in {message}"));
    };
    let (home, source) = (tempfile::tempdir().expect("a folder"), copy("base_bf16"));
    let kept = home.path().join("kept");
    fs::write(&kept, "mine").expect("a file");
    refused(&oracle("base_bf16"), home.path(), &["holds kept already", "empty"]);
    refused(&oracle("base_bf16"), &kept, &["kept", "no folder"]);
    assert_eq!(fs::read_to_string(&kept).expect("it is still there"), "mine");
    let name = source.path().to_str().expect("a path");
    refused(source.path(), source.path(), &[name, "lies in it"]);
    refused(source.path(), &source.path().join("a/b"), &[name, "lies in it"]);
    assert!(!source.path().join("a").exists());
    // An empty folder is filled; one that could not be is as empty as before.
    let empty = home.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    fs::remove_file(source.path().join("model.safetensors")).expect("removed");
    refused(source.path(), &empty, &["model.safetensors"]);
    convert(&oracle("base_bf16"), &empty, &nvfp4(), &mut |_, _| {}).expect("an empty folder will do");
    Checkpoint::open(&empty).expect("a model");
}

#[test]
fn numbers_that_are_none_are_named_with_their_place() {
    const EXPERT: &str = "model.language_model.layers.4.mlp.experts.6.up_proj.weight";
    const TABLE: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight";
    let [nan, inf] = [[0xc0, 0x7f], [0x80, 0xff]];
    for (tensor, at, bytes, word) in [
        (EXPERT, 77, nan, "NaN"),
        (EXPERT, 0, inf, "-inf"),
        (TABLE, 1000, nan, "NaN"),
        ("lm_head.weight", 64 * 300 + 5, inf, "-inf"),
        ("model.language_model.layers.3.self_attn.q_proj.weight", 9, nan, "NaN"),
    ] {
        let source = copy("base_bf16");
        let entry = Checkpoint::open(source.path()).expect("opens").entry(tensor).expect("there").clone();
        weights(source.path()).write_all_at(&bytes, entry.range.start + 2 * at).expect("damage");
        let words = [tensor, &format!("number {at}: {word} cannot be converted")];
        fails(source.path(), &nvfp4(), &mut |_, _| {}, &words);
    }
    // A code of no number is none either.
    let source = copy("quant_fp8_block");
    let tensor = "model.language_model.layers.1.mlp.experts.3.up_proj.weight";
    let entry = Checkpoint::open(source.path()).expect("opens").entry(tensor).expect("there").clone();
    weights(source.path()).write_all_at(&[0x7f], entry.range.start + 130).expect("damage");
    fails(source.path(), &nvfp4(), &mut |_, _| {}, &[tensor, "number 130: NaN"]);
}

/// The files are whole when they are opened, and not any more when they are read.
#[test]
fn a_source_that_ends_on_the_way() {
    for share in [2, 3, 10] {
        let source = copy("base_bf16");
        let file = weights(source.path());
        let bytes = file.metadata().expect("a size").len();
        let mut told = 0;
        let mut cut = |_, _| {
            if told == 0 {
                file.set_len(bytes - bytes / share).expect("cut");
            }
            told += 1;
        };
        fails(source.path(), &nvfp4(), &mut cut, &["could not read", "tensor "]);
    }
}

/// A source may hold what another conversion left, under the very names that are being written.
#[test]
fn what_another_conversion_left_is_not_copied() {
    let source = copy("base_bf16");
    let read = |dir: &Path| fs::read(dir.join("model.safetensors")).expect("weights");
    let options = ConvertOptions { table: Some(Format::Fp8Tensor), ..ConvertOptions::default() };
    let clean = Converted::new(source.path(), &options);
    let mut left = read(&clean.path());
    let length = left.len();
    left[length - 100_000..].fill(0);
    fs::write(source.path().join("model.safetensors.partial"), left).expect("a file");
    let again = Converted::new(source.path(), &options);
    assert!(read(&again.path()) == read(&clean.path()), "the weights are another's");
    assert!(!again.path().join("model.safetensors.partial").exists());
}

#[test]
fn too_many_files_are_refused() {
    let options = ConvertOptions { file_bytes: 1, ..nvfp4() };
    fails(&oracle("base_bf16"), &options, &mut |_, _| {}, &["--file-size 1", "512", "raise it"]);
}

/// While files are being written the folder is no model.
#[test]
fn an_unfinished_folder_does_not_open() {
    let home = tempfile::tempdir().expect("a folder");
    let (out, mut looks) = (home.path().join("out"), 0);
    let mut look = |done: u64, total: u64| {
        assert!(done <= total);
        Checkpoint::open(&out).map(drop).expect_err("not yet");
        let names = fs::read_dir(&out).expect("the folder is there").map(|item| item.expect("a file").path());
        assert!(names.filter(|name| name.extension().is_some_and(|e| e == "partial")).count() > 1);
        looks += 1;
    };
    let options = ConvertOptions { file_bytes: 300_000, ..nvfp4() };
    convert(&oracle("base_bf16"), &out, &options, &mut look).expect("converted");
    assert!(looks > 100, "{looks}");
    Checkpoint::open(&out).expect("now");
}

#[test]
fn formats_that_do_not_go_together() {
    let progress = &mut |_, _| panic!("nothing is read");
    let narrow = copy("base_bf16");
    let path = narrow.path().join("config.json");
    let text = fs::read_to_string(&path).expect("settings");
    // Made weights take any shape.
    let odd = text.replace("\"moe_intermediate_size\": 16", "\"moe_intermediate_size\": 24");
    assert_ne!(odd, text);
    fs::write(&path, odd).expect("settings");
    let from = runtime::convert::Source::Made { layers: None, seed: 1 };
    let options = ConvertOptions { from, ..nvfp4() };
    fails(narrow.path(), &options, progress, &["experts.", "down_proj.weight has 24 columns", "16", "fp8"]);
    let wrong = |options| fails(&oracle("base_bf16"), &options, &mut |_, _| {}, &["is none of"]);
    wrong(to(Format::F32, Format::Bf16, Format::Bf16));
    wrong(to(Format::Bf16, Format::Nvfp4, Format::Bf16));
    wrong(to(Format::Bf16, Format::Bf16, Format::Fp8));
}
