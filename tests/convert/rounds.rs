//! Conversions after one another.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use runtime::checkpoint::Dtype;
use runtime::checkpoint::layout::{Format, Matrix};
use runtime::convert::Purpose;

use crate::numbers::Numbers;
use crate::{Converted, MATRICES, TABLES, oracle, to};

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let items = fs::read_dir(dir).expect("a folder").map(|item| item.expect("a file").path());
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    items.map(|path| (name(&path), fs::read(&path).expect("its bytes"))).collect()
}

#[test]
fn the_same_formats_again_are_the_same_files() {
    for experts in MATRICES {
        for table in TABLES {
            let options = to(experts, Format::Fp8, table);
            let once = Converted::new(&oracle("base_bf16"), &options);
            let twice = Converted::new(&once.path(), &options);
            assert!(files(&once.path()) == files(&twice.path()), "{options:?}");
            assert!(twice.summary.outcomes.iter().all(|outcome| outcome.error.is_none()));
            assert_eq!(once.summary.outcomes[0].purpose, Purpose::Experts);
            assert_eq!(once.summary.outcomes[0].error.is_some(), experts != Format::Bf16);
        }
    }
}

#[test]
fn fp8_through_bf16_is_the_same_codes() {
    let fp8 = to(Format::Fp8, Format::Fp8, Format::Fp8Tensor);
    let once = Converted::new(&oracle("base_bf16"), &fp8);
    let plain = Converted::new(&once.path(), &to(Format::Bf16, Format::Bf16, Format::Bf16));
    let again = Converted::new(&plain.path(), &fp8);
    let [before, after] = [&once, &again].map(|model| Numbers::open(&model.path()));
    let mut compared = 0;
    for spec in before.0.layout.specs().into_iter().filter(|spec| spec.required) {
        if before.0.entry(&spec.name).expect("it is there").dtype != Dtype::F8_E4M3 {
            continue;
        }
        assert!(before.bytes(&spec.name) == after.bytes(&spec.name), "{}", spec.name);
        compared += 1;
    }
    assert_eq!(compared, 8 * 8 * 3 + 8 * 8 + 4 + 1, "experts, projections, pieces of the table, the head");
}

#[test]
fn nvfp4_becomes_the_bf16_next_to_its_numbers() {
    let once = Converted::new(&oracle("base_bf16"), &to(Format::Nvfp4, Format::Bf16, Format::Nvfp4));
    let plain = Converted::new(&once.path(), &to(Format::Bf16, Format::Bf16, Format::Bf16));
    let [codes, plain] = [&once, &plain].map(|model| Numbers::open(&model.path()));
    for layer in 0..8 {
        for (expert, matrix) in [(0, Matrix::Gate), (3, Matrix::Up), (7, Matrix::Down)] {
            let [(from, _), (to, _)] = [&codes, &plain].map(|model| model.expert(layer, expert, matrix));
            assert!(from.iter().map(|number| bf16::from_f32(*number).to_f32()).eq(to), "layer {layer}");
        }
    }
}
