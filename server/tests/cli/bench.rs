//! `roundhouse bench`: results as text and as JSON lines.

use serde_json::Value;

use crate::binary::{binary, data, on, run};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

fn of<'a>(lines: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    lines.iter().filter(move |line| line["line"] == kind)
}

#[test]
fn rounds_prompt_and_kernels_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("bench.jsonl");
    let mut line = binary("bench");
    line.args(["--device", "host", "--rows", "1,2", "--contexts", "128", "--rounds", "3", "--prompt", "70"]);
    let ended =
        run(line.args(["--piece", "64", "--kernels", "--table", "pinned", "--json"]).arg(&json)).good();
    for word in
        ["synthetic context", "TB/s", "prompt     70 tokens in pieces of 64", "kernels of a prompt round"]
    {
        assert!(ended.stdout.contains(word), "{word} is not in {}", ended.stdout);
    }
    let lines = lines(&std::fs::read_to_string(json).unwrap());
    assert!(of(&lines, "bandwidth").next().unwrap()["bytes_per_second"].as_f64().unwrap() > 1e8);
    let rounds: Vec<&Value> = of(&lines, "round").collect();
    assert_eq!(rounds.len(), 2);
    for (round, rows) in rounds.iter().zip([1, 2]) {
        assert_eq!(
            (&round["rows"], &round["context"], &round["synthetic"]),
            (&rows.into(), &128.into(), &true.into())
        );
        for field in ["graph_ms", "eager_ms", "device_ms", "host_us", "floor_ms", "nodes", "bytes", "full_ms"]
        {
            assert!(round[field].as_f64().unwrap() > 0.0, "{field} in {round}");
        }
        // Two of eight experts for each row.
        let distinct = round["distinct_experts"].as_f64().unwrap();
        assert!((2.0..=2.0 * f64::from(rows)).contains(&distinct), "{round}");
        assert_eq!((&round["layers"], &round["full_layers"]), (&8.into(), &8.into()));
    }
    assert!(rounds[0]["bytes"].as_f64() < rounds[1]["bytes"].as_f64());
    let prompt = of(&lines, "prompt").next().unwrap();
    assert_eq!(prompt["tokens_per_second"], prompt["full_tokens_per_second"]);

    let decode = [("experts_up", 8), ("index_score", 2), ("attend_part", 2), ("attend_join", 2)];
    let prompt = [("experts_up_prompt", 8), ("experts_sum", 8), ("index_select", 2), ("attend", 2)];
    for (kind, rows, some) in [("decode", 1, decode), ("decode", 2, decode), ("prompt", 64, prompt)] {
        let table = |line: &&Value| line["kind"] == kind && line["rows"] == rows;
        let kernels: Vec<&Value> = of(&lines, "kernel").filter(table).collect();
        let launches = |name| kernels.iter().find(|kernel| kernel["kernel"] == name).map(|k| &k["launches"]);
        for (name, count) in some {
            assert_eq!(launches(name), Some(&count.into()), "{name} of {kind} {rows}");
        }
        let all: u64 = kernels.iter().map(|kernel| kernel["launches"].as_u64().unwrap()).sum();
        let sum = of(&lines, "kernels").find(table).unwrap();
        if let Some(round) = rounds.iter().find(|round| kind == "decode" && round["rows"] == rows) {
            assert_eq!(all, round["nodes"].as_u64().unwrap(), "every launch is in the table");
        }
        assert!(sum["sum_ms"].as_f64().unwrap() > 0.0 && sum["device_ms"].as_f64().unwrap() > 0.0);
        let moving = kernels.iter().filter(|kernel| kernel["bytes"].as_f64().unwrap() > 0.0).count();
        // Blocks are scored only where there are more of them than a row may choose.
        let idle = if kind == "decode" { 4 } else { 3 };
        assert!(moving + idle >= kernels.len(), "all but rows, mark and advance move something that counts");
    }
}

#[test]
fn a_folder_of_a_config_and_the_first_layers_are_enough() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(data("../models/tiny/config.json"), dir.path().join("config.json")).unwrap();
    let json = dir.path().join("bench.jsonl");
    let mut line = on("bench", dir.path());
    line.args(["--load", "dummy", "--layers", "4", "--rows", "1", "--contexts", "64,2k", "--rounds", "2"]);
    let ended = run(line.args(["--prompt", "65", "--json"]).arg(&json)).good();
    assert!(ended.stdout.contains("for 8 layers") && ended.stdout.contains("times 8/4"), "{}", ended.stdout);
    let lines = lines(&std::fs::read_to_string(json).unwrap());
    for round in of(&lines, "round") {
        assert!(round["full_ms"].as_f64() > round["device_ms"].as_f64(), "{round}");
        assert_eq!((&round["layers"], &round["full_layers"]), (&4.into(), &8.into()));
    }
    run(on("generate", dir.path()).args(["--load", "dummy", "--ids", "1"])).refused(&["tokenizer.json"]);
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_numbers() {
    let refused = |options: &[&str], words: &[&str]| run(binary("bench").args(options)).refused(words);
    refused(&["--rows", "65"], &["--rows", "65", "64"]);
    refused(&["--rows", "0"], &["--rows"]);
    refused(&["--rows", "1,x"], &["--rows", "`x` is not a count"]);
    refused(&["--contexts", "64k"], &["--contexts 65536", "32768"]);
    refused(&["--contexts", "1k", "--prompt", "33k"], &["--prompt 33792", "32768"]);
    refused(&["--piece", "100", "--contexts", "64", "--prompt", "0"], &["100"]);
    refused(&["--json", "/absent/file", "--contexts", "64"], &["--json", "/absent/file"]);

    // This is known only when lanes are seated, after the first results.
    let mut few = binary("bench");
    let ended = run(few.args(["--rows", "2", "--contexts", "640", "--prompt", "0", "--memory", "3M"]));
    assert_eq!(ended.status, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains("1 of 2 lanes") && ended.stderr.contains("--memory"), "{}", ended.stderr);
}
