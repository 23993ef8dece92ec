//! Lanes that join and leave every few ids, 1 to 16 at a time: no capture after the start, and flat memory.

use benches::{Crowd, measuring, note, options, prompt, small};
use planner::{Kind, RequestId};
use runtime::receipts::Random;

/// Decode rounds; prompt passes come on top.
const ROUNDS: u64 = 10_000;
/// Decode rounds when only the answer is wanted.
const TEST_ROUNDS: u64 = 400;
const LANES: u32 = 16;

fn main() {
    let rounds = if measuring() { ROUNDS } else { TEST_ROUNDS };
    let mut crowd = Crowd::open(&small(), &options(LANES as u16, 512));
    let mut random = Random::new(17);
    let warm = crowd.engine.stats();
    assert_eq!((warm.graphs, warm.lanes, warm.rounds.replayed), (LANES as usize, 0, 0));
    let device = crowd.engine.runner().device.clone();
    let memory = device.used_bytes();
    let resident = resident_bytes();

    let (mut decoded, mut requests, mut cancelled) = (0, 0u64, 0u64);
    let mut seen = [0u64; LANES as usize + 1];
    let mut wanted = LANES as usize;
    while decoded < rounds {
        // Now and then another number of lanes is wanted, so that all of 1 to 16 come up.
        if random.below(24) == 0 {
            wanted = 1 + random.below(LANES) as usize;
        }
        let state = crowd.engine.state();
        let (live, waiting) = (state.lanes().count(), state.waiting().len());
        if live + waiting < wanted {
            let ids = prompt(random.below(1000) as usize, 1 + random.below(70) as usize);
            crowd.submit(ids, 1 + random.below(100));
            requests += 1;
        } else if live > wanted {
            let ids: Vec<RequestId> = state.lanes().map(|lane| lane.request().id).collect();
            crowd.engine.cancel(ids[random.below(ids.len() as u32) as usize]);
            cancelled += 1;
        }
        let settled = crowd.settled().expect("a lane is wanted");
        if settled.round.kind == Kind::Decode {
            decoded += 1;
            seen[settled.round.lanes.len()] += 1;
        }
        assert_eq!(device.used_bytes(), memory, "device memory after {decoded} decode rounds");
        crowd.listen();
    }
    crowd.finish();

    let stats = crowd.engine.stats();
    let grown = resident_bytes().zip(resident).map(|(now, before)| now.saturating_sub(before));
    println!(
        "{decoded} decode rounds, {requests} requests, {cancelled} of them called off; {} ids",
        stats.tokens
    );
    println!("rounds: {}", stats.rounds);
    println!("bank: {:?}; {} graphs of {} bytes", stats.bank, stats.graphs, stats.graph_bytes);
    println!("decode rounds by lanes: {:?}", &seen[1..]);
    println!("device memory: {memory} bytes before and after; the process grew by {grown:?} bytes");
    assert_eq!(stats.bank.captured, warm.bank.captured, "captures after the start");
    assert_eq!((stats.rounds.captured, stats.bank.first_sight, stats.bank.capture_failed), (0, 0, 0));
    assert_eq!((stats.graphs, stats.graph_bytes), (warm.graphs, warm.graph_bytes));
    assert_eq!((stats.pages_free, stats.lanes), (stats.pages_total, 0), "all lanes and pages are free");
    assert!(stats.rounds.replayed >= rounds && stats.rounds.eager.keys().eq([&"prompt pass"]));
    assert!(!measuring() || seen[1..].iter().all(|rounds| *rounds > 0), "1 to 16 lanes: {seen:?}");
    note("churn", "decode rounds", "rounds", decoded as f64);
    note("churn", "requests", "requests", requests as f64);
    note("churn", "captures after the start", "captures", (stats.bank.captured - warm.bank.captured) as f64);
    note("churn", "growth of device memory", "bytes", device.used_bytes() as f64 - memory as f64);
}

/// Bytes of this process in memory, where the system tells.
fn resident_bytes() -> Option<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}
