//! Quantised checkpoints: the numbers that are loaded, logits, and greedy runs.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use graph::Device;
use graph::host::HostOptions;
use kernels::numerics::ElementType;
use kernels::quant::{fp8, nvfp4};
use kernels::weight::{BLOCK, Format, GROUP, Matrix, Order};
use runtime::checkpoint::Checkpoint;
use runtime::error::Error;
use runtime::weights::{Loaded, MixerWeights, Piece, WeightForm, WeightPlan};
use tests::fixture::Fixture;
use tests::oracle::{Case, assert_close, cases, rms_relative};

use crate::{LOGIT_MARGIN, LOGITS, ROUTER_MARGIN, SELECT_MARGIN, one_lane};

fn logits(case: &Case, element: ElementType) -> Vec<(String, Vec<f32>)> {
    let mut fixture = Fixture::open(&case.checkpoint(), element, one_lane());
    let each = case.prompts().into_iter().map(|(name, ids, positions)| {
        let mut lane = fixture.lane(0);
        let logits = fixture.prompt(&mut lane, &ids);
        let vocab = logits.len() / ids.len();
        let got = positions.into_iter().flat_map(|at| logits[at * vocab..][..vocab].to_vec()).collect();
        (name, got)
    });
    each.collect()
}

#[test]
fn logits_agree_in_f32() {
    for case in cases("quantised") {
        for (name, got) in logits(&case, ElementType::F32) {
            let want = &case.tensor(&format!("{name}.logits_f32")).values;
            assert_close(&format!("{} {name}", case.id()), &got, want, LOGITS);
        }
    }
}

/// By the oracle's rule. No bf16 run of these models is recorded, so they may be as far from f32 as the quietest of
/// the others.
#[test]
fn logits_are_close_in_bf16() {
    let noises =
        cases("prefill_logits").into_iter().map(|case| case.number("/noise/bf16_sdpa_vs_f32/rms_rel"));
    let allowed = 1.5 * noises.fold(f64::MAX, f64::min) + 0.02;
    for case in cases("quantised") {
        for (name, got) in logits(&case, ElementType::Bf16) {
            let distance = rms_relative(&got, &case.tensor(&format!("{name}.logits_f32")).values);
            let id = case.id();
            assert!(distance <= allowed, "{id} {name}: rms distance {distance:.4}, allowed {allowed:.4}");
        }
    }
}

#[test]
fn greedy_runs_agree() {
    for case in cases("quantised") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
        let mut lane = fixture.lane(0);
        let ids: Vec<u32> = case.indices("greedy.input_ids").into_iter().map(|id| id as u32).collect();
        let expected = case.indices("greedy.tokens");
        fixture.prompt(&mut lane, &ids);
        let mut id = fixture.runner.outcomes(ids.len()).expect("the prompt ran")[ids.len() - 1].id;
        for (step, token) in expected.iter().enumerate() {
            let margin = |name: &str| case.tensor(name).values[step];
            assert!(
                margin("greedy.logit_margin") >= LOGIT_MARGIN
                    && margin("greedy.router_margin") >= ROUTER_MARGIN
                    && margin("greedy.qsa_margin") >= SELECT_MARGIN,
                "{} step {step}: a near tie",
                case.id()
            );
            assert_eq!(i64::from(id), *token, "{} step {step}", case.id());
            id = fixture.decode(&mut [&mut lane], None)[0].id;
        }
    }
}

fn load(dir: &Path) -> Result<Loaded, Error> {
    let device = Device::host(HostOptions::default());
    let checkpoint = Checkpoint::open(dir).expect("the checkpoint opens");
    let form = WeightForm::new(ElementType::F32, Order::of(&device));
    let (mut told, mut all) = (0, 0);
    let loaded = WeightPlan::new(&checkpoint, form)?
        .load(&checkpoint, &device, &mut |done, of| (told, all) = (done, of))?;
    assert_eq!(told, all, "every byte is read once, and told");
    Ok(loaded)
}

/// A code or a scale that stands for nothing is found when it is read, and named.
#[test]
fn damaged_codes_and_scales_are_refused_by_name() {
    const EXPERT: &str = "model.language_model.layers.1.mlp.experts.3.up_proj";
    let base = "model.language_model.layers";
    for (folder, tensor, at, bytes, problem) in [
        ("quant_fp8_block", format!("{EXPERT}.weight"), 130, &[0x7f][..], "code 0x7f is no number"),
        ("quant_fp8_block", format!("{EXPERT}.weight_scale_inv"), 0, &[0x80, 0x7f], "inf is no scale"),
        (
            "quant_fp8_block",
            format!("{base}.1.self_attn.o_proj.weight_scale_inv"),
            2,
            &[0x80, 0xbf],
            "-1 is no scale",
        ),
        (
            "quant_fp8_block",
            format!("{base}.0.ple.ple_embedding.ngram_embedding.shard_2.weight"),
            77,
            &[0xff],
            "code 0xff is no number",
        ),
        ("quant_nvfp4", format!("{EXPERT}.weight_scale"), 9, &[0x90], "code 0x90 is no scale"),
        ("quant_nvfp4", format!("{EXPERT}.weight_scale"), 9, &[0x7f], "code 0x7f is no scale"),
        ("quant_nvfp4", format!("{EXPERT}.weight_scale_2"), 0, &[0, 0, 0xc0, 0x7f], "NaN is no scale"),
    ] {
        let copy = tempfile::tempdir().expect("a folder");
        let dir = tests::fixture::repository("tests/oracle/checkpoints").join(folder);
        for file in std::fs::read_dir(&dir).expect("the folder is there") {
            let file = file.expect("a file");
            std::fs::copy(file.path(), copy.path().join(file.file_name())).expect("a copy");
        }
        let checkpoint = Checkpoint::open(&dir).expect("the checkpoint opens");
        let place = checkpoint.entry(&tensor).expect("the tensor is there").range.start + at;
        let file =
            OpenOptions::new().write(true).open(copy.path().join("model.safetensors")).expect("a file");
        file.write_all_at(bytes, place).expect("the damage is done");
        let why = load(copy.path()).map(|_| ()).expect_err("it is refused").to_string();
        assert!(why.contains(&tensor) && why.contains(problem), "{why}");
    }
}

/// The first rows of matrix 0 of `count` in memory, as numbers.
fn first_rows(loaded: &Loaded, at: graph::Ptr<u8>, matrix: Matrix, count: usize, from: usize) -> Vec<f32> {
    const ROWS: usize = 4;
    let bytes =
        loaded.memory.arena.read(at, matrix.bytes(count, Order::Rows, 4)).expect("the weights are there");
    let (parts, _) = matrix.parts(count, Order::Rows, 4);
    let columns = matrix.columns;
    let word = |at: usize| f32::from_le_bytes(bytes[at..][..4].try_into().expect("four bytes"));
    let number = |row: usize, column: usize| match matrix.format {
        Format::Plain => word(4 * (row * columns + column)),
        Format::Fp8 => {
            let scale = word(parts.scales + 4 * (row * columns.div_ceil(BLOCK) + column / BLOCK));
            fp8::decode(bytes[row * columns + column]) * scale
        }
        Format::Nvfp4 => {
            let number = row * columns + column;
            let code = nvfp4::decode(bytes[number / 2] >> (number % 2 * 4));
            code * (fp8::decode(bytes[parts.scales + number / GROUP]) * word(parts.globals + 4 * row))
        }
    };
    (from..from + ROWS)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(r, c)| number(r, c))
        .collect()
}

#[test]
fn what_is_loaded_is_what_the_codes_stand_for() {
    for case in cases("quantised") {
        let loaded = load(&case.checkpoint()).expect("weights load");
        let (config, layers) =
            (Checkpoint::open(&case.checkpoint()).expect("it opens").config, &loaded.weights.layers);
        let hidden = config.hidden_size;
        let exact = |name: &str, got: Vec<f32>| {
            let want = &case.tensor(&format!("dequant_first_rows.model.language_model.layers.{name}")).values;
            assert_eq!(got.len(), want.len(), "{name}");
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(f64::from(*got), *want, "{} {name}, value {at}", case.id());
            }
        };
        let MixerWeights::Recurrent(recurrent) = &layers[0].mixer else { panic!("layer 0 is recurrent") };
        let MixerWeights::Sparse(sparse) = &layers[1].mixer else { panic!("layer 1 is sparse") };
        let piece = |piece: &Piece<_>, columns: usize, from: usize| {
            let matrix = Matrix::plain(piece.outputs, columns).stored(piece.format);
            first_rows(&loaded, piece.at, matrix, 1, from)
        };
        exact("0.linear_attn.in_proj_qkv", piece(&recurrent.input[0], hidden, 0));
        exact("0.linear_attn.in_proj_z", piece(&recurrent.input[0], hidden, config.linear_conv_width()));
        exact("0.linear_attn.out_proj", piece(&recurrent.output, config.linear_value_width(), 0));
        let queries = 2 * config.attention_width();
        exact("1.self_attn.q_proj", piece(&sparse.input[0], hidden, 0));
        exact("1.self_attn.k_proj", piece(&sparse.input[0], hidden, queries));
        exact("1.self_attn.v_proj", piece(&sparse.input[0], hidden, queries + config.kv_width()));
        exact("1.self_attn.o_proj", piece(&sparse.output, config.attention_width(), 0));
        let (moe, inner, experts) = (&layers[0].moe, config.moe_intermediate_size, config.num_experts);
        let gate_up = Matrix::plain(2 * inner, hidden).grouped(2).stored(moe.routed);
        let down = Matrix::plain(hidden, inner).cut().stored(moe.routed);
        exact("0.mlp.experts.0.gate_proj", first_rows(&loaded, moe.gate_up, gate_up, experts, 0));
        exact("0.mlp.experts.0.up_proj", first_rows(&loaded, moe.gate_up, gate_up, experts, inner));
        exact("0.mlp.experts.0.down_proj", first_rows(&loaded, moe.down, down, experts, 0));
        if let Some(table) = case
            .tensors
            .get("dequant_first_rows.model.language_model.layers.0.ple.ple_embedding.ngram_embedding.shard_0")
        {
            let ngram = layers[0].ngram.as_ref().expect("a table");
            let shard =
                loaded.memory.arena.read(ngram.shards.cast::<graph::Ptr<u8>>(), 1).expect("an address")[0];
            let codes: Vec<u8> = loaded.memory.arena.read(shard, table.values.len()).expect("rows");
            let got = codes.iter().map(|code| fp8::decode(*code) * ngram.global);
            for (got, want) in got.zip(&table.values) {
                assert_eq!(f64::from(got), *want, "{}", case.id());
            }
        }
    }
}
