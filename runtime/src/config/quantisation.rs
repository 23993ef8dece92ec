//! What the settings say about quantised weights: read in full, believed in nothing, compared with the files.

use std::fmt;

use serde_json::{Map, Value, json};

use super::section::{self, Section};
use crate::error::ConfigError;

/// What one place in the settings says about quantised weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The place, as in `quantization_config`.
    pub place: String,
    /// What stands there, as in `modelopt NVFP4`.
    pub says: String,
    /// The formats that it names.
    pub families: Vec<Family>,
    /// The weights that it is about.
    pub covers: Covers,
}

/// Formats that settings do not tell apart reliably.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// 8-bit floats, with a scale for each block or one for all.
    Fp8,
    /// 4-bit floats with a scale for 16 columns.
    Nvfp4,
}

/// Which weights a claim is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covers {
    /// Any weight.
    All,
    /// The n-gram tables.
    Table,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
        })
    }
}

/// The file that some exports write beside `config.json`.
pub(super) const FILE: &str = "hf_quant_config.json";

const KEY: &str = "quantization_config";
const METHODS: [&str; 3] = ["fp8", "modelopt", "compressed-tensors"];
const MIXED: &str = "MIXED_PRECISION";
/// Two of the names mean the same blocks: an export renamed them between two revisions.
const ALGORITHMS: [(&str, Family); 4] = [
    ("NVFP4", Family::Nvfp4),
    ("FP8", Family::Fp8),
    ("FP8_PB_WO", Family::Fp8),
    ("FP8_BLOCK_SCALES", Family::Fp8),
];

/// Reads the claim of a section of `config.json`, if it makes one.
pub(super) fn read(c: &mut Section<'_>) -> Result<Option<Claim>, ConfigError> {
    if let Some(other) = c.get("quantization") {
        return Err(c.unsupported(
            "quantization",
            &section::short(other),
            &format!("{KEY} of {}", methods()),
        ));
    }
    let place = c.name(KEY);
    let Some(mut q) = c.section(KEY)? else { return Ok(None) };
    let method = match q.text("quant_method")? {
        Some(method) => method,
        None => return Err(q.unsupported("quant_method", "absent", &methods())),
    };
    match method.as_str() {
        "fp8" => blocks(q, place),
        "modelopt" => modelopt(q, place),
        "compressed-tensors" => compressed(q, place),
        _ => Err(q.unsupported("quant_method", &method, &methods())),
    }
    .map(Some)
}

/// Reads what the settings of the n-gram embedding say about its table.
pub(super) fn table(c: &mut Section<'_>) -> Result<Option<Claim>, ConfigError> {
    const KEY: &str = "ple_embedding_dtype";
    const FP8: &str = "float8_e4m3fn";
    let fp8 = c.one_of(KEY, &[("bfloat16", false), ("float32", false), (FP8, true)])?;
    Ok((fp8 == Some(true)).then(|| Claim {
        place: c.name(KEY),
        says: FP8.into(),
        families: vec![Family::Fp8],
        covers: Covers::Table,
    }))
}

/// Reads the text of a `hf_quant_config.json`.
pub(super) fn from_file(json: &str) -> Result<Claim, ConfigError> {
    let file = section::parse(json)?;
    let mut top = Section::new("", &file);
    let claim = modelopt(top.need_section("quantization")?, FILE.into())?;
    top.finish(&["producer"])?;
    Ok(claim)
}

fn methods() -> String {
    section::list(METHODS.into_iter())
}

fn claim(place: String, method: &str, named: &[String], families: impl IntoIterator<Item = Family>) -> Claim {
    let mut claim = Claim { place, says: method.into(), families: Vec::new(), covers: Covers::All };
    for name in named {
        claim.says += &format!(" {name}");
    }
    for family in families {
        if !claim.families.contains(&family) {
            claim.families.push(family);
        }
    }
    claim
}

/// FP8 by blocks, as its first exporter describes it.
fn blocks(mut q: Section<'_>, place: String) -> Result<Claim, ConfigError> {
    q.one_of("fmt", &[("e4m3", ()), ("float8_e4m3fn", ())])?;
    q.only("weight_block_size", json!([128, 128]))?;
    q.finish(&[
        "act_per_tensor",
        "activation_scheme",
        "ignored_layers",
        "modules_to_convert",
        "modules_to_not_convert",
        "weight_per_tensor",
    ])?;
    Ok(claim(place, "fp8", &[], [Family::Fp8]))
}

/// Algorithms by name, for the whole model or layer by layer.
fn modelopt(mut q: Section<'_>, place: String) -> Result<Claim, ConfigError> {
    let mut known: Vec<&str> = ALGORITHMS.iter().map(|(name, _)| *name).collect();
    known.push(MIXED);
    q.only_text("quant_algo", &known)?;
    let algorithm = q.text("quant_algo")?.unwrap_or_default();
    let mut families: Vec<Family> = family(&algorithm).into_iter().collect();
    let mut named = vec![algorithm];
    if named[0] == MIXED {
        let layers = q.name("quantized_layers");
        let map = match q.need("quantized_layers")? {
            Value::Object(map) => map,
            other => return Err(q.wrong_type("quantized_layers", "an object", other)),
        };
        for (layer, value) in map {
            let (name, family) = layer_algorithm(&layers, layer, value)?;
            families.push(family);
            if !named.contains(&name) {
                named.push(name);
            }
        }
        if families.is_empty() {
            return Err(ConfigError::Relation { rule: format!("{layers} names no layer for {MIXED}") });
        }
    }
    group_size(&mut q, &families)?;
    harmless(&mut q)?;
    q.finish(&[
        "config_groups",
        "exclude_modules",
        "ignore",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "producer",
    ])?;
    Ok(claim(place, "modelopt", &named, families))
}

fn family(algorithm: &str) -> Option<Family> {
    ALGORITHMS.iter().find(|(name, _)| *name == algorithm).map(|(_, family)| *family)
}

/// What one entry of `quantized_layers` names.
fn layer_algorithm(layers: &str, layer: &str, value: &Value) -> Result<(String, Family), ConfigError> {
    let key = format!("{layers}.{layer}");
    let map: &Map<String, Value> = value.as_object().ok_or_else(|| ConfigError::Type {
        key: key.clone(),
        wanted: "an object",
        found: section::short(value),
    })?;
    let mut entry = Section::new(&format!("{key}."), map);
    let known: Vec<&str> = ALGORITHMS.iter().map(|(name, _)| *name).collect();
    entry.only_text("quant_algo", &known)?;
    let name = entry.text("quant_algo")?.unwrap_or_default();
    let family = family(&name).expect("only known names pass");
    group_size(&mut entry, &[family])?;
    entry.only("weight_block_size", json!([128, 128]))?;
    harmless(&mut entry)?;
    entry.finish(&[])?;
    Ok((name, family))
}

/// Columns that share a scale: 16 for 4-bit codes, 128 for blocks.
fn group_size(q: &mut Section<'_>, families: &[Family]) -> Result<(), ConfigError> {
    let Some(size) = q.whole("group_size", [0, 1 << 16])? else { return Ok(()) };
    let fits = |family: &Family| match family {
        Family::Nvfp4 => size == 16,
        Family::Fp8 => size == 128 || size == 0,
    };
    match families.iter().any(fits) {
        true => Ok(()),
        false => Err(q.unsupported("group_size", &size.to_string(), "16 for nvfp4 or 128 for fp8")),
    }
}

/// Requires that what would change the meaning of the codes is off.
fn harmless(q: &mut Section<'_>) -> Result<(), ConfigError> {
    q.only("has_zero_point", false)?;
    q.only("pre_quant_scale", false)
}

/// Groups of layers, each with the numbers of its format.
fn compressed(mut q: Section<'_>, place: String) -> Result<Claim, ConfigError> {
    let formats = ["nvfp4-pack-quantized", "float-quantized", "mixed-precision"];
    q.only_text("format", &formats)?;
    let format = q.text("format")?.unwrap_or_default();
    q.only("sparsity_config", json!({}))?;
    q.only("transform_config", json!({}))?;
    q.only("quantization_status", "compressed")?;
    let groups = q.name("config_groups");
    let map = match q.need("config_groups")? {
        Value::Object(map) if !map.is_empty() => map,
        other => return Err(q.wrong_type("config_groups", "an object that names a group", other)),
    };
    let mut families = Vec::new();
    for (group, value) in map {
        let key = format!("{groups}.{group}");
        let map = value.as_object().ok_or_else(|| ConfigError::Type {
            key: key.clone(),
            wanted: "an object",
            found: section::short(value),
        })?;
        let mut g = Section::new(&format!("{key}."), map);
        families.push(group_family(g.need_section("weights")?)?);
        g.one_of("format", &formats.map(|format| (format, ())))?;
        g.finish(&["input_activations", "output_activations", "targets"])?;
    }
    q.finish(&["global_compression_ratio", "ignore", "kv_cache_scheme", "version"])?;
    Ok(claim(place, "compressed-tensors", &[format], families))
}

fn group_family(mut w: Section<'_>) -> Result<Family, ConfigError> {
    w.only_text("type", &["float"])?;
    w.only("symmetric", true)?;
    w.only("dynamic", false)?;
    let family = match w.whole("num_bits", [1, 64])? {
        Some(4) => Family::Nvfp4,
        Some(8) => Family::Fp8,
        other => {
            let found = other.map_or("absent".into(), |bits| bits.to_string());
            return Err(w.unsupported("num_bits", &found, "4 (nvfp4) or 8 (fp8)"));
        }
    };
    match family {
        Family::Nvfp4 => w.one_of("strategy", &[("tensor_group", ()), ("group", ())])?,
        Family::Fp8 => w.one_of("strategy", &[("tensor", ()), ("block", ())])?,
    };
    w.only("block_structure", json!([128, 128]))?;
    group_size(&mut w, &[family])?;
    w.finish(&["actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"])?;
    Ok(family)
}
