//! What serving costs beside the model: processor time of the server's own threads for each streamed token.

use std::thread;
use std::time::{Duration, Instant};

use crate::prompts::{CHAT, endless};
use crate::server::{Server, device};

crate::tests! {
    ;
    a_streamed_token_costs_under_100_us_at_16_streams,
    a_server_with_nothing_to_do_does_nothing,
}

/// Threads that compute the model, the second those of the pool that has the name of its maker; all others serve.
const COMPUTES: [&str; 2] = ["engine", "engine-load"];

fn cpu(server: &Server) -> (Duration, Duration) {
    let threads = server.threads();
    let of = |computes: bool| {
        threads
            .values()
            .filter(|thread| COMPUTES.contains(&thread.name.as_str()) == computes)
            .map(|thread| thread.cpu)
            .sum()
    };
    (of(false), of(true))
}

fn a_streamed_token_costs_under_100_us_at_16_streams() {
    let server = Server::start(&[]);
    let most = 900;
    // Buffers and caches are there before it counts.
    server.stream(CHAT, &endless(50));
    let (before, start) = (cpu(&server), Instant::now());
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let streamed = server.stream(CHAT, &endless(most));
                assert_eq!(streamed.usage.expect("usage")["completion_tokens"], most);
            });
        }
    });
    let after = cpu(&server);
    let tokens = 16 * most;
    let (own, computing) = (after.0 - before.0, after.1 - before.1);
    let names: Vec<String> = server.threads().into_values().map(|thread| thread.name).collect();
    println!(
        "{tokens} tokens in {:?}: {:?} a token for serving, {:?} for computing; threads {names:?}",
        start.elapsed(),
        own / tokens,
        computing / tokens,
    );
    // Where CUDA computes, the engine's thread has little to do.
    let share = if device() == "host" { 4 } else { 1 };
    assert!(
        computing > share * own,
        "the threads that compute are told apart by name: {own:?} and {computing:?} of {names:?}"
    );
    assert!(own > Duration::ZERO, "something serves: {names:?}");
    assert!(own / tokens < Duration::from_micros(100), "{:?}", own / tokens);
}

fn a_server_with_nothing_to_do_does_nothing() {
    let server = Server::start(&[]);
    server.stream(CHAT, &endless(50));
    let _idle: Vec<_> = (0..20).map(|_| server.connect()).collect();
    let before = cpu(&server);
    thread::sleep(Duration::from_secs(3));
    let after = cpu(&server);
    let used = after.0 + after.1 - before.0 - before.1;
    assert!(used <= Duration::from_millis(60), "{used:?} in 3 s of rest");
}
