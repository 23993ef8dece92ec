//! What carries bytes between two ends: memory of one process, or a socket. No call here waits.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

/// One end.
pub(super) enum Link {
    Memory { incoming: Arc<Pipe>, outgoing: Arc<Pipe> },
    Socket(TcpStream),
}

/// One direction between two threads.
#[derive(Default)]
pub(super) struct Pipe(Mutex<Flow>);

#[derive(Default)]
struct Flow {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// Why a link carries nothing more.
pub(super) type Gone = String;

/// How many bytes a pipe holds: few, so that both ends must read while they write, as over a socket.
const PIPE_BYTES: usize = 64 << 10;

impl Link {
    /// Both ends of a link in memory.
    pub(super) fn pair() -> [Link; 2] {
        let (one, two) = (Arc::<Pipe>::default(), Arc::<Pipe>::default());
        let first = Link::Memory { incoming: one.clone(), outgoing: two.clone() };
        [first, Link::Memory { incoming: two, outgoing: one }]
    }

    /// The end that a connected socket is.
    pub(super) fn socket(stream: TcpStream) -> io::Result<Link> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Link::Socket(stream))
    }

    /// Hands over as many of `bytes`, which are some, as there is room for; says how many.
    pub(super) fn give(&self, bytes: &[u8]) -> Result<usize, Gone> {
        match self {
            Link::Memory { outgoing, .. } => outgoing.give(bytes),
            Link::Socket(stream) => moved((&*stream).write(bytes)),
        }
    }

    /// Takes as many bytes as have come and fit `into`, which is not empty; says how many.
    pub(super) fn take(&self, into: &mut [u8]) -> Result<usize, Gone> {
        match self {
            Link::Memory { incoming, .. } => incoming.take(into),
            Link::Socket(stream) => moved((&*stream).read(into)),
        }
    }

    /// Finds out whether the peer has closed its end, unless bytes that came earlier hide it.
    pub(super) fn look(&self) -> Result<(), Gone> {
        match self {
            Link::Memory { incoming, .. } => incoming.look(),
            Link::Socket(stream) => moved(stream.peek(&mut [0])).map(drop),
        }
    }

    /// Closes both directions; what was given before still arrives.
    pub(super) fn shut(&self) {
        match self {
            Link::Memory { incoming, outgoing } => {
                incoming.0.lock().closed = true;
                outgoing.0.lock().closed = true;
            }
            // An error means that the socket is closed already.
            Link::Socket(stream) => drop(stream.shutdown(Shutdown::Both)),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shut();
    }
}

impl Pipe {
    fn give(&self, bytes: &[u8]) -> Result<usize, Gone> {
        let mut flow = self.0.lock();
        if flow.closed {
            return Err(closed());
        }
        let count = bytes.len().min(PIPE_BYTES - flow.bytes.len());
        flow.bytes.extend(&bytes[..count]);
        Ok(count)
    }

    fn take(&self, into: &mut [u8]) -> Result<usize, Gone> {
        let mut flow = self.0.lock();
        let count = moved(flow.bytes.read(into).and_then(|count| match count {
            0 if !flow.closed => Err(ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }))?;
        Ok(count)
    }

    fn look(&self) -> Result<(), Gone> {
        let flow = self.0.lock();
        if flow.closed && flow.bytes.is_empty() { Err(closed()) } else { Ok(()) }
    }
}

/// How many bytes a call moved that does not wait; none at all is the end.
fn moved(result: io::Result<usize>) -> Result<usize, Gone> {
    match result {
        Ok(0) => Err(closed()),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.to_string()),
    }
}

fn closed() -> Gone {
    "its end of the link is closed".into()
}
