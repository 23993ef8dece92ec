//! Running the binary, and what came of it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// How a run ended and what it printed.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The demo model.
pub(crate) fn tiny() -> PathBuf {
    repository().join("models/tiny")
}

/// A file of the test data.
pub(crate) fn data(path: &str) -> PathBuf {
    repository().join("tests").join(path)
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace")
}

/// The binary with no settings from the environment, about to run `command` on the demo model.
pub(crate) fn binary(command: &str) -> Command {
    on(command, &tiny())
}

/// The binary about to run `command` on a model folder.
pub(crate) fn on(command: &str, model: &Path) -> Command {
    let mut binary = bare();
    binary.arg(command).arg(model);
    binary
}

/// The binary with no settings from the environment and no arguments. It sees no CUDA device, so that every
/// machine shows the same.
pub(crate) fn bare() -> Command {
    let mut binary = Command::new(env!("CARGO_BIN_EXE_roundhouse"));
    binary.env("CUDA_VISIBLE_DEVICES", "");
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("ROUNDHOUSE_") {
            binary.env_remove(name);
        }
    }
    binary
}

/// Runs `generate` on the demo model.
pub(crate) fn generate(options: &[&str]) -> Ended {
    run(binary("generate").args(options))
}

/// Runs `generate --json` on the demo model, which must succeed; what it printed.
#[track_caller]
pub(crate) fn generate_json(options: &[&str]) -> Value {
    generate(&[options, &["--json"]].concat()).good().json()
}

pub(crate) fn run(binary: &mut Command) -> Ended {
    Ended::new(binary.output().expect("the binary starts"))
}

impl Ended {
    pub(crate) fn new(output: Output) -> Ended {
        let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
        Ended { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Requires exit status 0.
    #[track_caller]
    pub(crate) fn good(self) -> Ended {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }

    /// Requires exit status 2, nothing on stdout, and an error that says all of `words`.
    #[track_caller]
    pub(crate) fn refused(self, words: &[&str]) {
        self.failed(2, words);
    }

    /// Requires an exit status, nothing on stdout, and an error that says all of `words`.
    #[track_caller]
    pub(crate) fn failed(self, status: i32, words: &[&str]) {
        assert_eq!(self.status, Some(status), "{self:#?}");
        assert_eq!(self.stdout, "");
        let (_, error) = self.stderr.split_once("error: ").unwrap_or_else(|| panic!("{}", self.stderr));
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }

    /// The one JSON value on stdout.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{}", self.stdout);
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// How many of the receipts, `all` there are, had requests with pictures; those that say so had eager rounds of them.
pub(crate) fn with_pictures(ended: &Ended, all: usize) -> usize {
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let told = lines.array_windows().filter_map(|[receipt, rounds]| {
        let (_, counts) = receipt.split_once(" requests, ")?;
        let pictures: u32 = counts.split_once(" with pictures, ")?.0.parse().unwrap();
        let eager = rounds.matches("(image-bearing)").count();
        assert_eq!(eager, if pictures > 0 { 2 } else { 0 }, "{}", ended.stdout);
        Some(pictures > 0)
    });
    let told: Vec<bool> = told.collect();
    assert_eq!(told.len(), all, "{}", ended.stdout);
    told.into_iter().filter(|some| *some).count()
}
