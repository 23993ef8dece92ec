//! How the fields of every wire are read. What its table carries is read once; anything else is refused by name.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use runtime::json::Strict;
use serde_json::{Map, Value};

use super::errors::{ApiError, short, short_middle};
pub(crate) use super::tables::{
    CHAT, CLIP_PART, COMPLETIONS, DETOKENIZE, FORMAT, IMAGE_URL, MESSAGE, PART, PICTURE_PART, STREAM_OPTIONS,
    TEMPLATE, TOKENIZE, Table,
};

/// The fields of one object, being read.
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Path of the object, with the dot that a name follows; empty for the body itself.
    path: String,
}

/// Reads a body as one JSON object. Keys written twice, numbers out of range and deep nesting are refused.
pub(crate) fn body(bytes: &[u8], table: &Table, ignored: &mut Ignored) -> Result<Fields, ApiError> {
    let Strict(value) = serde_json::from_slice(bytes).map_err(|error| not_json(&error.to_string(), table))?;
    match value {
        Value::Object(_) => Fields::new(value, "", table, ignored),
        _ => Err(ApiError::json("the body must be a JSON object", None)),
    }
}

/// The reader's words, and the field that they begin with, if it is one of the table.
fn not_json(why: &str, table: &Table) -> ApiError {
    let first = why.split(": ").next().and_then(|name| name.split(" is there twice").next());
    let param = first.filter(|name| table.carried.contains(name) || table.ignorable.contains(name));
    let why = short_middle(why);
    let message = match why.contains("recursion limit exceeded") {
        true => format!("the body nests more than 127 lists and objects: {why}"),
        false => format!("the body is not JSON that is read here: {why}"),
    };
    ApiError::json(message, param.map(str::to_owned))
}

/// Names of fields that were accepted without effect.
#[derive(Debug, Default)]
pub(crate) struct Ignored(BTreeSet<String>);

impl Ignored {
    pub(crate) fn add(&mut self, name: impl Into<String>) {
        self.0.insert(name.into());
    }

    /// All of them with commas between, if there are any.
    pub(crate) fn list(&self) -> Option<String> {
        let names: Vec<&str> = self.0.iter().map(String::as_str).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

impl Fields {
    /// Takes an object whose fields must all be in `table`. A field that is null is as one that is not there.
    pub(crate) fn new(
        value: Value,
        path: &str,
        table: &Table,
        ignored: &mut Ignored,
    ) -> Result<Fields, ApiError> {
        let Value::Object(mut map) = value else { return Err(ApiError::field(path, "must be an object")) };
        let path = if path.is_empty() { String::new() } else { format!("{path}.") };
        for name in map.keys() {
            if table.ignorable.contains(&name.as_str()) {
                ignored.add(format!("{}{name}", without_numbers(&path)));
            } else if !table.carried.contains(&name.as_str()) {
                return Err(ApiError::unknown_field(format!("{path}{name}"), &table.carried.join(", ")));
            }
        }
        map.retain(|name, value| !value.is_null() && table.carried.contains(&name.as_str()));
        Ok(Fields { map, path })
    }

    /// The dotted path of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// An error about a field.
    pub(crate) fn wrong(&self, name: &str, why: impl Into<String>) -> ApiError {
        ApiError::field(self.path(name), why)
    }

    pub(crate) fn any(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name)
    }

    /// A field that `read` can make something of.
    fn typed<T>(
        &mut self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(Value) -> Result<T, Value>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.any(name) else { return Ok(None) };
        read(value).map(Some).map_err(|value| self.wrong(name, format!("{} is not {wanted}", shown(&value))))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool().ok_or(value))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| match value {
            Value::String(text) => Ok(text),
            other => Err(other),
        })
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.typed(name, "a list", |value| match value {
            Value::Array(list) => Ok(list),
            other => Err(other),
        })
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number that 32 bits can hold", |value| number(&value).ok_or(value))
    }

    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i128>,
    ) -> Result<Option<i128>, ApiError> {
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        self.typed(name, &wanted, |value| {
            integer(&value).filter(|number| range.contains(number)).ok_or(value)
        })
    }

    /// Ends the reading: what a table carries and nobody read is refused too.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            Some(name) => Err(self.wrong(name, "has no effect here; remove it")),
            None => Ok(()),
        }
    }
}

/// A value as an error repeats it.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".into(),
        plain => short(&plain.to_string()),
    }
}

/// A number that an f32 can hold.
pub(crate) fn number(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

/// A whole number, however it is written, if a double holds it exactly.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    let whole = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    let float = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT);
    whole.or_else(|| float().map(|number| number as i128))
}

/// A list of token ids.
pub(crate) fn ids(values: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(at, value): (usize, &Value)| {
        let id = integer(value).and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| ApiError::field(format!("{path}[{at}]"), "is not a token id"))
    };
    values.iter().enumerate().map(id).collect()
}

/// A path as it is reported: `messages[].name` for each message that has one.
fn without_numbers(path: &str) -> String {
    path.chars().filter(|c| !c.is_ascii_digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, table: &Table) -> Result<(Fields, Ignored), ApiError> {
        let mut ignored = Ignored::default();
        body(text.as_bytes(), table, &mut ignored).map(|fields| (fields, ignored))
    }

    fn refused(text: &str, words: &[&str]) {
        let Err(error) = read(text, &CHAT) else { panic!("{text} must be refused") };
        let body = error.to_json();
        assert_eq!(error.status, 400);
        words.iter().for_each(|word| assert!(body.contains(word), "{word} is not in {body}"));
    }

    #[test]
    fn a_field_is_carried_ignorable_or_refused() {
        let text = r#"{"model":"m","user":"u","store":null,"messages":[]}"#;
        let (fields, ignored) = read(text, &CHAT).ok().unwrap();
        assert_eq!(fields.map.len(), 2);
        assert_eq!(ignored.list().unwrap(), "store, user");
        refused(r#"{"reasoning_efort":"low"}"#, &["reasoning_efort", "unknown_field"]);
    }

    #[test]
    fn what_is_not_json_is_refused_with_the_place() {
        refused("{", &["invalid_json", "line 1"]);
        refused("[]", &["must be a JSON object"]);
        refused(r#"{"seed":1,"seed":2}"#, &["seed is there twice", r#""param":"seed""#]);
        refused(r#"{"logit_bias":{"1":1e999}}"#, &["out of range", r#""param":"logit_bias""#]);
        refused(&format!("{{\"messages\":{}", "[".repeat(100_000)), &["nests more than 127"]);
        let Err(error) = body(b"{\"model\":\"\xff\"}", &CHAT, &mut Ignored::default()) else { panic!() };
        assert!(error.message.contains("unicode"), "{}", error.message);
    }

    #[test]
    fn numbers_keep_their_kind_and_range() {
        let text = r#"{"top_k":1.5,"seed":1e3,"temperature":1e300,"n":true,"min_p":0.5}"#;
        let (mut fields, _) = read(text, &CHAT).ok().unwrap();
        assert!(fields.integer("top_k", 0..=9).is_err());
        assert_eq!(fields.integer("seed", 0..=5000).unwrap(), Some(1000));
        assert!(fields.number("temperature").is_err());
        assert!(fields.integer("n", 0..=9).is_err());
        assert_eq!(fields.number("min_p").unwrap(), Some(0.5));
        assert_eq!(fields.number("top_p").unwrap(), None);
        assert!(fields.finish().is_ok());
    }

    #[test]
    fn what_nobody_reads_is_refused() {
        let (fields, _) = read(r#"{"seed":1}"#, &CHAT).ok().unwrap();
        assert!(fields.finish().unwrap_err().message.contains("seed"));
    }
}
