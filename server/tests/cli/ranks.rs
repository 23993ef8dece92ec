//! `--tp 2`: two processes that share a model say what one says, and refuse what does not fit, on both sides.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::binary::{Ended, binary, data, generate, on, run, with_pictures};

const PROMPTS: [&str; 4] = ["--prompt", "Spell garden backwards.", "--prompt", "What is 27 + 58?"];

/// A port that nobody has now.
fn free() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// `generate --json` as one of two ranks.
fn rank(rank: &str, leader: &str, options: &[&str]) -> Command {
    let mut command = binary("generate");
    command.args(PROMPTS).args(["--json", "--tp", "2", "--rank", rank, "--leader", leader]).args(options);
    command
}

/// Runs one command, and the other so much later.
fn both(first: &mut Command, later: Duration, second: &mut Command) -> [Ended; 2] {
    let first = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    thread::sleep(later);
    let second = run(second);
    [Ended::new(first.wait_with_output().expect("it ends")), second]
}

fn answers(ended: Ended) -> Value {
    let mut answers = ended.good().json();
    for answer in answers.as_array_mut().expect("two answers") {
        assert!(answer["rounds"]["replayed"].as_u64() > Some(3), "{answer}");
    }
    answers
}

#[test]
fn two_processes_say_what_one_says() {
    for dtype in ["f32", "bf16"] {
        let answers =
            |tp| answers(generate(&[&PROMPTS[..], &["--json", "--dtype", dtype, "--tp", tp]].concat()));
        assert_eq!(answers("2"), answers("1"), "{dtype}");
    }
}

/// Each is started by hand, as on two hosts, in either order.
#[test]
fn ranks_meet_in_either_order() {
    let alone = answers(generate(&[&PROMPTS[..], &["--json"]].concat()));
    for later in [Duration::ZERO, Duration::from_millis(700)] {
        let leader = free();
        let [first, second] = both(&mut rank("0", &leader, &[]), later, &mut rank("1", &leader, &[]));
        assert_eq!(answers(first), alone);
        assert_eq!((second.good().stdout, "").1, "");
        let leader = free();
        let [first, second] = both(&mut rank("1", &leader, &[]), later, &mut rank("0", &leader, &[]));
        assert!(first.good().stderr.ends_with("rank 1 of 2: rank 0 has ended in good order\n"));
        assert_eq!(answers(second), alone);
    }
}

#[test]
fn receipts_hold_for_two_ranks() {
    for model in
        ["models/tiny", "tests/oracle/checkpoints/quant_fp8_block", "tests/oracle/checkpoints/quant_nvfp4"]
    {
        let model = data("..").join(model);
        let ended = run(on("check", &model).args(["--tp", "2", "--cases", "2"])).good();
        // Of the pair's first rank, and of the model that it is compared with.
        for words in ["memory plan of rank 0 of 2  ", "loading the whole model", "memory plan  "] {
            assert!(ended.stderr.contains(words), "{words:?}: {}", ended.stderr);
        }
        assert!(ended.stdout.contains("two ranks = one    ok"), "{}", ended.stdout);
        assert_eq!(ended.stdout.matches(" ok: ").count(), 4, "{}", ended.stdout);
        assert_eq!(with_pictures(&ended, 4), 4);
    }
}

/// Each rank makes the same half, so the whole that one rank makes is another model: a receipt would not hold.
#[test]
fn made_weights_are_measured_and_not_compared() {
    let made = ["--tp", "2", "--load", "dummy"];
    run(binary("check").args(made)).refused(&["--tp 2 with --load dummy", "convert"]);
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("bench.jsonl");
    let mut bench = binary("bench");
    bench.args(made).args([
        "--rows",
        "1,2",
        "--contexts",
        "70,100",
        "--rounds",
        "5",
        "--prompt",
        "90",
        "--json",
    ]);
    let ended = run(bench.arg(&json)).good();
    assert!(ended.stdout.contains("two against one"), "{}", ended.stdout);
    let text = std::fs::read_to_string(json).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 5, "{text}");
    for (line, (rows, context)) in lines.iter().zip([(1, 70), (1, 100), (2, 70), (2, 100)]) {
        assert_eq!(
            (&line["line"], &line["rows"], &line["context"]),
            (&"pair".into(), &rows.into(), &context.into())
        );
        for ranks in ["two", "one"] {
            let rounds = &line[ranks];
            assert!(
                rounds["graph_ms"].as_f64() > Some(0.0) && rounds["eager_ms"].as_f64() > Some(0.0),
                "{line}"
            );
            assert_eq!(rounds["captures"], 0, "{line}");
            assert!(rounds["floor_ms"].as_f64() > Some(0.0), "{line}");
        }
    }
    let floors =
        |line: &Value| ["two", "one"].map(|ranks| line[ranks]["floor_ms"].as_f64().expect("a number"));
    let [two, one] = floors(&lines[0]);
    assert!(two < one, "half of the bytes and what both read: {two} {one}");
    assert_eq!((&lines[4]["line"], &lines[4]["tokens"]), (&"pair prompt".into(), &90.into()));
    assert!(lines[4]["gain"].as_f64() > Some(0.0), "{}", lines[4]);
    run(binary("bench").args(["--tp", "2", "--kernels"])).refused(&["--kernels with --tp 2"]);
}

#[test]
fn a_rank_that_nobody_meets_gives_up_in_time() {
    let started = Instant::now();
    let timeout = ["--peer-timeout", "0.5"];
    run(&mut rank("0", "127.0.0.1:0", &timeout))
        .failed(3, &["rank 0 listened at 127.0.0.1:", "rank 1 did not come"]);
    run(&mut rank("1", &free(), &timeout)).failed(3, &["rank 1 called 127.0.0.1:", "did not answer"]);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

/// As a follower finds it that is started while its leader is killed.
#[test]
fn a_follower_whose_leader_is_gone_ends_at_once() {
    let started = Instant::now();
    run(&mut rank("1", &free(), &["--owned", "1"]))
        .failed(3, &["rank 0, which started this process, has ended"]);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// Both sides name both values.
#[test]
fn ranks_with_other_settings_are_refused_on_both_sides() {
    let leader = free();
    let other = ["--lanes", "3", "--context", "700", "--dense", "fp8"];
    let load = ["--load is ", "checkpoint,", "checkpoint, its dense projections in fp8"];
    let [first, second] =
        both(&mut rank("0", &leader, &[]), Duration::from_millis(100), &mut rank("1", &leader, &other));
    for ended in [first, second] {
        ended.refused(&[&["--lanes is ", "16", "3", "--context is ", "700"], &load[..]].concat());
    }
}

/// A follower that cannot open its share ends the leader at once, not after the time-out.
#[test]
fn a_model_that_cannot_be_shared_is_refused() {
    let started = Instant::now();
    let odd = data("oracle/checkpoints/ratio2_oddheads");
    run(on("generate", &odd).args(["--ids", "1,2,3", "--tp", "2"]))
        .refused(&["vocab_size is 451", "2 ranks"]);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    run(&mut rank("0", &address, &[])).refused(&["rank 0 cannot listen at", &address, "in use"]);
}

#[test]
fn options_of_ranks_that_contradict_each_other_are_refused() {
    let leader = ["--leader", "127.0.0.1:9"];
    for (options, words) in [
        (&["--rank", "1"][..], "add --tp 2"),
        (&leader[..], "add --tp 2"),
        (&["--tp", "2", "--rank", "1"], "--rank 1 without --leader"),
        (&["--tp", "2", "--rank", "0"], "--rank 0 without --leader"),
        (&["--tp", "2", "--leader", "127.0.0.1:9"], "--leader without --rank"),
        (&["--tp", "3"], "3 is not in 1..=2"),
        (&["--tp", "2", "--rank", "2"], "2 is not in 0..=1"),
        (&["--tp", "2", "--rank", "1", "--leader", "nowhere"], "nowhere"),
    ] {
        let ended = generate(&[&["--prompt", "x"][..], options].concat());
        assert_eq!(ended.status, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(words), "{words:?}: {}", ended.stderr);
    }
}
