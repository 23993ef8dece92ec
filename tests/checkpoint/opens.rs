//! The checkpoints of the repository open, whole, and give back their bytes.

use std::fs;

use runtime::checkpoint::layout::{Experts, Part, TokenMixer};
use runtime::checkpoint::{Checkpoint, Dtype};
use runtime::config::{LayerKind, OutputGate};

use crate::folder::{Folder, ORACLES, WEIGHTS, bytes, oracle, shard, tiny};

const ALL: [Part; 4] = [Part::Text, Part::Table, Part::Draft, Part::Vision];

#[test]
fn every_oracle_checkpoint_opens_and_all_bytes_are_accounted_for() {
    for name in ORACLES {
        let checkpoint = Checkpoint::open(&oracle(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let by_part: u64 =
            ALL.iter().chain(&[Part::Constants, Part::Idle]).map(|&p| checkpoint.bytes(p)).sum();
        let file = fs::read(oracle(name).join(WEIGHTS)).unwrap();
        let header = u64::from_le_bytes(*file.first_chunk().unwrap());
        assert_eq!(by_part + header + 8, file.len() as u64, "{name}");
        assert_eq!(checkpoint.generation.stop.len(), 2, "{name}");
    }
}

#[test]
fn every_tensor_reads_back_as_the_safetensors_library_reads_it() {
    for folder in [Folder::copy_of("base_bf16"), Folder::copy_of("base_fp32"), Folder::sharded("no_ple")] {
        let checkpoint = folder.open();
        let files =
            if folder.path(WEIGHTS).exists() { vec![WEIGHTS.into()] } else { vec![shard(0), shard(1)] };
        let mut count = 0;
        for (name, tensor) in files.iter().flat_map(|file| folder.tensors(file)) {
            let entry = checkpoint.entry(&name).unwrap();
            assert_eq!((entry.dtype, &entry.shape), (tensor.dtype, &tensor.shape), "{name}");
            assert_eq!(bytes(&checkpoint, &name), tensor.data, "{name}");
            let middle = tensor.data.len() / 3;
            let mut part = vec![0; tensor.data.len() / 2];
            checkpoint.read_range(&name, middle as u64, &mut part).unwrap();
            assert_eq!(part, tensor.data[middle..middle + part.len()], "{name}");
            count += 1;
        }
        assert_eq!(count, checkpoint.len());
    }
}

#[test]
fn the_tiny_model_opens_from_its_shards() {
    let checkpoint = Checkpoint::open(&tiny()).unwrap();
    let config = &checkpoint.config;
    assert_eq!((config.num_hidden_layers, config.vocab_size, config.boundary), (8, 2048, 2014));
    assert_eq!(checkpoint.generation.stop, [2016, 2014]);
    assert_eq!(checkpoint.generation.do_sample, Some(false));
    for (layer, kind) in checkpoint.layout.layers.iter().zip(&config.layers) {
        let sparse = matches!(layer.mixer, TokenMixer::Sparse(_));
        assert_eq!(sparse, *kind == LayerKind::SparseAttention);
        assert!(matches!(&layer.moe.experts, Experts::Split(experts) if experts.len() == 8));
    }
    assert!(matches!(checkpoint.layout.draft.as_ref().unwrap().moe.experts, Experts::Fused { .. }));
    let embed = checkpoint.expect(&checkpoint.layout.embed_tokens);
    assert_eq!((embed.dtype, embed.shape.as_slice()), (Dtype::BF16, [2048, 256].as_slice()));
    assert!(checkpoint.path(embed).ends_with("model-00001-of-00004.safetensors"));
    let total: u64 = ALL.iter().chain(&[Part::Constants]).map(|&part| checkpoint.bytes(part)).sum();
    assert_eq!(total, 33_321_640, "the index names this size");
}

#[test]
fn dialects_mean_what_they_say() {
    let two = Checkpoint::open(&oracle("two_ple")).unwrap();
    assert_eq!(two.config.output_gate, OutputGate::Silu, "from hidden_act");
    assert_eq!(two.config.boundary, 400, "the first of the list");
    let places: Vec<_> = two.config.ple.iter().map(|ple| (ple.layer, ple.ordinal)).collect();
    assert_eq!(places, [(0, 0), (2, 1)]);
    let rows = |layer: usize| two.layout.layers[layer].ple.as_ref().unwrap().shard_rows;
    assert_eq!((rows(0), rows(2)), (168, 188));

    let none = Checkpoint::open(&oracle("no_ple")).unwrap();
    assert_eq!((none.config.ngram, none.config.ple.len()), (None, 0));
    assert_eq!(
        none.config.layers.iter().position(|k| *k == LayerKind::SparseAttention),
        Some(3),
        "by interval"
    );

    let odd = Checkpoint::open(&oracle("ratio2_oddheads")).unwrap();
    assert_eq!(odd.config.ngram.unwrap().seed, 77);
    assert_eq!(two.config.ngram.unwrap().seed, 1234);
    assert_eq!(two.config.ngram.unwrap().embed_dim, 64, "the hidden size");
    assert!(matches!(odd.layout.layers[0].moe.experts, Experts::Fused { .. }));
    assert_eq!(odd.config.layers[3], LayerKind::SparseAttention, "spelled indexed_attention");
}

#[test]
fn what_is_not_used_is_reported() {
    let checkpoint = Checkpoint::open(&oracle("base_bf16")).unwrap();
    let idle = checkpoint.unused(&ALL);
    assert_eq!(idle.tensors, ["mtp.hyper_connection_mixer.block_inject_weight.weight"]);
    assert_eq!(idle.bytes, 4 * 256 * 2);

    let text_only = checkpoint.unused(&[Part::Text, Part::Table]);
    let prefixes = ["mtp.", "model.visual."];
    assert!(text_only.tensors.iter().all(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))));
    assert_eq!(text_only.bytes, idle.bytes + checkpoint.bytes(Part::Draft) + checkpoint.bytes(Part::Vision));
}

#[test]
fn reads_outside_a_tensor_are_refused() {
    let checkpoint = Checkpoint::open(&oracle("no_ple")).unwrap();
    let says = |error: runtime::error::LoadError, parts: &[&str]| {
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    let size = 448 * 64 * 2;
    let mut buffer = vec![0; size + 1];
    says(
        checkpoint.read("lm_head.weight", &mut buffer).unwrap_err(),
        &["57345 bytes", "lm_head.weight", "57344"],
    );
    says(
        checkpoint.read("lm_head.weight", &mut buffer[..9]).unwrap_err(),
        &["9 bytes", "lm_head.weight", "57344"],
    );
    let late = checkpoint.read_range("lm_head.weight", size as u64 - 8, &mut buffer[..9]);
    says(late.unwrap_err(), &["9 bytes at 57336", "lm_head.weight", "57344"]);
    let far = checkpoint.read_range("lm_head.weight", u64::MAX, &mut buffer[..9]);
    says(far.unwrap_err(), &["18446744073709551615", "lm_head.weight"]);
    checkpoint.read_range("lm_head.weight", size as u64 - 9, &mut buffer[..9]).unwrap();
    says(checkpoint.read("lm_tail.weight", &mut buffer).unwrap_err(), &["lm_tail.weight", "no_ple"]);
}

#[test]
fn a_file_cut_short_after_opening_fails_with_the_tensor_and_the_place() {
    let folder = Folder::copy_of("no_ple");
    let checkpoint = folder.open();
    fs::File::options().write(true).open(folder.path(WEIGHTS)).unwrap().set_len(9000).unwrap();
    let mut buffer = vec![0; 448 * 64 * 2];
    let message = checkpoint.read("lm_head.weight", &mut buffer).unwrap_err().to_string();
    let at = checkpoint.entry("lm_head.weight").unwrap().range.start;
    for part in ["57344 bytes", &format!("at {at} of "), WEIGHTS, "tensor lm_head.weight"] {
        assert!(message.contains(part), "{message} does not say {part}");
    }
}
