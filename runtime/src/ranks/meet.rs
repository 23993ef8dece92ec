//! How two ranks find each other, in either order of starting, and compare before they work together.
//!
//! ```text
//! follower                     leader
//!    Hello          ──►           compares; strangers are dropped and it goes on listening
//!    compares       ◄──           Hello, then Welcome, or Bye with why
//!    Welcome or Bye ──►           the link stands, or both end with the values that differ
//! ```

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use super::error::LinkError;
use super::hello::Difference;
use super::message::Message;
use super::socket::{Socket, until};
use super::wire::encode;

/// Most bytes of a message before both sides know each other.
pub(super) const GREETING: usize = 1 << 20;
/// How long a caller has to say what is expected of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn other_major(peer: &str, ours: u8, theirs: u8) -> LinkError {
    let (ours, theirs) = (ours.to_string(), theirs.to_string());
    let differences = vec![Difference { name: "wire version".into(), ours, theirs }];
    LinkError::Refused { peer: peer.into(), differences }
}

/// What the refused side is told. It reads from the other side: "here" is the rank that speaks.
pub(super) fn farewell(refused: &LinkError, rank: usize) -> Message {
    Message::Bye { why: format!("rank {rank} says: {refused}") }
}

/// Sends in one piece, so that a refusal arrives whole before the connection ends.
pub(super) fn say(socket: &Socket, messages: &[Message]) -> io::Result<()> {
    let mut bytes = Vec::new();
    for message in messages {
        bytes.extend(encode(message).map_err(|why| io::Error::other(why.to_string()))?);
    }
    socket.write(&bytes, until(PATIENCE))
}

pub(super) fn check_address(address: &str) -> Result<(), LinkError> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    let detail = match port.map(str::parse::<u16>) {
        Some(Ok(_)) => return Ok(()),
        Some(Err(why)) => format!("its port is no port: {why}"),
        None => "it has no host and port".into(),
    };
    Err(LinkError::Address { address: address.into(), detail })
}

/// The addresses that a host's name stands for. The system may take its time for that; we do not.
pub(super) fn resolve(address: &str, deadline: Instant) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (tell, told) = bounded(1);
    let name = address.to_owned();
    let look_up = move || {
        let found = name.to_socket_addrs().map(Vec::from_iter).map_err(|error| error.to_string());
        // Whoever asked may have given up.
        let _ = tell.send(found);
    };
    thread::Builder::new().name("rank link name".into()).spawn(look_up).map_err(|error| error.to_string())?;
    told.recv_deadline(deadline).unwrap_or_else(|_| Err("its name was not found in time".into()))
}
