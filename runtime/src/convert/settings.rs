//! The settings of a converted model: those of its source, true of the new files.
//!
//! What is quantised is described in the words of its first exporters, which other programs read as well: FP8 in blocks
//! as `fp8`, everything else as modelopt does. An FP8 table beside plain weights has a hint of its own.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::checkpoint::layout::{Format, Layout, Part, Spec, Stored};
use crate::config::{ModelConfig, read_text};
use crate::error::{ConfigError, LoadError};

const KEY: &str = "quantization_config";
/// The hint at an FP8 table.
const HINT: &str = "ple_embedding_dtype";

/// A `config.json`.
pub(super) struct Settings(Map<String, Value>);

impl Settings {
    /// Reads the settings of a model folder, which were found to be good.
    pub(super) fn read(model: &Path) -> Result<Settings, LoadError> {
        let path = model.join("config.json");
        serde_json::from_str(&read_text(&path)?).map(Settings).map_err(|error| LoadError::Config {
            path,
            problem: ConfigError::Json { detail: error.to_string() },
        })
    }

    /// Describes a model that was made: its first layers without draft layer and vision tower, in bf16.
    pub(super) fn cut(&mut self, config: &ModelConfig) {
        let layers = config.num_hidden_layers;
        self.0.shift_remove("vision_config");
        self.0.shift_remove("torch_dtype");
        self.0.insert("dtype".into(), "bfloat16".into());
        let text = self.text();
        text.shift_remove("mtp");
        text.shift_remove("torch_dtype");
        text.insert("dtype".into(), "bfloat16".into());
        text.insert("num_hidden_layers".into(), layers.into());
        text.insert("mtp_num_hidden_layers".into(), 0.into());
        if let Some(Value::Array(types)) = text.get_mut("layer_types") {
            types.truncate(layers);
        }
        if let Some(Value::Array(ids)) = text.get_mut("ple_layer_ids") {
            ids.retain(|id| id.as_u64().is_some_and(|id| id <= layers as u64));
        }
        if let Some(ngram) = config.ngram {
            text.insert("ngram_vocab_size_base".into(), ngram.vocab_size_base.into());
            text.insert("split_ngram_parts".into(), ngram.split_parts.into());
        }
    }

    /// Says how the weights of `layout` are stored, and no more.
    pub(super) fn describe(mut self, layout: &Layout) -> Value {
        self.0.shift_remove(KEY);
        let modules = Modules::of(layout);
        let words = modules.words();
        let text = self.text();
        text.shift_remove(KEY);
        let hinted = text.contains_key(HINT) || words.is_none();
        match modules.table {
            Some((_, Format::Fp8Tensor)) if hinted => text.insert(HINT.into(), "float8_e4m3fn".into()),
            _ => text.shift_remove(HINT),
        };
        if let Some(words) = words {
            self.0.insert(KEY.into(), words);
        }
        Value::Object(self.0)
    }

    fn text(&mut self) -> &mut Map<String, Value> {
        self.0["text_config"].as_object_mut().expect("the settings were read before")
    }
}

/// The matrices of a model by the names that exporters give them, in the order of the model.
struct Modules {
    quantised: Vec<(String, Format)>,
    plain: Vec<String>,
    /// The n-gram tables, by the name of one, if they are quantised.
    table: Option<(String, Format)>,
    tables: Vec<String>,
}

impl Modules {
    fn of(layout: &Layout) -> Modules {
        let specs = layout.specs();
        let scales: HashSet<&str> =
            specs.iter().flat_map(|spec| spec.scales()).map(|scale| scale.name.as_str()).collect();
        let mut modules =
            Modules { quantised: Vec::new(), plain: Vec::new(), table: None, tables: Vec::new() };
        let mut seen = HashSet::new();
        for spec in specs.into_iter().filter(|spec| !scales.contains(spec.name.as_str())) {
            let (name, format) = (module(spec), format(spec));
            let matrix = spec.shape.len() == 2 || name.ends_with(".mlp.experts");
            let named = match spec.part {
                Part::Text | Part::Draft => matrix && *spec != layout.embed_tokens,
                Part::Table | Part::Vision => true,
                Part::Constants | Part::Idle => false,
            };
            if !named || !seen.insert(name.clone()) {
                continue;
            }
            match (spec.part, format) {
                (Part::Table, Some(format)) => {
                    modules.table = Some((name.clone(), format));
                    modules.tables.push(name);
                }
                (Part::Table, None) => {}
                (_, Some(format)) => modules.quantised.push((name, format)),
                (_, None) => modules.plain.push(name),
            }
        }
        modules
    }

    /// What `quantization_config` says, if anything is to be said there.
    fn words(&self) -> Option<Value> {
        let all = |format| self.quantised.iter().all(|(_, other)| *other == format);
        let table = self.table.as_ref().map(|(_, format)| *format);
        let in_blocks = all(Format::Fp8) && table.is_none_or(|format| format == Format::Fp8Tensor);
        let experts = |name: &str| name.starts_with("model.") && name.ends_with(".mlp.experts");
        if self.quantised.is_empty() && table.is_none_or(|format| format == Format::Fp8Tensor) {
            return None;
        }
        if in_blocks {
            let mut words = json!({
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "weight_per_tensor": false,
                "act_per_tensor": false,
                "modules_to_not_convert": self.plain,
            });
            if table.is_some() {
                words["modules_to_convert"] = json!(["ple.ple_embedding.ngram_embedding"]);
            }
            return Some(words);
        }
        let producer = json!({"name": "roundhouse", "version": env!("CARGO_PKG_VERSION")});
        let mut words = json!({"quant_method": "modelopt", "producer": producer, "ignore": self.ignored()});
        let only_experts = self.quantised.iter().all(|(name, _)| experts(name));
        if all(Format::Nvfp4) && only_experts && table.is_none() {
            words["quant_algo"] = "NVFP4".into();
            words["config_groups"] = json!({"group_0": {
                "targets": ["Linear"],
                "weights": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"},
            }});
            return Some(words);
        }
        let tables = self.tables.iter().filter_map(|name| Some((name, table?)));
        let quantised = self.quantised.iter().map(|(name, format)| (name, *format));
        let layers: Map<String, Value> =
            quantised.chain(tables).map(|(name, format)| (name.clone(), algorithm(format))).collect();
        words["quant_algo"] = "MIXED_PRECISION".into();
        words["quantized_layers"] = layers.into();
        Some(words)
    }

    /// What is plain, one pattern for all layers.
    fn ignored(&self) -> Vec<String> {
        let pattern = |name: &String| {
            let mut parts: Vec<&str> = name.split('.').collect();
            if let ["model", "language_model", "layers", number, ..] = &mut parts[..] {
                *number = "*";
            }
            parts.join(".")
        };
        let mut seen = BTreeMap::new();
        for (place, pattern) in self.plain.iter().map(pattern).enumerate() {
            seen.entry(pattern).or_insert(place);
        }
        let mut patterns: Vec<(usize, String)> =
            seen.into_iter().map(|(name, place)| (place, name)).collect();
        patterns.sort();
        patterns.into_iter().map(|(_, name)| name).collect()
    }
}

/// One entry of `quantized_layers`.
fn algorithm(format: Format) -> Value {
    match format {
        Format::Nvfp4 => json!({"quant_algo": "NVFP4", "group_size": 16}),
        Format::Fp8 => json!({"quant_algo": "FP8_PB_WO", "weight_block_size": [128, 128]}),
        _ => json!({"quant_algo": "FP8"}),
    }
}

fn format(spec: &Spec) -> Option<Format> {
    match spec.stored {
        Stored::Plain => None,
        Stored::Fp8Block { .. } => Some(Format::Fp8),
        Stored::Fp8Tensor { .. } => Some(Format::Fp8Tensor),
        Stored::Nvfp4 { .. } => Some(Format::Nvfp4),
    }
}

/// The name of what a tensor is a part of: all experts of a layer are one, and so are a table and the vision tower.
fn module(spec: &Spec) -> String {
    let name = &spec.name;
    let until = |end: &str| name.find(end).map(|at| name[..at + end.len()].to_owned());
    match spec.part {
        Part::Vision => "model.visual".into(),
        Part::Table => until(".ngram_embedding").unwrap_or_else(|| name.clone()),
        _ => until(".mlp.experts").unwrap_or_else(|| {
            let base = name.strip_suffix("_packed").unwrap_or(name);
            base.strip_suffix(".weight").unwrap_or(base).to_owned()
        }),
    }
}
