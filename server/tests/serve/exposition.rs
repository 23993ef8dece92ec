//! The text form of metrics, read strictly: what is not in the format is a panic that shows the line.

use std::collections::{BTreeMap, HashSet};

use crate::client::Response;

/// All metrics of one answer.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    families: BTreeMap<String, Family>,
}

/// One metric: its type, and a value for every set of labels.
#[derive(Clone, Debug)]
struct Family {
    kind: String,
    samples: Vec<Sample>,
}

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Metrics {
    #[track_caller]
    pub(crate) fn of(response: &Response) -> Metrics {
        assert_eq!(response.status(), 200, "{}", response.text());
        let kind = response.head.get("content-type").unwrap_or_default();
        assert!(kind.starts_with("text/plain; version=0.0.4"), "content type {kind:?}");
        Metrics::parse(&response.text())
    }

    #[track_caller]
    pub(crate) fn parse(text: &str) -> Metrics {
        assert!(text.ends_with('\n'), "the last line has no end");
        let mut families: BTreeMap<String, Family> = BTreeMap::new();
        let mut helped = HashSet::new();
        let mut current = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap_or_else(|| panic!("no help in {line}"));
                assert!(!help.trim().is_empty() && helped.insert(name.to_owned()), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap_or_else(|| panic!("no type in {line}"));
                assert!(is_name(name), "{line}");
                assert!(helped.contains(name), "no help before {line}");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                let family = Family { kind: kind.into(), samples: Vec::new() };
                assert!(families.insert(name.into(), family).is_none(), "a type again: {line}");
                current = name.into();
            } else {
                let sample = Sample::parse(line);
                let family = families.get_mut(&current).unwrap_or_else(|| panic!("no type before {line}"));
                let rest = sample.name.strip_prefix(&current);
                let rest = rest.unwrap_or_else(|| panic!("not of {current}: {line}"));
                let allowed: &[&str] =
                    if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
                assert!(allowed.contains(&rest), "not of {current}: {line}");
                let same = |other: &Sample| other.name == sample.name && other.labels == sample.labels;
                assert!(!family.samples.iter().any(same), "twice: {line}");
                if family.kind != "gauge" {
                    assert!(sample.value >= 0.0, "{line}");
                }
                family.samples.push(sample);
            }
        }
        let metrics = Metrics { families };
        metrics.families.iter().for_each(|(name, family)| family.check(name));
        metrics
    }

    /// Every name and its type, one a line.
    pub(crate) fn outline(&self) -> String {
        self.families.iter().map(|(name, family)| format!("{name} {}\n", family.kind)).collect()
    }

    /// The sum over all label sets that hold `labels`. Nothing if there is no such metric.
    #[track_caller]
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let family = ["", "_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| self.families.get(name.strip_suffix(end)?))
            .unwrap_or_else(|| panic!("no metric {name} among\n{}", self.outline()));
        let samples = family.samples.iter().filter(|sample| sample.name == name);
        samples
            .filter(|sample| labels.iter().all(|label| sample.has(*label)))
            .map(|sample| sample.value)
            .sum()
    }

    #[track_caller]
    pub(crate) fn value(&self, name: &str) -> f64 {
        self.sum(name, &[])
    }

    /// The values that a label takes.
    pub(crate) fn label_values(&self, name: &str, label: &str) -> Vec<String> {
        let samples = self.families.get(name).into_iter().flat_map(|family| &family.samples);
        let labels = samples.flat_map(|sample| &sample.labels);
        labels.filter(|(name, _)| name == label).map(|(_, value)| value.clone()).collect()
    }
}

impl Family {
    fn check(&self, name: &str) {
        assert!(
            name.starts_with("roundhouse_") || name.starts_with("process_"),
            "a name without prefix: {name}"
        );
        if self.kind == "counter" {
            assert!(name.ends_with("_total"), "a counter without _total: {name}");
        } else {
            assert!(!name.ends_with("_total"), "a {} with _total: {name}", self.kind);
        }
        if self.kind != "histogram" {
            return;
        }
        let without_le = |sample: &Sample| {
            sample.labels.iter().filter(|(name, _)| name != "le").cloned().collect::<Vec<_>>()
        };
        for count in self.samples.iter().filter(|sample| sample.name.ends_with("_count")) {
            let own = |sample: &&Sample| without_le(sample) == count.labels;
            let buckets: Vec<&Sample> =
                self.samples.iter().filter(|sample| sample.name.ends_with("_bucket")).filter(own).collect();
            let bounds: Vec<f64> = buckets.iter().map(|bucket| bucket.le()).collect();
            assert!(bounds.is_sorted_by(|a, b| a < b), "bounds of {name}: {bounds:?}");
            assert!(buckets.is_sorted_by(|a, b| a.value <= b.value), "buckets of {name} do not add up");
            let last = buckets.last().unwrap_or_else(|| panic!("{name} has no buckets"));
            assert_eq!((last.le(), last.value), (f64::INFINITY, count.value), "{name}");
            let sums = self.samples.iter().filter(|sample| sample.name.ends_with("_sum")).filter(own).count();
            assert_eq!(sums, 1, "{name}");
        }
    }
}

impl Sample {
    fn parse(line: &str) -> Sample {
        let name_end = line.find(['{', ' ']).unwrap_or_else(|| panic!("no value: {line}"));
        let (name, mut rest) = line.split_at(name_end);
        assert!(is_name(name), "a name: {line}");
        let mut labels: Vec<(String, String)> = Vec::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner;
            while !rest.starts_with('}') {
                let (label, more) = rest.split_once("=\"").unwrap_or_else(|| panic!("a label: {line}"));
                assert!(is_name(label) && !label.contains(':'), "a label: {line}");
                let mut value = String::new();
                let mut characters = more.char_indices();
                let end = loop {
                    match characters.next().unwrap_or_else(|| panic!("an open label: {line}")) {
                        (at, '"') => break at,
                        (_, '\\') => match characters.next() {
                            Some((_, 'n')) => value.push('\n'),
                            Some((_, escaped @ ('"' | '\\'))) => value.push(escaped),
                            _ => panic!("an escape: {line}"),
                        },
                        (_, character) => value.push(character),
                    }
                };
                assert!(!labels.iter().any(|(other, _)| other == label), "a label twice: {line}");
                labels.push((label.into(), value));
                rest = &more[end + 1..];
                rest = rest.strip_prefix(',').unwrap_or(rest);
            }
            rest = &rest[1..];
        }
        let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("no space before the value: {line}"));
        let value = match value {
            "+Inf" => f64::INFINITY,
            value => value.parse().unwrap_or_else(|_| panic!("a value, and no time: {line}")),
        };
        assert!(!value.is_nan(), "{line}");
        Sample { name: name.into(), labels, value }
    }

    fn has(&self, (name, value): (&str, &str)) -> bool {
        self.labels.iter().any(|label| (label.0.as_str(), label.1.as_str()) == (name, value))
    }

    fn le(&self) -> f64 {
        let le = self.labels.iter().find(|(name, _)| name == "le").expect("a bucket has a bound");
        if le.1 == "+Inf" { f64::INFINITY } else { le.1.parse().expect("a bound is a number") }
    }
}

fn is_name(name: &str) -> bool {
    let first = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    first && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}
