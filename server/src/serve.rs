//! `roundhouse serve`: an OpenAI-compatible server, as a library.
//!
//! ```text
//! socket ─► listen ─► edge (limits, body, key) ─► routes ─► replies ─► fields ─► chat | completions ─► Asked
//!                                                             │
//!                                        Choices ◄─ events ◄─ engine thread
//!                                           │
//!                                           └─► sse, chunks (streamed) or wire (whole)
//! ```
//! Async code never computes for long: reading a request is done on threads of its own, and the model runs on the
//! engine's.

mod asked;
mod chat;
mod choices;
mod chunks;
mod completions;
mod data_url;
mod descriptors;
mod edge;
mod errors;
mod fields;
mod health;
mod lifetime;
mod listen;
mod logprobs;
mod metrics;
mod options;
mod parts;
mod pictures;
mod replies;
mod routes;
mod sanity;
mod settings;
mod socket;
mod sse;
mod state;
mod tables;
mod thinking;
mod tokens;
mod trouble;
mod until_dropped;
mod wire;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use runtime::engine::OpenEngine;

pub use settings::{Secret, Settings};

use crate::failure::Failure;
use state::App;

/// Threads that read requests: rendering and tokenising.
const READERS: usize = 4;

/// A server whose port is bound.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    settings: Settings,
}

impl Server {
    /// Binds the port, so that a conflict shows before anything is loaded.
    ///
    /// # Errors
    /// The address cannot be had.
    pub fn bind(settings: Settings) -> Result<Server, Failure> {
        let (listener, address) = listen::bind(&settings.host, settings.port).map_err(|error| {
            let Settings { host, port, .. } = &settings;
            Failure::Input(format!(
                "cannot listen on {host}:{port}: {error}; choose another --host or --port"
            ))
        })?;
        Ok(Server { listener, address, settings })
    }

    /// Where clients find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens the model and serves it until a signal says to stop, or the engine fails.
    ///
    /// # Errors
    /// The model cannot be opened, its first reply is wrong, or the engine has failed.
    pub fn run(
        self,
        open: impl FnOnce() -> Result<OpenEngine, Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        let Server { listener, settings, .. } = self;
        // Few threads: they only pass messages on, and the model wants the cores.
        let threads = available_parallelism().map_or(1, |cores| cores.get() / 8).clamp(1, 4);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(READERS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(|error| Failure::Device(format!("cannot start the server's threads: {error}")))?;
        let ended = runtime.block_on(lifetime::live(Arc::new(App::new(settings)), listener, open));
        // A thread that still loads or reads has nobody left to tell.
        runtime.shutdown_timeout(Duration::from_millis(100));
        ended
    }
}
