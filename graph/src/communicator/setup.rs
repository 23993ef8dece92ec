//! How two ranks that have a host end make an NCCL communicator of it.
//!
//! Both go through the same steps, and after each tell each other how it went: identity of the library,
//! what gathers are to be carried by, the number by which NCCL's ranks meet, NCCL's own start, and a test; then, unless
//! NCCL alone is wanted, the memory that each maps of the other, a test of pushed gathers, and what both means take.
//! What fails on one rank is said by both. Where push is only welcome, its failure leaves NCCL.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::bytes_of;

use super::group::{Choice, Group, within};
use super::proof::{self, What};
use super::{Communicator, Exchange, Means, measure};
use crate::cuda::{Cuda, HANDLE_BYTES, Handle, ID_BYTES, Inbox, MOST_BYTES, Nccl, Push, nccl_environment};
use crate::device::{CudaDevice, Device};
use crate::error::{Error, Result};

/// What ranks tell each other: whether the sender can go on (1) or not (2), the length of the rest in two bytes, and
/// the rest.
const MESSAGE_BYTES: usize = 512;
const HEAD_BYTES: usize = 3;
const CAN: u8 = 1;
const CANNOT: u8 = 2;

/// How long what failed halfway may take to end.
const CLEANUP: Duration = Duration::from_secs(5);

/// The CUDA end of the rank that has the host end `side`.
pub(super) fn join(side: Communicator, device: &Device, exchange: Exchange) -> Result<Communicator> {
    let rank = side.rank();
    let refused =
        |why| Error::Communicator { doing: format!("make an NCCL communicator of rank {rank}"), why };
    if side.nccl().is_some() {
        return Err(refused("this one is one already".into()));
    }
    let joined =
        start(&side, device, exchange).and_then(|communicator| prove(communicator, device, exchange));
    joined.inspect_err(|why| side.end(why.clone())).map_err(refused)
}

/// Everything up to a communicator that has not been tried yet.
fn start(side: &Communicator, device: &Device, exchange: Exchange) -> Result<Communicator, String> {
    let prepared = prepare(device);
    let identity = prepared.as_ref().map(|(_, nccl)| nccl.library.identity()).map_err(Clone::clone);
    agree(side, identity)?;
    let (cuda, nccl) = prepared?;
    agree_means(side, exchange)?;
    let id = if side.rank() == 0 { nccl.unique_id().map(Vec::from) } else { Ok(Vec::new()) };
    let theirs = trade(side, &id)?;
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
        Communicator::with(side.rank(), side.0.wait, Means::Cuda(Box::new(group)))
    });
    let went = settle(side, begun.as_ref().map(drop).map_err(Clone::clone));
    let communicator = begun?;
    went.inspect_err(|why| abandon(&communicator, why))?;
    Ok(communicator)
}

/// Tries every collective, settles what carries gathers, then watches the peer.
fn prove(communicator: Communicator, device: &Device, exchange: Exchange) -> Result<Communicator, String> {
    let proved = settle_means(&communicator, device, exchange)
        .map(|choice| group(&communicator).choose(choice))
        // Whoever goes on from here knows that the other does.
        .and_then(|()| settle(&group(&communicator).side, Ok(())))
        .and_then(|()| Group::watch(&communicator));
    proved.inspect_err(|why| abandon(&communicator, why))?;
    Ok(communicator)
}

fn group(communicator: &Communicator) -> &Group {
    communicator.group().expect("it was made so")
}

/// Tries NCCL, and push if it is wanted; says what carries gathers.
fn settle_means(communicator: &Communicator, device: &Device, exchange: Exchange) -> Result<Choice, String> {
    let (group, wait) = (group(communicator), communicator.0.wait);
    let tested = tried(communicator, device, Exchange::Nccl, &[What::Gathers, What::Passes], wait);
    let tested = tested.map_err(|why| {
        format!("the test of NCCL's collectives failed: {why}; NCCL_DEBUG=INFO tells how it connected")
    });
    settle(&group.side, tested)?;
    group.disown();
    let nccl = format!("NCCL {}", group.library().version);
    let only = |why: String, works| {
        let text = format!("{nccl} for all collectives{why}");
        Choice { pushes: false, works, text }
    };
    let push = |why: String| {
        let text = format!(
            "push over peer memory{why} for gathers of up to {} MiB of each rank; {nccl} for larger ones, sends and \
             receives",
            MOST_BYTES >> 20
        );
        Choice { pushes: true, works: true, text }
    };
    let mapped = || map(communicator).and_then(|()| try_push(communicator, device));
    match exchange {
        Exchange::Nccl => Ok(only(", as was asked for".into(), false)),
        Exchange::Push => match mapped() {
            Ok(()) => Ok(push(", as was asked for,".into())),
            Err(why) => Err(format!("push over peer memory was asked for and is not possible: {why}")),
        },
        Exchange::Auto => match mapped() {
            Err(why) => Ok(only(format!("; push over peer memory is not possible: {why}"), false)),
            Ok(()) => {
                let (pushes, [by_nccl, by_push]) = compare(communicator, device)?;
                Ok(match pushes {
                    true => push(format!(" ({by_push:.1} us; NCCL {by_nccl:.1} us)")),
                    false => only(format!(" ({by_nccl:.1} us; push over peer memory {by_push:.1} us)"), true),
                })
            }
        },
    }
}

/// Runs some of the test within `wait`, with gathers carried by `exchange`.
fn tried(
    communicator: &Communicator,
    device: &Device,
    exchange: Exchange,
    what: &'static [What],
    wait: Duration,
) -> Result<(), String> {
    let end = communicator.carried_by(exchange).map_err(|error| error.to_string())?;
    let device = device.clone();
    within(wait, "collectives-test", move || {
        // All are for one stream.
        let stream = device.stream();
        let mut runs = what.iter().map(|&what| proof::run(&end, &stream, what));
        runs.try_for_each(|run| run).map_err(|error| error.to_string())
    })
}

/// Maps the memory of both ranks. What fails on one is said by both, and neither has it then.
fn map(communicator: &Communicator) -> Result<(), String> {
    let group = group(communicator);
    let side = &group.side;
    let inbox = Inbox::new(&group.cuda);
    let ours = inbox.as_ref().map_err(Clone::clone).and_then(|inbox| {
        Ok(Offer { handle: inbox.handle()?, most_blocks: inbox.most_blocks(), place: place()? })
    });
    let theirs = trade(side, &ours.as_ref().map(Offer::bytes).map_err(Clone::clone)).inspect_err(|_| {
        // Neither maps anything then, unless the peer is gone: nobody knows what it did.
        if let (Ok(inbox), None) = (&inbox, side.ended()) {
            inbox.free();
        }
    })?;
    let (inbox, ours) = (inbox?, ours?);
    let outbox = Offer::read(&theirs).and_then(|theirs| {
        one_place(side, &ours.place, &theirs.place)?;
        Ok((inbox.outbox(theirs.handle)?, ours.most_blocks.min(theirs.most_blocks)))
    });
    let went = settle(side, outbox.as_ref().map(drop).map_err(Clone::clone));
    let why = match (outbox, went) {
        (Ok((outbox, most_blocks)), Ok(())) => {
            group.add(Push::new(inbox, outbox, most_blocks, communicator.0.wait));
            return Ok(());
        }
        (Ok((outbox, _)), Err(why)) => {
            outbox.unmap();
            why
        }
        (Err(why), _) => why,
    };
    // What this rank mapped is unmapped by now, and when the other has done so too, this buffer can go.
    if side.gather(&[2; 8], &mut [0; 8]).is_ok() {
        inbox.free();
    }
    Err(why)
}

/// Tests pushed gathers. The waits are shorter than those of the link, over which both ranks then tell each other.
fn try_push(communicator: &Communicator, device: &Device) -> Result<(), String> {
    let (group, wait) = (group(communicator), communicator.0.wait);
    let push = group.push().ok_or("it is not mapped")?;
    push.wait_at_most(wait / 4);
    let tested = tried(communicator, device, Exchange::Push, &[What::Gathers], wait / 2);
    let tested = tested.map_err(|why| {
        let on_device = push.failed().map(|why| format!(" ({why})")).unwrap_or_default();
        format!("the test of pushed gathers failed: {why}{on_device}")
    });
    let went = settle(&group.side, tested);
    group.disown();
    went.inspect_err(|_| push.stop())?;
    push.wait_at_most(wait);
    Ok(())
}

/// What both ranks decide from what each measured: whether they push, and the microseconds of both means.
fn compare(communicator: &Communicator, device: &Device) -> Result<(bool, [f64; 2]), String> {
    let group = group(communicator);
    let ours = {
        let (communicator, device) = (communicator.clone(), device.clone());
        let measured = move || measure::both(&communicator, &device.stream());
        let measured = move || measured().map_err(|error| error.to_string());
        within(group.side.0.wait, "gathers-measured", measured)
    };
    let ours = ours.map_err(|why| format!("gathers cannot be timed: {why}"));
    let theirs =
        trade(&group.side, &ours.as_ref().map(|ours| bytes_of(ours).to_vec()).map_err(Clone::clone))?;
    let theirs: [f64; 2] = bytemuck::try_pod_read_unaligned(&theirs)
        .map_err(|_| format!("the other rank sent times of {} bytes; run one build on both", theirs.len()))?;
    group.disown();
    Ok(measure::decide(ours?, theirs))
}

/// Tells the peer how a step went, and hears how its went.
fn settle(side: &Communicator, went: Result<(), String>) -> Result<(), String> {
    trade(side, &went.map(|()| Vec::new())).map(drop)
}

/// Ends a communicator that one of the ranks cannot use, before anyone is told: whoever then ends the process would
/// pull the library away from under a thread that ends it.
fn abandon(communicator: &Communicator, why: &str) {
    communicator.stop(why);
    // What is not ended by then leaks, as any that is not closed.
    let _ = communicator.clone().close(CLEANUP);
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
    let theirs = trade(side, &identity.clone().map(String::into_bytes))?;
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

/// Compares what both ranks want gathers to be carried by.
fn agree_means(side: &Communicator, exchange: Exchange) -> Result<(), String> {
    let ours = exchange.to_string();
    let theirs = trade(side, &Ok(ours.clone().into_bytes()))?;
    let theirs = String::from_utf8_lossy(&theirs);
    match ours == theirs {
        true => Ok(()),
        false => {
            let [own, peer] = [side.rank(), side.peer()];
            Err(format!(
                "rank {own} wants gathers by `{ours}`, and rank {peer} by `{theirs}`; ask for the same on both"
            ))
        }
    }
}

/// What a rank tells the other of its half of peer memory.
#[derive(Debug, PartialEq)]
struct Offer {
    handle: [u8; HANDLE_BYTES],
    most_blocks: usize,
    /// The host that it runs on.
    place: String,
}

impl Offer {
    fn bytes(&self) -> Vec<u8> {
        let blocks = (self.most_blocks as u32).to_le_bytes();
        [&self.handle[..], &blocks, self.place.as_bytes()].concat()
    }

    fn read(bytes: &[u8]) -> Result<Offer, String> {
        let parts = bytes.split_first_chunk().and_then(|(handle, rest)| {
            let (blocks, place) = rest.split_first_chunk()?;
            Some((*handle, u32::from_le_bytes(*blocks), place))
        });
        let (handle, blocks, place) =
            parts.ok_or_else(|| format!("the other rank offers memory in {} bytes", bytes.len()))?;
        let place = String::from_utf8_lossy(place).into_owned();
        Ok(Offer { handle, most_blocks: blocks as usize, place })
    }
}

/// The host that this process runs on: its name, and the number of its start.
fn place() -> Result<String, String> {
    let read = |file: &str| {
        let text = fs::read_to_string(file);
        text.map(|text| text.trim().to_owned()).map_err(|error| format!("cannot read {file}: {error}"))
    };
    Ok(format!("{} {}", read("/proc/sys/kernel/hostname")?, read("/proc/sys/kernel/random/boot_id")?))
}

/// Refuses ranks on two hosts: memory is mapped within one.
fn one_place(side: &Communicator, ours: &str, theirs: &str) -> Result<(), String> {
    match ours == theirs {
        true => Ok(()),
        false => {
            let [own, peer] = [side.rank(), side.peer()];
            Err(format!("rank {own} runs on host `{ours}`, and rank {peer} on host `{theirs}`"))
        }
    }
}

/// Sends the peer `mine`, and gives what the peer sent. Whoever cannot go on says why, on both ranks.
fn trade(side: &Communicator, mine: &Result<Vec<u8>, String>) -> Result<Vec<u8>, String> {
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
    fn ranks_that_want_other_means_are_told_both() {
        let asked = |wanted: [Exchange; 2]| {
            let [first, second] = Communicator::pair(WAIT);
            std::thread::scope(|scope| {
                let first = scope.spawn(move || agree_means(&first, wanted[0]));
                let second = agree_means(&second, wanted[1]);
                [first.join().unwrap(), second]
            })
        };
        for same in [Exchange::Auto, Exchange::Nccl, Exchange::Push] {
            assert_eq!(asked([same, same]), [Ok(()), Ok(())]);
        }
        let said = asked([Exchange::Push, Exchange::Auto]).map(Result::unwrap_err);
        let tail = "ask for the same on both";
        assert_eq!(said[0], format!("rank 0 wants gathers by `push`, and rank 1 by `auto`; {tail}"));
        assert_eq!(said[1], format!("rank 1 wants gathers by `auto`, and rank 0 by `push`; {tail}"));
    }

    #[test]
    fn ranks_on_two_hosts_share_no_memory() {
        let [first, _second] = Communicator::pair(WAIT);
        let here = place().unwrap();
        assert_eq!(one_place(&first, &here, &place().unwrap()), Ok(()));
        // A name alone does not tell hosts apart, nor does a start of the kernel alone tell containers apart.
        for there in ["other 1-2", "this 3-4", ""] {
            let said = one_place(&first, "this 1-2", there).unwrap_err();
            assert_eq!(said, format!("rank 0 runs on host `this 1-2`, and rank 1 on host `{there}`"));
        }
    }

    #[test]
    fn an_offer_is_read_as_it_was_written() {
        let handle = std::array::from_fn(|i| i as u8);
        let offer = Offer { handle, most_blocks: 64, place: place().unwrap() };
        let bytes = offer.bytes();
        assert!(bytes.len() <= MESSAGE_BYTES - HEAD_BYTES);
        assert_eq!(Offer::read(&bytes), Ok(offer));
        let said = Offer::read(&bytes[..HANDLE_BYTES + 3]).unwrap_err();
        assert_eq!(said, "the other rank offers memory in 67 bytes");
    }
}
