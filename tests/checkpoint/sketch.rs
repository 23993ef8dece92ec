//! Exports of the oracle's base model as headers without weights: the dialects, and what may be changed in them.

use runtime::checkpoint::Dtype;
use serde_json::{Value, json};

use crate::folder::{Folder, Heads, INDEX, WEIGHTS};

/// The main model's layers.
pub(crate) const TEXT: &str = "model.language_model.layers.";
/// The draft layer's experts.
pub(crate) const DRAFT: &str = "mtp.layers.0.mlp.experts.";
/// The n-gram table.
pub(crate) const TABLE: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
/// The file of what some exports keep apart.
pub(crate) const SIDE: &str = "model-fp8-mtp-ple.safetensors";

pub(crate) struct Sketch {
    pub(crate) config: Value,
    pub(crate) heads: Heads,
}

impl Sketch {
    /// BF16, with the main model's experts one by one and the draft layer's stacked.
    pub(crate) fn bf16() -> Self {
        let folder = Folder::copy_of("base_bf16");
        let constant = |name: &str| name.contains("ple_embedding.") && !name.contains("shard_");
        let heads = folder.tensors(WEIGHTS).into_iter().filter(|(name, _)| !constant(name));
        let heads = heads.map(|(name, tensor)| (name, (tensor.dtype, tensor.shape))).collect();
        let config = serde_json::from_slice(&std::fs::read(folder.path("config.json")).unwrap()).unwrap();
        Self { config, heads }
    }

    /// The same with another `quantization_config`.
    pub(crate) fn saying(mut self, quantisation: Value) -> Self {
        self.config["quantization_config"] = quantisation;
        self
    }

    /// Experts, table and draft experts in FP8, as its first exporter writes it.
    pub(crate) fn fp8(scale: Dtype) -> Self {
        let mut sketch = Self::bf16().saying(json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "weight_per_tensor": false,
            "act_per_tensor": false,
            "modules_to_not_convert": ["lm_head"],
            "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        }));
        sketch.unstack_draft();
        sketch.each(".mlp.experts.", |sketch, base| sketch.blocks(base, scale));
        sketch.fp8_table();
        sketch
    }

    /// NVFP4 experts, an FP8 table of which only a hint speaks, and a draft layer in BF16.
    pub(crate) fn nvfp4() -> Self {
        let mut sketch = Self::bf16().saying(json!({
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.46.0"},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
            "ignore": ["lm_head", "mtp.*", "*.ple.*"],
            "kv_cache_scheme": null,
        }));
        sketch.config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn".into();
        sketch.each(".mlp.experts.", |sketch, base| sketch.codes(base));
        sketch.fp8_table();
        sketch
    }

    /// NVFP4 experts, FP8 draft experts and an FP8 table; `blocks` is the name of the draft experts' algorithm.
    pub(crate) fn mixed(blocks: &str) -> Self {
        let mut sketch = Self::bf16();
        sketch.each(".mlp.experts.", |sketch, base| sketch.codes(base));
        sketch.unstack_draft();
        sketch.each(DRAFT, |sketch, base| sketch.blocks(base, Dtype::BF16));
        sketch.fp8_table();
        let mut layers = serde_json::Map::new();
        for layer in 0..8 {
            let entry = json!({"quant_algo": "NVFP4", "group_size": 16});
            layers.insert(format!("{TEXT}{layer}.mlp.experts"), entry);
        }
        layers.insert(TABLE.into(), json!({"quant_algo": "FP8"}));
        layers.insert(DRAFT.trim_end_matches('.').into(), json!({"quant_algo": blocks}));
        sketch.saying(json!({
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            "exclude_modules": ["lm_head"],
        }))
    }

    /// NVFP4 experts under the names of another exporter.
    pub(crate) fn packed() -> Self {
        let mut sketch = Self::bf16().saying(json!({
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                    "symmetric": true, "dynamic": false, "observer": "minmax", "observer_kwargs": {},
                },
                "input_activations": {"num_bits": 4},
            }},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.12.0",
        }));
        sketch.each(".mlp.experts.", |sketch, base| {
            sketch.codes(base);
            for (one, other) in [
                ("weight", "weight_packed"),
                ("weight_scale_2", "weight_global_scale"),
                ("input_scale", "input_global_scale"),
            ] {
                let (dtype, _) = sketch.heads[&format!("{base}.{one}")];
                let shape = if one == "weight" { sketch.shape(&format!("{base}.weight")) } else { vec![1] };
                sketch.heads.remove(&format!("{base}.{one}"));
                sketch.heads.insert(format!("{base}.{other}"), (dtype, shape));
            }
        });
        sketch
    }

    pub(crate) fn shape(&self, name: &str) -> Vec<usize> {
        self.heads[name].1.clone()
    }

    pub(crate) fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        self.heads.insert(name.into(), (dtype, shape.to_vec()));
    }

    #[track_caller]
    pub(crate) fn remove(&mut self, name: &str) {
        assert!(self.heads.remove(name).is_some(), "{name}");
    }

    /// Changes all single weights `X.weight` with `part` in their name; `change` is given `X`.
    pub(crate) fn each(&mut self, part: &str, change: impl Fn(&mut Self, &str)) {
        let bases: Vec<String> = self
            .heads
            .keys()
            .filter(|name| name.contains(part))
            .filter_map(|name| Some(name.strip_suffix(".weight")?.into()))
            .collect();
        assert!(!bases.is_empty(), "{part}");
        bases.iter().for_each(|base| change(self, base));
    }

    /// FP8 with a scale for each block.
    pub(crate) fn blocks(&mut self, base: &str, scale: Dtype) {
        let name = format!("{base}.weight");
        let shape = self.shape(&name);
        self.put(&name, Dtype::F8_E4M3, &shape);
        let blocks: Vec<usize> = shape.iter().map(|size| size.div_ceil(128)).collect();
        self.put(&format!("{base}.weight_scale_inv"), scale, &blocks);
    }

    /// FP8 with one scale.
    pub(crate) fn whole(&mut self, base: &str) {
        let name = format!("{base}.weight");
        let shape = self.shape(&name);
        self.put(&name, Dtype::F8_E4M3, &shape);
        self.put(&format!("{base}.weight_scale"), Dtype::F32, &[]);
        self.put(&format!("{base}.input_scale"), Dtype::F32, &[]);
    }

    /// NVFP4.
    pub(crate) fn codes(&mut self, base: &str) {
        let name = format!("{base}.weight");
        let [out, columns] = self.shape(&name)[..] else { panic!("{name}") };
        self.put(&name, Dtype::U8, &[out, columns / 2]);
        self.put(&format!("{base}.weight_scale"), Dtype::F8_E4M3, &[out, columns / 16]);
        self.put(&format!("{base}.weight_scale_2"), Dtype::F32, &[]);
        self.put(&format!("{base}.input_scale"), Dtype::F32, &[]);
    }

    pub(crate) fn fp8_table(&mut self) {
        self.each("ngram_embedding.shard_", |sketch, base| {
            let name = format!("{base}.weight");
            let shape = sketch.shape(&name);
            sketch.put(&name, Dtype::F8_E4M3, &shape);
        });
        self.put(&format!("{TABLE}.weight_scale"), Dtype::BF16, &[1]);
    }

    pub(crate) fn nvfp4_table(&mut self) {
        self.each("ngram_embedding.shard_", |sketch, base| {
            let name = format!("{base}.weight");
            let [rows, width] = sketch.shape(&name)[..] else { panic!("{name}") };
            sketch.put(&name, Dtype::U8, &[rows, width / 2]);
            sketch.put(&format!("{base}.weight_scale"), Dtype::F8_E4M3, &[rows, width / 16]);
        });
        self.put(&format!("{TABLE}.weight_scale_2"), Dtype::F32, &[1]);
    }

    /// The draft layer's experts one by one.
    pub(crate) fn unstack_draft(&mut self) {
        let [experts, hidden, width] = self.shape(&format!("{DRAFT}down_proj"))[..] else { panic!() };
        for expert in 0..experts {
            for matrix in ["gate_proj", "up_proj"] {
                self.put(&format!("{DRAFT}{expert}.{matrix}.weight"), Dtype::BF16, &[width, hidden]);
            }
            self.put(&format!("{DRAFT}{expert}.down_proj.weight"), Dtype::BF16, &[hidden, width]);
        }
        self.remove(&format!("{DRAFT}down_proj"));
        self.remove(&format!("{DRAFT}gate_up_proj"));
    }

    /// The main model's experts stacked.
    pub(crate) fn stack(&mut self) {
        self.heads.retain(|name, _| !name.starts_with(TEXT) || !name.contains(".mlp.experts."));
        for layer in 0..8 {
            self.put(&format!("{TEXT}{layer}.mlp.experts.gate_up_proj"), Dtype::BF16, &[8, 32, 64]);
            self.put(&format!("{TEXT}{layer}.mlp.experts.down_proj"), Dtype::BF16, &[8, 64, 16]);
        }
    }

    /// Writes two files and an index: the table and the draft experts lie apart.
    pub(crate) fn folder(&self) -> Folder {
        let folder = Folder::with_config(&self.config);
        let aside = |name: &str| name.starts_with(TABLE) || name.starts_with(DRAFT);
        let file = |name: &str| if aside(name) { SIDE } else { "model-1.safetensors" };
        let places: serde_json::Map<String, Value> =
            self.heads.keys().map(|name| (name.clone(), file(name).into())).collect();
        for one in [SIDE, "model-1.safetensors"] {
            let mut heads = self.heads.clone();
            heads.retain(|name, _| file(name) == one);
            folder.write_hollow(one, &heads);
        }
        folder.write_json(INDEX, &json!({"weight_map": places}));
        folder
    }
}
