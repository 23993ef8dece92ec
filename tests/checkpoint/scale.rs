//! The published model's size: its parameters by the layout, and its 75,000 tensors through the opening checks.

use runtime::checkpoint::Dtype;
use runtime::checkpoint::layout::{Experts, Layout, Part, Spec};
use runtime::config::ModelConfig;
use serde_json::{Map, Value, json};

use crate::folder::{Folder, Heads, INDEX};

/// The published configuration.
pub(crate) fn flash_next() -> Value {
    serde_json::from_str(include_str!("flash_next.json")).unwrap()
}

fn elements(spec: &Spec) -> u64 {
    spec.shape.iter().map(|&size| size as u64).product()
}

#[test]
fn the_published_model_has_the_published_number_of_parameters() {
    let config = ModelConfig::from_json(&flash_next().to_string()).unwrap();
    for fused in [true, false] {
        let layout = Layout::plain(&config, fused);
        let specs = layout.specs();
        let sum = |part: Part| specs.iter().filter(|s| s.part == part).map(|s| elements(s)).sum::<u64>();
        assert_eq!(sum(Part::Text), 120_795_955_200 + 3_676_300_160 + 1_271_398_400);
        assert_eq!(sum(Part::Table), 51_200_245_760);
        assert_eq!(sum(Part::Draft), 2_607_150_848);
        assert_eq!(sum(Part::Vision), 448_931_056);
        assert_eq!(specs.iter().filter(|spec| spec.part == Part::Vision).count(), 333);
        assert_eq!(matches!(layout.layers[0].moe.experts, Experts::Fused { .. }), fused);
    }
}

/// Files of the real sizes, with holes in place of weights.
#[test]
fn the_published_model_opens_with_all_its_experts_apart() {
    const SHARDS: usize = 64;
    let config = flash_next();
    let folder = Folder::with_config(&config);
    let layout = Layout::plain(&ModelConfig::from_json(&config.to_string()).unwrap(), false);
    let specs: Vec<&Spec> = layout.specs().into_iter().filter(|spec| spec.required).collect();
    assert!(specs.len() > 75_000);
    let mut places = Map::new();
    for (number, specs) in specs.chunks(specs.len().div_ceil(SHARDS)).enumerate() {
        let name = format!("model-{number:05}.safetensors");
        let heads: Heads =
            specs.iter().map(|spec| (spec.name.clone(), (Dtype::BF16, spec.shape.clone()))).collect();
        places.extend(heads.keys().map(|tensor| (tensor.clone(), Value::from(name.as_str()))));
        folder.write_hollow(&name, &heads);
    }
    folder.write_json(INDEX, &json!({"weight_map": places}));

    let checkpoint = folder.open();
    assert_eq!(checkpoint.len(), specs.len());
    let parts = [Part::Text, Part::Table, Part::Draft, Part::Vision];
    assert_eq!(parts.map(|part| checkpoint.bytes(part)).iter().sum::<u64>(), 359_999_962_848);
    assert!(checkpoint.unused(&parts).tensors.is_empty());
    let last = checkpoint.layout.layers[47].moe.experts.place(511, runtime::checkpoint::layout::Matrix::Down);
    let mut bytes = [1; 64];
    checkpoint.read_range(&last.spec.name, 2560 * 640 * 2 - 64, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
}
