//! Dense projections that are quantised while they are loaded.

use std::path::Path;

use kernels::numerics::ElementType;
use runtime::checkpoint::layout::Format;
use runtime::convert::ConvertOptions;
use runtime::open::Load;
use runtime::place::Place;
use runtime::probe::{LogitsOptions, LogitsRequest, logits};
use runtime::quality;
use runtime::receipts::{CheckOptions, check};
use runtime::weights::{DenseForm, TablePlace};

use super::{Converted, oracle, tiny};

const FP8: Load = Load::Checkpoint { dense: DenseForm::Fp8 };

#[test]
fn quantised_while_loading_is_quantised_by_a_conversion() {
    for (source, vocab) in [(tiny(), 2000), (oracle("base_bf16"), 1000), (oracle("quant_fp8_block"), 300)] {
        let options = ConvertOptions { dense: Some(Format::Fp8), ..ConvertOptions::default() };
        let converted = Converted::new(&source, &options);
        let request = LogitsRequest {
            ids: (0..90).map(|id| id * 7919 % vocab).collect(),
            decode_from: Some(70),
            ..LogitsRequest::default()
        };
        for element in [ElementType::Bf16, ElementType::F32] {
            let run = |dir: &Path, load| {
                let options = LogitsOptions { element, load, ..LogitsOptions::default() };
                logits(dir, &options, &request, &mut |_| {}).unwrap_or_else(|error| panic!("{error}")).data
            };
            let (at_load, before) = (run(&source, FP8), run(&converted.path(), Load::default()));
            assert!(at_load == before, "{} {element:?}", source.display());
            assert!(
                at_load != run(&source, Load::default()),
                "{} {element:?}: nothing changed",
                source.display()
            );
        }
    }
}

#[test]
fn receipts_hold_and_say_what_it_changes() {
    let options = CheckOptions {
        exchange: graph::Exchange::Auto,
        place: Place::Host,
        element: ElementType::Bf16,
        load: FP8,
        table: TablePlace::Device,
        cases: 1,
        seed: 5,
    };
    let receipts = check(&tiny(), &options, None, &mut |_| {}).expect("the model opens");
    assert!(receipts.iter().all(|receipt| receipt.passed), "{receipts:?}");
    let stored = check(&tiny(), &CheckOptions { load: Load::default(), ..options }, None, &mut |_| {})
        .expect("the model opens");
    assert!(stored[0].digests != receipts[0].digests, "they are its own receipts");
    let quality =
        |dense| quality::of_dense(&tiny(), &LogitsOptions::default(), dense).expect("it is measured");
    let same = quality(DenseForm::Stored);
    assert!(same.mean_kl == 0.0 && same.agreeing == same.positions && same.positions > 400, "{same}");
    // Seen: 0.042 nats, and the same token at 446 of 501 positions.
    let fp8 = quality(DenseForm::Fp8);
    assert!(fp8.mean_kl > 0.001 && fp8.mean_kl < 0.08 && fp8.agreeing > 420, "{fp8}");
}

#[test]
fn a_weight_that_is_no_number_is_named() {
    use std::os::unix::fs::FileExt;
    let copy = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(oracle("base_bf16")).expect("the folder is there") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), copy.path().join(file.file_name())).expect("a copy");
    }
    let name = "model.language_model.layers.0.linear_attn.out_proj.weight";
    let checkpoint = runtime::checkpoint::Checkpoint::open(copy.path()).expect("it opens");
    let entry = checkpoint.entry(name).expect("the tensor is there");
    let file = std::fs::OpenOptions::new().write(true).open(checkpoint.path(entry)).expect("a file");
    file.write_all_at(&[0x80, 0x7f], entry.range.start + 2 * 33).expect("the damage is done");
    let request = LogitsRequest { ids: vec![1, 2], ..LogitsRequest::default() };
    let options = LogitsOptions { load: FP8, ..LogitsOptions::default() };
    let why = logits(copy.path(), &options, &request, &mut |_| {}).map(drop).expect_err("it is refused");
    let why = why.to_string();
    for word in [name, "33", "--dense fp8"] {
        assert!(why.contains(word), "{word:?} is not in: {why}");
    }
}
