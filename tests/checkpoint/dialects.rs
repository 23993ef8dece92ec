//! Every export dialect opens, with its formats, its scales and nothing left over.

use std::fs;

use runtime::checkpoint::layout::{Experts, Format, Formats, Matrix, Part, Stored};
use runtime::checkpoint::{Checkpoint, Dtype};
use serde_json::{Value, json};

use crate::folder::oracle;
use crate::sketch::{DRAFT, Sketch, TABLE, TEXT};

const ALL: [Part; 6] = [Part::Text, Part::Table, Part::Constants, Part::Draft, Part::Vision, Part::Idle];

/// The formats of the base model where nothing is quantised.
fn plain() -> Formats {
    Formats {
        experts: Format::Bf16,
        shared: Format::Bf16,
        dense: vec![Format::Bf16],
        head: Format::Bf16,
        table: Some(Format::Bf16),
        draft_experts: Some(Format::Bf16),
        draft_dense: vec![Format::Bf16],
    }
}

/// Opens a sketch and requires its formats, and that every tensor of it is some part's.
#[track_caller]
fn opens(sketch: &Sketch, formats: &Formats) -> Checkpoint {
    let checkpoint = sketch.folder().open();
    assert_eq!(checkpoint.layout.formats, *formats);
    let specs = checkpoint.layout.specs();
    let named: std::collections::BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(named.len(), specs.len(), "a tensor is named twice");
    for (name, (dtype, shape)) in &sketch.heads {
        assert!(named.contains(name.as_str()), "{name}");
        let bytes: usize = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let mut last = [1];
        checkpoint.read_range(name, bytes as u64 - 1, &mut last).unwrap();
        assert_eq!(last, [0]);
    }
    assert!(
        specs.iter().all(|spec| spec.required || spec.part == Part::Idle || spec.part == Part::Constants)
    );
    let size: usize = sketch.heads.values().map(|(d, s)| s.iter().product::<usize>() * d.bitsize() / 8).sum();
    assert_eq!(ALL.map(|part| checkpoint.bytes(part)).iter().sum::<u64>(), size as u64);
    checkpoint
}

#[test]
fn bf16_stacked_or_one_by_one() {
    let mut sketch = Sketch::bf16();
    let split = opens(&sketch, &plain());
    assert!(split.layout.specs().iter().all(|spec| spec.stored == Stored::Plain));
    sketch.stack();
    let stacked = opens(&sketch, &plain());
    assert!(stacked.layout.layers.iter().all(|layer| matches!(layer.moe.experts, Experts::Fused { .. })));
}

#[test]
fn fp8_by_blocks_with_scales_in_either_float() {
    for scale in [Dtype::BF16, Dtype::F32] {
        let checkpoint = opens(
            &Sketch::fp8(scale),
            &Formats {
                experts: Format::Fp8,
                table: Some(Format::Fp8Tensor),
                draft_experts: Some(Format::Fp8),
                ..plain()
            },
        );
        let down = checkpoint.layout.layers[2].moe.experts.place(7, Matrix::Down);
        assert_eq!((&down.spec.shape, down.spec.stored_shape()), (&vec![64, 16], vec![64, 16]));
        let Stored::Fp8Block { scale: of } = &down.spec.stored else { panic!("{:?}", down.spec) };
        assert_eq!(of.name, format!("{TEXT}2.mlp.experts.7.down_proj.weight_scale_inv"));
        assert_eq!((&of.shape, of.part, checkpoint.expect(of).dtype), (&vec![1, 1], Part::Text, scale));
        let mut values = vec![0; 64 * 16];
        checkpoint
            .read_expert(&checkpoint.layout.layers[2].moe.experts, 7, Matrix::Down, &mut values)
            .unwrap();
        assert_eq!(checkpoint.config.quantisation[0].says, "fp8");
    }
}

#[test]
fn nvfp4_with_an_fp8_table_and_a_plain_draft_layer() {
    let sketch = Sketch::nvfp4();
    let formats = Formats { experts: Format::Nvfp4, table: Some(Format::Fp8Tensor), ..plain() };
    let checkpoint = opens(&sketch, &formats);
    assert_eq!(
        checkpoint.layout.formats.to_string(),
        "experts nvfp4, shared expert bf16, dense bf16, head bf16, table fp8 (one scale), draft experts bf16, draft \
         dense bf16"
    );
    assert!(checkpoint.to_string().contains("formats      experts nvfp4, shared expert bf16"));
    let experts = &checkpoint.layout.layers[0].moe.experts;
    let gate = experts.place(3, Matrix::Gate).spec;
    assert_eq!((&gate.shape, gate.stored_shape()), (&vec![16, 64], vec![16, 32]));
    let Stored::Nvfp4 { scales, global, reciprocal: false } = &gate.stored else { panic!("{gate:?}") };
    assert_eq!(scales.name, format!("{TEXT}0.mlp.experts.3.gate_proj.weight_scale"));
    assert_eq!(global.name, format!("{TEXT}0.mlp.experts.3.gate_proj.weight_scale_2"));
    assert_eq!((&scales.shape, &global.shape), (&vec![16, 4], &vec![]));
    checkpoint.read_expert(experts, 3, Matrix::Gate, &mut [0; 16 * 32]).unwrap();
    checkpoint.read_expert(experts, 3, Matrix::Gate, &mut [0; 16 * 64]).unwrap_err();

    let ple = checkpoint.layout.layers[1].ple.as_ref().unwrap();
    for shard in &ple.shards {
        let Stored::Fp8Tensor { scale } = &shard.stored else { panic!("{shard:?}") };
        assert_eq!((&scale.name, scale.part), (&format!("{TABLE}.weight_scale"), Part::Table));
    }
    let unused = checkpoint.unused(&[Part::Text, Part::Table, Part::Draft, Part::Vision]);
    assert_eq!(unused.tensors.len(), 8 * 8 * 3 + 1, "activations' scales and the draft mixer's injection");

    // Exports without them are as good.
    let mut without = sketch;
    without.heads.retain(|name, _| !name.ends_with(".input_scale"));
    opens(&without, &formats);
}

#[test]
fn nvfp4_experts_with_fp8_draft_experts_and_table_under_both_names_of_the_algorithm() {
    for name in ["FP8_PB_WO", "FP8_BLOCK_SCALES"] {
        let checkpoint = opens(
            &Sketch::mixed(name),
            &Formats {
                experts: Format::Nvfp4,
                table: Some(Format::Fp8Tensor),
                draft_experts: Some(Format::Fp8),
                ..plain()
            },
        );
        assert!(checkpoint.config.quantisation[0].says.contains(name));
        let draft = &checkpoint.layout.draft.as_ref().unwrap().moe.experts;
        let scale = draft.place(0, Matrix::Up).spec.scales().next().unwrap();
        assert_eq!((&scale.name, scale.part), (&format!("{DRAFT}0.up_proj.weight_scale_inv"), Part::Draft));
    }
}

#[test]
fn an_nvfp4_table_has_its_own_scales_and_one_for_all() {
    let mut sketch = Sketch::bf16();
    sketch.each(".mlp.experts.", |sketch, base| sketch.codes(base));
    sketch.nvfp4_table();
    let sketch = sketch.saying(json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}));
    let checkpoint =
        opens(&sketch, &Formats { experts: Format::Nvfp4, table: Some(Format::Nvfp4), ..plain() });
    let shards = &checkpoint.layout.layers[1].ple.as_ref().unwrap().shards;
    let Stored::Nvfp4 { scales, global, .. } = &shards[3].stored else { panic!() };
    assert_eq!(
        (&scales.name, &global.name),
        (&format!("{TABLE}.shard_3.weight_scale"), &format!("{TABLE}.weight_scale_2"))
    );
    assert_eq!((&shards[3].shape, &scales.shape), (&vec![516, 16], &vec![516, 1]));
}

#[test]
fn packed_names_mean_that_the_global_scale_divides() {
    let checkpoint = opens(&Sketch::packed(), &Formats { experts: Format::Nvfp4, ..plain() });
    let down = checkpoint.layout.layers[7].moe.experts.place(0, Matrix::Down).spec;
    assert_eq!(down.name, format!("{TEXT}7.mlp.experts.0.down_proj.weight_packed"));
    let Stored::Nvfp4 { global, reciprocal: true, .. } = &down.stored else { panic!("{down:?}") };
    assert_eq!(global.name, format!("{TEXT}7.mlp.experts.0.down_proj.weight_global_scale"));
    assert_eq!(checkpoint.expect(global).shape, [1]);
}

/// All that may be quantised, in FP8 with one scale, and the scales of a cache beside it.
#[test]
fn projections_shared_experts_and_the_head_may_be_quantised_too() {
    let modelopt = |algorithm: &str| json!({"quant_method": "modelopt", "quant_algo": algorithm});
    let parts = ["_proj", ".in_proj_", "lm_head"];
    let change = |change: &dyn Fn(&mut Sketch, &str)| {
        let mut sketch = Sketch::bf16();
        sketch.unstack_draft();
        for part in parts {
            sketch.each(part, |sketch, base| {
                let projection = !base.contains(".ple.") && !base.contains(".visual.");
                if projection && sketch.heads[&format!("{base}.weight")].0 == Dtype::BF16 {
                    change(sketch, base);
                }
            });
        }
        for name in ["3.self_attn.k_proj.k_scale", "3.self_attn.v_proj.v_scale", "7.self_attn.k_scale"] {
            sketch.put(&format!("{TEXT}{name}"), Dtype::F32, &[1]);
        }
        sketch
    };
    let all = |format: Format| Formats {
        experts: format,
        shared: format,
        dense: vec![format],
        head: format,
        draft_experts: Some(format),
        draft_dense: vec![format],
        ..plain()
    };
    let whole = change(&|sketch, base| sketch.whole(base)).saying(modelopt("FP8"));
    opens(&whole, &all(Format::Fp8Tensor));
    let blocks = change(&|sketch, base| sketch.blocks(base, Dtype::F32)).saying(modelopt("FP8_PB_WO"));
    let checkpoint = opens(&blocks, &all(Format::Fp8));
    assert_eq!(checkpoint.layout.lm_head.scales().next().unwrap().shape, [9, 1]);
    let codes = change(&|sketch, base| sketch.codes(base)).saying(modelopt("NVFP4"));
    opens(&codes, &all(Format::Nvfp4));
}

#[test]
fn the_quantised_checkpoints_of_the_oracle_open() {
    let fp8 = Checkpoint::open(&oracle("quant_fp8_block")).unwrap_or_else(|error| panic!("{error}"));
    let nvfp4 = Checkpoint::open(&oracle("quant_nvfp4")).unwrap_or_else(|error| panic!("{error}"));
    let formats = |format: Format, table: Format| Formats {
        experts: format,
        shared: format,
        dense: vec![format, Format::Bf16],
        head: Format::Bf16,
        table: Some(table),
        draft_experts: None,
        draft_dense: Vec::new(),
    };
    assert_eq!(fp8.layout.formats, formats(Format::Fp8, Format::Fp8Tensor));
    assert_eq!(nvfp4.layout.formats, formats(Format::Nvfp4, Format::Bf16));
    assert_eq!(nvfp4.config.quantisation.len(), 2, "in config.json and in a file of its own");
    for checkpoint in [fp8, nvfp4] {
        for spec in checkpoint.layout.specs() {
            for scale in spec.scales() {
                let mut bytes = vec![0; checkpoint.expect(scale).bytes() as usize];
                checkpoint.read_range(&scale.name, 0, &mut bytes).unwrap();
                assert!(bytes.iter().any(|&byte| byte != 0), "{}", scale.name);
            }
        }
        let all = checkpoint.len();
        let found =
            checkpoint.layout.specs().iter().filter(|spec| checkpoint.entry(&spec.name).is_some()).count();
        assert_eq!(found, all);
    }
}

#[test]
fn settings_in_the_other_places_count_as_well() {
    let mut inner = Sketch::fp8(Dtype::F32);
    let said = inner.config["quantization_config"].take();
    inner.config["text_config"]["quantization_config"] = said;
    assert_eq!(inner.folder().open().config.quantisation[0].place, "text_config.quantization_config");

    let mut beside = Sketch::nvfp4();
    beside.config["quantization_config"] = Value::Null;
    let folder = beside.folder();
    folder.refused(&["no quantization_config"]);
    fs::copy(oracle("quant_nvfp4").join("hf_quant_config.json"), folder.path("hf_quant_config.json"))
        .unwrap();
    assert_eq!(folder.open().config.quantisation[1].place, "hf_quant_config.json");
}
