//! How two ranks find each other, in either order of starting, and compare before they work together.
//!
//! ```text
//! follower                     leader
//!    Hello          ──►           compares; strangers are dropped and it goes on listening
//!    compares       ◄──           Hello, then Welcome, or Bye with why
//!    Welcome or Bye ──►           the link stands, or both end with the values that differ
//! ```

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use super::error::LinkError;
use super::hello::{Difference, Hello};
use super::link::{Link, system};
use super::message::Message;
use super::socket::{Socket, until};
use super::wire::{Frames, WireError, encode};

/// Most bytes of a message before both sides know each other.
const GREETING: usize = 1 << 20;
/// How long a caller has to say what is expected of it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Callers that are heard at once; the one that has waited longest makes room for another.
const CALLERS: usize = 32;
/// Pause before looking or trying again.
const PAUSE: Duration = Duration::from_millis(5);
/// Longest wait for one address to take a call.
const ATTEMPT: Duration = Duration::from_secs(2);

impl Link {
    /// Waits at `address` for rank 1: [`Listener::bind`] and [`Listener::accept`] in one.
    ///
    /// # Errors
    /// As theirs.
    pub fn listen(address: &str, hello: &Hello, within: Duration) -> Result<Link, LinkError> {
        Listener::bind(address)?.accept(hello, within)
    }

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
            if Instant::now() + PAUSE >= deadline {
                return Err(LinkError::Nobody {
                    listening: false,
                    address: address.into(),
                    waited: began.elapsed(),
                    tried: Some((times, last)),
                });
            }
            thread::sleep((10 * PAUSE).min(deadline.saturating_duration_since(Instant::now())));
        }
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
    /// dropped.
    ///
    /// # Errors
    /// No rank came `within` this time; one came that does not fit.
    pub fn accept(self, hello: &Hello, within: Duration) -> Result<Link, LinkError> {
        let (began, deadline) = (Instant::now(), until(within));
        let mut callers: Vec<Caller> = Vec::new();
        let mut dropped: Option<(u64, String)> = None;
        let mut drop_because = |peer: &str, why: String| {
            let times = dropped.as_ref().map_or(0, |(times, _)| *times);
            dropped = Some((times + 1, format!("{peer} {why}")));
        };
        loop {
            while let Ok((stream, address)) = self.socket.accept() {
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
    fn new(stream: TcpStream, address: SocketAddr) -> std::io::Result<Caller> {
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
    let again = |why: std::io::Error| Attempt::Again(format!("the connection broke: {why}"));
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
    let mut last = format!("{address} stands for no address");
    for one in resolve(address, deadline)? {
        let left = deadline.saturating_duration_since(Instant::now()).min(ATTEMPT);
        if left.is_zero() {
            return Err("the time was over".into());
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

fn other_major(peer: &str, ours: u8, theirs: u8) -> LinkError {
    let (ours, theirs) = (ours.to_string(), theirs.to_string());
    let differences = vec![Difference { name: "wire version".into(), ours, theirs }];
    LinkError::Refused { peer: peer.into(), differences }
}

/// What the refused side is told. It reads from the other side: "here" is the rank that speaks.
fn farewell(refused: &LinkError, rank: usize) -> Message {
    Message::Bye { why: format!("rank {rank} says: {refused}") }
}

/// Sends in one piece, so that a refusal arrives whole before the connection ends.
fn say(socket: &Socket, messages: &[Message]) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    for message in messages {
        bytes.extend(encode(message).map_err(|why| std::io::Error::other(why.to_string()))?);
    }
    socket.write(&bytes, until(PATIENCE))
}

fn check_address(address: &str) -> Result<(), LinkError> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    let detail = match port.map(str::parse::<u16>) {
        Some(Ok(_)) => return Ok(()),
        Some(Err(why)) => format!("its port is no port: {why}"),
        None => "it has no host and port".into(),
    };
    Err(LinkError::Address { address: address.into(), detail })
}

/// The addresses that a host's name stands for. The system may take its time for that; we do not.
fn resolve(address: &str, deadline: Instant) -> Result<Vec<SocketAddr>, String> {
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
