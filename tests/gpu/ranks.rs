//! Collectives of two ranks, over NCCL and pushed over peer memory. A rank is a process with a device of its own: this program, started again.

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use graph::Exchange::{self, Auto, Nccl, Push};
use graph::host::HostOptions;
use graph::{Arena, Communicator, CudaOptions, Device, Emission, Error, Event, Exec, Recording, Stream};
use tests::process::{Process, part, say};

use crate::pair;
use crate::rig::{Add, AddArgs};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("collectives_move_the_right_bytes_at_every_size", || ranks("bytes", Nccl)),
    ("pushed_gathers_move_the_right_bytes_at_every_size", || ranks("bytes", Push)),
    ("captured_and_replayed_is_eager_byte_for_byte", || ranks("replays", Nccl)),
    ("pushed_captured_and_replayed_is_eager_byte_for_byte", || ranks("replays", Push)),
    ("gathers_of_all_sizes_in_any_order_are_those_of_nccl", || ranks("mixed", Push)),
    ("epochs_start_anew", || ranks("wrap", Push)),
    ("only_the_first_stream_has_collectives", || ranks("streams", Auto)),
    ("another_library_on_the_other_rank_is_refused", || ranks("libraries", Auto)),
    ("other_means_on_the_other_rank_are_refused", || ranks("differ", Auto)),
    ("what_carries_gathers_is_said_and_chosen_alike", || ranks("chosen", Auto)),
    ("every_means_is_measured", || ranks("times", Auto)),
    ("close_says_how_many_hold_it_and_both_ranks_end_in_order", || ranks("close", Nccl)),
    ("close_ends_push_in_order_and_its_memory_is_free", || ranks("close", Push)),
    ("a_stop_reaches_both_ranks", || ranks("stop", Nccl)),
    ("a_stop_reaches_both_ranks_that_push", || ranks("stop", Push)),
    ("a_stop_reaches_pushed_gathers_that_wait", || ranks("waiting", Push)),
    ("pushed_gathers_end_by_themselves_after_the_wait", || ranks("late", Push)),
    ("what_waits_for_a_killed_peer_ends_and_the_device_is_well", || ranks("killed", Nccl)),
    ("pushed_gathers_that_wait_for_a_killed_peer_end_and_the_device_is_well", || ranks("killed", Push)),
];

/// What NCCL must find (`graph::nccl_environment` is asked in each rank whether that is all).
const ENVIRONMENT: [(&str, &str); 2] = [("NCCL_GRAPH_MIXING_SUPPORT", "0"), ("NCCL_NVLS_ENABLE", "0")];
/// What one test may take.
const LIMIT: Duration = Duration::from_secs(120);
/// What one step of two live ranks may take.
const WAIT: Duration = Duration::from_secs(40);
/// What one step may take where a gather is to wait for so long.
const LATE: Duration = Duration::from_secs(15);
/// What pushed gathers may take to see a stop word: a replay of 96 that wait is through within milliseconds.
const DRAIN: Duration = Duration::from_millis(250);
/// What ending may take.
const END: Duration = Duration::from_secs(10);

/// What these tests lack on this machine.
pub(crate) fn lacks() -> Option<String> {
    match Device::cuda_count() {
        Ok(count) if count < 2 => Some(format!("two ranks need 2 CUDA devices and there are {count}")),
        Ok(_) => graph::nccl_library().err().map(|_| "NCCL is not usable".into()),
        Err(_) => Some("the CUDA driver is not usable".into()),
    }
}

/// Does a rank's part of a test if this process was started for that: `CASE EXCHANGE RANK PORT` says which test, what
/// carries gathers there, and which rank. Rank 0 tells the port.
pub(crate) fn child() -> Option<ExitCode> {
    let part = part()?;
    let [case, exchange, rank, port] = part.split(' ').collect::<Vec<_>>()[..] else { panic!("{part}") };
    let exchange = [Auto, Nccl, Push].into_iter().find(|known| known.to_string() == exchange);
    let exchange = exchange.expect("a means");
    let rank: usize = rank.parse().expect("a rank");
    if pair::child(case, exchange, rank, port) {
        return Some(ExitCode::SUCCESS);
    }
    let stream = match rank {
        0 => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            say(&listener.local_addr().unwrap().port().to_string());
            listener.accept().unwrap().0
        }
        _ => TcpStream::connect(("127.0.0.1", port.parse().expect("a port"))).unwrap(),
    };
    let wait = if case == "late" { LATE } else { WAIT };
    let side = Communicator::over(stream, rank, wait).unwrap();
    match case {
        "bytes" => bytes(Rank::new(side, exchange)),
        "replays" => replays(Rank::new(side, exchange)),
        "mixed" => mixed(Rank::new(side, exchange)),
        "wrap" => wrap(Rank::new(side, exchange)),
        "streams" => streams(side),
        "libraries" => libraries(side),
        "differ" => differ(side),
        "chosen" => chosen(Rank::new(side, exchange)),
        "times" => times(Rank::new(side, exchange)),
        "close" => close(Rank::new(side, exchange)),
        "stop" => stop(Rank::new(side, exchange)),
        "waiting" => waiting(Rank::new(side, exchange)),
        "late" => late(Rank::new(side, exchange)),
        "killed" => killed(Rank::new(side, exchange)),
        other => panic!("no test is called {other}"),
    }
    Some(ExitCode::SUCCESS)
}

/// Runs both ranks of a test; whatever one of them finds wrong is on its standard error.
pub(crate) fn ranks(case: &str, exchange: Exchange) {
    let started = Instant::now();
    let start =
        |rank, port: &str| Process::start(&format!("{case} {exchange} {rank} {port}"), &[], &ENVIRONMENT);
    let mut first = start(0, "-");
    let mut second = start(1, &first.line());
    let mortal = case == "killed";
    if mortal {
        assert_eq!(second.line(), "kill me");
        second.kill();
    }
    let mut left = vec![("rank 0", &mut first)];
    if !mortal {
        left.push(("rank 1", &mut second));
    }
    while !left.is_empty() {
        left.retain_mut(|(name, process)| match process.ended() {
            None => true,
            Some(status) => {
                let meant = case.contains(&name.replace("rank ", "dies-"));
                assert_eq!(status.success(), !meant, "{name} of `{case}`: {status}; see above");
                false
            }
        });
        let names: Vec<_> = left.iter().map(|(name, _)| *name).collect();
        assert!(started.elapsed() < LIMIT, "{names:?} of `{case}` did not end within {LIMIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// One rank on its device, with data in which byte `i` is `i * 13 + rank`.
struct Rank {
    device: Device,
    stream: Stream,
    end: Communicator,
    data: Arena,
}

const DATA: usize = 4 << 20;

fn device(rank: usize) -> Device {
    let device = Device::cuda_with(CudaOptions { ordinal: rank, poison: true }).unwrap();
    device.prepare(&crate::rig::KERNELS).unwrap();
    device
}

impl Rank {
    fn new(side: Communicator, exchange: Exchange) -> Rank {
        assert_eq!(graph::nccl_environment(), [], "the test program sets all that is needed");
        let (device, host_epoch, begun) = (device(side.rank()), side.epoch(), Instant::now());
        eprintln!("rank {}: {} MiB are free before it", side.rank(), device.free_bytes() >> 20);
        let end = side.on_cuda_with(&device, exchange).unwrap();
        assert_ne!(end.epoch(), host_epoch);
        eprintln!("rank {}: {} after {:.1?}", end.rank(), end.nccl().unwrap(), begun.elapsed());
        eprintln!("rank {}: {}", end.rank(), end.means());
        let data = device.arena("data", DATA).unwrap();
        let rank = Rank { stream: device.stream(), device, end, data };
        rank.refresh();
        rank
    }

    fn fresh(rank: usize) -> Vec<u8> {
        (0..DATA).map(|i| (i * 13 + rank) as u8).collect()
    }

    fn refresh(&self) {
        self.data.write(self.data.base(), &Rank::fresh(self.end.rank())).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        self.data.read(self.data.base(), DATA).unwrap()
    }

    fn queue(&self, emission: Emission) {
        self.stream.run(emission, std::slice::from_ref(&self.data)).unwrap();
    }

    fn run(&self, emission: Emission) {
        self.queue(emission);
        self.stream.synchronize().unwrap();
    }

    fn capture(&self, emission: Emission) -> Exec {
        let recording = Recording::begin(&self.stream, "round").unwrap();
        self.queue(emission);
        recording.finish(vec![]).unwrap()
    }

    fn gather(&self, at: usize, bytes: usize) -> Emission {
        self.gather_by(&self.end, at, bytes)
    }

    fn gather_by(&self, end: &Communicator, at: usize, bytes: usize) -> Emission {
        let mut emission = Emission::new();
        emission.gather(end, self.data.base().byte_add(at), bytes).unwrap();
        emission
    }

    /// `from` sends what lies at `at`, and the other rank receives it at `to`.
    fn pass(&self, from: usize, at: usize, to: usize, bytes: usize) -> Emission {
        let (mut emission, data) = (Emission::new(), self.data.base());
        match self.end.rank() == from {
            true => emission.send(&self.end, data.byte_add(at), bytes).unwrap(),
            false => emission.receive(&self.end, data.byte_add(to), bytes).unwrap(),
        }
        emission
    }

    /// Adds to `words` words at `at` what differs from rank to rank.
    fn change(&self, emission: &mut Emission, at: usize, words: usize, value: u32) {
        let to = self.data.base().byte_add(at).cast();
        let value = value.wrapping_mul(2_654_435_761).wrapping_add(self.end.rank() as u32);
        emission.launch::<Add>(&AddArgs { to, from: to, count: words as u32, value }).unwrap();
    }

    /// Whether gathers are pushed unless a handle says otherwise.
    fn pushes(&self) -> bool {
        self.end.means().starts_with("push ")
    }

    /// Ends in order, with the peer; gives the device, whose memory is free then unless others hold some.
    fn close(self) -> Device {
        let Rank { device, stream, end, data } = self;
        drop((stream, data));
        let begun = Instant::now();
        end.clone().close(END).unwrap();
        assert_eq!(end.ended(), Some("it was closed"));
        eprintln!("rank {} closed after {:.1?}", end.rank(), begun.elapsed());
        device
    }
}

/// So much device memory is used, as soon as the helpers of a communicator that has ended are gone.
fn is_used(device: &Device, bytes: usize) {
    let begun = Instant::now();
    while device.used_bytes() != bytes {
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{} bytes are used, not {bytes}",
            device.used_bytes()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

fn bytes(rank: Rank) {
    const SIZES: [usize; 14] = [1, 2, 3, 4, 5, 7, 33, 255, 4096, 10_240, 65_537, 81_920, 999_999, 1 << 20];
    let own = rank.end.rank();
    for bytes in SIZES {
        for at in [0, 4, 11] {
            rank.refresh();
            rank.run(rank.gather(at, bytes));
            let mut expected = Rank::fresh(own);
            (0..2).for_each(|part| {
                let range = at + part * bytes..at + (part + 1) * bytes;
                expected[range.clone()].copy_from_slice(&Rank::fresh(part)[range]);
            });
            assert!(rank.bytes() == expected, "rank {own}: gather of {bytes} bytes at {at}");
        }
        for (from, at, to) in [(0, 0, 2 << 20), (1, 0, 2 << 20), (0, 11, (2 << 20) + 5), (1, 6, 2 << 20)] {
            rank.refresh();
            rank.run(rank.pass(from, at, to, bytes));
            let mut expected = Rank::fresh(own);
            if own != from {
                expected[to..to + bytes].copy_from_slice(&Rank::fresh(from)[at..at + bytes]);
            }
            assert!(rank.bytes() == expected, "rank {own}: {bytes} bytes from rank {from} at {at}");
        }
    }
    is_used(&rank.close(), 0);
}

/// Numbers that both ranks draw alike.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

fn replays(rank: Rank) {
    // A round like those of a model: own parts change, then they are gathered; 12 collectives.
    let mut first = Emission::new();
    for (step, bytes) in [5120, 20_480, 81_920, 4, 327_680, 40].into_iter().enumerate() {
        let at = step << 18;
        rank.change(&mut first, at, 2 * bytes / 4, step as u32 + 1);
        first.append(&rank.gather(at, bytes));
        rank.change(&mut first, at, 2 * bytes / 4, step as u32 + 7);
        first.append(&rank.gather(at, bytes));
    }
    let mut second = Emission::new();
    for step in 0..4 {
        rank.change(&mut second, 0, 4096, step + 40);
        second.append(&rank.pass(step as usize % 2, 64 * step as usize, 2 << 20, 10_240));
        second.append(&rank.gather(1 << 19, 1001));
    }
    let execs = [rank.capture(first.clone()), rank.capture(second.clone())];
    for (exec, emission) in execs.iter().zip([&first, &second]) {
        // With the mixing of graphs left on, there are nodes of events beside those of kernels.
        assert_eq!(exec.nodes(), emission.len(), "kernels alone:\n{exec}");
        eprintln!("rank {}: {} nodes, {:?}", rank.end.rank(), exec.nodes(), exec.times());
    }
    let play = |captured: bool, seed: u64| {
        rank.refresh();
        let mut draws = Draws(seed);
        for _ in 0..60 {
            match draws.below(5) {
                choice @ (0 | 1) if captured => rank.stream.replay(&execs[choice]).unwrap(),
                0 => rank.queue(first.clone()),
                1 => rank.queue(second.clone()),
                2 => {
                    rank.queue(rank.pass(draws.below(2), draws.below(1000), 3 << 20, 1 + draws.below(50_000)))
                }
                3 => rank.queue(rank.gather(draws.below(5000), 1 + draws.below(300_000))),
                _ => {
                    let mut emission = Emission::new();
                    rank.change(&mut emission, 4 * draws.below(1000), 1 + draws.below(9000), 3);
                    rank.queue(emission);
                }
            }
        }
        rank.stream.synchronize().unwrap();
        rank.bytes()
    };
    for seed in 0..8 {
        let (eager, captured) = (play(false, seed), play(true, seed));
        let differs = eager.iter().zip(&captured).position(|(eager, captured)| eager != captured);
        assert_eq!(differs, None, "rank {}, seed {seed}: the first byte that differs", rank.end.rank());
        assert!(eager != Rank::fresh(rank.end.rank()));
    }
    drop(execs);
    drop((first, second));
    is_used(&rank.close(), 0);
}

/// Gathers whose blocks' epochs part ways: pushed, pushed from graphs, and NCCL's. Some are too large to be pushed.
fn mixed(rank: Rank) {
    const GATHERS: usize = 10_000;
    const PART: usize = 500;
    let by_nccl = rank.end.carried_by(Nccl).unwrap();
    let rounds = |end: &Communicator| -> Vec<Emission> {
        let mut draws = Draws(7);
        let round = |_| {
            let mut emission = Emission::new();
            for step in 0..PART {
                let (most, unit) = match draws.below(100) {
                    0 => (280_000, 8),
                    1..20 => (20_000, 8),
                    20..80 => (1280, 8),
                    80..90 => (1000, 4),
                    _ => (3000, 1),
                };
                let bytes = unit * (1 + draws.below(most));
                let bytes = bytes.min(DATA / 2 - 64);
                let at = unit * draws.below(64 / unit);
                if step % 5 == 0 {
                    rank.change(&mut emission, 0, 100_000, draws.below(1000) as u32);
                }
                emission.append(&rank.gather_by(end, at, bytes));
            }
            emission
        };
        (0..GATHERS / PART).map(round).collect()
    };
    let bytes_after = |play: &dyn Fn()| {
        rank.refresh();
        let begun = Instant::now();
        play();
        rank.stream.synchronize().unwrap();
        assert_eq!(rank.end.ended(), None);
        eprintln!("rank {}: {GATHERS} gathers in {:.1?}", rank.end.rank(), begun.elapsed());
        rank.bytes()
    };
    let (pushed, carried) = (rounds(&rank.end), rounds(&by_nccl));
    let digests = |rounds: &[Emission]| rounds.iter().map(Emission::digest).collect::<Vec<_>>();
    assert_ne!(digests(&pushed), digests(&carried), "what carries a gather is part of a digest");
    let queue = |rounds: &[Emission]| rounds.iter().for_each(|round| rank.queue(round.clone()));
    let expected = bytes_after(&|| queue(&carried));
    let eager = bytes_after(&|| queue(&pushed));
    let execs: Vec<Exec> = pushed.iter().map(|round| rank.capture(round.clone())).collect();
    let replay = || execs.iter().for_each(|exec| rank.stream.replay(exec).unwrap());
    let replayed = bytes_after(&replay);
    for (name, found) in [("pushed", eager), ("replayed", replayed)] {
        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(differs, None, "rank {}, {name}: the first byte that differs", rank.end.rank());
    }
    assert!(expected != Rank::fresh(rank.end.rank()));
    drop((pushed, carried, execs, by_nccl));
    is_used(&rank.close(), 0);
}

/// Both ranks are here, and nothing is under way on either that came before.
fn meet(rank: &Rank) {
    let by_nccl = rank.end.carried_by(Nccl).unwrap();
    rank.run(rank.gather_by(&by_nccl, DATA - 64, 8));
}

fn wrap(rank: Rank) {
    const SMALL: usize = 64 * 256 * 8;
    const LARGE: usize = 1 << 20;
    let own = rank.end.rank();
    let byte = |i: usize, part: usize, turn: usize| (i * 13 + part * 101 + turn * 29) as u8;
    let turns = |name: &str, bytes: usize, first: usize, count: usize| {
        let exec = rank.capture(rank.gather(0, bytes));
        for turn in first..first + count {
            let mut words = vec![0xee; 2 * bytes];
            (0..bytes).for_each(|i| words[own * bytes + i] = byte(i, own, turn));
            rank.data.write(rank.data.base(), &words).unwrap();
            rank.stream.replay(&exec).unwrap();
            rank.stream.synchronize().unwrap();
            assert_eq!(rank.end.ended(), None);
            let found: Vec<u8> = rank.data.read(rank.data.base(), 2 * bytes).unwrap();
            let wrong = (0..2 * bytes).find(|&i| found[i] != byte(i % bytes, i / bytes, turn));
            assert_eq!(wrong, None, "rank {own}, {name}, turn {turn}: the first byte that is wrong");
        }
    };
    let plant = |epoch: u32| {
        meet(&rank);
        rank.end.plant_epochs(epoch).unwrap();
    };
    // Two epochs each, 1 to 16: all units of both slots are left with 15 and 16.
    plant(0);
    turns("before", LARGE, 0, 8);
    // All blocks, but a quarter of their units: over the last epoch and on, from 2 to 14.
    plant(u32::MAX - 9);
    turns("over the end", SMALL, 100, 9 + 13);
    // 15 and 16 again: what was left of the first must not pass for these.
    turns("after", LARGE, 200, 8);
    is_used(&rank.close(), 0);
}

fn differ(side: Communicator) {
    let [ours, theirs] = if side.rank() == 0 { [Push, Nccl] } else { [Nccl, Push] };
    let (own, peer) = (side.rank(), 1 - side.rank());
    let said = side.on_cuda_with(&device(own), ours).map(drop).unwrap_err().to_string();
    let wanted =
        format!("rank {own} wants gathers by `{ours}`, and rank {peer} by `{theirs}`; ask for the same");
    assert!(said.contains(&wanted), "{said}");
}

/// What was chosen is said in words, in the same on both ranks; what was not can be used all the same.
fn chosen(rank: Rank) {
    let said = rank.end.means().to_owned();
    let nccl = format!("NCCL {}", rank.end.nccl().unwrap().version);
    assert!(said.contains(&nccl) && said.contains(" us"), "{said}");
    let mut words = said.clone().into_bytes();
    words.resize(512, b' ');
    let part = |of: usize| rank.data.base().byte_add(512 * of);
    for exchange in [Auto, Nccl, Push] {
        rank.refresh();
        rank.data.write(part(rank.end.rank()), &words).unwrap();
        rank.run(rank.gather_by(&rank.end.carried_by(exchange).unwrap(), 0, 512));
        let found: Vec<u8> = rank.data.read(part(1 - rank.end.rank()), 512).unwrap();
        assert_eq!(String::from_utf8_lossy(&found).trim(), said, "{exchange}");
    }
    is_used(&rank.close(), 0);
}

fn times(rank: Rank) {
    let sizes = [5120, 10_240, 20_480, 65_536, 163_840, 512_000, 1 << 20];
    let times = rank.end.measure(&rank.stream, &sizes).unwrap();
    assert_eq!(times.len(), 2 * sizes.len());
    for time in times {
        let (own, graph::GatherTimes { bytes, exchange, eager, graph }) = (rank.end.rank(), time);
        eprintln!(
            "rank {own}: gather of {bytes:7} bytes by {exchange}: {eager:6.2} us eager, {graph:6.2} us in a graph"
        );
        assert!(eager.is_finite() && eager > 0.0 && graph.is_finite() && graph > 0.0);
    }
    is_used(&rank.close(), 0);
}

/// The reason for which a communicator was not used.
fn refusal(result: Result<(), Error>) -> String {
    match result {
        Err(Error::Communicator { doing, why }) => {
            assert!(doing.starts_with("run collectives of the communicator of rank "), "{doing}");
            why
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn streams(side: Communicator) {
    let host = side.clone();
    let rank = Rank::new(side, Auto);
    let keeps = [rank.data.clone()];
    let other = rank.device.stream();
    rank.run(rank.gather(0, 64));
    let exec = rank.capture(rank.gather(0, 64));
    let another = "this is another stream; use that one";
    assert!(refusal(other.run(rank.gather(0, 64), &keeps)).contains(another));
    assert!(refusal(other.replay(&exec)).contains(another));
    {
        let recording = Recording::begin(&other, "other").unwrap();
        assert!(refusal(other.run(rank.gather(0, 64), &keeps)).contains(another));
        match recording.finish(vec![]).err() {
            Some(Error::CaptureFailed { why, .. }) => assert!(why.contains(another), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    let mut of_host = Emission::new();
    of_host.gather(&host, rank.data.base(), 64).unwrap();
    assert!(refusal(rank.stream.run(of_host, &keeps)).starts_with("it is for a host device"));
    let stream = Device::host(HostOptions::default()).stream();
    assert!(refusal(stream.run(rank.gather(0, 64), &[])).starts_with("it is for a CUDA device"));
    let second = Device::cuda(rank.end.rank()).unwrap();
    assert!(refusal(second.stream().run(rank.gather(0, 64), &[])).contains("made for another device"));
    // Nothing of that was queued, and the stream that owns it goes on.
    rank.stream.replay(&exec).unwrap();
    rank.stream.synchronize().unwrap();
    drop(exec);
    drop((keeps, other, stream, second));
    is_used(&rank.close(), 0);
}

/// Rank 1 says in the first message of the setup that it has another library. It needs no library for that: the
/// message is 512 bytes, which are gathered: 1, the length of a text in two bytes, the text.
fn libraries(side: Communicator) {
    let other = "NCCL 2.0.1 with digest 0000";
    if side.rank() == 0 {
        let error = side.clone().on_cuda(&device(0)).map(drop).unwrap_err();
        let (said, own) = (error.to_string(), graph::nccl_library().unwrap());
        let parts = [
            "cannot make an NCCL communicator of rank 0: rank 0 has NCCL ",
            &own.version,
            &own.digest.to_string(),
            &format!("and rank 1 has {other}; install the same library for both"),
        ];
        parts.iter().for_each(|part| assert!(said.contains(part), "{said}"));
        assert!(side.ended().is_some());
        return;
    }
    let device = Device::host(HostOptions::default());
    let (stream, data) = (device.stream(), device.arena("message", 1024).unwrap());
    let mut message = vec![1, other.len() as u8, 0];
    message.extend_from_slice(other.as_bytes());
    message.resize(512, 0);
    data.write(data.base().byte_add(512), &message).unwrap();
    let mut emission = Emission::new();
    emission.gather(&side, data.base(), 512).unwrap();
    stream.run(emission, std::slice::from_ref(&data)).unwrap();
    stream.synchronize().unwrap();
    let theirs: Vec<u8> = data.read(data.base(), 512).unwrap();
    assert_eq!(theirs[0], 1);
    assert!(String::from_utf8_lossy(&theirs[3..]).starts_with("NCCL 2."));
}

fn close(rank: Rank) {
    let exec = rank.capture(rank.gather(0, 5120));
    let kept = rank.gather(0, 8);
    rank.stream.replay(&exec).unwrap();
    rank.stream.synchronize().unwrap();
    let soon = Duration::from_millis(200);
    let said = rank.end.clone().close(soon).unwrap_err().to_string();
    assert!(said.contains("2 graphs or emissions still hold its collectives; drop them first"), "{said}");
    drop(kept);
    let said = rank.end.clone().close(soon).unwrap_err().to_string();
    assert!(said.contains("1 graphs or emissions still hold its collectives"), "{said}");
    // Nothing has ended.
    assert_eq!(rank.end.ended(), None);
    rank.stream.replay(&exec).unwrap();
    // The stream holds the exec for its work, which runs while the close waits.
    drop(exec);
    let (end, stream) = (rank.end.clone(), rank.stream.clone());
    let device = rank.close();
    end.close(soon).expect("what is closed can be closed");
    stream.synchronize().unwrap();
    drop(stream);
    is_used(&device, 0);
}

fn stop(rank: Rank) {
    let exec = rank.capture(rank.gather(0, 5120));
    rank.stream.replay(&exec).unwrap();
    rank.stream.synchronize().unwrap();
    if rank.end.rank() == 1 {
        rank.end.stop("the test says so");
    }
    let reason = if rank.end.rank() == 1 { "it was stopped: the test says so" } else { "rank 1 is gone" };
    ended_within(&rank.end, Duration::from_secs(5));
    let replayed = refusal(rank.stream.replay(&exec));
    assert!(replayed.starts_with("it had ended: ") && replayed.contains(reason), "{replayed}");
    assert!(refusal(rank.stream.run(rank.gather(0, 8), &[])).contains(reason));
    drop(exec);
    let begun = Instant::now();
    rank.end.clone().close(END).unwrap();
    eprintln!("rank {}: aborted after {:.1?}", rank.end.rank(), begun.elapsed());
    assert!(rank.end.ended().unwrap().contains(reason), "the first reason stays");
    well(&rank);
}

fn ended_within(end: &Communicator, limit: Duration) {
    let begun = Instant::now();
    while end.ended().is_none() {
        assert!(begun.elapsed() < limit, "nothing ended the communicator within {limit:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The device still does what it is asked.
fn well(rank: &Rank) {
    rank.refresh();
    let mut emission = Emission::new();
    let (to, from) = (rank.data.base().byte_add(DATA / 2), rank.data.base());
    emission.copy(to, from, DATA / 2);
    rank.change(&mut emission, 0, 1000, 9);
    rank.run(emission);
    let fresh = Rank::fresh(rank.end.rank());
    assert!(rank.bytes()[DATA / 2..] == fresh[..DATA / 2] && rank.bytes()[..4000] != fresh[..4000]);
    assert_eq!(rank.device.arena("more", 1 << 20).unwrap().bytes(), 1 << 20);
}

/// Rounds of gathers, of which the peer has done the first few.
fn rounds(rank: &Rank) -> Exec {
    let mut round = Emission::new();
    (0..96).for_each(|step| round.append(&rank.gather(step * 11_000, 5120)));
    let exec = rank.capture(round);
    for _ in 0..5 {
        rank.stream.replay(&exec).unwrap();
    }
    rank.stream.synchronize().unwrap();
    assert_eq!(rank.end.ended(), None);
    exec
}

/// Queues rounds of which the peer does no part, so that the stream stays in a kernel; the event behind them.
fn alone(rank: &Rank, exec: &Exec) -> Event {
    let event = rank.device.event();
    for _ in 0..3 {
        rank.stream.replay(exec).unwrap();
    }
    rank.queue(rank.gather(0, 40));
    rank.stream.record(&event).unwrap();
    event
}

/// How long it takes until an event is reached.
fn reached_within(event: &Event, limit: Duration) -> Duration {
    let begun = Instant::now();
    while !event.reached() {
        assert!(begun.elapsed() < limit, "what waits did not end within {limit:?}");
        thread::yield_now();
    }
    begun.elapsed()
}

/// What is left of the memory of push after an end that was not in order: the buffer that the peer may still write.
const LEFT: usize = 2 << 20;

/// Closes after a stop, without the peer, and finds the device well.
fn close_alone(rank: Rank, exec: Exec) {
    let begun = Instant::now();
    rank.end.stop("the test goes on alone");
    drop(exec);
    rank.end.clone().close(END).unwrap();
    let ended = begun.elapsed();
    eprintln!("rank {}: closed after {ended:.1?}", rank.end.rank());
    assert!(ended < END);
    well(&rank);
    let left = if rank.pushes() { LEFT } else { 0 };
    let Rank { device, stream, end, data } = rank;
    let own = end.rank();
    drop((stream, data, end));
    is_used(&device, left);
    // What was released is freed at the next allocation.
    drop(device.arena("any", 1).unwrap());
    eprintln!("rank {own}: {} MiB are free after that", device.free_bytes() >> 20);
}

fn waiting(rank: Rank) {
    let exec = rounds(&rank);
    if rank.end.rank() == 0 {
        let event = alone(&rank, &exec);
        thread::sleep(Duration::from_millis(100));
        assert!(!event.reached(), "the peer does no part of it");
        rank.end.stop("the test says so");
        let took = reached_within(&event, DRAIN);
        eprintln!("rank 0: 289 gathers that waited ended {took:.1?} after the stop");
        rank.stream.synchronize().unwrap();
    }
    ended_within(&rank.end, END);
    let reason = if rank.end.rank() == 0 { "it was stopped: the test says so" } else { "rank 0 is gone" };
    assert!(rank.end.ended().unwrap().contains(reason), "{:?}", rank.end.ended());
    assert!(refusal(rank.stream.replay(&exec)).contains(reason));
    close_alone(rank, exec);
}

fn late(rank: Rank) {
    let exec = rounds(&rank);
    if rank.end.rank() == 0 {
        let begun = Instant::now();
        let event = alone(&rank, &exec);
        // Nobody ends this communicator but its own kernels, and the thread that finds that they did.
        let took = reached_within(&event, LATE + END);
        eprintln!("rank 0: 289 gathers that waited ended after {took:.1?}");
        assert!(begun.elapsed() >= LATE, "{took:?}");
        let why = rank.end.ended().expect("what waited is void, and that is known at once");
        assert!(why.contains("waited on the device for longer"), "{why}");
        assert!(refusal(rank.stream.replay(&exec)).contains(why));
    }
    ended_within(&rank.end, LATE + END);
    close_alone(rank, exec);
}

fn killed(rank: Rank) {
    let exec = rounds(&rank);
    if rank.end.rank() == 1 {
        say("kill me");
        thread::sleep(LIMIT);
        panic!("nobody killed this process");
    }
    let event = alone(&rank, &exec);
    ended_within(&rank.end, END);
    assert!(rank.end.ended().unwrap().contains("rank 1 is gone"), "{:?}", rank.end.ended());
    match rank.pushes() {
        true => {
            let took = reached_within(&event, DRAIN);
            eprintln!("rank 0: 289 gathers that waited ended {took:.1?} after the peer was missed");
        }
        false => assert!(!event.reached(), "nothing but an abort ends NCCL's kernels that wait for a peer"),
    }
    rank.end.stop("the peer is gone");
    let begun = Instant::now();
    close_alone(rank, exec);
    eprintln!("rank 0: all ended {:.1?} after the peer was missed", begun.elapsed());
    assert!(event.reached());
}
