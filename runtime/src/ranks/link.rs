//! A live control link: messages both ways, and the news of its end.
//!
//! A thread reads and hands messages over, another says every so often that this side is alive; sending happens on
//! the caller's thread. A heartbeat says that a process lives, not that its engine does: whoever waits for an answer
//! gives [`Link::receive`] a bound of its own.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use super::error::LinkError;
use super::message::Message;
use super::socket::{Socket, TICK, until};
use super::wire::{Frames, MAX_PAYLOAD, encode};

/// Longest time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);
/// Messages that may wait to be received; with more, the sender waits.
const WAITING: usize = 1024;
/// How long what was sent last may take to arrive after a link was dropped.
const LINGER: Duration = Duration::from_secs(2);

/// A link to the other rank. Dropping it closes the connection and does not wait.
pub struct Link {
    shared: Arc<Shared>,
    inbox: Receiver<Message>,
    /// Its end ends the heartbeat.
    _beating: Sender<()>,
}

impl Link {
    /// Two ends inside one process, without a handshake. A silence is at least a tenth of a second.
    ///
    /// # Errors
    /// The system has no socket or thread left.
    pub fn pair(silence: Duration) -> Result<(Link, Link), LinkError> {
        let (leader, follower) = UnixStream::pair().map_err(|error| system("making a socket", &error))?;
        let end = |stream, peer: &str| {
            Link::start(Socket::Pair(stream), Frames::new(MAX_PAYLOAD), peer.into(), silence)
        };
        Ok((end(leader, "rank 1 in this process")?, end(follower, "rank 0 in this process")?))
    }

    /// A link over a connection whose handshake is done. `frames` holds what came since.
    pub(super) fn start(
        socket: Socket,
        mut frames: Frames,
        peer: String,
        silence: Duration,
    ) -> Result<Link, LinkError> {
        socket.tick().map_err(|error| system("setting up a socket", &error))?;
        frames.raise(MAX_PAYLOAD);
        let silence = silence.max(TICK);
        let (state, turn, closed) = (Mutex::default(), Mutex::new(()), OnceLock::new());
        let shared = Arc::new(Shared { socket, peer, silence, state, turn, closed });
        let (deliver, inbox) = bounded(WAITING);
        let (beating, end) = bounded(0);
        let link = Link { shared, inbox, _beating: beating };
        let shared = Arc::clone(&link.shared);
        spawn("rank link read", move || shared.read(frames, &deliver))?;
        let shared = Arc::clone(&link.shared);
        spawn("rank link beat", move || shared.beat(&end))?;
        Ok(link)
    }

    /// The other side, for messages to people.
    pub fn peer(&self) -> &str {
        &self.shared.peer
    }

    /// The host of the other side, if it is not in this process.
    pub fn host(&self) -> Option<IpAddr> {
        self.shared.socket.host()
    }

    /// Sends a message. It waits for at most twice the link's silence, and in practice not at all.
    ///
    /// # Errors
    /// Why the link has ended; [`LinkError::Oversized`] without harm to the link.
    pub fn send(&self, message: &Message) -> Result<(), LinkError> {
        let name = message.name();
        let frame = encode(message).map_err(|problem| LinkError::Oversized { message: name, problem })?;
        self.shared.failed()?;
        let Some(_turn) = self.shared.turn.try_lock_for(self.shared.silence) else {
            return Err(self.shared.fail(self.shared.stuck(name, frame.len())));
        };
        self.shared.write(name, &frame).map_err(|error| self.shared.fail(error))
    }

    /// The next message, which may have come before the link ended.
    ///
    /// # Errors
    /// [`LinkError::Late`] if none comes `within` this time; once all messages were taken, why the link has ended.
    pub fn receive(&self, within: Duration) -> Result<Message, LinkError> {
        self.inbox.recv_deadline(until(within)).map_err(|why| match why {
            RecvTimeoutError::Timeout => LinkError::Late { peer: self.shared.peer.clone(), waited: within },
            RecvTimeoutError::Disconnected => {
                self.failure().unwrap_or_else(|| self.shared.gone("its reader has ended".into()))
            }
        })
    }

    /// Why the link has ended, if it has. Messages that came before can still be received.
    pub fn failure(&self) -> Option<LinkError> {
        self.shared.failed().err()
    }

    /// Has `callback` called as soon as the link ends, on the thread that finds out, or at once if it has ended.
    /// The other side's orderly end is an end too. Dropping this side calls nothing.
    pub fn on_failure(&self, callback: impl FnOnce(&LinkError) + Send + 'static) {
        let mut state = self.shared.state.lock();
        match state.failure.clone() {
            Some(failure) => {
                drop(state);
                callback(&failure);
            }
            None => state.callbacks.push(Box::new(callback)),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.state.lock().callbacks.clear();
        // The reader goes on until the other side closes too: closing over unread bytes would take back what was
        // sent last.
        self.shared.closed.get_or_init(Instant::now);
        self.shared.socket.shutdown(Shutdown::Write);
    }
}

struct Shared {
    socket: Socket,
    peer: String,
    silence: Duration,
    state: Mutex<State>,
    /// Held while a frame is written.
    turn: Mutex<()>,
    /// When the link was dropped.
    closed: OnceLock<Instant>,
}

#[derive(Default)]
struct State {
    failure: Option<LinkError>,
    callbacks: Vec<Box<dyn FnOnce(&LinkError) + Send>>,
}

impl Shared {
    fn failed(&self) -> Result<(), LinkError> {
        match &self.state.lock().failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// Ends the link, and returns why it ended first.
    fn fail(&self, error: LinkError) -> LinkError {
        let mut state = self.state.lock();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(error.clone());
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        for callback in callbacks {
            callback(&error);
        }
        if let LinkError::Garbled { .. } = error {
            // The other side should not have to guess; what came after the damage is of no use.
            let farewell = Message::Failed { why: error.to_string() };
            if let (Some(_turn), Ok(frame)) = (self.turn.try_lock_for(TICK), encode(&farewell)) {
                let _ = self.socket.write(&frame, until(TICK));
            }
            self.socket.shutdown(Shutdown::Write);
        } else {
            self.socket.shutdown(Shutdown::Both);
        }
        error
    }

    /// Hands over what comes, until the link ends.
    fn read(&self, mut frames: Frames, inbox: &Sender<Message>) {
        let mut chunk = vec![0; 64 << 10];
        let mut quiet = Duration::ZERO;
        loop {
            loop {
                match frames.next_message() {
                    Ok(Some(Message::Beat)) => {}
                    Ok(Some(Message::Failed { why })) => {
                        self.fail(LinkError::Failed { peer: self.peer.clone(), why });
                        return;
                    }
                    Ok(Some(message)) => {
                        // Nobody receives any more: the link was dropped, and the rest is read to be forgotten.
                        let _ = inbox.send(message);
                    }
                    Ok(None) => break,
                    Err(problem) => {
                        self.fail(LinkError::Garbled { peer: self.peer.clone(), problem });
                        return;
                    }
                }
            }
            if self.closed.get().is_some_and(|closed| closed.elapsed() >= LINGER) {
                return;
            }
            let began = Instant::now();
            match self.socket.read(&mut chunk) {
                Ok(Some(0)) => {
                    let detail = match frames.is_empty() {
                        true => "it closed it, or its process ended",
                        false => "it closed it in the middle of a message",
                    };
                    self.fail(self.gone(detail.into()));
                    return;
                }
                Ok(Some(bytes)) => {
                    quiet = Duration::ZERO;
                    frames.push(&chunk[..bytes]);
                }
                Ok(None) => {
                    // Time in which this process itself was stopped is not the other side's silence.
                    quiet += began.elapsed().min(2 * TICK);
                    if quiet >= self.silence {
                        self.fail(LinkError::Silent { peer: self.peer.clone(), silence: self.silence });
                        return;
                    }
                }
                Err(error) => {
                    self.fail(self.gone(error.to_string()));
                    return;
                }
            }
        }
    }

    /// Says that this side is alive, until the link ends.
    fn beat(&self, end: &Receiver<()>) {
        let frame = encode(&Message::Beat).expect("a heartbeat is short");
        let pause = BEAT.min(self.silence / 10);
        while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(pause) {
            if self.failed().is_err() {
                return;
            }
            // A message that is being written says the same.
            let Some(_turn) = self.turn.try_lock() else { continue };
            if let Err(error) = self.write("Beat", &frame) {
                self.fail(error);
                return;
            }
        }
    }

    /// Writes a frame. The caller has the turn.
    fn write(&self, message: &'static str, frame: &[u8]) -> Result<(), LinkError> {
        self.socket.write(frame, until(self.silence)).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => self.stuck(message, frame.len()),
            _ => self.gone(format!("{message} could not be sent: {error}")),
        })
    }

    fn stuck(&self, message: &'static str, bytes: usize) -> LinkError {
        LinkError::Stuck { peer: self.peer.clone(), message, bytes, waited: self.silence }
    }

    fn gone(&self, detail: String) -> LinkError {
        LinkError::Gone { peer: self.peer.clone(), detail }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), LinkError> {
    let made = thread::Builder::new().name(name.into()).spawn(body);
    made.map(|_| ()).map_err(|error| system("starting a thread", &error))
}

pub(super) fn system(doing: &'static str, error: &io::Error) -> LinkError {
    LinkError::System { doing, detail: error.to_string() }
}
