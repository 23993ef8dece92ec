//! The text form of metrics, read strictly: what is not in the format is an error that shows the line.

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

/// Ends a function with an error unless something holds.
macro_rules! need {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(format!($($why)+));
        }
    };
}

impl Metrics {
    #[track_caller]
    pub(crate) fn of(response: &Response) -> Metrics {
        assert_eq!(response.status(), 200, "{}", response.text());
        let kind = response.head.get("content-type").unwrap_or_default();
        assert!(kind.starts_with("text/plain; version=0.0.4"), "content type {kind:?}");
        Metrics::parse(&response.text()).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn parse(text: &str) -> Result<Metrics, String> {
        need!(text.ends_with('\n'), "the last line has no end");
        let mut families: BTreeMap<String, Family> = BTreeMap::new();
        let mut helped = HashSet::new();
        let mut current = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').ok_or_else(|| format!("no help in {line}"))?;
                need!(
                    !help.trim().is_empty() && helped.insert(name.to_owned()),
                    "help again, or none: {line}"
                );
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').ok_or_else(|| format!("no type in {line}"))?;
                need!(is_name(name) && helped.contains(name), "no name, or no help before {line}");
                need!(["counter", "gauge", "histogram"].contains(&kind), "an unknown type: {line}");
                let family = Family { kind: kind.into(), samples: Vec::new() };
                need!(families.insert(name.into(), family).is_none(), "a type again: {line}");
                current = name.into();
            } else {
                let sample = Sample::parse(line)?;
                let family = families.get_mut(&current).ok_or_else(|| format!("no type before {line}"))?;
                let rest = sample.name.strip_prefix(&current);
                let ends: &[&str] =
                    if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
                need!(rest.is_some_and(|rest| ends.contains(&rest)), "not of {current}: {line}");
                let same = |other: &Sample| other.name == sample.name && other.labels == sample.labels;
                need!(!family.samples.iter().any(same), "twice: {line}");
                need!(family.kind == "gauge" || sample.value >= 0.0, "below zero: {line}");
                family.samples.push(sample);
            }
        }
        let metrics = Metrics { families };
        metrics.families.iter().try_for_each(|(name, family)| family.check(name))?;
        Ok(metrics)
    }

    /// Every name and its type, one a line.
    pub(crate) fn outline(&self) -> String {
        self.families.iter().map(|(name, family)| format!("{name} {}\n", family.kind)).collect()
    }

    /// The sum over all label sets that hold `labels`.
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
    fn check(&self, name: &str) -> Result<(), String> {
        need!(["roundhouse_", "process_"].iter().any(|prefix| name.starts_with(prefix)), "no prefix: {name}");
        need!(
            (self.kind == "counter") == name.ends_with("_total"),
            "_total is of counters: {name} {}",
            self.kind
        );
        if self.kind != "histogram" {
            return Ok(());
        }
        let without_bound = |sample: &Sample| -> Vec<(String, String)> {
            sample.labels.iter().filter(|(name, _)| name != "le").cloned().collect()
        };
        need!(self.samples.iter().any(|sample| sample.name.ends_with("_count")), "{name} has no count");
        for count in self.samples.iter().filter(|sample| sample.name.ends_with("_count")) {
            let own = |end: &str| {
                let own = self.samples.iter().filter(|sample| sample.name.ends_with(end));
                own.filter(|sample| without_bound(sample) == count.labels).collect::<Vec<_>>()
            };
            let buckets = own("_bucket");
            let bounds = buckets.iter().map(|bucket| bucket.bound()).collect::<Result<Vec<f64>, _>>()?;
            need!(bounds.is_sorted_by(|a, b| a < b), "bounds of {name}: {bounds:?}");
            need!(buckets.is_sorted_by(|a, b| a.value <= b.value), "buckets of {name} do not add up");
            let last = buckets.last().map(|last| last.value);
            need!(
                bounds.last() == Some(&f64::INFINITY) && last == Some(count.value),
                "the last bucket of {name}"
            );
            need!(own("_sum").len() == 1, "the sum of {name}");
        }
        Ok(())
    }
}

impl Sample {
    fn parse(line: &str) -> Result<Sample, String> {
        let name_end = line.find(['{', ' ']).ok_or_else(|| format!("no value: {line}"))?;
        let (name, mut rest) = line.split_at(name_end);
        need!(is_name(name), "no name: {line}");
        let mut labels: Vec<(String, String)> = Vec::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner;
            while !rest.starts_with('}') {
                let (label, more) = rest.split_once("=\"").ok_or_else(|| format!("no label: {line}"))?;
                need!(is_name(label) && !label.contains(':'), "no label: {line}");
                need!(!labels.iter().any(|(other, _)| other == label), "a label twice: {line}");
                let (value, end) = quoted(more).ok_or_else(|| format!("no value of a label: {line}"))?;
                labels.push((label.into(), value));
                rest = &more[end..];
                rest = rest.strip_prefix(',').unwrap_or(rest);
            }
            rest = &rest[1..];
        }
        let value = rest.strip_prefix(' ').ok_or_else(|| format!("no space before the value: {line}"))?;
        let value = match value {
            "+Inf" => f64::INFINITY,
            value => value.parse().map_err(|_| format!("no value, or a time: {line}"))?,
        };
        need!(!value.is_nan(), "no number: {line}");
        Ok(Sample { name: name.into(), labels, value })
    }

    fn has(&self, (name, value): (&str, &str)) -> bool {
        self.labels.iter().any(|label| (label.0.as_str(), label.1.as_str()) == (name, value))
    }

    fn bound(&self) -> Result<f64, String> {
        let bound = self.labels.iter().find(|(name, _)| name == "le").map(|(_, value)| value.as_str());
        match bound {
            Some("+Inf") => Ok(f64::INFINITY),
            bound => bound.and_then(|le| le.parse().ok()).ok_or_else(|| format!("no bound: {self:?}")),
        }
    }
}

/// The text before the quote that ends it, and where what follows begins.
fn quoted(text: &str) -> Option<(String, usize)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    loop {
        match characters.next()? {
            (at, '"') => return Some((value, at + 1)),
            (_, '\\') => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped @ ('"' | '\\') => value.push(escaped),
                _ => return None,
            },
            (_, character) => value.push(character),
        }
    }
}

fn is_name(name: &str) -> bool {
    let first = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    first && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}
