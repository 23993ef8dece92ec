//! One JSON object of a settings file, and the account of which of its keys were read.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::StorageDtype;
use crate::error::ConfigError;
use crate::json::{Object, Strict};

/// A JSON object whose keys are taken one by one; [`finish`](Section::finish) refuses those that nobody took.
///
/// A key whose value is `null` counts as absent.
pub(super) struct Section<'a> {
    path: String,
    map: &'a Map<String, Value>,
    taken: HashSet<&'a str>,
}

/// The object that a settings file consists of.
pub(super) fn parse(json: &str) -> Result<Map<String, Value>, ConfigError> {
    let entries: Object<Strict> =
        serde_json::from_str(json).map_err(|error| ConfigError::Json { detail: error.to_string() })?;
    Ok(entries.0.into_iter().map(|(key, Strict(value))| (key, value)).collect())
}

/// The storage type a section names, under its new or its old key.
pub(super) fn dtype(section: &mut Section<'_>) -> Result<Option<StorageDtype>, ConfigError> {
    let new = section.one_of("dtype", &[("bfloat16", StorageDtype::Bf16), ("float32", StorageDtype::F32)])?;
    let old =
        section.one_of("torch_dtype", &[("bfloat16", StorageDtype::Bf16), ("float32", StorageDtype::F32)])?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(ConfigError::Relation {
            rule: format!("{} and {} must name one type", section.name("dtype"), section.name("torch_dtype")),
        }),
        _ => Ok(new.or(old)),
    }
}

impl<'a> Section<'a> {
    /// The account of `map`; `path` is what errors put before a key, as in `text_config.`.
    pub(super) fn new(path: &str, map: &'a Map<String, Value>) -> Self {
        Self { path: path.into(), map, taken: HashSet::new() }
    }

    /// Refuses every key that was neither taken nor is on the list of keys that do not matter.
    pub(super) fn finish(self, informative: &[&str]) -> Result<(), ConfigError> {
        let unread =
            |key: &&String| !self.taken.contains(key.as_str()) && !informative.contains(&key.as_str());
        let keys: Vec<String> = self.map.keys().filter(unread).map(|key| self.name(key)).collect();
        if keys.is_empty() { Ok(()) } else { Err(ConfigError::Unknown { keys }) }
    }

    /// The key as errors name it.
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    pub(super) fn get(&mut self, key: &str) -> Option<&'a Value> {
        let (key, value) = self.map.get_key_value(key)?;
        self.taken.insert(key);
        Some(value).filter(|value| !value.is_null())
    }

    pub(super) fn need(&mut self, key: &str) -> Result<&'a Value, ConfigError> {
        self.get(key).ok_or_else(|| self.missing(key))
    }

    pub(super) fn section(&mut self, key: &str) -> Result<Option<Section<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong_type(key, "an object", value))?;
        Ok(Some(Section::new(&format!("{}.", self.name(key)), map)))
    }

    pub(super) fn need_section(&mut self, key: &str) -> Result<Section<'a>, ConfigError> {
        self.section(key)?.ok_or_else(|| self.missing(key))
    }

    /// A whole number in `range`, if present.
    pub(super) fn whole(&mut self, key: &str, range: [u64; 2]) -> Result<Option<u64>, ConfigError> {
        self.get(key).map(|value| self.as_whole(key, value, range)).transpose()
    }

    /// A size from 1 to `most`.
    pub(super) fn size(&mut self, key: &str, most: u64) -> Result<usize, ConfigError> {
        let value = self.need(key)?;
        self.as_whole(key, value, [1, most]).map(|size| size as usize)
    }

    /// A token id of a vocabulary of `vocab_size`, if present.
    pub(super) fn id(&mut self, key: &str, vocab_size: usize) -> Result<Option<u32>, ConfigError> {
        Ok(self.whole(key, [0, vocab_size as u64 - 1])?.map(|id| id as u32))
    }

    /// Token ids, written as one number or as a list; empty if absent.
    pub(super) fn ids(&mut self, key: &str, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
        let range = [0, vocab_size as u64 - 1];
        let ids = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(|value| self.as_whole(key, value, range)).collect(),
            Some(value) => self.as_whole(key, value, range).map(|id| vec![id]),
        };
        ids.map(|ids| ids.into_iter().map(|id| id as u32).collect())
    }

    /// A list of whole numbers in `range`, if present.
    pub(super) fn whole_list(
        &mut self,
        key: &str,
        range: [u64; 2],
    ) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong_type(key, "a list", value))?;
        list.iter()
            .map(|value| self.as_whole(key, value, range).map(|n| n as usize))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// A finite number, if present.
    pub(super) fn number(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong_type(key, "a number", value))
    }

    /// A number above zero that a 32-bit float holds.
    pub(super) fn positive(&mut self, key: &str) -> Result<f64, ConfigError> {
        let number = self.number(key)?.ok_or_else(|| self.missing(key))?;
        let fits = number as f32 > 0.0 && (number as f32).is_finite();
        if fits {
            Ok(number)
        } else {
            Err(self.out_of_range(key, number, "a positive number of ordinary size"))
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong_type(key, "true or false", value))
    }

    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(|text| Some(text.into())).ok_or_else(|| self.wrong_type(key, "a string", value))
    }

    /// The meaning of a word, if present; any word outside the list is refused.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        key: &str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        match words.iter().find(|(word, _)| *word == text) {
            Some(&(_, meaning)) => Ok(Some(meaning)),
            None => Err(self.unsupported(key, &text, &list(words.iter().map(|(word, _)| *word)))),
        }
    }

    /// Requires one of the words.
    pub(super) fn only_text(&mut self, key: &str, words: &[&str]) -> Result<(), ConfigError> {
        let text = self.text(key)?.ok_or_else(|| self.missing(key))?;
        if words.contains(&text.as_str()) {
            return Ok(());
        }
        Err(self.unsupported(key, &text, &list(words.iter().copied())))
    }

    /// Requires, of a list that may be absent, that it holds nothing but these words.
    pub(super) fn only_list(&mut self, key: &str, words: &[&str]) -> Result<(), ConfigError> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let items = value.as_array().ok_or_else(|| self.wrong_type(key, "a list", value))?;
        match items.iter().find(|item| !item.as_str().is_some_and(|text| words.contains(&text))) {
            None => Ok(()),
            Some(other) => Err(self.unsupported(key, &short(other), &list(words.iter().copied()))),
        }
    }

    /// Requires, of a key that may be absent, that it has the one supported value.
    pub(super) fn only(&mut self, key: &str, supported: impl Into<Value>) -> Result<(), ConfigError> {
        let supported = supported.into();
        match self.get(key) {
            Some(value) if *value != supported => {
                Err(self.unsupported(key, &short(value), &short(&supported)))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: self.name(key) }
    }

    pub(super) fn wrong_type(&self, key: &str, wanted: &'static str, found: &Value) -> ConfigError {
        ConfigError::Type { key: self.name(key), wanted, found: short(found) }
    }

    pub(super) fn unsupported(&self, key: &str, found: &str, supported: &str) -> ConfigError {
        ConfigError::Unsupported { key: self.name(key), found: found.into(), supported: supported.into() }
    }

    pub(super) fn out_of_range(&self, key: &str, found: impl ToString, rule: &str) -> ConfigError {
        ConfigError::Range { key: self.name(key), found: found.to_string(), rule: rule.into() }
    }

    fn as_whole(&self, key: &str, value: &Value, [least, most]: [u64; 2]) -> Result<u64, ConfigError> {
        if !value.is_i64() && !value.is_u64() {
            return Err(self.wrong_type(key, "a whole number", value));
        }
        match value.as_u64() {
            Some(n) if (least..=most).contains(&n) => Ok(n),
            _ => Err(self.out_of_range(key, value, &format!("from {least} to {most}"))),
        }
    }
}

pub(super) fn list<'w>(words: impl Iterator<Item = &'w str>) -> String {
    words.collect::<Vec<_>>().join(" or ")
}

/// A value as errors show it.
pub(super) fn short(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= SHOWN { text } else { text.chars().take(SHOWN).chain("...".chars()).collect() }
}
