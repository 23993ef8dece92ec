//! Metrics: names and types that do not change unseen, and numbers that add up.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Ask;
use crate::exposition::Metrics;
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, unending, with};
use crate::server::{Server, context};

crate::tests! {
    names_and_types_are_those_of_the_golden_file,
    numbers_add_up,
    requests_are_counted_by_route_and_status,
    replies_are_counted_by_how_they_ended,
    gauges_follow_the_load;
    the_first_token_is_timed_from_the_request_s_arrival,
}

/// A name that changes empties somebody's dashboard.
fn names_and_types_are_those_of_the_golden_file() {
    let server = Server::start(&[]);
    let fresh = server.metrics().outline();
    assert_eq!(
        fresh,
        include_str!("metrics.txt"),
        "if this is meant, change server/tests/serve/metrics.txt too"
    );
    server.post(CHAT, &chat("Hello!")).good();
    server.post(CHAT, &json!({})).error(400);
    assert_eq!(server.metrics().outline(), fresh, "all of them are there from the start");
}

/// The growth of a counter.
fn grown(before: &Metrics, after: &Metrics, name: &str, labels: &[(&str, &str)]) -> f64 {
    after.sum(name, labels) - before.sum(name, labels)
}

fn numbers_add_up() {
    let server = Server::start(&[]);
    let before = server.metrics();
    let (mut prompt, mut completion_tokens, mut replies) = (0.0, 0.0, 0.0);
    for (path, body) in [
        (CHAT, chat("Spell garden backwards.")),
        (
            CHAT,
            with(chat("Count from 5 to 16."), json!({"n": 3, "seed": 1, "temperature": 1, "max_tokens": 20})),
        ),
        (COMPLETIONS, with(completion("5, 6, 7,"), json!({"prompt": ["5, 6, 7,", "Once"]}))),
        (CHAT, with(chat("Count from 5 to 16."), json!({"stop": ", 10"}))),
    ] {
        for streamed in [false, true] {
            let (usage, choices) = if streamed {
                let stream = server.stream(path, &body);
                (stream.usage.unwrap(), stream.choices.len())
            } else {
                let reply = server.post(path, &body).good();
                (reply["usage"].clone(), reply["choices"].as_array().unwrap().len())
            };
            prompt += usage["prompt_tokens"].as_f64().unwrap();
            completion_tokens += usage["completion_tokens"].as_f64().unwrap();
            replies += choices as f64;
        }
    }
    server.idle_within(Duration::from_secs(5));
    let after = server.metrics();
    let grew = |name: &str| grown(&before, &after, name, &[]);
    // What is counted by usage is what the caller sees; a prompt of several choices is computed for each.
    assert!(
        grew("roundhouse_prompt_tokens_total") >= prompt,
        "{} of {prompt}",
        grew("roundhouse_prompt_tokens_total")
    );
    assert_eq!(grew("roundhouse_completion_tokens_total"), completion_tokens);
    assert_eq!(grew("roundhouse_time_to_first_token_seconds_count"), replies);
    assert_eq!(grew("roundhouse_inter_token_seconds_count"), completion_tokens - replies);
    assert_eq!(grew("roundhouse_request_duration_seconds_count"), 8.0);
    assert!(grew("roundhouse_time_to_first_token_seconds_sum") > 0.0);
    assert!(
        grew("roundhouse_request_duration_seconds_sum")
            > grew("roundhouse_time_to_first_token_seconds_sum") / replies
    );

    let outcomes = after.label_values("roundhouse_rounds_total", "outcome");
    assert!(
        outcomes.iter().all(|outcome| ["captured", "replayed", "eager"].contains(&outcome.as_str())),
        "{outcomes:?}"
    );
    let rounds = |outcome: &str| grown(&before, &after, "roundhouse_rounds_total", &[("outcome", outcome)]);
    // Each prompt is a round at least, and eager; each further token of a lone lane is a replay.
    assert!(rounds("eager") >= replies, "{} eager of {replies}", rounds("eager"));
    assert!(rounds("replayed") > 30.0 && rounds("replayed") < completion_tokens);
    assert_eq!(rounds("captured"), 0.0, "all graphs are captured before ready");
    assert_eq!(grew("roundhouse_rounds_total"), rounds("eager") + rounds("replayed") + rounds("captured"));
    let reasons = after.label_values("roundhouse_rounds_total", "reason");
    assert!(reasons.iter().any(|reason| !reason.is_empty() && reason != "none"), "{reasons:?}");

    assert!(after.value("roundhouse_graphs") >= 16.0);
    assert!(after.value("roundhouse_graph_bytes") > 0.0);
    assert_eq!(after.value("roundhouse_pages_free"), after.value("roundhouse_pages"));
    assert_eq!(after.value("roundhouse_pages"), 16.0 * f64::from(context() / 64));
}

fn requests_are_counted_by_route_and_status() {
    let server = Server::start(&["--body-limit", "64K"]);
    let before = server.metrics();
    server.post(CHAT, &chat("Hello!")).good();
    server.post(CHAT, &chat("Hello!")).good();
    server.stream(CHAT, &chat("Hello!"));
    server.post(CHAT, &json!({})).error(400);
    server.post(CHAT, &with(chat("Hello!"), json!({"model": "x"}))).error(404);
    server.post(COMPLETIONS, &completion("Hello")).good();
    server.get("/v1/models").good();
    server.get(CHAT).error(405);
    server.post("/tokenize", &json!({"prompt": "a"})).good();
    for at in 0..20 {
        server.get(&format!("/nothing/{at}")).error(404);
    }
    server.idle_within(Duration::from_secs(5));
    let after = server.metrics();
    let grew = |route: &str, status: &str| {
        grown(&before, &after, "roundhouse_requests_total", &[("route", route), ("status", status)])
    };
    assert_eq!(grew(CHAT, "200"), 3.0);
    assert_eq!(grew(CHAT, "400"), 1.0);
    assert_eq!(grew(CHAT, "404"), 1.0);
    assert_eq!(grew(CHAT, "405"), 1.0);
    assert_eq!(grew(COMPLETIONS, "200"), 1.0);
    assert_eq!(grew("/v1/models", "200"), 1.0);
    assert_eq!(grew("/tokenize", "200"), 1.0);
    // A client cannot make up routes, each with a counter of its own.
    let routes = after.label_values("roundhouse_requests_total", "route");
    assert!(!routes.iter().any(|route| route.contains("nothing")), "{routes:?}");
    let unknown = grown(&before, &after, "roundhouse_requests_total", &[("status", "404")]);
    assert_eq!(unknown, 21.0);
}

/// Whoever is gone before there is an answer was a request too.
fn replies_are_counted_by_how_they_ended() {
    let server = Server::start(&[]);
    let before = server.metrics();
    server.post(CHAT, &chat("Hello!")).good();
    server.stream(CHAT, &with(unending(), json!({"n": 2, "max_tokens": 3})));
    let mut streamed = server.begin(CHAT, &with(unending(), json!({"n": 3})));
    streamed.read(5);
    let mut whole = server.connect();
    whole.send(&Ask::post(CHAT, &unending()).bytes()).unwrap();
    server.reaches(Duration::from_secs(5), |(lanes, _, _)| lanes == 4.0);
    drop((streamed, whole));
    server.idle_within(Duration::from_secs(5));
    let after = server.metrics();
    let ended = |outcome: &str| grown(&before, &after, "roundhouse_replies_total", &[("outcome", outcome)]);
    assert_eq!(["stop", "length", "cancelled"].map(ended), [1.0, 2.0, 4.0]);
    assert_eq!(["slow", "failed", "stopped", "refused"].map(ended), [0.0; 4]);
    let requests = |status: &str| {
        grown(&before, &after, "roundhouse_requests_total", &[("route", CHAT), ("status", status)])
    };
    assert_eq!((requests("200"), requests("499")), (3.0, 1.0));
}

/// Waiting to be read is waiting for the first token.
fn the_first_token_is_timed_from_the_request_s_arrival() {
    let server = Server::start(&[]);
    // Large bodies are read one after the other, and these take long to be read and refused.
    let many: serde_json::Map<String, Value> =
        (0..200_000).map(|at| (format!("key{at}"), json!(at))).collect();
    let long = with(completion("Hello"), json!({"n": 0, "metadata": many}));
    let mut readers: Vec<_> = (0..12).map(|_| server.connect()).collect();
    for reader in &mut readers {
        reader.send(&Ask::post(COMPLETIONS, &long).bytes()).unwrap();
    }
    let before = server.metrics();
    let start = Instant::now();
    let body = with(completion("Hello"), json!({"max_tokens": 1, "user": "x".repeat(300_000)}));
    server.post(COMPLETIONS, &body).good();
    let took = start.elapsed().as_secs_f64();
    readers.iter_mut().for_each(|reader| drop(reader.response().unwrap().names("n")));
    let told = grown(&before, &server.metrics(), "roundhouse_time_to_first_token_seconds_sum", &[]);
    assert!(took > 0.3, "the test shows a wait: {took} s");
    assert!(told > 0.7 * took && told < took, "{told} s of {took} s");
}

fn gauges_follow_the_load() {
    let server = Server::start(&["--lanes", "2", "--queue", "4"]);
    let mut running: Vec<_> = (0..2).map(|_| server.begin(CHAT, &unending())).collect();
    running.iter_mut().for_each(|stream| stream.read(3));
    let (lanes, waiting, pages) = server.load();
    assert_eq!((lanes, waiting), (2.0, 0.0));
    assert!(pages >= 2.0, "{pages}");
    let mut waits = server.connect();
    waits.send(&Ask::post(CHAT, &chat("Hello!")).bytes()).unwrap();
    server.reaches(Duration::from_secs(2), |(lanes, waiting, _)| (lanes, waiting) == (2.0, 1.0));
    drop(running);
    waits.response().unwrap().good();
    server.idle_within(Duration::from_secs(2));
}
