//! Converting checkpoints: formats, numbers, round trips, models that still answer, and what is refused.

mod answers;
mod dense;
mod files;
mod formats;
mod made;
mod numbers;
mod refused;
mod rounds;
mod tables;

use std::path::{Path, PathBuf};

use runtime::checkpoint::layout::Format;
use runtime::convert::{ConvertOptions, Summary, convert};
use runtime::error::Error;
use tempfile::TempDir;
use tests::fixture::repository;

/// The formats of matrices.
const MATRICES: [Format; 3] = [Format::Bf16, Format::Fp8, Format::Nvfp4];
/// Those of tables.
const TABLES: [Format; 3] = [Format::Bf16, Format::Fp8Tensor, Format::Nvfp4];

fn tiny() -> PathBuf {
    repository("models/tiny")
}

fn oracle(name: &str) -> PathBuf {
    repository("tests/oracle/checkpoints").join(name)
}

fn to(experts: Format, dense: Format, table: Format) -> ConvertOptions {
    let (experts, dense, table) = (Some(experts), Some(dense), Some(table));
    ConvertOptions { experts, dense, table, ..ConvertOptions::default() }
}

/// A converted model in a folder of its own.
struct Converted {
    home: TempDir,
    summary: Summary,
}

impl Converted {
    #[track_caller]
    fn new(source: &Path, options: &ConvertOptions) -> Converted {
        let home = tempfile::tempdir().expect("a folder");
        let summary = convert(source, &home.path().join("out"), options, &mut |_, _| {});
        Converted { home, summary: summary.unwrap_or_else(|error| panic!("{error}")) }
    }

    fn path(&self) -> PathBuf {
        self.home.path().join("out")
    }
}

/// Requires that a conversion fails with all of `words`, and that nothing is left of it.
#[track_caller]
fn fails(source: &Path, options: &ConvertOptions, progress: &mut dyn FnMut(u64, u64), words: &[&str]) {
    let home = tempfile::tempdir().expect("a folder");
    let out = home.path().join("out");
    let error: Error = convert(source, &out, options, progress).map(drop).expect_err("it is refused");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
    assert!(!out.exists(), "{} is left: {message}", out.display());
}
