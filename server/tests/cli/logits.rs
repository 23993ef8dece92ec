//! `logits`: the file it writes, and what may not change it.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::binary::{Ended, binary, generate_json, run};

/// One more than two pages, and one that no page ends on.
const IDS: usize = 133;
const VOCAB: usize = 2048;

fn ids(count: usize) -> String {
    (0..count).map(|i| (i * 37 % 2000).to_string()).collect::<Vec<_>>().join(",")
}

fn write(file: &Path, ids: &str, options: &[&str]) -> Ended {
    run(binary("logits").args(["--ids", ids, "--out"]).arg(file).args(options))
}

/// The file that the options lead to.
fn bytes(ids: &str, options: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let ended = write(&file, ids, options).good();
    assert_eq!(ended.stdout, "");
    fs::read(file).unwrap()
}

/// The logits in a file, a row per position.
fn rows(file: &[u8]) -> Vec<Vec<f32>> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    assert_eq!(tensors.names(), ["logits"]);
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!(logits.dtype(), Dtype::F32);
    assert_eq!(logits.shape()[1..], [VOCAB]);
    let values: Vec<f32> =
        logits.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    values.chunks_exact(VOCAB).map(<[f32]>::to_vec).collect()
}

/// The largest difference, as a part of the largest logit.
fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

fn largest(row: &[f32]) -> usize {
    // The last of equals, seen from behind, is the first.
    (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap()
}

#[test]
fn there_is_a_row_for_every_position() {
    for count in [1, 2, 64, 65] {
        let rows = rows(&bytes(&ids(count), &[]));
        assert_eq!(rows.len(), count);
        assert!(rows.iter().flatten().all(|x| x.is_finite()));
    }
}

#[test]
fn tables_may_live_anywhere() {
    let ids = ids(65);
    let here = bytes(&ids, &[]);
    for table in ["pinned", "mmap"] {
        assert!(bytes(&ids, &["--table", table]) == here, "{table}");
    }
}

#[test]
fn pieces_on_the_grid_give_the_same_bytes_as_the_whole_prompt() {
    for dtype in ["f32", "bf16"] {
        let whole = bytes(&ids(IDS), &["--dtype", dtype]);
        assert_eq!(rows(&whole).len(), IDS);
        for pieces in ["64,64,5", "128,5"] {
            let same = bytes(&ids(IDS), &["--dtype", dtype, "--pieces", pieces]) == whole;
            assert!(same, "{pieces} in {dtype}");
        }
    }
}

#[test]
fn pieces_off_the_grid_agree_within_tolerance() {
    let whole = rows(&bytes(&ids(IDS), &["--dtype", "f32"]));
    for pieces in ["50,40,43", "1,132"] {
        let cut = rows(&bytes(&ids(IDS), &["--dtype", "f32", "--pieces", pieces]));
        let distance = distance(&whole, &cut);
        assert!(distance < 1e-4, "{pieces}: {distance}");
    }
}

#[test]
fn decoded_positions_agree_with_the_prompt_within_tolerance() {
    let whole = rows(&bytes(&ids(IDS), &["--dtype", "f32"]));
    for from in ["1", "64", "100"] {
        let decoded = rows(&bytes(&ids(IDS), &["--dtype", "f32", "--decode-from", from]));
        let distance = distance(&whole, &decoded);
        assert!(distance < 1e-4, "from {from}: {distance}");
        let prompt: usize = from.parse().unwrap();
        assert_eq!(whole[..prompt], decoded[..prompt], "rows before {from} are prompt rows");
    }
}

#[test]
fn decoded_positions_pick_what_generate_makes_of_them() {
    let prompt = "5,6,7,8,9,10,11";
    for dtype in ["f32", "bf16"] {
        let options = ["--ids", prompt, "--dtype", dtype, "--ignore-eos", "--max-tokens", "20"];
        let answer = generate_json(&options)["ids"].clone();
        let made: Vec<usize> =
            answer.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as usize).collect();
        let fed: Vec<String> = made[..19].iter().map(usize::to_string).collect();
        let all = [prompt, &fed.join(",")].join(",");
        let rows = rows(&bytes(&all, &["--dtype", dtype, "--decode-from", "7"]));
        let picked: Vec<usize> = rows[6..].iter().map(|row| largest(row)).collect();
        assert_eq!(picked, made, "{dtype}");
    }
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let refused = |options: &[&str], words: &[&str]| write(&file, "1,2,3", options).refused(words);
    refused(&["--pieces", "2"], &["--pieces", "3 prompt ids"]);
    refused(&["--pieces", "2,2"], &["--pieces", "3 prompt ids"]);
    refused(&["--pieces", "2,1", "--decode-from", "2"], &["--pieces", "2 prompt ids"]);
    refused(&["--pieces", "3,0"], &["--pieces", "`0`"]);
    refused(&["--decode-from", "0"], &["--decode-from 0", "3 ids"]);
    refused(&["--decode-from", "4"], &["--decode-from 4", "3 ids"]);
    refused(&["--context", "2"], &["3 ids", "context of 2", "--context"]);
    write(&file, "1,2048", &[]).refused(&["2048", "position 1"]);
    assert!(!file.exists());
    let nowhere = dir.path().join("absent").join("logits.safetensors");
    write(&nowhere, "1", &[]).refused(&["absent", "--out"]);
}
