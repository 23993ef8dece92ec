//! Connections: accepting them, reading requests from them, and ending them in a way that clients understand.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{Domain, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use super::descriptors;
use super::edge::HEADER_BYTES;
use super::errors::ApiError;
use super::socket::{Overdue, Socket, Watch};
use super::state::App;
use super::until_dropped::UntilDropped;
use crate::output::note;

/// Connections at once; more wait to be accepted.
const CONNECTIONS: usize = 8192;
/// Connections that the system keeps for us until they are accepted, if it allows so many.
const WAITING: i32 = 4096;
/// Bytes that a connection may hold of a head that is not complete. Beyond the limit on headers there must be room for
/// the names and the request line.
const BUFFER_BYTES: usize = 2 * HEADER_BYTES + 8192;
/// Headers of a request.
const HEADERS: usize = 128;
/// How often it is looked whether a client is gone that has sent more than was read, or owes something for too long.
const LOOK: Duration = Duration::from_millis(250);
/// What is read and dropped after the last answer, so that the client gets to read it: bytes and time.
const LINGER: (usize, Duration) = (8 << 20, Duration::from_secs(2));

/// Accepts connections until it is dropped.
pub(crate) async fn accept(listener: TcpListener, router: Router, app: Arc<App>) {
    let room = Arc::new(Semaphore::new(descriptors::connections(CONNECTIONS)));
    let mut told = false;
    loop {
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (router, app) = (router.clone(), app.clone());
                tokio::spawn(async move {
                    app.metrics.connections.inc();
                    serve(stream, router, &app).await;
                    app.metrics.connections.dec();
                    drop(place);
                });
            }
            Err(error) => {
                // The client is gone already, or files are short: then some will be closed.
                if descriptors::is_shortage(&error) && !told {
                    told = true;
                    note(format_args!(
                        "cannot accept a connection: {error}; raise the limit on open files (ulimit -n)"
                    ));
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Binds the address before anything else is done.
pub(crate) fn bind(host: &str, port: u16) -> io::Result<(std::net::TcpListener, SocketAddr)> {
    let mut refused = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match listen_at(address) {
            Ok(listener) => return listener.local_addr().map(|address| (listener, address)),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn listen_at(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // A port whose last owner has just ended can be had.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(WAITING)?;
    Ok(socket.into())
}

/// One connection, from its first request to its end.
async fn serve(stream: TcpStream, router: Router, app: &App) {
    let (socket, watch) = Socket::new(stream, app.settings.write_timeout);
    let seen = watch.clone();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let (answering, body) = (seen.answering(), seen.body());
        let answer = router.clone().oneshot(request.map(|read| Body::new(UntilDropped::new(read, body))));
        Box::pin(async move {
            let Ok(answer) = answer.await;
            Ok::<_, Infallible>(answer.map(|written| UntilDropped::new(written, answering)))
        })
    });
    let mut connection = http1::Builder::new()
        // hyper's own cannot tell a slow head from an idle connection.
        .header_read_timeout(None)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(socket), service);
    let mut closing = false;
    let overdue = loop {
        tokio::select! {
            biased;
            // What hyper could not read it has answered itself.
            _ = std::future::poll_fn(|context| connection.poll_without_shutdown(context)) => break None,
            () = app.closing.cancelled(), if !closing => {
                closing = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
            overdue = gone(&watch, app) => match overdue {
                Some(overdue) => break Some(overdue),
                None => return,
            },
        }
    };
    let mut socket = connection.into_parts().io.into_inner();
    if overdue == Some(Overdue::Head) {
        let why = format!(
            "the head of the request did not come within {} s",
            app.settings.header_timeout.as_secs_f32()
        );
        let error = ApiError::refused(StatusCode::REQUEST_TIMEOUT, "slow_headers", why);
        // Nobody may be there to read it.
        let _ = socket.write_all(error.to_http().as_bytes()).await;
    }
    linger(socket, app).await;
}

/// Ends when the client has closed its side, or owes something for too long.
async fn gone(watch: &Watch, app: &App) -> Option<Overdue> {
    loop {
        sleep(LOOK).await;
        let overdue = watch.overdue(app.settings.header_timeout, app.settings.idle_timeout);
        if overdue.is_some() || watch.is_gone().await {
            return overdue;
        }
    }
}

/// Closes a connection after its last answer. What the client still sends is dropped for a while: a system that
/// closes with bytes unread would take the answer back.
async fn linger(mut socket: Socket, app: &App) {
    if socket.shutdown().await.is_err() {
        return;
    }
    let (most, time) = LINGER;
    let drop_rest = async {
        let (mut dropped, mut buffer) = (0, vec![0; 16 << 10]);
        while let Ok(bytes @ 1..) = socket.read(&mut buffer).await {
            dropped += bytes;
            if dropped > most {
                return;
            }
        }
    };
    let hurried = async {
        app.closing.cancelled().await;
        sleep(LOOK).await;
    };
    tokio::select! {
        _ = timeout(time, drop_rest) => {}
        () = hurried => {}
    }
}
