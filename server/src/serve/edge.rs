//! What every request passes before it is answered: limits on its head and body, the count, the key.
//!
//! What the head decides is decided before a byte of the body is kept. A body that nobody took is drained before the
//! answer goes out, so that a refused request leaves its connection fit for the next.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};

use super::errors::ApiError;
use super::state::{App, Phase};

/// Bytes of names and values of the headers of a request.
pub(crate) const HEADER_BYTES: usize = 32 << 10;
/// Bytes beyond the limit that are read and dropped, so that the client reads why and can go on.
const OVERRUN_BYTES: usize = 8 << 20;
/// Bodies up to this size are small: as many may be in memory as there are connections.
const SMALL_BYTES: usize = 64 << 10;

/// Around every route.
pub(crate) async fn around(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let _active = app.begin();
    let path = request.extensions().get::<MatchedPath>();
    let route = path.map_or_else(|| "other".to_owned(), |path| path.as_str().to_owned());
    let counted = app.metrics.request(route);
    let (request, unread) = Unread::part(request);
    let mut response = match check_size(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    let fit = unread.drain(&app).await;
    // Whoever asks a server that will end should not ask this one again.
    if !fit || matches!(app.phase(), Phase::Stopping | Phase::Failed(_)) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    counted.answered(response.status());
    response
}

/// What may be asked without the key.
const OPEN: [&str; 3] = ["/health", "/ready", "/metrics"];

/// Around all that needs the key, what there is nothing at included.
pub(crate) async fn with_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let key = app.settings.api_key.as_ref().filter(|_| !OPEN.contains(&request.uri().path()));
    let Some(key) = key else { return next.run(request).await };
    let shown = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(bearer);
    match shown {
        Some(shown) if key.is(shown) => next.run(request).await,
        Some(_) => ApiError::unauthorised("the key is not the one of this server").into_response(),
        None => ApiError::unauthorised("this server needs a key: Authorization: Bearer KEY").into_response(),
    }
}

/// Around routes that take a body: only plain JSON is read, and that whole.
pub(crate) async fn with_json(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    if let Err(error) = check_kind(request.headers()) {
        return error.into_response();
    }
    if let Some(sent) = request.extensions().get::<Unread>().and_then(Unread::take) {
        match whole(sent, &app).await {
            Ok(body) => *request.body_mut() = Body::from(body),
            Err(error) => return error.into_response(),
        }
    }
    next.run(request).await
}

/// The body of a request until somebody takes it.
#[derive(Clone)]
struct Unread(Arc<Mutex<Option<Sent>>>);

/// A body that a client sends, and what its head said of it.
struct Sent {
    body: Body,
    /// Its bytes, if they are stated.
    stated: Option<u64>,
    /// Whether the client waits for leave to send it, which the first look at the body gives.
    waits: bool,
}

impl Unread {
    /// Parts a request from its body, which stays with it for whoever takes it.
    fn part(request: Request) -> (Request, Unread) {
        let (mut head, body) = request.into_parts();
        let length = head.headers.get(header::CONTENT_LENGTH);
        let stated = length.and_then(|value| value.to_str().ok()?.parse().ok());
        let waits = head.headers.contains_key(header::EXPECT);
        let unread = Unread(Arc::new(Mutex::new(Some(Sent { body, stated, waits }))));
        head.extensions.insert(unread.clone());
        (Request::from_parts(head, Body::empty()), unread)
    }

    fn take(&self) -> Option<Sent> {
        self.0.lock().take()
    }

    /// Drops what nobody took, as it comes; whether the connection is fit for another request then.
    async fn drain(&self, app: &App) -> bool {
        let Some(Sent { mut body, stated, waits }) = self.take() else { return true };
        if body.is_end_stream() {
            return true;
        }
        let most = app.settings.body_limit.saturating_add(OVERRUN_BYTES);
        if waits || stated.is_some_and(|bytes| bytes > most as u64) {
            return false;
        }
        let dropped = async {
            let mut bytes = 0;
            while let Some(frame) = body.frame().await {
                bytes += frame.ok()?.data_ref().map_or(0, Bytes::len);
                if bytes > most {
                    return None;
                }
            }
            Some(())
        };
        matches!(timeout(app.settings.header_timeout, dropped).await, Ok(Some(())))
    }
}

/// A body in memory, with its place among the large ones if it is one: both are given back together.
struct Held {
    bytes: Bytes,
    _place: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The key in an `Authorization` header.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Whether the headers keep their limit.
fn check_size(headers: &HeaderMap) -> Result<(), ApiError> {
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if bytes <= HEADER_BYTES {
        return Ok(());
    }
    let why = format!("the headers have {bytes} bytes; at most {HEADER_BYTES} are read");
    Err(ApiError::refused(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", why))
}

/// Whether a body is plain JSON, by its headers.
fn check_kind(headers: &HeaderMap) -> Result<(), ApiError> {
    let wrong =
        |why: &str| ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", why);
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("?"));
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
    if !kind.trim().eq_ignore_ascii_case("application/json") {
        return Err(wrong("the body must be JSON: Content-Type: application/json"));
    }
    match text(header::CONTENT_ENCODING) {
        None | Some("identity") => Ok(()),
        Some(_) => Err(wrong("the body must not be compressed: leave Content-Encoding out")),
    }
}

/// Reads a body of at most as many bytes, and in as much time, as the settings say.
async fn whole(sent: Sent, app: &App) -> Result<Bytes, ApiError> {
    let Sent { mut body, stated, waits } = sent;
    let (limit, time) = (app.settings.body_limit, app.settings.header_timeout);
    let too_large = |bytes: &str| {
        let why = format!("the body has {bytes} bytes; at most {limit} are read (--body-limit)");
        ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", why)
    };
    let late = |_| {
        let why = format!("the body did not come within {} s", time.as_secs_f32());
        ApiError::refused(StatusCode::REQUEST_TIMEOUT, "slow_body", why).closing()
    };
    let most = limit.saturating_add(OVERRUN_BYTES);
    if let Some(bytes) = stated.filter(|bytes| *bytes > limit as u64) {
        // A client that waits for leave to send has sent nothing.
        if waits || bytes > most as u64 {
            return Err(too_large(&bytes.to_string()).closing());
        }
    }
    let mut until = Instant::now() + time;
    let (mut kept, mut bytes, mut place) = (BytesMut::new(), 0, None);
    loop {
        match timeout_at(until, body.frame()).await.map_err(late)? {
            None if bytes > limit => return Err(too_large(&bytes.to_string())),
            None => return Ok(Bytes::from_owner(Held { bytes: kept.freeze(), _place: place })),
            Some(Err(error)) => {
                let why = format!("the body broke off: {error}");
                return Err(ApiError::refused(StatusCode::BAD_REQUEST, "broken_body", why).closing());
            }
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                bytes += data.len();
                if bytes > limit {
                    // It will be refused: nothing of it is kept, and its place is free for another.
                    (kept, place) = (BytesMut::new(), None);
                    if bytes > most {
                        return Err(too_large("more").closing());
                    }
                    continue;
                }
                if bytes > SMALL_BYTES && place.is_none() {
                    let asked = Instant::now();
                    place = Some(large_place(app).await?);
                    // The client cannot help the wait.
                    until += asked.elapsed();
                }
                kept.extend_from_slice(&data);
            }
        }
    }
}

/// A place among the large bodies in memory.
async fn large_place(app: &App) -> Result<OwnedSemaphorePermit, ApiError> {
    match timeout(app.settings.header_timeout, app.large_bodies.clone().acquire_owned()).await {
        Ok(Ok(place)) => Ok(place),
        _ => Err(ApiError::full("too many large bodies are being read; try again later").closing()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_follows_its_scheme() {
        assert_eq!(bearer(b"Bearer abc"), Some(b"abc".as_slice()));
        assert_eq!(bearer(b"bearer  abc "), Some(b"abc".as_slice()));
        for other in [&b"Basic abc"[..], b"Bearer", b"", b"abc"] {
            assert_eq!(bearer(other), None);
        }
    }

    #[test]
    fn only_plain_json_is_read() {
        let takes = |headers: &[(header::HeaderName, &str)]| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
            check_kind(&headers.collect()).is_ok()
        };
        let json = (header::CONTENT_TYPE, "Application/JSON; charset=utf-8");
        assert!(takes(std::slice::from_ref(&json)));
        assert!(takes(&[json.clone(), (header::CONTENT_ENCODING, "identity")]));
        assert!(!takes(&[json, (header::CONTENT_ENCODING, "gzip")]));
        assert!(!takes(&[(header::CONTENT_TYPE, "text/plain")]));
        assert!(!takes(&[]));
    }
}
