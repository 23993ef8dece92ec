//! The follower's side of meeting: it calls the leader until that answers.

use std::io;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::error::LinkError;
use super::hello::Hello;
use super::link::Link;
use super::meet::{GREETING, check_address, farewell, other_major, resolve, say};
use super::message::Message;
use super::socket::{Socket, until};
use super::wire::{Frames, WireError};

/// Pause before the follower calls again.
const REDIAL: Duration = Duration::from_millis(50);
/// Longest wait for one address to take a call.
const ATTEMPT: Duration = Duration::from_secs(2);

impl Link {
    /// Calls rank 0 at `address` until it answers.
    ///
    /// # Errors
    /// Nobody answered `within` this time; what answered is no rank; the two do not fit together.
    pub fn connect(address: &str, hello: &Hello, within: Duration) -> Result<Link, LinkError> {
        check_address(address)?;
        let (began, deadline) = (Instant::now(), until(within));
        let mut times = 0;
        loop {
            times += 1;
            let last = match attempt(address, hello, deadline) {
                Ok(link) => return Ok(link),
                Err(Attempt::Over(error)) => return Err(error),
                Err(Attempt::Again(why)) => why,
            };
            if Instant::now() + REDIAL >= deadline {
                return Err(LinkError::Nobody {
                    listening: false,
                    address: address.into(),
                    waited: began.elapsed(),
                    tried: Some((times, last)),
                });
            }
            thread::sleep(REDIAL);
        }
    }
}

/// How an attempt to call the leader ended without a link.
enum Attempt {
    /// It may still come.
    Again(String),
    /// It will not get better.
    Over(LinkError),
}

fn attempt(address: &str, hello: &Hello, deadline: Instant) -> Result<Link, Attempt> {
    let stream = call(address, deadline).map_err(Attempt::Again)?;
    let socket = Socket::Tcp(stream);
    let again = |why: io::Error| Attempt::Again(format!("the connection broke: {why}"));
    socket.tick().map_err(again)?;
    say(&socket, &[Message::Hello(hello.clone())]).map_err(again)?;
    let mut frames = Frames::new(GREETING);
    let mut peer = format!("rank 0 at {address}");
    let theirs = match hear(&socket, &mut frames, &peer, hello, deadline)? {
        Message::Hello(theirs) => theirs,
        other => return Err(Attempt::Again(format!("{peer} said {} before its hello", other.name()))),
    };
    peer = format!("rank {} at {address}", theirs.rank);
    let differences = hello.differences(&theirs);
    if !differences.is_empty() {
        let refused = LinkError::Refused { peer, differences };
        // The leader compares too; this is for one that knows less than we do.
        let _ = say(&socket, &[farewell(&refused, hello.rank)]);
        return Err(Attempt::Over(refused));
    }
    match hear(&socket, &mut frames, &peer, hello, deadline)? {
        Message::Welcome => {}
        Message::Bye { why } => return Err(Attempt::Over(LinkError::RefusedByPeer { peer, why })),
        other => return Err(Attempt::Again(format!("{peer} said {} instead of Welcome", other.name()))),
    }
    say(&socket, &[Message::Welcome]).map_err(again)?;
    Link::start(socket, frames, peer, hello.silence()).map_err(Attempt::Over)
}

/// A connection to one of the addresses that the name stands for.
fn call(address: &str, deadline: Instant) -> Result<TcpStream, String> {
    let mut last = format!("there was no time left to call {address}");
    for one in resolve(address, deadline)? {
        let left = deadline.saturating_duration_since(Instant::now()).min(ATTEMPT);
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&one, left) {
            // A call to a free port of this machine may be answered by the caller's own socket.
            Ok(stream) if stream.local_addr().is_ok_and(|own| own == one) => {
                last = format!("nobody listens at {one}");
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = format!("{one}: {error}"),
        }
    }
    Err(last)
}

/// Waits for the leader's next message.
fn hear(
    socket: &Socket,
    frames: &mut Frames,
    peer: &str,
    hello: &Hello,
    deadline: Instant,
) -> Result<Message, Attempt> {
    let mut chunk = vec![0; 16 << 10];
    loop {
        match frames.next_message() {
            Ok(Some(message)) => return Ok(message),
            Ok(None) => {}
            Err(WireError::Major { ours, theirs }) => {
                let refused = other_major(peer, ours, theirs);
                let _ = say(socket, &[farewell(&refused, hello.rank)]);
                return Err(Attempt::Over(refused));
            }
            Err(problem) => {
                return Err(Attempt::Over(LinkError::Garbled { peer: peer.into(), problem }));
            }
        }
        match socket.read(&mut chunk) {
            Ok(Some(0)) => {
                return Err(Attempt::Again(format!(
                    "{peer} closed the connection before the handshake was done; it may have its other rank already"
                )));
            }
            Ok(Some(bytes)) => frames.push(&chunk[..bytes]),
            Ok(None) if Instant::now() >= deadline => {
                return Err(Attempt::Again(format!("{peer} took the call and did not answer")));
            }
            Ok(None) => {}
            Err(error) => return Err(Attempt::Again(format!("the connection to {peer} broke: {error}"))),
        }
    }
}
