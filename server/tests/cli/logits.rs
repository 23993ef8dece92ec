//! `logits`: the file it writes, and what may not change it.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use tests::oracle::{Case, assert_close, cases};

use crate::binary::{Ended, data, generate_json, on, run, tiny};
use crate::folder::Folder;

/// One more than two pages, and one that no page ends on.
const IDS: usize = 133;
const VOCAB: usize = 2048;

fn ids(count: usize) -> String {
    (0..count).map(|i| (i * 37 % 2000).to_string()).collect::<Vec<_>>().join(",")
}

fn write(file: &Path, ids: &str, options: &[&str]) -> Ended {
    write_of(&tiny(), file, ids, options)
}

fn write_of(model: &Path, file: &Path, ids: &str, options: &[&str]) -> Ended {
    run(on("logits", model).args(["--ids", ids, "--out"]).arg(file).args(options))
}

/// The file that the options lead to.
fn bytes(ids: &str, options: &[&str]) -> Vec<u8> {
    bytes_of(&tiny(), ids, options)
}

fn bytes_of(model: &Path, ids: &str, options: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let ended = write_of(model, &file, ids, options).good();
    assert_eq!(ended.stdout, "");
    fs::read(file).unwrap()
}

/// The logits in a file of the demo model, a row per position.
fn rows(file: &[u8]) -> Vec<Vec<f32>> {
    rows_of(file, VOCAB)
}

fn rows_of(file: &[u8], vocab: usize) -> Vec<Vec<f32>> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    assert_eq!(tensors.names(), ["logits"]);
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!(logits.dtype(), Dtype::F32);
    assert_eq!(logits.shape()[1..], [vocab]);
    let values: Vec<f32> =
        logits.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    values.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
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

/// What stands for a picture in the oracle's checkpoints, and in the demo model.
const PADS: [u32; 2] = [1012, 2026];

/// A recorded prompt with pictures, as the command takes it.
struct Pictured {
    case: Case,
    /// One placeholder for each picture.
    ids: String,
    images: Vec<String>,
}

impl Pictured {
    fn all() -> Vec<Pictured> {
        let all: Vec<Pictured> = cases("image_prompt").into_iter().map(Pictured::new).collect();
        assert!(all.iter().any(|one| one.images.len() == 2));
        assert!(all.iter().any(|one| one.case.input_ids().len() > 64));
        all
    }

    fn new(case: Case) -> Pictured {
        let mut ids = case.input_ids();
        ids.dedup_by(|a, b| a == b && *a == PADS[0]);
        let files = case.manifest["images"].as_array().unwrap().iter();
        let images =
            files.map(|file| data("oracle").join(file.as_str().unwrap()).display().to_string()).collect();
        Pictured { case, ids: list(&ids), images }
    }

    fn bytes(&self, options: &[&str]) -> Vec<u8> {
        let images: Vec<&str> = self.images.iter().flat_map(|file| ["--image", file]).collect();
        bytes_of(&self.case.checkpoint(), &self.ids, &[&images, options].concat())
    }

    fn rows(&self, options: &[&str]) -> Vec<Vec<f32>> {
        let vocab = self.case.tensor("logits_f32").row(0).len();
        let rows = rows_of(&self.bytes(&[&["--dtype", "f32"], options].concat()), vocab);
        assert_eq!(rows.len(), self.case.input_ids().len(), "{}", self.case.id());
        rows
    }

    /// Where decoding may begin first.
    fn end(&self) -> usize {
        1 + self.case.input_ids().iter().rposition(|id| *id == PADS[0]).unwrap()
    }
}

fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn logits_of_pictures_are_the_recorded_ones() {
    for one in Pictured::all() {
        let (rows, expected) = (one.rows(&[]), one.case.tensor("logits_f32"));
        for (row, position) in one.case.indices("positions").into_iter().enumerate() {
            let what = format!("{} position {position}", one.case.id());
            // The tolerance of the manifest.
            assert_close(&what, &rows[position as usize], expected.row(row), 1e-4);
        }
    }
}

#[test]
fn pieces_cut_pictures_without_a_trace() {
    for one in Pictured::all() {
        let (count, first) = (one.case.input_ids().len(), one.end() - 1);
        let whole = one.rows(&[]);
        // Inside of the last picture.
        let cut = format!("{first},{}", count - first);
        let distance = distance(&whole, &one.rows(&["--pieces", &cut]));
        assert!(distance < 1e-4, "{} in {cut}: {distance}", one.case.id());
    }
    // The same again at position 64, where nothing may differ.
    let shapes = data("probes/images/two_shapes.png").display().to_string();
    let ids = format!("{},{},{}", ids(62), PADS[1], ids(70));
    for dtype in ["f32", "bf16"] {
        let run =
            |options: &[&str]| bytes(&ids, &[&["--image", &shapes, "--dtype", dtype], options].concat());
        let whole = run(&[]);
        let count = rows(&whole).len();
        assert!(count >= 62 + 4 + 70, "{count} positions: the picture lies across position 64");
        assert!(run(&["--pieces", &format!("64,{}", count - 64)]) == whole, "{dtype}");
    }
}

#[test]
fn positions_decoded_behind_pictures_agree_with_the_prompt() {
    for one in Pictured::all() {
        let (whole, end) = (one.rows(&[]), one.end());
        for from in [end, end + 5] {
            let decoded = one.rows(&["--decode-from", &from.to_string()]);
            let distance = distance(&whole, &decoded);
            assert!(distance < 1e-4, "{} from {from}: {distance}", one.case.id());
        }
    }
}

#[test]
fn pictures_that_do_not_fit_the_ids_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let image = data("probes/images/small.png").display().to_string();
    let one = format!("5,{},6,7", PADS[1]);
    let refused = |ids: &str, options: &[&str], words: &[&str]| write(&file, ids, options).refused(words);
    refused(&one, &[], &["2026", "position 1", "stands for a row of a picture"]);
    refused("5,6", &["--image", &image], &["--ids", "0 picture placeholders", "1 pictures"]);
    refused(&one, &["--image", &image, "--image", &image], &["1 picture placeholders", "2 pictures"]);
    refused(&format!("{one},{}", PADS[1]), &["--image", &image], &["2 picture placeholders", "1 pictures"]);
    // A video has no option: its placeholder is refused, also where a picture is.
    let video = "5,2027,6,7";
    refused(video, &[], &["2027", "position 1", "stands for a row of a picture"]);
    refused(video, &["--image", &image], &["--ids", "0 picture placeholders", "1 pictures"]);
    let both = format!("{one},2027");
    refused(&both, &["--image", &image], &["--ids", "1 video placeholders (id 2027) for 0 videos"]);
    refused(&one, &["--video", &image], &["--video"]);
    refused(&one, &["--image", "absent.png"], &["absent.png", "--image"]);
    let text = dir.path().join("text.png");
    fs::write(&text, "hello").unwrap();
    let text = text.display().to_string();
    refused(&one, &["--image", &text], &["--image", "text.png", "no picture of a known format"]);
    refused(&one, &["--image", &image, "--context", "4"], &["do not fit a context of 4", "1 pictures"]);
    refused(&one, &["--image", &image, "--decode-from", "2"], &["--decode-from 2", "decode from there"]);
    let blind = Folder::new().without("preprocessor_config.json");
    write_of(blind.path(), &file, &one, &["--image", &image]).refused(&["reads no pictures", "--image"]);
    assert!(!file.exists());
}
