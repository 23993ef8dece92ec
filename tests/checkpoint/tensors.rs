//! Tensors that the configuration does not describe, or describes otherwise.

use runtime::checkpoint::Dtype;
use runtime::checkpoint::layout::Part;

use crate::folder::{Folder, Tensor, WEIGHTS, bytes};

const ROUTER: &str = "model.language_model.layers.2.mlp.gate.weight";
const DECAY: &str = "model.language_model.layers.0.linear_attn.A_log";
const BIAS: &str = "model.language_model.layers.0.linear_attn.dt_bias";
const HASH: &str = "model.language_model.layers.1.ple.ple_embedding.";

fn zeros(dtype: Dtype, shape: &[usize]) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Tensor { dtype, shape: shape.to_vec(), data: vec![0; bytes] }
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = Folder::copy_of("no_ple");
    folder.edit(WEIGHTS, |tensors| drop(tensors.remove(ROUTER)));
    folder.refused(&[&format!("missing 1: {ROUTER}")]);
}

#[test]
fn a_left_over_tensor_is_named() {
    let folder = Folder::copy_of("no_ple");
    let extra = "model.language_model.layers.2.mlp.gate.bias";
    folder.edit(WEIGHTS, |tensors| drop(tensors.insert(extra.into(), zeros(Dtype::BF16, &[8]))));
    folder.refused(&[&format!("left over 1: {extra}")]);
}

#[test]
fn a_renamed_tensor_is_named_twice() {
    let folder = Folder::copy_of("no_ple");
    folder.edit(WEIGHTS, |tensors| {
        let router = tensors.remove(ROUTER).unwrap();
        tensors.insert("router".into(), router);
    });
    folder.refused(&[&format!("missing 1: {ROUTER}"), "left over 1: router"]);
}

#[test]
fn many_missing_tensors_are_counted() {
    let folder = Folder::copy_of("no_ple");
    folder.edit(WEIGHTS, |tensors| tensors.retain(|name, _| !name.contains("layers.3.mlp.experts.")));
    folder.refused(&["missing 24: ", "layers.3.mlp.experts.0.gate_proj.weight", "and 16 more"]);
}

#[test]
fn every_single_missing_tensor_is_named_and_optional_ones_are_not_missed() {
    let folder = Folder::copy_of("base_bf16");
    let all = folder.tensors(WEIGHTS);
    let optional = |name: &str| {
        name.starts_with(HASH) && !name.contains("shard")
            || name.contains("hyper_connection_mixer.block_inject")
    };
    let names: Vec<&String> =
        all.keys().filter(|name| !name.contains(".experts.") || name.contains(".3.")).collect();
    assert!(names.len() > 200);
    for name in names {
        let mut tensors = all.clone();
        tensors.remove(name);
        folder.write(WEIGHTS, &tensors);
        if optional(name) {
            folder.open();
        } else {
            folder.refused(&[&format!("missing 1: {name}")]);
        }
    }
}

#[test]
fn a_wrong_shape_is_named_with_both_shapes() {
    for shape in [vec![64, 8], vec![8, 64, 1], vec![512]] {
        let folder = Folder::copy_of("no_ple");
        folder.edit(WEIGHTS, |tensors| drop(tensors.insert(ROUTER.into(), zeros(Dtype::BF16, &shape))));
        folder.refused(&[ROUTER, WEIGHTS, &format!("{shape:?}"), "[8, 64]"]);
    }
}

#[test]
fn a_configuration_of_another_size_is_a_wrong_shape() {
    let folder = Folder::copy_of("no_ple");
    folder.edit_json("config.json", |config| config["text_config"]["hc_lowrank"] = 9.into());
    folder.refused(&["input_mix_weight_down.weight", "[8, 256]", "[9, 256]"]);
}

#[test]
fn a_wrong_type_is_named() {
    for (dtype, word) in [(Dtype::F16, "F16"), (Dtype::F8_E4M3, "F8_E4M3"), (Dtype::I64, "I64")] {
        let folder = Folder::copy_of("no_ple");
        folder.edit(WEIGHTS, |tensors| drop(tensors.insert(ROUTER.into(), zeros(dtype, &[8, 64]))));
        folder.refused(&[ROUTER, WEIGHTS, &format!("stored as {word}"), "BF16 or F32"]);
    }
}

#[test]
fn decay_may_be_stored_in_either_float() {
    let folder = Folder::copy_of("no_ple");
    let mut wide = Vec::new();
    folder.edit(WEIGHTS, |tensors| {
        for name in [DECAY, BIAS] {
            let tensor = tensors[name].widened();
            wide.push((name, tensor.clone()));
            tensors.insert(name.into(), tensor);
        }
    });
    let checkpoint = folder.open();
    for (name, tensor) in wide {
        assert_eq!(checkpoint.entry(name).unwrap().dtype, Dtype::F32);
        assert_eq!(bytes(&checkpoint, name), tensor.data);
    }
}

#[test]
fn stored_hash_constants_must_equal_the_recomputed_ones() {
    for name in ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"] {
        let folder = Folder::copy_of("base_bf16");
        let name = format!("{HASH}{name}");
        folder.edit(WEIGHTS, |tensors| tensors.get_mut(&name).unwrap().data[8] ^= 2);
        folder.refused(&[&name, WEIGHTS, "config.json implies", "n-gram table"]);
    }
    let folder = Folder::copy_of("base_bf16");
    folder.edit_json("config.json", |config| config["text_config"]["seed"] = 1235.into());
    folder.refused(&[&format!("{HASH}layer_multipliers")]);
}

#[test]
fn hash_constants_may_be_absent_but_not_of_another_type() {
    let folder = Folder::copy_of("base_bf16");
    let name = format!("{HASH}layer_multipliers");
    folder.edit(WEIGHTS, |tensors| drop(tensors.insert(name.clone(), zeros(Dtype::I32, &[3]))));
    folder.refused(&[&name, "I32", "I64"]);
    folder
        .edit(WEIGHTS, |tensors| tensors.retain(|name, _| !name.starts_with(HASH) || name.contains("shard")));
    assert_eq!(folder.open().bytes(Part::Constants), 0);
}

#[test]
fn a_table_in_another_number_of_pieces_is_refused_until_the_configuration_agrees() {
    let folder = Folder::copy_of("base_bf16");
    folder.edit(WEIGHTS, |tensors| {
        let piece = |s: usize| format!("{HASH}ngram_embedding.shard_{s}.weight");
        for s in 0..2 {
            let mut whole = tensors.remove(&piece(2 * s)).unwrap();
            whole.data.extend(tensors.remove(&piece(2 * s + 1)).unwrap().data);
            whole.shape[0] *= 2;
            tensors.insert(piece(s), whole);
        }
    });
    folder.refused(&["missing 2", "ngram_embedding.shard_2.weight"]);
    folder.edit_json("config.json", |config| config["text_config"]["split_ngram_parts"] = 2.into());
    assert_eq!(folder.open().layout.layers[1].ple.as_ref().unwrap().shard_rows, 1032);
}

#[test]
fn the_final_mixer_may_carry_an_unused_weight_of_the_right_shape() {
    let folder = Folder::copy_of("no_ple");
    let name = "model.language_model.hyper_connection_mixer.block_inject_weight.weight";
    folder.edit(WEIGHTS, |tensors| drop(tensors.insert(name.into(), zeros(Dtype::BF16, &[4, 256]))));
    let checkpoint = folder.open();
    assert!(checkpoint.unused(&[Part::Text, Part::Vision]).tensors.contains(&name));
    folder.edit(WEIGHTS, |tensors| drop(tensors.insert(name.into(), zeros(Dtype::BF16, &[5, 256]))));
    folder.refused(&[name, "[5, 256]", "[4, 256]"]);
}

#[test]
fn parts_that_the_configuration_announces_must_be_there_and_no_others() {
    let folder = Folder::copy_of("base_bf16");
    folder.edit(WEIGHTS, |tensors| tensors.retain(|name, _| !name.starts_with("mtp.")));
    folder.refused(&["missing 53", "mtp.fc_embedding.weight", "mtp_num_hidden_layers must be 0"]);
    folder.edit_json("config.json", |config| config["text_config"]["mtp_num_hidden_layers"] = 0.into());
    assert!(folder.open().layout.draft.is_none());
    folder.edit(WEIGHTS, |tensors| tensors.retain(|name, _| !name.starts_with("model.visual.")));
    folder.refused(&["missing 33", "model.visual.patch_embed.proj.weight", "vision_config must be absent"]);
    folder.edit_json("config.json", |config| drop(config.as_object_mut().unwrap().remove("vision_config")));
    assert!(folder.open().layout.vision.is_none());

    let folder = Folder::copy_of("base_bf16");
    folder.edit_json("config.json", |config| config["text_config"]["mtp_num_hidden_layers"] = 0.into());
    folder.refused(&["left over", "mtp.fc_embedding.weight"]);
    let folder = Folder::copy_of("base_bf16");
    folder.edit_json("config.json", |config| drop(config.as_object_mut().unwrap().remove("vision_config")));
    folder.refused(&["left over 33", "model.visual.blocks.0.attn.proj.bias"]);
}
