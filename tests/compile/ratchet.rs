//! The recorded local memory of kernels: it may only shrink, and the record shrinks with it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use graph::cuda::code::Resources;
use tests::fixture::repository;

/// Bytes of local memory per thread, by kernel and architecture; those that use none are left out.
#[derive(Default)]
pub(crate) struct Ratchet(BTreeMap<(String, String), u32>);

fn path() -> PathBuf {
    repository("tests/compile/ratchet.txt")
}

impl Ratchet {
    /// Adds what a kernel uses.
    pub(crate) fn note(&mut self, architecture: &str, kernel: &Resources) {
        if kernel.local_bytes > 0 {
            self.0.insert((kernel.symbol.clone(), architecture.into()), kernel.local_bytes);
        }
    }

    /// The recorded one.
    pub(crate) fn read() -> Result<Ratchet, String> {
        let path = path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut ratchet = Ratchet::default();
        for (index, line) in text.lines().enumerate() {
            let refused = |why: &str| format!("{}:{}: {why}: {line}", path.display(), index + 1);
            let words: Vec<&str> = line.split_whitespace().collect();
            let [kernel, architecture, bytes] = words[..] else {
                return Err(refused("a line is a kernel, an architecture and bytes"));
            };
            let bytes = bytes.parse().ok().filter(|bytes| *bytes > 0);
            let bytes = bytes.ok_or_else(|| refused("not a number of bytes above 0"))?;
            if ratchet.0.insert((kernel.into(), architecture.into()), bytes).is_some() {
                return Err(refused("said twice"));
            }
        }
        Ok(ratchet)
    }

    /// Makes this the recorded one.
    pub(crate) fn write(&self) -> Result<(), String> {
        let path = path();
        let line = |((kernel, architecture), bytes): (&(String, String), &u32)| {
            format!("{kernel} {architecture} {bytes}\n")
        };
        let text: String = self.0.iter().map(line).collect();
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// How what is used differs from what is recorded.
    pub(crate) fn differences(&self, recorded: &Ratchet) -> Vec<String> {
        let keys = self.0.keys().chain(recorded.0.keys().filter(|key| !self.0.contains_key(key)));
        let bytes = |ratchet: &Ratchet, key: &_| ratchet.0.get(key).copied().unwrap_or(0);
        let difference = |key: &(String, String)| {
            let (used, allowed) = (bytes(self, key), bytes(recorded, key));
            let (kernel, architecture) = key;
            match used.cmp(&allowed) {
                std::cmp::Ordering::Equal => None,
                std::cmp::Ordering::Greater => Some(format!(
                    "{kernel} for {architecture} uses {used} bytes of local memory, and may use {allowed}"
                )),
                std::cmp::Ordering::Less => Some(format!(
                    "{kernel} for {architecture} uses {used} bytes of local memory, and the record says \
                     {allowed}: UPDATE=1 cargo test --release -p tests --test compile lowers it"
                )),
            }
        };
        keys.filter_map(difference).collect()
    }
}
