//! A hundred clients of all kinds for two minutes: nothing is lost, everything is given back, and every reply is the
//! one that it is alone.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use runtime::receipts::Random;
use serde_json::json;

use crate::client::{Ask, Response};
use crate::events::Stream;
use crate::prompts::{CHAT, COMPLETIONS, Prompt, bytes_of, chat, completion, endless, with};
use crate::server::{Server, streamed};

crate::tests! {
    ;
    a_hundred_mixed_clients_for_two_minutes,
}

const CLIENTS: u64 = 100;
const LENGTH: Duration = Duration::from_secs(120);
/// What caches and the allocator may keep, on top of what a first half minute of the same load left.
const KEPT_BYTES: u64 = 24 << 20;

/// Short and of every wire, so that many come and go.
fn prompts() -> Vec<Prompt> {
    let chats = [
        ("greedy", chat("Spell garden backwards.")),
        ("story", chat("Tell me a short story about Mia the fox and the lamp.")),
        ("thinking", with(chat("What is 46 + 37?"), json!({"enable_thinking": true}))),
        ("stop", with(chat("Count from 5 to 16."), json!({"stop": ", 10"}))),
        ("sampled", with(endless(40), json!({"temperature": 1.2, "seed": 4}))),
        ("several", with(endless(20), json!({"temperature": 1, "seed": 5, "n": 3}))),
        ("bytes", bytes_of("🙂é", 6, 40)),
        ("logprobs", with(endless(20), json!({"logprobs": true, "top_logprobs": 5}))),
        ("long prompt", with(chat(&"The radio of Henry is yellow. ".repeat(60)), json!({"max_tokens": 10}))),
    ];
    let texts = [
        ("text", completion("Once upon a time")),
        ("texts", with(completion(""), json!({"prompt": ["5, 6, 7,", "Once"], "temperature": 1, "seed": 8}))),
    ];
    let chats = chats.into_iter().map(|(name, body)| Prompt { name, path: CHAT, body });
    chats.chain(texts.into_iter().map(|(name, body)| Prompt { name, path: COMPLETIONS, body })).collect()
}

/// What became of requests.
#[derive(Default)]
struct Tally {
    counts: Mutex<BTreeMap<&'static str, u64>>,
    wrong: Mutex<Vec<String>>,
}

impl Tally {
    fn count(&self, what: &'static str) {
        *self.counts.lock().unwrap().entry(what).or_default() += 1;
    }

    /// A refusal for want of room. The client comes again later, though sooner than it was told.
    fn full(&self) {
        self.count("full");
        thread::sleep(Duration::from_millis(100));
    }

    fn wrong(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }

    /// Compares a whole reply or a refusal for want of room.
    fn whole(&self, name: &str, response: &Response, expected: &[String]) {
        if response.status() == 429 {
            return self.full();
        }
        if response.status() != 200 {
            return self.wrong(format!("{name}: {} {}", response.status(), response.text()));
        }
        let reply = response.json();
        let shas: Vec<&str> = reply["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["token_sha"].as_str().unwrap_or("none"))
            .collect();
        if shas != *expected {
            self.wrong(format!("{name}: {shas:?} and not {expected:?}"));
        }
        self.count("whole");
    }
}

/// One client: what it does is a function of its number.
fn client(server: &Server, number: u64, prompts: &[(Prompt, Vec<String>)], stop: &AtomicBool, tally: &Tally) {
    let mut random = Random::new(number);
    let (mut kept, mut used) = (server.connect(), Instant::now());
    while !stop.load(Ordering::Relaxed) {
        if used.elapsed() > Duration::from_secs(15) {
            // The server closes what is idle for longer than --header-timeout.
            kept = server.connect();
            used = Instant::now();
        }
        let (prompt, expected) = &prompts[random.below(prompts.len() as u32) as usize];
        let name = prompt.name;
        let ask = Ask::post(prompt.path, &prompt.body);
        let stream_ask = Ask::post(prompt.path, &streamed(&prompt.body));
        match random.below(10) {
            0 | 1 => match kept.try_ask(&ask) {
                Ok(response) => tally.whole(name, &response, expected),
                Err(error) => {
                    tally.wrong(format!("{name}, kept connection: {error}"));
                    kept = server.connect();
                }
            },
            2 => match server.connect().try_ask(&ask) {
                Ok(response) => tally.whole(name, &response, expected),
                Err(error) => tally.wrong(format!("{name}: {error}")),
            },
            kind @ 3..=5 => {
                let mut connection = server.connect();
                connection.send(&stream_ask.bytes()).expect("a request is taken");
                match Stream::try_new(connection) {
                    Err(error) if error.to_string().contains("429") => tally.full(),
                    Err(error) => tally.wrong(format!("{name}, streamed: {error}")),
                    Ok(mut stream) => {
                        if kind == 5 {
                            // A slow reader: the reply waits in buffers meanwhile.
                            thread::sleep(Duration::from_millis(300));
                        }
                        finish(tally, name, &mut stream, expected);
                    }
                }
            }
            6 => {
                let mut connection = server.connect();
                connection.send(&stream_ask.bytes()).expect("a request is taken");
                match Stream::try_new(connection) {
                    Err(_) => tally.full(),
                    Ok(mut stream) => {
                        for _ in 0..random.below(12) {
                            if !stream.take_one().unwrap_or(false) {
                                break;
                            }
                        }
                        if random.below(2) == 0 {
                            stream.connection.half_close();
                            thread::sleep(Duration::from_millis(50));
                        }
                        tally.count("left a stream");
                    }
                }
            }
            7 => {
                let mut connection = server.connect();
                connection.send(&ask.bytes()).expect("a request is taken");
                thread::sleep(Duration::from_millis(u64::from(random.below(200))));
                tally.count("left a reply");
            }
            8 => {
                let bytes = ask.bytes();
                let mut connection = server.connect();
                let cut = random.below(bytes.len() as u32) as usize;
                connection.send(&bytes[..cut]).expect("bytes are taken");
                thread::sleep(Duration::from_millis(20));
                tally.count("left a request");
            }
            _ => {
                let bad =
                    Ask::post(prompt.path, &with(prompt.body.clone(), json!({"reasoning_efort": "low"})));
                match kept.try_ask(&bad) {
                    Ok(response) if response.status() == 400 => tally.count("bad"),
                    Ok(response) if response.status() == 429 => tally.full(),
                    Ok(response) => tally.wrong(format!("a bad request: {}", response.status())),
                    Err(error) => {
                        tally.wrong(format!("a bad request: {error}"));
                        kept = server.connect();
                    }
                }
            }
        }
    }
}

fn finish(tally: &Tally, name: &str, stream: &mut Stream, expected: &[String]) {
    match stream.rest_of() {
        Err(error) => tally.wrong(format!("{name}, streamed: {error}")),
        Ok(streamed) if !streamed.done => {
            tally.wrong(format!("{name}: a stream without an end, {:?}", streamed.error))
        }
        Ok(streamed) => {
            let shas: Vec<String> = streamed
                .choices
                .values()
                .map(|choice| choice.token_sha.clone().unwrap_or_default())
                .collect();
            if shas != *expected {
                tally.wrong(format!("{name}, streamed: {shas:?} and not {expected:?}"));
            }
            tally.count("streamed");
        }
    }
}

/// Runs the clients for a while.
fn play(server: &Server, prompts: &[(Prompt, Vec<String>)], length: Duration, first: u64) -> Tally {
    let (tally, stop) = (Tally::default(), AtomicBool::new(false));
    let alive = AtomicU64::new(0);
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (tally, stop, alive) = (&tally, &stop, &alive);
            scope.spawn(move || {
                client(server, first + number, prompts, stop, tally);
                alive.fetch_add(1, Ordering::Relaxed);
            });
        }
        let start = Instant::now();
        while start.elapsed() < length {
            thread::sleep(Duration::from_millis(250));
            if server.get("/health").status() != 200 {
                tally.wrong("health failed under load".into());
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(alive.load(Ordering::Relaxed), CLIENTS);
    tally
}

fn a_hundred_mixed_clients_for_two_minutes() {
    let server = Server::start(&["--context", "1024", "--queue", "128", "--write-timeout", "5"]);
    let alone = |prompt: &Prompt| -> Vec<String> {
        let reply = server.post(prompt.path, &prompt.body).good();
        reply["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["token_sha"].as_str().unwrap().to_owned())
            .collect()
    };
    let prompts: Vec<(Prompt, Vec<String>)> = prompts()
        .into_iter()
        .map(|prompt| {
            let shas = alone(&prompt);
            (prompt, shas)
        })
        .collect();
    let before_all = server.metrics();
    let warm = play(&server, &prompts, LENGTH / 4, 0);
    server.idle_within(Duration::from_secs(10));
    thread::sleep(Duration::from_secs(1));
    let (bytes, files, threads) = (server.resident_bytes(), server.open_files(), server.threads().len());
    let tally = play(&server, &prompts, LENGTH, 1000);
    let took = server.idle_within(Duration::from_secs(10));
    thread::sleep(Duration::from_secs(1));

    let counts = tally.counts.lock().unwrap().clone();
    let metrics = server.metrics();
    println!(
        "{counts:?}; idle after {took:?}; memory {bytes} -> {} bytes, files {files} -> {}, threads {threads} -> {}",
        server.resident_bytes(),
        server.open_files(),
        server.threads().len()
    );
    for tally in [&warm, &tally] {
        let wrong = tally.wrong.lock().unwrap();
        assert!(
            wrong.is_empty(),
            "{} of many went wrong, such as {:#?}",
            wrong.len(),
            &wrong[..wrong.len().min(10)]
        );
    }
    for kind in ["whole", "streamed", "left a stream", "left a reply", "left a request", "bad"] {
        assert!(counts.get(kind).is_some_and(|count| *count > 50), "{kind}: {counts:?}");
    }
    assert!(server.resident_bytes() < bytes + KEPT_BYTES, "{bytes} bytes became {}", server.resident_bytes());
    assert!(server.open_files() <= files + 2, "{files} files became {}", server.open_files());
    assert!(server.threads().len() <= threads + 4);
    assert_eq!(metrics.value("roundhouse_pages_free"), before_all.value("roundhouse_pages"));
    for (prompt, expected) in &prompts {
        assert_eq!(alone(prompt), *expected, "{}", prompt.name);
    }
}
