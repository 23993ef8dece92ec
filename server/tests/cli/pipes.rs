//! Readers that go away.

use std::io::Read;
use std::process::{Command, Stdio};

use crate::binary::{Ended, binary};

/// Runs with a stdout that is closed after `read` bytes.
fn closed_after(read: usize, binary: &mut Command) -> Ended {
    let mut child = binary.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut vec![0; read]).expect("the binary prints that much");
    drop(stdout);
    Ended::new(child.wait_with_output().unwrap())
}

#[test]
fn an_answer_that_no_one_reads_is_not_made() {
    let options = ["--prompt", "Count from 5 to 16.", "--ignore-eos", "--max-tokens", "5000"];
    for read in [0, 5] {
        let ended = closed_after(read, binary("generate").args(options)).good();
        let note = ended.stderr.lines().last().unwrap();
        assert!(note.starts_with("cancelled after "), "{note}");
    }
}

#[test]
fn other_output_that_no_one_reads_is_no_failure() {
    let json = ["--ids", "1", "--max-tokens", "1", "--json"];
    for binary in [binary("inspect").arg("--help"), &mut binary("inspect"), binary("generate").args(json)] {
        let ended = closed_after(0, binary).good();
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
}

#[test]
fn notes_that_no_one_reads_are_no_failure() {
    let mut line = binary("generate");
    line.args(["--prompt", "Spell garden backwards."]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = line.spawn().expect("the binary starts");
    drop(child.stderr.take());
    let ended = Ended::new(child.wait_with_output().unwrap()).good();
    assert_eq!(ended.stdout, "n-e-d-r-a-g.\n");
}

#[test]
fn a_full_disk_is_a_failure_that_names_stdout() {
    let Ok(full) = std::fs::File::options().write(true).open("/dev/full") else {
        panic!("this system has no /dev/full to write to");
    };
    let ended = crate::binary::run(binary("inspect").stdout(full));
    ended.refused(&["stdout"]);
}
