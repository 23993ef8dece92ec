//! A client's socket: writes have a deadline, and what was read since the last request is known.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// Bytes of a stream that the system holds for a client. More would hide for long that it does not read.
const SEND_BYTES: usize = 64 << 10;

/// One side of a connection to a client.
pub(crate) struct Socket {
    stream: Arc<TcpStream>,
    begun: Arc<AtomicBool>,
    patience: Duration,
    /// Runs while a write waits.
    deadline: Pin<Box<Sleep>>,
    waits: bool,
}

/// A look at the same connection from outside.
#[derive(Clone)]
pub(crate) struct Watch {
    stream: Arc<TcpStream>,
    begun: Arc<AtomicBool>,
}

impl Socket {
    /// A socket whose client must take what is written within `patience`.
    pub(crate) fn new(stream: TcpStream, patience: Duration) -> (Socket, Watch) {
        // None of these decides about right or wrong; a system that refuses one serves all the same.
        let _ = stream.set_nodelay(true);
        let _ = SockRef::from(&stream).set_send_buffer_size(SEND_BYTES);
        #[cfg(target_os = "linux")]
        let _ = SockRef::from(&stream).set_tcp_user_timeout(Some(patience));
        let (stream, begun) = (Arc::new(stream), Arc::new(AtomicBool::new(false)));
        let deadline = Box::pin(tokio::time::sleep(patience));
        let watch = Watch { stream: stream.clone(), begun: begun.clone() };
        (Socket { stream, begun, patience, deadline, waits: false }, watch)
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
                        self.waits = false;
                        return Poll::Ready(written);
                    }
                },
                Poll::Pending => {
                    if !self.waits {
                        self.waits = true;
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
    /// A request has been read: what comes next belongs to another.
    pub(crate) fn request_read(&self) {
        self.begun.store(false, Ordering::Relaxed);
    }

    /// Whether a part of another request has come.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Whether the client has closed its side, even if there is something to read before that.
    pub(crate) async fn is_gone(&self) -> bool {
        let mut ready = std::pin::pin!(self.stream.ready(Interest::READABLE));
        let now = std::future::poll_fn(|context| Poll::Ready(ready.as_mut().poll(context))).await;
        matches!(now, Poll::Ready(Ok(ready)) if ready.is_read_closed())
    }
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
                        self.begun.store(true, Ordering::Relaxed);
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
