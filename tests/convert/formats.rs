//! Every combination of formats: what is asked for is what is stored, and its numbers are what the quantisers make.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::bf16;
use kernels::quant::{fp8, nvfp4};
use runtime::checkpoint::Checkpoint;
use runtime::checkpoint::layout::{Format, Formats, Matrix, Spec};
use runtime::convert::ConvertOptions;

use crate::numbers::Numbers;
use crate::{Converted, MATRICES, TABLES, fails, oracle, tiny, to};

/// What matrices become that share one number, if the format has one.
fn quantised(format: Format, matrices: &[(Vec<f32>, usize)]) -> Vec<Vec<f32>> {
    let all: Vec<f32> = matrices.iter().flat_map(|(numbers, _)| numbers).copied().collect();
    let each = matrices.iter();
    match format {
        Format::Bf16 => {
            each.map(|(all, _)| all.iter().map(|n| bf16::from_f32(*n).to_f32()).collect()).collect()
        }
        Format::Fp8 => each
            .map(|(all, columns)| fp8::dequantise(&fp8::quantise(all, *columns, fp8::Scale::Bf16), *columns))
            .collect(),
        Format::Fp8Tensor => {
            let (codes, scale) = fp8::quantise_table(&all);
            let numbers: Vec<f32> = codes.into_iter().map(|code| fp8::decode(code) * scale).collect();
            let mut rest = &numbers[..];
            each.map(|(all, _)| rest.split_off(..all.len()).expect("as many").to_vec()).collect()
        }
        Format::Nvfp4 => {
            let global = nvfp4::global(&all);
            each.map(|(all, columns)| nvfp4::dequantise(&nvfp4::quantise_under(all, *columns, global)))
                .collect()
        }
        Format::F32 => panic!("nothing becomes f32"),
    }
}

fn columns(spec: &Spec) -> usize {
    *spec.shape.last().expect("columns")
}

/// Requires that `new` holds what `old` becomes, or what was stored so already, and the rest byte for byte.
pub(crate) fn holds(old: &Numbers, new: &Numbers, options: &ConvertOptions) {
    let mut changed: Vec<&Spec> = Vec::new();
    let same = |before: &Spec, after: &Spec| {
        before.name == after.name
            && before.stored == after.stored
            && [before]
                .into_iter()
                .chain(before.scales())
                .all(|spec| old.bytes(&spec.name) == new.bytes(&spec.name))
    };
    if let Some(format) = options.experts {
        for layer in 0..old.0.layout.layers.len() {
            for expert in 0..old.0.config.num_experts {
                for group in [&[Matrix::Gate, Matrix::Up][..], &[Matrix::Down]] {
                    let spec =
                        |model: &Numbers, matrix| model.experts(layer).place(expert, matrix).spec.clone();
                    let read = |model: &Numbers| -> Vec<_> {
                        group.iter().map(|matrix| model.expert(layer, expert, *matrix)).collect()
                    };
                    let got: Vec<Vec<f32>> = read(new).into_iter().map(|(numbers, _)| numbers).collect();
                    let kept = group.iter().all(|matrix| same(&spec(old, *matrix), &spec(new, *matrix)));
                    let made = || got == quantised(format, &read(old));
                    assert!(kept || made(), "layer {layer}, expert {expert}, {group:?}");
                }
                let three = [Matrix::Gate, Matrix::Up, Matrix::Down];
                changed.extend(three.map(|matrix| old.experts(layer).place(expert, matrix).spec));
            }
        }
    }
    if let Some(format) = options.dense {
        for (before, after) in old.dense().into_iter().zip(new.dense()) {
            let made = || new.of(after) == quantised(format, &[(old.of(before), columns(before))])[0];
            assert!(same(before, after) || made(), "{}", after.name);
            changed.push(before);
        }
    }
    if let Some(format) = options.table {
        for (before, after) in old.tables().into_iter().zip(new.tables()) {
            let pieces: Vec<_> = before.iter().map(|piece| (old.of(piece), columns(piece))).collect();
            let got: Vec<Vec<f32>> = after.iter().map(|piece| new.of(piece)).collect();
            let kept = before.iter().zip(after).all(|(before, after)| same(before, after));
            assert!(kept || got == quantised(format, &pieces), "{}", after[0].name);
            changed.extend(before);
        }
    }
    let scales = changed.iter().flat_map(|spec| spec.scales());
    let changed: Vec<&str> = scales.chain(changed.iter().copied()).map(|spec| spec.name.as_str()).collect();
    let mut copied = 0;
    for spec in old.0.layout.specs() {
        if changed.contains(&spec.name.as_str()) || spec.name.ends_with(".input_scale") {
            continue;
        }
        let (Some(before), after) = (old.0.entry(&spec.name), new.0.entry(&spec.name)) else { continue };
        let after = after.unwrap_or_else(|| panic!("{} is gone", spec.name));
        assert_eq!((before.dtype, &before.shape), (after.dtype, &after.shape), "{}", spec.name);
        assert!(old.bytes(&spec.name) == new.bytes(&spec.name), "{}", spec.name);
        copied += 1;
    }
    assert!(copied > 20, "only {copied} tensors are copied");
}

fn every_combination(source: &Path) {
    let old = Numbers::open(source);
    for experts in MATRICES {
        for table in TABLES {
            for dense in [Format::Bf16, Format::Fp8] {
                let options = to(experts, dense, table);
                let converted = Converted::new(source, &options);
                let new = Numbers::open(&converted.path());
                let formats = Formats {
                    experts,
                    shared: dense,
                    dense: vec![dense],
                    head: dense,
                    table: Some(table),
                    draft_experts: Some(Format::Bf16),
                    draft_dense: vec![Format::Bf16],
                };
                assert_eq!(new.0.layout.formats, formats);
                holds(&old, &new, &options);
            }
        }
    }
}

#[test]
fn every_combination_of_the_oracles_model() {
    every_combination(&oracle("base_bf16"));
}

#[test]
fn every_combination_of_the_tiny_model() {
    every_combination(&tiny());
}

#[test]
fn other_sources_are_dequantised_first() {
    for source in ["quant_fp8_block", "quant_nvfp4", "base_fp32", "two_ple", "no_ple"] {
        let old = Numbers::open(&oracle(source));
        for (experts, table) in MATRICES.into_iter().zip(TABLES) {
            for dense in [Format::Bf16, Format::Fp8] {
                let options = to(experts, dense, table);
                let new = Numbers::open(&Converted::new(&oracle(source), &options).path());
                let formats = &new.0.layout.formats;
                assert_eq!((formats.experts, formats.shared, formats.head), (experts, dense, dense));
                assert_eq!(
                    (&formats.dense, formats.table.unwrap_or(table)),
                    (&vec![dense], table),
                    "{source}"
                );
                holds(&old, &new, &options);
            }
        }
    }
}

#[test]
fn what_is_not_named_stays_as_it_is() {
    let source = oracle("quant_nvfp4");
    let options = ConvertOptions { table: Some(Format::Fp8Tensor), ..ConvertOptions::default() };
    let (old, new) = (Numbers::open(&source), Numbers::open(&Converted::new(&source, &options).path()));
    let expected = Formats { table: Some(Format::Fp8Tensor), ..old.0.layout.formats.clone() };
    assert_eq!(new.0.layout.formats, expected);
    holds(&old, &new, &options);
    // So do the scales of activations, of which those of what is converted go.
    let scales = |model: &Numbers| model.0.layout.idle.len();
    assert_eq!((scales(&old), scales(&new)), (37, 37));
    let experts = Converted::new(&source, &ConvertOptions { experts: Some(Format::Fp8), ..options });
    assert_eq!(scales(&Numbers::open(&experts.path())), 13);
}

/// Codes under another exporter's names are the same codes.
#[test]
fn codes_of_another_exporter_are_renamed() {
    let home = tempfile::tempdir().expect("a folder");
    let (source, old) = (oracle("quant_nvfp4"), Numbers::open(&oracle("quant_nvfp4")));
    for file in ["config.json", "generation_config.json"] {
        std::fs::copy(source.join(file), home.path().join(file)).expect("a copy");
    }
    let bytes = std::fs::read(source.join("model.safetensors")).expect("weights");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let renamed: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, view)| {
            let (base, last) = name.rsplit_once('.').expect("a dot");
            let (mut data, expert) = (view.data().to_vec(), base.contains(".mlp.experts."));
            let last = match last {
                "weight" if expert => "weight_packed",
                "weight_scale_2" if expert => {
                    let number = f32::from_le_bytes(data[..].try_into().expect("four bytes"));
                    data = (1.0 / number).to_le_bytes().to_vec();
                    "weight_global_scale"
                }
                "input_scale" if expert => "input_global_scale",
                other => other,
            };
            (format!("{base}.{last}"), view.dtype(), view.shape().to_vec(), data)
        })
        .collect();
    let views = renamed.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    let file = safetensors::serialize(views, None).expect("a file");
    std::fs::write(home.path().join("model.safetensors"), file).expect("weights are written");
    let options = ConvertOptions { experts: Some(Format::Nvfp4), ..ConvertOptions::default() };
    let new = Numbers::open(&Converted::new(home.path(), &options).path());
    for expert in 0..4 {
        for matrix in [Matrix::Gate, Matrix::Up, Matrix::Down] {
            let specs = [&old, &new].map(|model| model.experts(1).place(expert, matrix).spec);
            assert_eq!(specs[0], specs[1]);
            assert_eq!(old.bytes(&specs[0].name), new.bytes(&specs[1].name));
            let close = old.of(specs[0]).into_iter().zip(new.of(specs[1]));
            close.for_each(|(a, b)| assert!((a - b).abs() <= 1e-6 * a.abs(), "{a} {b}"));
        }
    }
    assert_eq!(new.0.layout.idle.len(), 13);

    // What the loader would refuse is not written anew.
    let expert = "model.language_model.layers.1.mlp.experts.3.up_proj";
    for (last, damage) in
        [("weight_global_scale", &[0; 4][..]), ("weight_scale", &[0x7f]), ("weight_scale", &[0x90])]
    {
        let name = format!("{expert}.{last}");
        let checkpoint = Checkpoint::open(home.path()).expect("it opens");
        let (entry, mut old) = (checkpoint.entry(&name).expect("it is there").clone(), vec![0; damage.len()]);
        let file = OpenOptions::new().read(true).write(true).open(checkpoint.path(&entry)).expect("a file");
        file.read_exact_at(&mut old, entry.range.start).expect("it is read");
        file.write_all_at(damage, entry.range.start).expect("the damage is done");
        for experts in [Format::Nvfp4, Format::Fp8, Format::Bf16] {
            let options = ConvertOptions { experts: Some(experts), ..options };
            fails(home.path(), &options, &mut |_, _| {}, &[&name]);
        }
        file.write_all_at(&old, entry.range.start).expect("it is mended");
    }
}
