//! Values inside the model, read between launches: streams, hyper-connections, routers, block selection.

use std::collections::HashMap;

use graph::{Emission, Kernel, Ptr};
use kernels::numerics::{CUTS, ElementType};
use kernels::{embed, experts, hyper, index, linear, ngram, residual, router};
use runtime::model::Picks;
use tests::fixture::Fixture;
use tests::oracle::{Case, assert_close, cases};

use crate::{BLOCK_MARGIN, INNER, ROUTER_MARGIN, one_lane};

/// Everything seen while a prompt ran entry by entry, by the oracle's names.
#[derive(Default)]
struct Seen {
    floats: HashMap<String, Vec<f32>>,
    ids: HashMap<String, Vec<u32>>,
}

#[test]
fn streams_and_blocks_agree() {
    for case in cases("hidden_states") {
        let seen = trace(&case);
        let mut compared = 0;
        for (name, expected) in &case.tensors {
            if name != "input_ids" {
                let got =
                    seen.floats.get(name).unwrap_or_else(|| panic!("{}: {name} was not seen", case.id()));
                assert_close(&format!("{} {name}", case.id()), got, &expected.values, INNER);
                compared += 1;
            }
        }
        assert!(compared >= 3, "{}: only {compared} tensors", case.id());
    }
}

#[test]
fn routers_choose_the_same_experts() {
    for case in cases("router") {
        let seen = trace(&case);
        let config = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane()).runner.model.config;
        let (experts, k) = (config.num_experts, config.num_experts_per_tok);
        for layer in 0..config.num_hidden_layers {
            let what = |name: &str| format!("{} layer {layer} {name}", case.id());
            let name = |name: &str| format!("layer.{layer}.{name}");
            let logits = &seen.floats[&name("router_logits")];
            let own: Vec<f32> =
                logits.chunks_exact(experts + 1).flat_map(|row| row[..experts].to_vec()).collect();
            let expected = case.tensor(&name("router_logits"));
            assert_close(&what("logits"), &own, &expected.values, INNER);
            let weights = &seen.floats[&name("router_weights")];
            let (expected_ids, expected_weights) =
                (case.tensor(&name("router_ids")), case.tensor(&name("router_weights")));
            for row in 0..case.input_ids().len() {
                // The choice is only told where the last chosen stands clear of the first refused, and the
                // order only where neighbours stand clear of each other.
                let mut sorted = expected.row(row).to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                if sorted.windows(2).take(k).all(|pair| pair[0] - pair[1] > ROUTER_MARGIN) {
                    let got: Vec<f64> = seen.ids[&name("router_ids")][row * k..][..k]
                        .iter()
                        .map(|id| f64::from(*id))
                        .collect();
                    assert_eq!(got, expected_ids.row(row), "{} row {row}", what("ids"));
                    let got = &weights[row * (k + 1)..][..k];
                    assert_close(&what("weights"), got, expected_weights.row(row), INNER);
                }
            }
        }
    }
}

#[test]
fn indexers_select_the_same_blocks() {
    for case in cases("qsa_select") {
        let seen = trace(&case);
        let layers: Vec<usize> =
            (0..64).filter(|layer| case.tensors.contains_key(&format!("layer.{layer}.blocks"))).collect();
        assert!(!layers.is_empty(), "{}: no layer", case.id());
        for layer in layers {
            let expected = case.tensor(&format!("layer.{layer}.blocks"));
            let margins = &case.tensor(&format!("layer.{layer}.margin")).values;
            let top = expected.shape[1];
            let mut sparse = 0;
            for (row, margin) in margins.iter().enumerate() {
                let blocks = &seen.ids[&format!("layer.{layer}.blocks")][row * top..][..top];
                let got: Vec<f64> =
                    blocks.iter().map(|b| if *b == u32::MAX { -1.0 } else { f64::from(*b) }).collect();
                if *margin > BLOCK_MARGIN {
                    assert_eq!(got, expected.row(row), "{} layer {layer} row {row}", case.id());
                    sparse += usize::from(*margin < 1e29);
                }
            }
            assert!(sparse > 0, "{} layer {layer}: no row had to choose", case.id());
        }
    }
}

/// Runs a case's prompt entry by entry and reads what each launch wrote.
fn trace(case: &Case) -> Seen {
    let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
    let mut lane = fixture.lane(0);
    let ids = case.input_ids();
    let emission = fixture.prompt_emission(&mut lane, &ids, Picks::All);
    let config = fixture.runner.model.config.clone();
    let rows = ids.len();
    let (hidden, width) = (config.hidden_size, config.streams_width());
    let mut seen = Seen::default();
    let mut watch =
        Watch { fixture: &fixture, emission: &emission, rows, layer: 0, in_mlp: false, before: Vec::new() };
    fixture.trace(&emission, |at| {
        if let Some(args) = watch.launched::<embed::Embed<f32>>(at) {
            seen.floats.insert("streams.in".into(), watch.floats(args.streams, rows * width));
        }
        if let Some(args) = watch.launched::<ngram::NgramGather<f32>>(at) {
            let _ = args;
            watch.before = watch.floats(fixture.runner.scratch.buffers.streams, rows * width);
        }
        if let Some(args) = watch.launched::<ngram::NgramConv<f32>>(at) {
            let after = watch.floats(args.streams, rows * width);
            let added = after.iter().zip(&watch.before).map(|(after, before)| after - before).collect();
            seen.floats.insert(format!("layer.{}.ple_out", watch.layer), added);
        }
        if let Some(args) = watch.launched::<hyper::MixDownPrompt<f32>>(at)
            && !args.inject.is_null()
        {
            let name = format!("layer.{}.{}.injection", watch.layer, watch.connection());
            seen.floats.insert(name, watch.floats(args.inject.cast(), rows * config.hc_count));
        }
        if let Some(args) = watch.launched::<hyper::MixUpPrompt<f32>>(at) {
            let name = match watch.layer == config.num_hidden_layers {
                true => "final_mixed".into(),
                false => format!("layer.{}.{}.mixed", watch.layer, watch.connection()),
            };
            seen.floats.insert(name, watch.floats(args.mixed, rows * hidden));
        }
        if let Some(args) = watch.launched::<linear::LinearCutPrompt<f32>>(at) {
            let kind = match config.layers[watch.layer] {
                runtime::config::LayerKind::LinearAttention => "linear_attn_out",
                runtime::config::LayerKind::SparseAttention => "self_attn_out",
            };
            seen.floats.insert(format!("layer.{}.{kind}", watch.layer), watch.sum_of_cuts(args.y, hidden));
            watch.in_mlp = true;
        }
        if let Some(args) = watch.launched::<linear::LinearWidePrompt<f32>>(at) {
            let name = format!("layer.{}.router_logits", watch.layer);
            seen.floats.insert(name, watch.floats(args.y, rows * args.outputs as usize));
        }
        if let Some(args) = watch.launched::<router::Route>(at) {
            let k = args.k as usize;
            let arena = &fixture.runner.scratch.arena;
            seen.ids.insert(
                format!("layer.{}.router_ids", watch.layer),
                arena.read(args.ids, rows * k).expect("read"),
            );
            let weights = watch.floats(args.weights.cast(), rows * (k + 1));
            seen.floats.insert(format!("layer.{}.router_weights", watch.layer), weights);
        }
        if let Some(args) = watch.launched::<index::IndexSelect<f32>>(at) {
            let chosen =
                fixture.runner.scratch.arena.read(args.chosen, rows * args.top as usize).expect("read");
            seen.ids.insert(format!("layer.{}.blocks", watch.layer), chosen);
        }
        if let Some(args) = watch.launched::<experts::ExpertsSum>(at) {
            seen.floats
                .insert(format!("layer.{}.mlp_out", watch.layer), watch.sum_of_cuts(args.p.cast(), hidden));
            watch.layer += 1;
            watch.in_mlp = false;
        }
        // The streams after layer i are complete when the next layer's first launch has written back.
        if let Some(args) = watch.launched::<residual::Residual<f32>>(at)
            && !watch.in_mlp
            && watch.layer > 0
        {
            let name = format!("streams.layer.{}", watch.layer - 1);
            seen.floats.entry(name).or_insert_with(|| watch.floats(args.streams, rows * width));
        }
    });
    seen
}

/// Where a traced prompt is.
struct Watch<'a> {
    fixture: &'a Fixture,
    emission: &'a Emission,
    rows: usize,
    layer: usize,
    in_mlp: bool,
    /// The streams before an n-gram embedding was added.
    before: Vec<f32>,
}

impl Watch<'_> {
    fn launched<K: Kernel>(&self, at: usize) -> Option<K::Args> {
        self.emission.args::<K>(at)
    }

    fn floats(&self, at: Ptr<u8>, count: usize) -> Vec<f32> {
        self.fixture.runner.scratch.arena.read(at.cast(), count).expect("a buffer of the round")
    }

    fn sum_of_cuts(&self, at: Ptr<u8>, hidden: usize) -> Vec<f32> {
        let partials = self.floats(at, CUTS * self.rows * hidden);
        let (first, second) = partials.split_at(self.rows * hidden);
        first.iter().zip(second).map(|(a, b)| a + b).collect()
    }

    fn connection(&self) -> &'static str {
        if self.in_mlp { "mlp_hyper_connection" } else { "attn_hyper_connection" }
    }
}
