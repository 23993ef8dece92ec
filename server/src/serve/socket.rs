//! A client's socket: writes have a deadline, and it is known whether the client owes a request, and since when.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// Bytes of a stream that the system holds for a client. More would hide for long that it does not read.
const SEND_BYTES: usize = 64 << 10;

/// One side of a connection to a client.
pub(crate) struct Socket {
    stream: Arc<TcpStream>,
    turn: Arc<Mutex<Turn>>,
    patience: Duration,
    /// Runs while a write waits.
    deadline: Pin<Box<Sleep>>,
}

/// A look at the same connection from outside.
#[derive(Clone)]
pub(crate) struct Watch {
    stream: Arc<TcpStream>,
    turn: Arc<Mutex<Turn>>,
}

/// Whose turn it is on a connection.
#[derive(Debug)]
struct Turn {
    /// A request was read, and its answer is not written to the end.
    answering: bool,
    /// A write waits for the client.
    writing: bool,
    /// A part of a request has come that is not read to its end.
    begun: bool,
    /// No request was read so far.
    fresh: bool,
    /// Since when the client owes the rest of a request, or may be idle.
    since: Instant,
}

/// What a client owes for too long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Overdue {
    /// The rest of a head.
    Head,
    /// Anything at all: nobody waits for an answer.
    Nothing,
}

impl Socket {
    /// A socket whose client must take what is written within `patience`.
    pub(crate) fn new(stream: TcpStream, patience: Duration) -> (Socket, Watch) {
        // None of these decides about right or wrong; a system that refuses one serves all the same.
        let _ = stream.set_nodelay(true);
        let _ = SockRef::from(&stream).set_send_buffer_size(SEND_BYTES);
        #[cfg(target_os = "linux")]
        let _ = SockRef::from(&stream).set_tcp_user_timeout(Some(patience));
        let (stream, turn) = (Arc::new(stream), Arc::new(Mutex::new(Turn::new())));
        let deadline = Box::pin(tokio::time::sleep(patience));
        let watch = Watch { stream: stream.clone(), turn: turn.clone() };
        (Socket { stream, turn, patience, deadline }, watch)
    }

    /// Repeats a write until the socket takes some, or the client was too slow.
    fn write(
        &mut self,
        context: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.stream.poll_write_ready(context)? {
                Poll::Ready(()) => match write(&self.stream) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    written => {
                        self.turn.lock().wrote();
                        return Poll::Ready(written);
                    }
                },
                Poll::Pending => {
                    if !std::mem::replace(&mut self.turn.lock().writing, true) {
                        self.deadline.as_mut().reset(Instant::now() + self.patience);
                    }
                    ready!(self.deadline.as_mut().poll(context));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
            }
        }
    }
}

impl Watch {
    /// The head of a request has been read; its answer is under way until what this gives is dropped.
    pub(crate) fn answering(&self) -> impl Send + Sync + 'static + use<> {
        let mut turn = self.turn.lock();
        (turn.answering, turn.begun, turn.fresh) = (true, false, false);
        let turn = self.turn.clone();
        at_drop(move || {
            let mut turn = turn.lock();
            (turn.answering, turn.since) = (false, Instant::now());
        })
    }

    /// What comes until what this gives is dropped is the body of the request; what comes then belongs to another.
    pub(crate) fn body(&self) -> impl Send + Sync + 'static + use<> {
        let turn = self.turn.clone();
        at_drop(move || turn.lock().begun = false)
    }

    /// What the client owes for too long: a head longer than `head`, or anything longer than `idle`.
    pub(crate) fn overdue(&self, head: Duration, idle: Duration) -> Option<Overdue> {
        self.turn.lock().overdue(head, idle, Instant::now())
    }

    /// Whether the client has closed its side, even if there is something to read before that.
    pub(crate) async fn is_gone(&self) -> bool {
        let mut ready = std::pin::pin!(self.stream.ready(Interest::READABLE));
        let now = std::future::poll_fn(|context| Poll::Ready(ready.as_mut().poll(context))).await;
        matches!(now, Poll::Ready(Ok(ready)) if ready.is_read_closed())
    }
}

impl Turn {
    fn new() -> Turn {
        Turn { answering: false, writing: false, begun: false, fresh: true, since: Instant::now() }
    }

    fn read(&mut self) {
        // A new connection owes a head from its beginning on, and every byte of a head is owed since its first.
        if !(self.begun || self.answering || self.fresh) {
            self.since = Instant::now();
        }
        self.begun = true;
    }

    fn wrote(&mut self) {
        self.writing = false;
        if !self.begun {
            self.since = Instant::now();
        }
    }

    fn overdue(&self, head: Duration, idle: Duration, now: Instant) -> Option<Overdue> {
        let (limit, owed) = match self {
            Turn { answering: true, .. } | Turn { writing: true, .. } => return None,
            Turn { begun: true, .. } => (head, Overdue::Head),
            Turn { fresh: true, .. } => (head, Overdue::Nothing),
            _ => (idle, Overdue::Nothing),
        };
        (now.duration_since(self.since) >= limit).then_some(owed)
    }
}

/// Runs `act` when what it gives is dropped.
fn at_drop<F: FnOnce() + Send + Sync>(act: F) -> impl Send + Sync + use<F> {
    struct AtDrop<F: FnOnce()>(Option<F>);
    impl<F: FnOnce()> Drop for AtDrop<F> {
        fn drop(&mut self) {
            self.0.take().into_iter().for_each(|act| act());
        }
    }
    AtDrop(Some(act))
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Ok(bytes) => {
                    if bytes > 0 {
                        self.turn.lock().read();
                    }
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_owes_a_head_once_it_has_begun_one() {
        let (head, idle) = (Duration::from_secs(1), Duration::from_secs(5));
        let mut turn = Turn::new();
        let after =
            |turn: &Turn, seconds| turn.overdue(head, idle, turn.since + Duration::from_secs(seconds));
        assert_eq!((after(&turn, 0), after(&turn, 1)), (None, Some(Overdue::Nothing)));
        turn.read();
        assert_eq!(after(&turn, 1), Some(Overdue::Head));
        (turn.answering, turn.begun, turn.fresh) = (true, false, false);
        assert_eq!(after(&turn, 100), None);
        turn.answering = false;
        assert_eq!((after(&turn, 4), after(&turn, 5)), (None, Some(Overdue::Nothing)));
        turn.writing = true;
        assert_eq!(after(&turn, 100), None);
        turn.wrote();
        turn.read();
        assert_eq!(after(&turn, 1), Some(Overdue::Head));
    }
}
