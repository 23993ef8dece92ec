//! `demo` and `check`: what is shown, and receipts.

use std::process::Command;

use crate::binary::{Ended, bare, binary, on, run, with_pictures};
use crate::folder::Folder;

/// The words that begin the lines of the end of a demo.
const SUMMARY: [&str; 6] = ["requests ", "rounds ", "tokens ", "graphs ", "pages ", "receipt "];

fn good_demo(line: &mut Command) -> Ended {
    let ended = run(line).good();
    let said = |start: &str| ended.stdout.lines().find(|line| line.starts_with(start));
    for start in SUMMARY {
        assert!(said(start).is_some(), "no line begins with {start:?} in:\n{}", ended.stdout);
    }
    let receipt = said("receipt ").unwrap();
    let (_, digests) = receipt.split_once("graph = eager").expect(receipt);
    let (left, right) = digests.split_once(" = ").expect(receipt);
    let digest = left.rsplit(' ').next().unwrap();
    assert!(digest.len() >= 12 && right.starts_with(digest), "{receipt}");
    assert!(receipt.contains("ok"), "{receipt}");
    ended
}

#[test]
fn a_demo_needs_no_arguments_wherever_it_is_started() {
    let mut line = bare();
    line.arg("demo").current_dir(std::env::temp_dir());
    let ended = good_demo(&mut line);
    assert!(ended.stdout.starts_with("device     host (auto: "), "{}", ended.stdout);

    let lines: Vec<&str> = ended.stdout.lines().collect();
    let at = |words: [&str; 2]| {
        let found = lines.iter().position(|line| words.iter().all(|word| line.contains(word)));
        found.unwrap_or_else(|| panic!("{words:?} is in no line of:\n{}", ended.stdout))
    };
    assert_eq!(ended.stdout.matches(" joins ").count(), 9);
    assert_eq!(ended.stdout.matches(" leaves ").count(), 9);
    // Lanes overlap, and some come after others left.
    assert!(at(["sum ", "joins"]) < at(["story ", "leaves"]));
    assert!(at(["sum ", "leaves"]) < at(["repeat ", "joins"]));
    at(["sum ", "27 + 58 = 85. (stop after 12 tokens)"]);
    at(["spell ", "n-e-d-r-a-g. (stop after 8 tokens)"]);
    let described =
        "There is a red circle on the left and a blue square on the right. The background is white.";
    at(["picture ", described]);
    let shown = at(["picture ", "Describe the picture. (the one below)"]);
    assert!(lines[shown + 1..shown + 16].iter().any(|line| line.contains("██")), "{}", ended.stdout);
    at(["count ", "(cancelled after "]);
    at(["rounds ", "eager 9 (prompt pass)"]);
    at(["pages ", "992 of 992 free"]);
    assert!(!ended.stdout.contains('\x1b'), "plain text where there is no terminal");
}

#[test]
fn a_demo_takes_a_model_and_engine_options() {
    let ended = good_demo(binary("demo").args(["--graphs", "off", "--lanes", "2", "--device", "host"]));
    assert!(ended.stdout.starts_with("device     host (asked for with --device)"), "{}", ended.stdout);
    assert!(ended.stdout.contains("(graphs off)"), "{}", ended.stdout);
    run(bare().args(["demo", "absent"])).refused(&["absent", "config.json"]);
}

#[test]
fn a_check_prints_a_receipt_for_each_equality() {
    let check = |seed: &str| {
        let ended = run(binary("check").args(["--cases", "1", "--seed", seed, "--dtype", "f32"])).good();
        for name in ["graph = eager", "crowded = alone", "run = run"] {
            assert!(ended.stdout.contains(&format!("{name} ")), "{name} is not in:\n{}", ended.stdout);
        }
        assert_eq!(ended.stdout.matches(" ok: ").count(), 3, "{}", ended.stdout);
        assert_eq!(with_pictures(&ended, 3), 3);
        ended.stdout
    };
    let first = check("5");
    assert_eq!(first, check("5"), "a seed gives the same schedules and digests");
    assert_ne!(first, check("6"));
}

#[test]
fn a_check_of_a_model_that_is_blind_shows_no_pictures() {
    let blind = Folder::new().without("preprocessor_config.json");
    let ended = run(on("check", blind.path()).args(["--cases", "1"])).good();
    assert_eq!(ended.stdout.matches(" ok: ").count(), 3, "{}", ended.stdout);
    assert_eq!(with_pictures(&ended, 3), 0);
}

#[test]
fn a_check_that_makes_no_sense_is_refused() {
    run(binary("check").args(["--cases", "0"])).refused(&["--cases", "0"]);
    run(binary("check").args(["--seed", "-1"])).refused(&["--seed"]);
    run(bare().args(["check", "absent"])).refused(&["absent", "config.json"]);
}
