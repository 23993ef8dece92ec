//! How a rank begins: it finds the other one, and connects the collectives.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use graph::{Communicator, Device, Exchange};

use super::{Hello, Link, Listener, Message, Peer};
use crate::error::Error;
use crate::share::Share;

/// Pause before looking for a connection again.
const PAUSE: Duration = Duration::from_millis(5);

/// One rank of two, connected with the other.
pub struct Rank {
    /// The other one.
    pub peer: Peer,
    /// The way of the collectives.
    pub communicator: Communicator,
}

/// How long a rank waits for the other.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For its start.
    pub start: Duration,
    /// For an answer, and in a collective.
    pub answer: Duration,
}

impl Rank {
    /// Leads: waits for the other rank at `listener`, unless `vain` says why there is no point in that.
    ///
    /// # Errors
    /// It does not come in time, or does not fit.
    pub fn lead(
        listener: Listener,
        hello: &Hello,
        patience: Patience,
        vain: impl Fn() -> Option<String>,
    ) -> Result<Rank, Error> {
        let address = listener.address().ip();
        let link = listener.accept(hello, patience.start, vain)?;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Error::Peer(format!(
                "connecting the collectives at {address}: {what}: {error}; start both ranks again"
            ))
        };
        let data = TcpListener::bind(SocketAddr::new(address, 0))
            .map_err(|error| failed("no port is free", &error))?;
        let port = data.local_addr().map_err(|error| failed("reading the port", &error))?.port();
        data.set_nonblocking(true).map_err(|error| failed("setting up the port", &error))?;
        link.send(&Message::Meet { port })?;
        let began = Instant::now();
        let mut last = "nobody called".to_owned();
        loop {
            match data.accept() {
                // Whoever calls from another host is no rank, and must not be waited for.
                Ok((_, caller)) if Some(caller.ip()) != link.host() => last = format!("{caller} called"),
                Ok((stream, _)) => match connected(stream, 0, patience) {
                    Ok(communicator) => {
                        return Ok(Rank { peer: Peer::new(link, true, patience.answer), communicator });
                    }
                    Err(error) => last = error.to_string(),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
                Err(error) => last = error.to_string(),
            }
            if let Some(error) = link.failure() {
                return Err(error.into());
            }
            if began.elapsed() > patience.start {
                return Err(failed("the other rank did not call in time", &last));
            }
        }
    }

    /// Follows the leader at `address`.
    ///
    /// # Errors
    /// It is not there in time, or does not fit.
    pub fn follow(address: &str, hello: &Hello, patience: Patience) -> Result<Rank, Error> {
        let link = Link::connect(address, hello, patience.start)?;
        let Message::Meet { port } = link.receive(patience.start)? else {
            return Err(Error::Peer(format!("the leader at {address} did not say where collectives meet")));
        };
        let leader =
            link.host().ok_or_else(|| Error::Peer(format!("{address} is no address of a leader")))?;
        let to = SocketAddr::new(leader, port);
        let stream = TcpStream::connect_timeout(&to, patience.start).map_err(|error| {
            Error::Peer(format!(
                "connecting the collectives at {to}: {error}; check that rank 1's host can reach it"
            ))
        })?;
        let communicator = connected(stream, 1, patience)?;
        Ok(Rank { peer: Peer::new(link, false, patience.answer), communicator })
    }

    /// Both ranks in this process, for tests: each for a thread of its own.
    ///
    /// # Errors
    /// The system has no socket or thread left.
    pub fn pair(patience: Patience, silence: Duration) -> Result<[Rank; 2], Error> {
        let (leader, follower) = Link::pair(silence)?;
        let [first, second] = Communicator::pair(patience.answer);
        Ok([
            Rank { peer: Peer::new(leader, true, patience.answer), communicator: first },
            Rank { peer: Peer::new(follower, false, patience.answer), communicator: second },
        ])
    }

    /// Makes the collectives those of `device`, once both ranks have theirs; of CUDA devices carried as `exchange` says.
    ///
    /// # Errors
    /// The other rank is gone; or the devices cannot be connected.
    pub(crate) fn connect(&mut self, device: &Device, exchange: Exchange) -> Result<(), Error> {
        self.peer.meet("its device")?;
        if let Device::Cuda(_) = device {
            self.communicator = self.communicator.clone().on_cuda_with(device, exchange)?;
        }
        Ok(())
    }

    /// What it has of a model.
    ///
    /// # Errors
    /// There are ranks that a model cannot be shared by.
    pub fn share(&self) -> Result<Share, Error> {
        Share::new(self.communicator.rank(), self.communicator.ranks())
    }
}

fn connected(stream: TcpStream, rank: usize, patience: Patience) -> Result<Communicator, Error> {
    stream
        .set_nonblocking(false)
        .map_err(|error| Error::Peer(format!("setting up a connection: {error}")))?;
    Ok(Communicator::over(stream, rank, patience.answer)?)
}
