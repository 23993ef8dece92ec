//! Faults planted in quantised exports: each is refused by name.

use std::fs;

use runtime::checkpoint::Dtype;
use serde_json::json;

use crate::folder::{Folder, INDEX};
use crate::sketch::{DRAFT, SIDE, Sketch, TABLE, TEXT};

const MAIN: &str = "model-1.safetensors";
/// What a refusal of a form lists.
const KNOWN: [&str; 3] = ["weight_scale_inv", "weight_scale_2", "X.weight_packed"];

fn gate() -> String {
    format!("{TEXT}4.mlp.experts.5.gate_proj")
}

#[track_caller]
fn refused(mut sketch: Sketch, fault: impl FnOnce(&mut Sketch), parts: &[&str]) {
    sketch.folder().open();
    fault(&mut sketch);
    sketch.folder().refused(parts);
}

#[test]
fn scales_of_another_shape() {
    let scale = format!("{}.weight_scale_inv", gate());
    let put = |shape: &'static [usize]| {
        let scale = scale.clone();
        move |sketch: &mut Sketch| sketch.put(&scale, Dtype::BF16, shape)
    };
    for (shape, found) in [(&[1, 2][..], "[1, 2]"), (&[1], "[1]"), (&[], "[]")] {
        refused(Sketch::fp8(Dtype::BF16), put(shape), &[&scale, MAIN, found, "[1, 1]", "fetch"]);
    }
    let scales = format!("{}.weight_scale", gate());
    let short = |sketch: &mut Sketch| sketch.put(&scales, Dtype::F8_E4M3, &[16, 2]);
    refused(Sketch::nvfp4(), short, &[&scales, MAIN, "[16, 2]", "[16, 4]"]);
    let global = format!("{}.weight_scale_2", gate());
    let list = |sketch: &mut Sketch| sketch.put(&global, Dtype::F32, &[2]);
    refused(Sketch::nvfp4(), list, &[&global, MAIN, "[2]", "a single value, [] or [1]"]);
    let table = format!("{TABLE}.weight_scale");
    let rows = |sketch: &mut Sketch| sketch.put(&table, Dtype::BF16, &[516]);
    refused(Sketch::nvfp4(), rows, &[&table, SIDE, "[516]", "a single value"]);
    let idle = format!("{}.input_scale", gate());
    let columns = |sketch: &mut Sketch| sketch.put(&idle, Dtype::F32, &[64]);
    refused(Sketch::nvfp4(), columns, &[&idle, "[64]", "a single value"]);
}

#[test]
fn weights_of_another_shape() {
    let name = format!("{}.weight", gate());
    let logical = |sketch: &mut Sketch| sketch.put(&name, Dtype::U8, &[16, 64]);
    refused(Sketch::nvfp4(), logical, &[&name, MAIN, "[16, 64]", "[16, 32]"]);
    let halved = |sketch: &mut Sketch| sketch.put(&name, Dtype::F8_E4M3, &[16, 32]);
    refused(Sketch::fp8(Dtype::F32), halved, &[&name, MAIN, "[16, 32]", "[16, 64]"]);
}

#[test]
fn absent_scales() {
    let base = gate();
    let gone = |names: &'static [&'static str]| {
        let base = base.clone();
        move |sketch: &mut Sketch| names.iter().for_each(|name| sketch.remove(&format!("{base}.{name}")))
    };
    let weight = format!("tensor {base}.weight in {MAIN}");
    let [inverse, scale, global] =
        ["weight_scale_inv", "weight_scale", "weight_scale_2"].map(|name| format!("{base}.{name}"));
    let mut parts = vec![weight.as_str(), "F8_E4M3", &inverse, &scale];
    parts.extend(KNOWN);
    refused(Sketch::fp8(Dtype::F32), gone(&["weight_scale_inv"]), &parts);
    refused(Sketch::nvfp4(), gone(&["weight_scale"]), &[&weight, "U8", &format!("no {scale};")]);
    refused(Sketch::nvfp4(), gone(&["weight_scale_2"]), &[&weight, "U8", &format!("no {global};")]);
    refused(
        Sketch::packed(),
        gone(&["weight_global_scale"]),
        &[&format!("{base}.weight_packed"), &format!("no {base}.weight_global_scale;")],
    );
    let every = |sketch: &mut Sketch| sketch.heads.retain(|name, _| !name.ends_with(".weight_scale_2"));
    refused(Sketch::nvfp4(), every, &["has no", "and 191 more weights lack a scale"]);
    let table = format!("{TABLE}.weight_scale");
    refused(
        Sketch::fp8(Dtype::F32),
        |sketch| sketch.remove(&table),
        &[&format!("{TABLE}.shard_0.weight"), SIDE, &format!("no {table},"), "3 more"],
    );
}

#[test]
fn an_absent_weight_is_missing_and_its_scales_are_left_over() {
    let name = format!("{}.weight", gate());
    refused(
        Sketch::nvfp4(),
        |sketch| sketch.remove(&name),
        &[&format!("missing 1: {name}"), "left over 3: ", &format!("{}.weight_scale_2", gate())],
    );
}

#[test]
fn companions_of_another_type() {
    let base = gate();
    let swapped = |sketch: &mut Sketch| {
        let [one, other] = ["weight_scale", "weight_scale_2"].map(|name| format!("{base}.{name}"));
        let (a, b) = (sketch.heads[&one].clone(), sketch.heads[&other].clone());
        sketch.heads.extend([(one, b), (other, a)]);
    };
    let scale = format!("tensor {base}.weight_scale in {MAIN} is stored as F32");
    refused(Sketch::nvfp4(), swapped, &[&scale, "reads it as F8_E4M3"]);
    let half = |sketch: &mut Sketch| sketch.put(&format!("{base}.weight_scale_inv"), Dtype::F16, &[1, 1]);
    refused(Sketch::fp8(Dtype::F32), half, &["weight_scale_inv", "stored as F16", "BF16 or F32"]);
    let coarse = |sketch: &mut Sketch| sketch.put(&format!("{base}.weight_scale_2"), Dtype::BF16, &[]);
    refused(Sketch::nvfp4(), coarse, &["weight_scale_2", "stored as BF16", "reads it as F32"]);
    let exponents =
        |sketch: &mut Sketch| sketch.put(&format!("{base}.weight_scale"), Dtype::F8_E8M0, &[16, 4]);
    refused(Sketch::nvfp4(), exponents, &["weight_scale", "stored as F8_E8M0", "reads it as F8_E4M3"]);
    for dtype in [Dtype::I8, Dtype::F8_E5M2, Dtype::F16, Dtype::I32] {
        let other = |sketch: &mut Sketch| {
            let shape = sketch.shape(&format!("{base}.weight"));
            sketch.put(&format!("{base}.weight"), dtype, &shape);
        };
        let found = format!("{base}.weight in {MAIN} is stored as {dtype}");
        refused(Sketch::fp8(Dtype::F32), other, &[&[found.as_str()][..], &KNOWN].concat());
    }
}

#[test]
fn tensors_that_nobody_loads() {
    for extra in ["weight_zero_point", "pre_quant_scale", "weight_scale_inv", "bias"] {
        let name = format!("{}.{extra}", gate());
        let add = |sketch: &mut Sketch| sketch.put(&name, Dtype::F32, &[1]);
        refused(Sketch::nvfp4(), add, &[&format!("left over 1: {name}")]);
    }
    let name = format!("{TEXT}0.mlp.gate.input_scale");
    let add = |sketch: &mut Sketch| sketch.put(&name, Dtype::F32, &[]);
    refused(Sketch::nvfp4(), add, &[&format!("left over 1: {name}")]);
    let both = |sketch: &mut Sketch| sketch.put(&format!("{}.weight_scale", gate()), Dtype::F32, &[]);
    refused(Sketch::fp8(Dtype::F32), both, &["left over 1: ", ".weight_scale"]);
}

#[test]
fn what_may_not_be_quantised() {
    let plain = [
        format!("{TEXT}2.mlp.gate"),
        format!("{TEXT}2.mlp.shared_expert_gate"),
        format!("{TEXT}2.attn_hyper_connection.input_mix_weight_down"),
        format!("{TEXT}1.ple.key_proj"),
        "model.language_model.embed_tokens".into(),
        "mtp.fc_hidden".into(),
        "model.visual.merger.linear_fc1".into(),
    ];
    for base in plain {
        let name = format!("tensor {base}.weight in {MAIN}");
        for change in [Sketch::codes, Sketch::whole, |sketch: &mut Sketch, base: &str| {
            sketch.blocks(base, Dtype::F32);
        }] {
            let quantised = |sketch: &mut Sketch| change(sketch, &base);
            refused(
                Sketch::nvfp4(),
                quantised,
                &[&name, "BF16 or F32", "what may be quantised is", "lm_head"],
            );
        }
    }
    let norm = format!("{TEXT}2.linear_attn.norm.weight");
    let quantised = |sketch: &mut Sketch| sketch.put(&norm, Dtype::F8_E4M3, &[16]);
    refused(Sketch::nvfp4(), quantised, &[&norm, "stored as F8_E4M3", "what may be quantised is"]);
    let stacked =
        |sketch: &mut Sketch| sketch.put(&format!("{DRAFT}down_proj"), Dtype::F8_E4M3, &[8, 64, 16]);
    refused(Sketch::nvfp4(), stacked, &["experts.down_proj", "F8_E4M3", "routed experts stored one by one"]);
}

#[test]
fn weights_of_one_purpose_that_differ() {
    let bare = |sketch: &mut Sketch, base: &str| {
        sketch.heads.retain(|name, _| !name.starts_with(&format!("{base}.")));
        sketch.put(&format!("{base}.weight"), Dtype::BF16, &[16, 64]);
    };
    let names = [format!("{TEXT}0.mlp.experts.0.gate_proj.weight"), format!("{}.weight", gate())];
    let parts = ["the routed experts must", &names[0], "nvfp4", &names[1], "bf16", MAIN, "fetch"];
    refused(Sketch::nvfp4(), |sketch| bare(sketch, &gate()), &parts);
    let fp8 = |sketch: &mut Sketch| {
        bare(sketch, &gate());
        sketch.blocks(&gate(), Dtype::F32);
    };
    refused(Sketch::nvfp4(), fp8, &["the routed experts must", &names[0], &names[1], "fp8"]);
    let draft = format!("{DRAFT}2.up_proj");
    let one = |sketch: &mut Sketch| bare(sketch, &draft);
    refused(Sketch::mixed("FP8"), one, &["the draft layer's routed experts", "fp8", &draft, "bf16", SIDE]);
    let shared = format!("{TEXT}6.mlp.shared_expert.up_proj");
    let one = |sketch: &mut Sketch| sketch.codes(&shared);
    refused(Sketch::nvfp4(), one, &["the shared experts must", &shared, "nvfp4"]);
    let z = format!("{TEXT}6.linear_attn.in_proj_z");
    let one = |sketch: &mut Sketch| sketch.codes(&z);
    refused(
        Sketch::nvfp4(),
        one,
        &["in_proj_z must", &format!("{TEXT}0.linear_attn.in_proj_z"), &z, "nvfp4"],
    );
    let shard = format!("{TABLE}.shard_2.weight");
    let one = |sketch: &mut Sketch| sketch.put(&shard, Dtype::BF16, &[516, 16]);
    refused(
        Sketch::nvfp4(),
        one,
        &["the n-gram table must", "shard_0", "fp8 (one scale)", &shard, "bf16", SIDE],
    );
}

#[test]
fn codes_that_do_not_fill_a_group() {
    let mut sketch = Sketch::bf16().saying(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}));
    sketch.config["text_config"]["moe_intermediate_size"] = 24.into();
    sketch.each(".mlp.experts.", |sketch, base| {
        let shape = if base.ends_with("down_proj") { [64, 24] } else { [24, 64] };
        sketch.put(&format!("{base}.weight"), Dtype::BF16, &shape);
        sketch.codes(base);
    });
    sketch.put(&format!("{DRAFT}gate_up_proj"), Dtype::BF16, &[8, 48, 64]);
    sketch.put(&format!("{DRAFT}down_proj"), Dtype::BF16, &[8, 64, 24]);
    sketch.folder().refused(&["experts.0.down_proj.weight", MAIN, "16 columns", "24 columns"]);
}

#[test]
fn files_that_are_cut_or_stale() {
    let cut = Sketch::mixed("FP8").folder();
    let file = fs::File::options().write(true).open(cut.path(SIDE)).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    cut.refused(&[SIDE, "truncated: fetch it again"]);

    let scale = format!("{TABLE}.weight_scale");
    let stale = Sketch::mixed("FP8").folder();
    stale.edit_json(INDEX, |index| index["weight_map"][&scale] = MAIN.into());
    stale.refused(&[INDEX, &scale, MAIN, SIDE, "stale"]);
    let unnamed = Sketch::mixed("FP8").folder();
    unnamed.edit_json(INDEX, |index| drop(index["weight_map"].as_object_mut().unwrap().remove(&scale)));
    unnamed.refused(&[INDEX, &scale, SIDE, "stale"]);
    let gone = Sketch::mixed("FP8").folder();
    fs::remove_file(gone.path(SIDE)).unwrap();
    gone.refused(&[SIDE, "is missing", "fetch"]);
}

#[test]
fn layouts_of_other_programs() {
    for (name, layout) in [
        ("scales", "MLX 4-bit"),
        ("biases", "MLX 4-bit"),
        ("qweight", "GPTQ or AWQ"),
        ("qzeros", "GPTQ or AWQ"),
        ("g_idx", "GPTQ or AWQ"),
    ] {
        let name = format!("{}.{name}", gate());
        let add = |sketch: &mut Sketch| sketch.put(&name, Dtype::I32, &[4]);
        refused(Sketch::nvfp4(), add, &[&[name.as_str(), MAIN, layout][..], &KNOWN].concat());
    }
    let folder = Sketch::nvfp4().folder();
    fs::write(folder.path("model-Q4_K_M.gguf"), b"GGUF").unwrap();
    folder.refused(&[&["model-Q4_K_M.gguf", "GGUF layout"][..], &KNOWN].concat());
    let bare = Folder::with_config(&json!({}));
    fs::remove_file(bare.path("config.json")).unwrap();
    fs::write(bare.path("model.gguf"), b"GGUF").unwrap();
    bare.refused(&["model.gguf", "GGUF layout"]);
}
