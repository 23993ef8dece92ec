//! Who a rank is and what must agree before two ranks work together.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::wire::{MAJOR, MINOR};

/// A rank's first message. Both sides compare both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Major and minor version of the messages.
    pub version: (u8, u16),
    /// Hex digest of the executable.
    pub binary: String,
    /// Architecture of the device, as in `sm_90a` or `host`.
    pub architecture: String,
    /// The speaker's rank; 0 leads.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// What must be equal on all ranks.
    pub settings: Settings,
    /// A link on which nothing came for this long is dead; at least a tenth of a second.
    #[serde(default = "default_silence_ms")]
    pub silence_ms: u64,
}

impl Hello {
    /// The hello of `rank`, in this build's version and with a silence of ten seconds.
    pub fn new(rank: usize, ranks: usize, binary: &str, architecture: &str, settings: Settings) -> Hello {
        Hello {
            version: (MAJOR, MINOR),
            binary: binary.into(),
            architecture: architecture.into(),
            rank,
            ranks,
            settings,
            silence_ms: default_silence_ms(),
        }
    }

    /// A link on which nothing came for this long is dead.
    pub fn silence(&self) -> Duration {
        Duration::from_millis(self.silence_ms)
    }

    /// Everything that keeps two ranks from working together; empty if nothing does.
    pub fn differences(&self, theirs: &Hello) -> Vec<Difference> {
        let mut all = Vec::new();
        let mut differ = |name: &str, ours: String, theirs: String| {
            if ours != theirs {
                all.push(Difference { name: name.into(), ours, theirs });
            }
        };
        differ("wire version", self.version.0.to_string(), theirs.version.0.to_string());
        differ("binary", self.binary.clone(), theirs.binary.clone());
        differ("architecture", self.architecture.clone(), theirs.architecture.clone());
        differ("number of ranks", self.ranks.to_string(), theirs.ranks.to_string());
        differ("silence in ms", self.silence_ms.to_string(), theirs.silence_ms.to_string());
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in self.settings.0.iter().chain(&theirs.settings.0) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        for name in names {
            differ(name, self.settings.text(name), theirs.settings.text(name));
        }
        if self.rank == theirs.rank || theirs.rank >= theirs.ranks {
            let (ours, theirs) = (self.rank.to_string(), theirs.rank.to_string());
            all.push(Difference { name: "rank (each needs its own)".into(), ours, theirs });
        }
        all
    }
}

fn default_silence_ms() -> u64 {
    10_000
}

/// Names and values that must be equal on all ranks, in the order in which differences are told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings(pub Vec<(String, String)>);

impl Settings {
    /// Adds a setting.
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Settings {
        self.0.push((name.into(), value.to_string()));
        self
    }

    /// All values of `name`: a setting that is there twice differs from the same one given once.
    fn text(&self, name: &str) -> String {
        let values: Vec<&str> =
            self.0.iter().filter(|entry| entry.0 == name).map(|entry| &*entry.1).collect();
        match values.is_empty() {
            true => "(not set)".into(),
            false => values.join(" and "),
        }
    }
}

/// One thing that differs between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What it is.
    pub name: String,
    /// Its value at the side that tells.
    pub ours: String,
    /// Its value at the other side.
    pub theirs: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} here and {} there", self.name, self.ours, self.theirs)
    }
}
