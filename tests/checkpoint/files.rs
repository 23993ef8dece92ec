//! Damaged, missing, superfluous and contradicting files.

use std::fs;

use serde_json::json;

use crate::folder::{Folder, INDEX, WEIGHTS, shard};

/// Replaces the header of a file by `edit` of its text, and keeps the data.
fn edit_header(folder: &Folder, edit: impl FnOnce(String) -> String) {
    folder.edit_bytes(WEIGHTS, |bytes| {
        let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let header = edit(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
        let data = bytes.split_off(8 + length);
        *bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    });
}

#[test]
fn a_folder_without_weights_says_what_it_lacks() {
    let folder = Folder::copy_of("no_ple");
    fs::remove_file(folder.path(WEIGHTS)).unwrap();
    folder.refused(&[WEIGHTS, INDEX]);
    fs::remove_file(folder.path("config.json")).unwrap();
    folder.refused(&["could not read", "config.json"]);
}

#[test]
fn a_truncated_file_is_refused() {
    for missing in [1, 700_000] {
        let folder = Folder::copy_of("no_ple");
        folder.edit_bytes(WEIGHTS, |bytes| bytes.truncate(bytes.len() - missing));
        folder.refused(&[WEIGHTS, "truncated", "746272", &format!("{}", 746272 - missing)]);
    }
}

#[test]
fn a_file_with_bytes_to_spare_is_refused() {
    let folder = Folder::copy_of("no_ple");
    folder.edit_bytes(WEIGHTS, |bytes| bytes.push(0));
    folder.refused(&[WEIGHTS, "746273 bytes", "746272"]);
}

#[test]
fn a_file_too_short_for_its_header_is_refused() {
    for length in [0, 7, 8, 9, 26263] {
        let folder = Folder::copy_of("no_ple");
        folder.edit_bytes(WEIGHTS, |bytes| bytes.truncate(length));
        folder.refused(&[
            WEIGHTS,
            &format!("the file has {length}"),
            if length < 8 { "needs 8" } else { "26272" },
        ]);
    }
}

#[test]
fn a_huge_header_is_refused_before_it_is_read() {
    for length in [100_000_001, 1 << 40, u64::MAX] {
        let folder = Folder::copy_of("no_ple");
        folder.edit_bytes(WEIGHTS, |bytes| bytes[..8].copy_from_slice(&length.to_le_bytes()));
        folder.refused(&[WEIGHTS, &length.to_string(), "limit"]);
    }
    let folder = Folder::copy_of("no_ple");
    folder.edit_bytes(WEIGHTS, |bytes| bytes[..8].copy_from_slice(&90_000_000u64.to_le_bytes()));
    folder.refused(&[WEIGHTS, "90000008"]);
}

#[test]
fn a_header_that_is_no_json_is_refused() {
    for broken in ["", "{", "[]", "null", "{\"a\":1}", "{\"a\":{}}", "{\"a\":{\"dtype\":\"BF16\"}}", "\u{0}"]
    {
        let folder = Folder::copy_of("no_ple");
        edit_header(&folder, |_| broken.into());
        folder.refused(&[WEIGHTS, "the header is damaged"]);
    }
}

#[test]
fn damage_to_one_tensor_of_a_header_names_it() {
    let norm = "model.language_model.hyper_connection_mixer.hc_norm.weight";
    let cases: [(&str, &str, &[&str]); 5] = [
        ("\"dtype\":\"BF16\"", "\"dtype\":\"BF17\"", &["BF17"]),
        ("\"shape\":[256]", "\"shape\":[257]", &["[257]", "byte range"]),
        ("\"shape\":[256]", "\"shape\":[4611686018427387904,4,4]", &["byte range"]),
        ("\"shape\":[256]", "\"shape\":[-1]", &["-1"]),
        ("\"shape\":[256]", "\"shape\":\"none\"", &["none"]),
    ];
    for (from, to, parts) in cases {
        let folder = Folder::copy_of("no_ple");
        edit_header(&folder, |header| {
            let at = header.find(norm).unwrap();
            format!("{}{}", &header[..at], header[at..].replacen(from, to, 1))
        });
        folder.refused(&[&[WEIGHTS, norm], parts].concat());
    }
}

#[test]
fn gaps_overlaps_and_repeats_in_a_header_are_refused() {
    let tensor = |begin: usize, end: usize| json!({"dtype": "BF16", "shape": [(end - begin) / 2], "data_offsets": [begin, end]});
    let cases = [
        (json!({"a": tensor(0, 8), "b": tensor(10, 16)}).to_string(), ["tensor b", "gap"]),
        (json!({"a": tensor(2, 8), "b": tensor(8, 16)}).to_string(), ["tensor a", "gap"]),
        (json!({"a": tensor(0, 8), "b": tensor(6, 16)}).to_string(), ["tensor b", "overlapping"]),
        (format!("{{\"a\":{},\"a\":{}}}", tensor(0, 8), tensor(8, 16)), ["a is there twice", "damaged"]),
    ];
    for (header, parts) in cases {
        let folder = Folder::copy_of("no_ple");
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 16]].concat();
        fs::write(folder.path(WEIGHTS), bytes).unwrap();
        folder.refused(&[&[WEIGHTS], &parts[..]].concat());
    }
    let folder = Folder::copy_of("no_ple");
    let header = json!({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 0]}}).to_string();
    fs::write(folder.path(WEIGHTS), [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())
        .unwrap();
    folder.refused(&[WEIGHTS, "tensor a", "8..0"]);
}

#[test]
fn a_sharded_folder_is_the_same_checkpoint() {
    let (one, two) = (Folder::copy_of("no_ple").open(), Folder::sharded("no_ple").open());
    assert_eq!(one.len(), two.len());
    assert_eq!(one.layout.specs(), two.layout.specs());
}

#[test]
fn a_missing_shard_is_named() {
    let folder = Folder::sharded("no_ple");
    fs::remove_file(folder.path(&shard(1))).unwrap();
    folder.refused(&[&shard(1), INDEX, "is missing", "tensors in it"]);
}

#[test]
fn an_index_that_names_a_tensor_its_shard_lacks_is_stale() {
    let folder = Folder::sharded("no_ple");
    folder.edit_json(INDEX, |index| index["weight_map"]["phantom"] = shard(0).into());
    folder.refused(&[INDEX, "phantom", &shard(0), "stale"]);
}

#[test]
fn an_index_that_names_another_shard_is_stale() {
    let folder = Folder::sharded("no_ple");
    assert!(folder.tensors(&shard(0)).contains_key("lm_head.weight"));
    folder.edit_json(INDEX, |index| index["weight_map"]["lm_head.weight"] = shard(1).into());
    folder.refused(&[
        INDEX,
        "lm_head.weight",
        &format!("in {}, which does not", shard(1)),
        &format!("is in {}", shard(0)),
    ]);
}

#[test]
fn an_index_that_does_not_name_a_tensor_is_stale() {
    let folder = Folder::sharded("no_ple");
    folder.edit_json(INDEX, |index| {
        drop(index["weight_map"].as_object_mut().unwrap().shift_remove("lm_head.weight"))
    });
    folder.refused(&[INDEX, "lm_head.weight", &shard(0), "does not name", "stale"]);
}

#[test]
fn a_tensor_in_two_shards_is_named_with_both() {
    let folder = Folder::sharded("no_ple");
    let head = folder.tensors(&shard(0)).remove("lm_head.weight").unwrap();
    folder.edit(&shard(1), |tensors| drop(tensors.insert("lm_head.weight".into(), head)));
    folder.refused(&["lm_head.weight", &shard(0), &shard(1), "both"]);
}

#[test]
fn a_weight_file_that_nothing_names_is_refused() {
    let folder = Folder::sharded("no_ple");
    fs::copy(folder.path(&shard(0)), folder.path("model-3-of-2.safetensors")).unwrap();
    folder.refused(&["model-3-of-2.safetensors", "not named", INDEX]);
    let folder = Folder::copy_of("no_ple");
    fs::copy(folder.path(WEIGHTS), folder.path("extra.safetensors")).unwrap();
    folder.refused(&["extra.safetensors", WEIGHTS]);
}

#[test]
fn a_damaged_index_is_refused() {
    let cases = [
        ("{", "EOF"),
        ("{}", "weight_map"),
        ("{\"weight_map\":{}}", "names no tensor"),
        ("{\"weight_map\":{\"a\":1}}", "a: "),
        ("{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"x.safetensors\"}}", "a is there twice"),
        ("{\"weight_map\":{\"a\":\"../x.safetensors\"}}", "../x.safetensors"),
        ("{\"weight_map\":{\"a\":\"/x.safetensors\"}}", "/x.safetensors"),
        ("{\"weight_map\":{\"a\":\"x.bin\"}}", "x.bin"),
    ];
    for (text, part) in cases {
        let folder = Folder::sharded("no_ple");
        fs::write(folder.path(INDEX), text).unwrap();
        folder.refused(&[INDEX, "not a usable index", part]);
    }
}
