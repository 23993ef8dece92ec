//! Settings: flags, environment and file say the same things; what none of them may say is refused by name.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::json;
use tempfile::TempDir;

use crate::prompts::{CHAT, chat, with};
use crate::server::{Server, bare, run, serve, tiny};

crate::tests! {
    a_flag_wins_over_the_environment_over_the_file_over_the_default,
    every_option_is_a_setting_of_the_file_and_of_the_environment,
    a_key_that_is_no_setting_is_refused,
    a_bad_value_is_refused_with_file_and_key,
    a_bad_value_is_refused_even_if_another_wins,
    a_file_that_is_none_is_refused,
    bad_flags_are_refused,
    unknown_variables_are_refused,
    variables_of_a_kubernetes_service_are_told_as_such,
    a_key_is_never_shown,
    lists_and_switches_come_from_a_file,
    the_readme_tells_of_every_setting;
}

/// A settings file.
fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("round.toml");
    fs::write(&path, text).expect("a file");
    (dir, path)
}

/// How many choices a server of this command makes at most.
#[track_caller]
fn most_choices(file_says: Option<u32>, environment: Option<u32>, flag: Option<u32>) -> u32 {
    let (_dir, path) = file(&file_says.map(|n| format!("max-n = {n}\n")).unwrap_or_default());
    let mut command = serve(&["--config", path.to_str().expect("a path")]);
    if let Some(n) = environment {
        command.env("ROUNDHOUSE_MAX_N", n.to_string());
    }
    if let Some(n) = flag {
        command.args(["--max-n", &n.to_string()]);
    }
    let server = Server::ready(command);
    let n = |n: u32| with(chat("Hello!"), json!({"max_tokens": 1, "n": n}));
    (1..=17).take_while(|most| server.post(CHAT, &n(*most)).status() == 200).last().expect("one choice")
}

fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    assert_eq!(most_choices(None, None, None), 16);
    assert_eq!(most_choices(Some(2), None, None), 2);
    assert_eq!(most_choices(Some(2), Some(3), None), 3);
    assert_eq!(most_choices(Some(2), Some(3), Some(4)), 4);
    assert_eq!(most_choices(Some(2), None, Some(1)), 1);
    // The file may be named by the environment too.
    let (_dir, path) = file("served-name = \"of the file\"\n");
    let mut command = serve(&[]);
    command.env("ROUNDHOUSE_CONFIG", &path);
    assert_eq!(Server::ready(command).get("/v1/models").good()["data"][0]["id"], "of the file");
}

/// The options that the help lists, without the dashes.
fn options() -> Vec<String> {
    let output = bare().args(["serve", "--help"]).output().expect("the binary starts");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let option = |line: &str| {
        let rest = line.trim_start().strip_prefix("-h, ").unwrap_or(line.trim_start()).strip_prefix("--")?;
        let name: String = rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
        (!["help", "version"].contains(&name.as_str())).then_some(name)
    };
    let options: Vec<String> = text.lines().filter_map(option).collect();
    assert!(options.len() > 20, "{text}");
    options
}

/// A value that no setting of that name takes.
const NO_VALUE: &str = "no/such value\u{1}";

/// Settings that take any text.
const TEXTS: [&str; 5] = ["config", "api-key", "served-name", "host", "cors-origin"];

/// Every setting has each of its three ways, and none of them takes nonsense.
fn every_option_is_a_setting_of_the_file_and_of_the_environment() {
    for option in options().iter().filter(|option| !TEXTS.contains(&option.as_str())) {
        let variable = format!("ROUNDHOUSE_{}", option.to_uppercase().replace('-', "_"));
        let with_variable = |value: &str| {
            let mut command = bare();
            command.arg("serve").arg(tiny()).env(&variable, value);
            run(&mut command)
        };
        with_variable(NO_VALUE).failed(2, &[option]);
        let (_dir, path) = file(&format!("{option} = \"no such value\"\n"));
        let mut command = bare();
        command.arg("serve").arg(tiny()).arg("--config").arg(&path).env_remove("ROUNDHOUSE_DEVICE");
        run(&mut command).failed(2, &["round.toml", option, "no such value"]);
    }
    for option in ["api-key", "served-name", "host", "cors-origin"] {
        let (_dir, path) = file(&format!("{option} = 5\n"));
        let mut command = bare();
        command.arg("serve").arg(tiny()).arg("--config").arg(&path);
        run(&mut command).failed(2, &["round.toml", option, if option == "api-key" { "" } else { "5" }]);
    }
}

#[track_caller]
fn refused(text: &str, words: &[&str]) {
    let (_dir, path) = file(text);
    let ended = run(&mut serve(&["--config", path.to_str().expect("a path")]));
    ended.failed(2, &[&["round.toml"], words].concat());
    assert!(!ended.stderr.contains("listening"), "{}", ended.stderr);
}

fn a_key_that_is_no_setting_is_refused() {
    refused("lane = 2\n", &["lane"]);
    refused("max_n = 2\nlan = 5\n", &["lan"]);
    refused("model = \"x\"\n", &["model"]);
    refused("config = \"other.toml\"\n", &["config"]);
    refused("help = true\n", &["help"]);
    refused("[server]\nport = 1\n", &["server"]);
    refused("\"--port\" = 1\n", &["--port"]);
}

fn a_bad_value_is_refused_with_file_and_key() {
    refused("lanes = \"abc\"\n", &["lanes", "abc"]);
    refused("lanes = -1\n", &["lanes", "-1"]);
    refused("lanes = 0\n", &["lanes", "0"]);
    refused("lanes = [1]\n", &["lanes"]);
    refused("lanes = {a = 1}\n", &["lanes"]);
    refused("port = 70000\n", &["port", "70000"]);
    refused("drain = \"soon\"\n", &["drain", "soon"]);
    refused("body-limit = \"big\"\n", &["body-limit", "big"]);
    refused("default-thinking = \"maybe\"\n", &["default-thinking", "maybe"]);
    refused("max-n = 0\n", &["max-n", "0"]);
    refused("max-n = 1.5\n", &["max-n", "1.5"]);
    refused("lanes = 1979-05-27\n", &["lanes", "1979-05-27"]);
    refused("api-key = \"\"\n", &["api-key"]);
}

/// It would be met on the day on which the other is taken away.
fn a_bad_value_is_refused_even_if_another_wins() {
    let (_dir, path) = file("lanes = \"abc\"\n");
    run(&mut serve(&["--config", path.to_str().expect("a path"), "--lanes", "2"]))
        .failed(2, &["round.toml", "lanes", "abc"]);
}

fn a_file_that_is_none_is_refused() {
    refused("lanes = \n", &["1"]);
    refused("lanes = 2\nlanes = 3\n", &["lanes"]);
    refused("{\"lanes\": 2}", &[]);
    let ended = run(&mut serve(&["--config", "/no/such/file.toml"]));
    ended.failed(2, &["/no/such/file.toml"]);
    let dir = tempfile::tempdir().unwrap();
    run(&mut serve(&["--config", dir.path().to_str().unwrap()])).failed(2, &[dir.path().to_str().unwrap()]);
    let path = dir.path().join("bytes.toml");
    fs::write(&path, b"served-name = \"\xFF\"\n").unwrap();
    run(&mut serve(&["--config", path.to_str().unwrap()])).failed(2, &["bytes.toml"]);
}

fn bad_flags_are_refused() {
    for (option, value) in [
        ("--port", "x"),
        ("--port", "65536"),
        ("--lanes", "abc"),
        ("--queue", "-1"),
        ("--max-n", "0"),
        ("--drain", "-1"),
        ("--drain", "nan"),
        ("--body-limit", "0"),
        ("--max-pictures", "0"),
        ("--max-picture-pixels", "many"),
        ("--picture-memory", "0"),
        ("--write-timeout", "0"),
        ("--header-timeout", "x"),
        ("--sanity-sha", "xyz"),
        ("--max-tokens-default", "0"),
        ("--failure-exit", "x"),
        ("--default-thinking", "maybe"),
        ("--host", "not a host!"),
        ("--idle-timeout", "0"),
        ("--cors-origin", "example.org"),
    ] {
        let mut command = serve(&[]);
        command.arg(format!("{option}={value}"));
        run(&mut command).failed(2, &[option.trim_start_matches('-')]);
    }
    run(&mut serve(&["--lane", "2"])).failed(2, &["--lane"]);
    let mut nowhere = bare();
    nowhere.args(["serve", "/no/such/model", "--port", "0"]);
    run(&mut nowhere).failed(2, &["/no/such/model"]);
    run(bare().arg("serve")).failed(2, &["MODEL"]);
}

fn unknown_variables_are_refused() {
    for (name, value) in [("ROUNDHOUSE_LANE", "2"), ("ROUNDHOUSE_MAXN", "2"), ("ROUNDHOUSE_", "")] {
        let mut command = serve(&[]);
        command.env(name, value);
        run(&mut command).failed(2, &[name]);
    }
    let mut command = serve(&[]);
    command.env("ROUNDHOUSE_LANES", "abc");
    run(&mut command).failed(2, &["lanes", "abc"]);
}

fn variables_of_a_kubernetes_service_are_told_as_such() {
    for (name, value) in [("ROUNDHOUSE_PORT", "tcp://10.0.0.1:8000"), ("ROUNDHOUSE_SERVICE_HOST", "10.0.0.1")]
    {
        let mut command = bare();
        command.arg("serve").arg(tiny()).env(name, value);
        run(&mut command).failed(2, &["Kubernetes", "enableServiceLinks: false", name]);
    }
    let mut command = serve(&[]);
    command.env("ROUNDHOUSE_LANES", "abc");
    assert!(!run(&mut command).stderr.contains("Kubernetes"));
}

/// Not by any mistake that is made with it.
fn a_key_is_never_shown() {
    let unseen = |command: &mut std::process::Command| {
        let ended = run(command);
        ended.failed(2, &[]);
        assert!(!ended.stderr.contains("sesame"), "{command:?}: {}", ended.stderr);
    };
    for text in [
        "api_key = \"sesame\"",
        "apikey = \"sesame\"",
        "api-key = \"sesame \"",
        "api-key = \"sesame\\n\"",
        "api-key = \"sesame",
        "api-key = sesame",
        "[server]\napi-key = \"sesame\"",
    ] {
        let (_dir, path) = file(text);
        unseen(serve(&[]).arg("--config").arg(&path));
    }
    for key in ["sesame\n", " sesame", "open\nsesame"] {
        unseen(serve(&[]).env("ROUNDHOUSE_API_KEY", key));
        unseen(serve(&[]).arg("--api-key").arg(key));
    }
    for option in ["--api_key", "--apikey", "--api-keys"] {
        unseen(serve(&[]).arg(format!("{option}=sesame")));
    }
}

fn lists_and_switches_come_from_a_file() {
    let (_dir, path) = file(
        "# A house.\ncors-origin = [\"http://a.example\", \"http://b.example\"]\napi-key = \"k\"\nlanes = 2\nqueue = 3\nmemory = \"8M\"\nbody-limit = \"64K\"\n\
         default-thinking = \"on\"\ngraphs = \"off\"\nwrite-timeout = 5\ndrain = 1.5\nserved-name = \"é\"\n",
    );
    let server = Server::ready(serve(&["--config", path.to_str().expect("a path")]));
    let ask = |origin: &str| {
        let ask = crate::client::Ask::get("/v1/models")
            .header("origin", origin)
            .header("authorization", "Bearer k");
        server.ask(&ask)
    };
    for origin in ["http://a.example", "http://b.example"] {
        assert_eq!(ask(origin).head.get("access-control-allow-origin"), Some(origin));
    }
    assert_eq!(ask("").good()["data"][0]["id"], "é");
}

fn the_readme_tells_of_every_setting() {
    let Ok(readme) = fs::read_to_string(tests::fixture::repository("README.md")) else { return };
    for option in options() {
        assert!(readme.contains(&format!("`--{option}")), "README.md says nothing of --{option}");
    }
    let help = bare().args(["serve", "--help"]).stderr(Stdio::inherit()).output().expect("the binary starts");
    assert!(String::from_utf8_lossy(&help.stdout).contains("ROUNDHOUSE_PORT"));
}
