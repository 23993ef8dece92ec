//! The recorded cases of another implementation: manifest, expected tensors, and how values are compared.

use std::collections::HashMap;
use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::fixture::repository;

/// One recorded case.
pub struct Case {
    /// Its entry in the manifest.
    pub manifest: Value,
    /// Its tensors, by name.
    pub tensors: HashMap<String, Tensor>,
}

/// A tensor, widened: integers and floats alike as f64, which holds every stored value.
pub struct Tensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<f64>,
}

/// All cases of a kind.
pub fn cases(kind: &str) -> Vec<Case> {
    let manifest = read_json("tests/oracle/manifest.json");
    let all = manifest["cases"].as_array().expect("a list of cases").iter();
    let cases: Vec<Case> =
        all.filter(|case| case["kind"] == kind).map(|case| Case::read(case.clone())).collect();
    assert!(!cases.is_empty(), "the manifest has no case of kind {kind}");
    cases
}

/// Reads a JSON file of the repository.
pub fn read_json(path: &str) -> Value {
    let path = repository(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Case {
    fn read(manifest: Value) -> Case {
        let path = manifest["expected"].as_str().expect("a path").to_owned();
        let mut tensors = HashMap::new();
        if path.ends_with(".safetensors") {
            let bytes =
                std::fs::read(repository("tests/oracle").join(&path)).expect("expected values are there");
            let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
            for (name, view) in file.tensors() {
                tensors.insert(
                    name,
                    Tensor { shape: view.shape().into(), values: widen(view.dtype(), view.data()) },
                );
            }
        }
        Case { manifest, tensors }
    }

    /// Its name.
    pub fn id(&self) -> &str {
        self.manifest["id"].as_str().expect("an id")
    }

    /// The folder of its checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        let name = self.manifest["checkpoint"].as_str().expect("a checkpoint");
        repository("tests/oracle/checkpoints").join(name)
    }

    /// Its input ids.
    pub fn input_ids(&self) -> Vec<u32> {
        let ids = self.manifest["input_ids"].as_array().expect("input ids");
        ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    }

    /// An expected tensor.
    pub fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("{} has no tensor {name}", self.id()))
    }

    /// The values of an expected tensor of indices.
    pub fn indices(&self, name: &str) -> Vec<i64> {
        self.tensor(name).values.iter().map(|value| *value as i64).collect()
    }

    /// The prompts of a quantised case: the name of each, its ids, and the positions whose logits are recorded.
    pub fn prompts(&self) -> Vec<(String, Vec<u32>, Vec<usize>)> {
        let named = self.manifest["prompts"].as_object().expect("prompts").keys();
        let of = |name: &String| {
            let ids = self.indices(&format!("prompt_{name}.input_ids"));
            let positions = self.indices(&format!("prompt_{name}.positions"));
            let positions = positions.into_iter().map(|position| position as usize).collect();
            (format!("prompt_{name}"), ids.into_iter().map(|id| id as u32).collect(), positions)
        };
        named.map(of).collect()
    }

    /// A number of the manifest, by path.
    pub fn number(&self, pointer: &str) -> f64 {
        self.manifest
            .pointer(pointer)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{} has no {pointer}", self.id()))
    }
}

impl Tensor {
    /// Row `index` of a matrix.
    pub fn row(&self, index: usize) -> &[f64] {
        let width: usize = self.shape[1..].iter().product();
        &self.values[index * width..][..width]
    }
}

fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|word| value(*word)).collect()
    }
    match dtype {
        Dtype::U8 => each(bytes, |[byte]| byte.into()),
        Dtype::F32 => each(bytes, |word| f32::from_le_bytes(word).into()),
        Dtype::BF16 => each(bytes, |word| half::bf16::from_le_bytes(word).into()),
        Dtype::I32 => each(bytes, |word| i32::from_le_bytes(word).into()),
        Dtype::I64 => each(bytes, |word| i64::from_le_bytes(word) as f64),
        other => panic!("no case stores {other:?}"),
    }
}

/// Asserts `max |got - expected| <= tolerance * max |expected|`.
pub fn assert_close(what: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of values");
    let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let (at, worst) =
        got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).enumerate().fold(
            (0, 0.0),
            |worst, (at, difference)| {
                if difference > worst.1 || difference.is_nan() { (at, difference) } else { worst }
            },
        );
    assert!(
        worst <= tolerance * largest,
        "{what}: value {at} is {} instead of {}, off by {:.2e} of the largest ({largest}); allowed {tolerance:.0e}",
        got[at],
        expected[at],
        worst / largest
    );
}

/// `rms(a - b) / rms(b)`.
pub fn rms_relative(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |sum: f64, x: f64| sum + x * x;
    let difference = a.iter().zip(b).map(|(a, b)| f64::from(*a) - b).fold(0.0, square);
    (difference / b.iter().copied().fold(0.0, square)).sqrt()
}
