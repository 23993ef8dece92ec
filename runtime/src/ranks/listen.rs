//! The leader's side of meeting: one rank with the right hello, among whoever calls.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::error::LinkError;
use super::hello::Hello;
use super::link::{Link, system};
use super::meet::{GREETING, PATIENCE, check_address, farewell, other_major, resolve, say};
use super::message::Message;
use super::socket::{Socket, until};
use super::wire::{Frames, WireError};

/// Callers that are heard at once; the one that has waited longest makes room for another.
const CALLERS: usize = 32;
/// Pause before the leader looks again.
const PAUSE: Duration = Duration::from_millis(5);

impl Link {
    /// Waits at `address` for rank 1: [`Listener::bind`] and [`Listener::accept`] in one.
    ///
    /// # Errors
    /// As theirs.
    pub fn listen(address: &str, hello: &Hello, within: Duration) -> Result<Link, LinkError> {
        Listener::bind(address)?.accept(hello, within, || None)
    }
}

/// The leader's ear: a bound address where nobody has come yet.
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens at `address`, as in `0.0.0.0:7700`; port 0 takes any free one.
    ///
    /// # Errors
    /// The address is not one of this machine, or its port is in use.
    pub fn bind(address: &str) -> Result<Listener, LinkError> {
        check_address(address)?;
        let unusable = |detail| LinkError::Address { address: address.into(), detail };
        let addresses = resolve(address, until(PATIENCE)).map_err(unusable)?;
        let socket = TcpListener::bind(&addresses[..]).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => LinkError::InUse { address: address.into() },
            _ => unusable(error.to_string()),
        })?;
        let address = socket.local_addr().map_err(|error| system("reading the port", &error))?;
        socket.set_nonblocking(true).map_err(|error| system("setting up a socket", &error))?;
        Ok(Listener { socket, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for one rank that says the right hello. Whoever says anything else that is no hello, or nothing, is
    /// dropped. `vain` says why there is no point in waiting any longer, if there is none.
    ///
    /// # Errors
    /// No rank came `within` this time, or none will; one came that does not fit.
    pub fn accept(
        self,
        hello: &Hello,
        within: Duration,
        vain: impl Fn() -> Option<String>,
    ) -> Result<Link, LinkError> {
        let (began, deadline) = (Instant::now(), until(within));
        let mut callers: Vec<Caller> = Vec::new();
        let mut dropped: Option<(u64, String)> = None;
        let mut drop_because = |peer: &str, why: String| {
            let times = dropped.as_ref().map_or(0, |(times, _)| *times);
            dropped = Some((times + 1, format!("{peer} {why}")));
        };
        loop {
            loop {
                let (stream, address) = match self.socket.accept() {
                    Ok(call) => call,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => {
                        drop_because("a call", format!("could not be taken: {error}"));
                        break;
                    }
                };
                if callers.len() == CALLERS {
                    let oldest = callers.iter().position(|caller| !caller.welcomed).unwrap_or(0);
                    drop_because(&callers.remove(oldest).peer, "made room for others".into());
                }
                match Caller::new(stream, address) {
                    Ok(caller) => callers.push(caller),
                    Err(error) => drop_because(&address.to_string(), error.to_string()),
                }
            }
            let mut waiting = Vec::new();
            let mut busy = callers.iter().any(|caller| caller.welcomed);
            for mut caller in callers.drain(..) {
                // One at a time is welcomed: whoever was is taken.
                let heard = match busy && !caller.welcomed {
                    true => Heard::Nothing,
                    false => caller.hear(hello),
                };
                match heard {
                    Heard::Nothing => {
                        busy |= caller.welcomed;
                        waiting.push(caller);
                    }
                    Heard::Stranger(why) => drop_because(&caller.peer, why),
                    Heard::Rank => {
                        return Link::start(caller.socket, caller.frames, caller.peer, hello.silence());
                    }
                    Heard::Refused(error) => return Err(error),
                }
            }
            callers = waiting;
            if let Some(why) = vain() {
                return Err(LinkError::Vain { why });
            }
            if Instant::now() >= deadline {
                return Err(LinkError::Nobody {
                    listening: true,
                    address: self.address.to_string(),
                    waited: began.elapsed(),
                    tried: dropped,
                });
            }
            thread::sleep(PAUSE);
        }
    }
}

/// Somebody who called the leader.
struct Caller {
    socket: Socket,
    frames: Frames,
    peer: String,
    patience: Instant,
    /// Whether its hello was right, so that only its own verdict is missing.
    welcomed: bool,
}

enum Heard {
    /// Not enough yet.
    Nothing,
    /// It is no rank.
    Stranger(String),
    /// It is the rank, and both sides agree.
    Rank,
    /// It is a rank that does not fit.
    Refused(LinkError),
}

impl Caller {
    fn new(stream: TcpStream, address: SocketAddr) -> io::Result<Caller> {
        stream.set_nonblocking(true)?;
        Ok(Caller {
            socket: Socket::Tcp(stream),
            frames: Frames::new(GREETING),
            peer: address.to_string(),
            patience: until(PATIENCE),
            welcomed: false,
        })
    }

    /// Reads what has come and answers it.
    fn hear(&mut self, hello: &Hello) -> Heard {
        let mut chunk = vec![0; 16 << 10];
        let read = self.socket.read(&mut chunk);
        if let Ok(Some(bytes)) = read {
            self.frames.push(&chunk[..bytes]);
        }
        match self.frames.next_message() {
            Ok(Some(Message::Hello(theirs))) if !self.welcomed => self.greet(hello, &theirs),
            Ok(Some(Message::Welcome)) if self.welcomed => Heard::Rank,
            Ok(Some(Message::Bye { why })) if self.welcomed => {
                Heard::Refused(LinkError::RefusedByPeer { peer: self.peer.clone(), why })
            }
            Ok(Some(other)) => Heard::Stranger(format!("said {} out of turn", other.name())),
            Err(WireError::Major { ours, theirs }) => {
                let refused = other_major(&self.peer, ours, theirs);
                self.say(&[Message::Hello(hello.clone()), farewell(&refused, hello.rank)]);
                Heard::Refused(refused)
            }
            Err(problem) => Heard::Stranger(format!("sent no message: {problem}")),
            Ok(None) => match read {
                Ok(Some(0)) => Heard::Stranger("closed the connection".into()),
                Err(error) => Heard::Stranger(format!("broke the connection: {error}")),
                _ if Instant::now() >= self.patience => {
                    Heard::Stranger(format!("said too little in {} s", PATIENCE.as_secs()))
                }
                _ => Heard::Nothing,
            },
        }
    }

    /// Answers a hello with ours and what we think of theirs.
    fn greet(&mut self, hello: &Hello, theirs: &Hello) -> Heard {
        self.peer = format!("rank {} at {}", theirs.rank, self.peer);
        let differences = hello.differences(theirs);
        if !differences.is_empty() {
            let refused = LinkError::Refused { peer: self.peer.clone(), differences };
            self.say(&[Message::Hello(hello.clone()), farewell(&refused, hello.rank)]);
            return Heard::Refused(refused);
        }
        self.say(&[Message::Hello(hello.clone()), Message::Welcome]);
        self.welcomed = true;
        self.patience = until(PATIENCE);
        Heard::Nothing
    }

    fn say(&self, messages: &[Message]) {
        // If it cannot be sent, the caller has gone, and the next read tells.
        let _ = say(&self.socket, messages);
    }
}
