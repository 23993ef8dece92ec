//! A stream of bytes between two ranks: TCP, or a pair inside one process.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that one read or write waits before its thread looks around.
pub(super) const TICK: Duration = Duration::from_millis(100);

pub(super) enum Socket {
    Tcp(TcpStream),
    Pair(UnixStream),
}

impl Socket {
    /// Makes reads and writes wait for at most a tick.
    pub(super) fn tick(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
            Self::Pair(stream) => {
                stream.set_read_timeout(Some(TICK))?;
                stream.set_write_timeout(Some(TICK))
            }
        }
    }

    /// The host of the other side, if it has one.
    pub(super) fn host(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip()),
            Self::Pair(_) => None,
        }
    }

    /// Reads what is there; none if that is nothing yet, 0 bytes at the end.
    pub(super) fn read(&self, to: &mut [u8]) -> io::Result<Option<usize>> {
        let read = match self {
            Self::Tcp(stream) => (&mut &*stream).read(to),
            Self::Pair(stream) => (&mut &*stream).read(to),
        };
        later(read)
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the other side has not taken them by `until`, or what the system says. Some of the
    /// bytes may have gone.
    pub(super) fn write(&self, mut bytes: &[u8], until: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let wrote = match self {
                Self::Tcp(stream) => (&mut &*stream).write(bytes),
                Self::Pair(stream) => (&mut &*stream).write(bytes),
            };
            match later(wrote)? {
                Some(0) => return Err(ErrorKind::WriteZero.into()),
                Some(wrote) => bytes = &bytes[wrote..],
                // A handshake's socket does not wait by itself.
                None => thread::sleep(Duration::from_millis(1)),
            }
            if !bytes.is_empty() && Instant::now() >= until {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Ends one or both directions; whoever waits in them wakes.
    pub(super) fn shutdown(&self, how: Shutdown) {
        // It fails only on a connection that has ended.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Pair(stream) => stream.shutdown(how),
        };
    }
}

/// The moment `within` from now.
pub(super) fn until(within: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(within).unwrap_or(now + Duration::from_secs(1 << 30))
}

fn later(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        },
    }
}
