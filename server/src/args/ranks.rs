//! How a model is shared by two ranks: who leads, and where they meet.

use std::time::Duration;

use clap::{Args, ValueEnum};
use graph::Exchange;

use super::Seconds;
use crate::failure::Failure;

/// How many ranks share the model, and which this one is.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct RankArgs {
    /// How many ranks share the model, 1 or 2: each is a process with half of the heads, of the experts' width and of the
    /// head. With 2 and no --rank, this process leads and starts the other one on this host.
    #[arg(
        long,
        env = "ROUNDHOUSE_TP",
        value_name = "RANKS",
        default_value_t = 1,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u8).range(1..=2)
    )]
    tp: u8,

    /// With --tp 2 on two hosts: which rank this is. Rank 0 leads; rank 1 does what it says.
    #[arg(
        long,
        env = "ROUNDHOUSE_RANK",
        value_name = "RANK",
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u8).range(0..=1)
    )]
    rank: Option<u8>,

    /// With --rank: the address of rank 0, such as 10.0.0.1:7700, where it listens and rank 1 calls. Whoever reaches
    /// it while the ranks start can disturb them: choose one of a private network.
    #[arg(long, env = "ROUNDHOUSE_LEADER", value_name = "ADDRESS", value_parser = address)]
    leader: Option<String>,

    /// With --tp 2: how long a rank waits for the other, at the start and for an answer, before both end.
    #[arg(long, env = "ROUNDHOUSE_PEER_TIMEOUT", value_name = "SECONDS", default_value = "60")]
    peer_timeout: Seconds,

    /// With --tp 2 on CUDA: what carries what the ranks exchange in a round: push over peer memory, nccl, or whichever is
    /// faster when they start. The bytes are the same.
    #[arg(long, env = "ROUNDHOUSE_EXCHANGE", value_name = "MEANS", default_value = "auto")]
    exchange: Means,

    /// What a leader adds for the follower that it starts, which ends with it, however that ends: its own process number.
    #[arg(long, hide = true, value_name = "PROCESS")]
    owned: Option<u32>,
}

/// [`Exchange`] by its name.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Means {
    Auto,
    Push,
    Nccl,
}

/// A host and a port, as they are written.
fn address(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':').filter(|(host, port)| {
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:[]%".contains(c);
        !host.is_empty() && host.chars().all(plain) && port.parse::<u16>().is_ok()
    });
    match parts {
        Some(_) => Ok(text.to_owned()),
        None => Err("it is no host and port, such as 10.0.0.1:7700".into()),
    }
}

/// What this process is.
#[derive(Debug, PartialEq)]
pub(crate) enum Role {
    /// The only rank.
    Alone,
    /// The one that decides, at this address; none: with a follower that it starts itself.
    Leader(Option<String>),
    /// The one that follows the leader at this address.
    Follower(String),
}

impl RankArgs {
    /// What this process is.
    ///
    /// # Errors
    /// The options contradict each other, or one is missing.
    pub(crate) fn role(&self) -> Result<Role, Failure> {
        let wrong = |why: &str| Err(Failure::Input(why.into()));
        match (self.tp, self.rank, &self.leader) {
            (1, None, None) => Ok(Role::Alone),
            (1, _, _) => wrong(
                "--rank and --leader are for models that two ranks share; add --tp 2, or leave them out",
            ),
            (_, None, None) => Ok(Role::Leader(None)),
            (_, Some(0), Some(address)) => Ok(Role::Leader(Some(address.clone()))),
            (_, Some(_), Some(address)) => Ok(Role::Follower(address.clone())),
            (_, Some(rank), None) => Err(Failure::Input(format!(
                "--rank {rank} without --leader: say where rank 0 listens, such as --leader 10.0.0.1:7700"
            ))),
            (_, None, Some(_)) => {
                wrong("--leader without --rank: say which rank this is, --rank 0 or --rank 1")
            }
        }
    }

    /// The process of the leader, if that has started this one.
    pub(crate) fn owner(&self) -> Option<u32> {
        self.owned
    }

    /// What carries gathers.
    pub(crate) fn exchange(&self) -> Exchange {
        match self.exchange {
            Means::Auto => Exchange::Auto,
            Means::Push => Exchange::Push,
            Means::Nccl => Exchange::Nccl,
        }
    }

    /// How long to wait for the other rank.
    pub(crate) fn timeout(&self) -> Duration {
        self.peer_timeout.0
    }
}
