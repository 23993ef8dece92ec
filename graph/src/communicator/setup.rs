//! How two ranks that have a host end make an NCCL communicator of it.
//!
//! Both go through the same steps, and after each tell each other how it went: identity of the library, the number
//! by which NCCL's ranks meet, NCCL's own start, and a test. What fails on one rank is said by both.

use std::sync::Arc;
use std::time::Duration;

use super::group::{Group, spawn, within};
use super::{Communicator, Means};
use crate::cuda::{Cuda, Handle, ID_BYTES, Nccl, nccl_environment};
use crate::device::{CudaDevice, Device};
use crate::emission::Emission;
use crate::error::{Error, Result};

/// What ranks tell each other: whether the sender can go on (1) or not (2), the length of the rest in two bytes, and
/// the rest.
const MESSAGE_BYTES: usize = 512;
const HEAD_BYTES: usize = 3;
const CAN: u8 = 1;
const CANNOT: u8 = 2;

/// How often the test does each collective.
const RUNS: usize = 100;
/// Words of each, in turn: NCCL's protocols differ by size, and each is to have run before the first capture.
const WORDS: [usize; 6] = [1, 3, 640, 10_240, 81_920, 262_144];
const MOST_WORDS: usize = WORDS[WORDS.len() - 1];

/// How long what failed halfway may take to end.
const CLEANUP: Duration = Duration::from_secs(5);

/// The NCCL end of the rank that has the host end `side`.
pub(super) fn join(side: Communicator, device: &Device) -> Result<Communicator> {
    let rank = side.rank();
    let refused =
        |why| Error::Communicator { doing: format!("make an NCCL communicator of rank {rank}"), why };
    if side.nccl().is_some() {
        return Err(refused("this one is one already".into()));
    }
    let joined = start(&side, device).and_then(|communicator| prove(communicator, device));
    joined.inspect_err(|why| side.end(why.clone())).map_err(refused)
}

/// Everything up to a communicator that has not been tried yet.
fn start(side: &Communicator, device: &Device) -> Result<Communicator, String> {
    let prepared = prepare(device);
    let identity = prepared.as_ref().map(|(_, nccl)| nccl.library.identity()).map_err(Clone::clone);
    agree(side, identity)?;
    let (cuda, nccl) = prepared?;
    let id = if side.rank() == 0 { nccl.unique_id().map(Vec::from) } else { Ok(Vec::new()) };
    let theirs = exchange(side, &id)?;
    let id = if side.rank() == 0 { id? } else { theirs };
    let id: [u8; ID_BYTES] = id
        .try_into()
        .map_err(|id: Vec<u8>| format!("rank 0 sent an id of {} bytes, not {ID_BYTES}", id.len()))?;
    let begun = {
        let (cuda, rank) = (cuda.clone(), side.rank());
        within(side.0.wait, "nccl-init", move || Handle::new(nccl, &cuda, rank, id))
    };
    let begun = begun.map(|handle| {
        let group = Group::new(side.clone(), cuda, handle);
        Communicator::with(side.rank(), side.0.wait, Means::Nccl(group))
    });
    let went = settle(side, begun.as_ref().map(drop).map_err(Clone::clone));
    let communicator = begun?;
    went.inspect_err(|why| abandon(&communicator, why))?;
    Ok(communicator)
}

/// Tries every collective, then watches the peer.
fn prove(communicator: Communicator, device: &Device) -> Result<Communicator, String> {
    let Means::Nccl(group) = &communicator.0.means else { unreachable!("it was made so") };
    let tested = {
        let (communicator, device) = (communicator.clone(), device.clone());
        within(communicator.0.wait, "nccl-test", move || test(&communicator, &device))
    };
    let tested = tested.map_err(|why| format!("the test of its collectives failed: {why}"));
    settle(&group.side, tested).inspect_err(|why| abandon(&communicator, why))?;
    group.disown();
    Group::watch(&communicator).inspect_err(|why| abandon(&communicator, why))?;
    Ok(communicator)
}

/// Tells the peer how a step went, and hears how its went.
fn settle(side: &Communicator, went: Result<(), String>) -> Result<(), String> {
    exchange(side, &went.map(|()| Vec::new())).map(drop)
}

/// Ends a communicator that one of the ranks cannot use, in the background: who asked for it learns now why there is
/// none.
fn abandon(communicator: &Communicator, why: &str) {
    communicator.stop(why);
    let communicator = communicator.clone();
    // What is not ended leaks, as any that is not closed.
    let _ = spawn("nccl-cleanup", move || drop(communicator.close(CLEANUP)));
}

/// What this rank needs before it can start.
fn prepare(device: &Device) -> Result<(Arc<Cuda>, &'static Nccl), String> {
    let Device::Cuda(CudaDevice(cuda)) = device else {
        return Err("a host device has collectives of its own; use the communicator as it is".into());
    };
    let lacks = nccl_environment();
    if !lacks.is_empty() {
        let lacks: Vec<_> = lacks.iter().map(|(name, value)| format!("{name}={value}")).collect();
        return Err(format!("the environment lacks {}; start the program with it", lacks.join(" ")));
    }
    Ok((cuda.clone(), Nccl::get().map_err(|error| error.to_string())?))
}

/// Compares the libraries of both ranks.
fn agree(side: &Communicator, identity: Result<String, String>) -> Result<(), String> {
    let theirs = exchange(side, &identity.clone().map(String::into_bytes))?;
    let (ours, theirs) = (identity?, String::from_utf8_lossy(&theirs).into_owned());
    match ours == theirs {
        true => Ok(()),
        false => {
            let [own, peer] = [side.rank(), side.peer()];
            Err(format!(
                "rank {own} has {ours}, and rank {peer} has {theirs}; install the same library for both"
            ))
        }
    }
}

/// Sends the peer `mine`, and gives what the peer sent. Whoever cannot go on says why, on both ranks.
fn exchange(side: &Communicator, mine: &Result<Vec<u8>, String>) -> Result<Vec<u8>, String> {
    let mut message = [0; MESSAGE_BYTES];
    let (status, rest) = match mine {
        Ok(rest) => (CAN, rest.as_slice()),
        Err(why) => (CANNOT, why.as_bytes()),
    };
    let rest = &rest[..rest.len().min(MESSAGE_BYTES - HEAD_BYTES)];
    message[0] = status;
    message[1..HEAD_BYTES].copy_from_slice(&(rest.len() as u16).to_le_bytes());
    message[HEAD_BYTES..][..rest.len()].copy_from_slice(rest);
    let mut came = [0; MESSAGE_BYTES];
    let met = side.gather(&message, &mut came);
    // One's own reason says more than that the peer is gone.
    mine.as_ref().map_err(Clone::clone)?;
    met?;
    let length = usize::from(u16::from_le_bytes([came[1], came[2]]));
    let rest =
        came.get(HEAD_BYTES..HEAD_BYTES + length).ok_or("the other rank sent a message without an end")?;
    match came[0] {
        CAN => Ok(rest.to_vec()),
        CANNOT => Err(format!("rank {} cannot: {}", side.peer(), String::from_utf8_lossy(rest))),
        other => Err(format!("rank {} sent a message of kind {other}; run one build on both", side.peer())),
    }
}

/// Word `index` that `rank` brings to a run of the test.
fn word(run: usize, rank: usize, index: usize) -> f32 {
    (2 * index + rank + 31 * run) as f32 * 0.5 - 3.0
}

/// Runs every collective and looks at what came.
fn test(end: &Communicator, device: &Device) -> Result<(), String> {
    collectives(end, device).map_err(|error| error.to_string())
}

fn collectives(end: &Communicator, device: &Device) -> Result<()> {
    let (stream, data) = (device.stream(), device.arena("NCCL's test", 8 * MOST_WORDS)?);
    let part = |run, rank, words| (0..words).map(move |index| word(run, rank, index));
    let run = |emission| {
        stream.run(emission, std::slice::from_ref(&data))?;
        stream.synchronize()
    };
    for turn in 0..2 * RUNS {
        let words = WORDS[turn % WORDS.len()];
        let (bytes, mut emission) = (4 * words, Emission::new());
        let (from, wrong) = (data.base().cast::<f32>(), vec![f32::NAN; 2 * words]);
        data.write(from, &wrong)?;
        // The first half of the turns gathers; then ranks send in turn.
        let (expected, what): (Vec<f32>, _) = if turn < RUNS {
            let own: Vec<f32> = part(turn, end.rank(), words).collect();
            data.write(data.base().byte_add(end.rank() * bytes).cast(), &own)?;
            emission.gather(end, data.base(), bytes)?;
            (part(turn, 0, words).chain(part(turn, 1, words)).collect(), "gather")
        } else {
            let sender = turn / WORDS.len() % 2;
            let whole: Vec<f32> = part(turn, sender, words).collect();
            match end.rank() == sender {
                true => {
                    data.write(from, &whole)?;
                    emission.send(end, data.base(), bytes)?;
                }
                false => emission.receive(end, data.base(), bytes)?,
            }
            (whole, "send")
        };
        run(emission)?;
        let found: Vec<f32> = data.read(from, expected.len())?;
        let differs =
            found.iter().zip(&expected).position(|(found, expected)| found.to_bits() != expected.to_bits());
        if let Some(at) = differs {
            let (found, expected) = (found[at], expected[at]);
            let doing = format!("{what} {words} words for the {turn}th time");
            let why =
                format!("word {at} is {found} and not {expected}; NCCL_DEBUG=INFO tells how it connected");
            return Err(Error::Communicator { doing, why });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostOptions;

    const WAIT: Duration = Duration::from_secs(30);

    /// What both ranks get that have these libraries.
    fn agreed(identities: [Result<&str, &str>; 2]) -> [Result<(), String>; 2] {
        let [first, second] = Communicator::pair(WAIT);
        let own = |identity: Result<&str, &str>| identity.map(String::from).map_err(String::from);
        let [one, two] = identities.map(own);
        std::thread::scope(|scope| {
            let first = scope.spawn(move || agree(&first, one));
            let second = agree(&second, two);
            [first.join().unwrap(), second]
        })
    }

    #[test]
    fn ranks_with_one_library_agree() {
        assert_eq!(agreed([Ok("NCCL 2.28.9"), Ok("NCCL 2.28.9")]), [Ok(()), Ok(())]);
    }

    #[test]
    fn ranks_with_two_libraries_are_told_both() {
        let said = agreed([Ok("NCCL 2.28.9"), Ok("NCCL 2.28.3")]).map(Result::unwrap_err);
        let tail = "install the same library for both";
        assert_eq!(said[0], format!("rank 0 has NCCL 2.28.9, and rank 1 has NCCL 2.28.3; {tail}"));
        assert_eq!(said[1], format!("rank 1 has NCCL 2.28.3, and rank 0 has NCCL 2.28.9; {tail}"));
    }

    #[test]
    fn what_one_rank_lacks_both_say() {
        let said = agreed([Err("there is no library"), Ok("NCCL 2.28.9")]).map(Result::unwrap_err);
        assert_eq!(said, ["there is no library", "rank 0 cannot: there is no library"]);
        let said = agreed([Err("this is missing"), Err("that is missing")]).map(Result::unwrap_err);
        assert_eq!(said, ["this is missing", "that is missing"]);
        let long = "x".repeat(4000);
        let said = agreed([Ok("NCCL 2.28.9"), Err(&long)]).map(Result::unwrap_err);
        assert_eq!(said[0], format!("rank 1 cannot: {}", "x".repeat(MESSAGE_BYTES - HEAD_BYTES)));
    }

    #[test]
    fn a_host_device_is_refused_on_both_ranks() {
        let [first, second] = Communicator::pair(WAIT);
        let said = std::thread::scope(|scope| {
            let join = |end: Communicator| end.on_cuda(&Device::host(HostOptions::default())).unwrap_err();
            let first = scope.spawn(move || join(first));
            [join(second), first.join().unwrap()]
        });
        for (error, rank) in said.into_iter().zip([1, 0]) {
            let said = error.to_string();
            assert!(
                said.starts_with(&format!("cannot make an NCCL communicator of rank {rank}: a host device"))
            );
        }
    }

    #[test]
    fn words_of_the_test_are_exact_and_differ() {
        let most = word(2 * RUNS, 1, MOST_WORDS);
        assert!(most < (1 << 23) as f32 && word(0, 0, 1) != word(0, 1, 0) && word(0, 0, 5) == -3.0 + 5.0);
    }
}
