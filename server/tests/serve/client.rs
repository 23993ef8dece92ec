//! HTTP/1.1 over a plain socket: what a test sends is what the server gets, and what comes back is read strictly.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long an answer may take before a test gives up on it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A request as it will be sent.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Option<Vec<u8>>,
}

/// A connection, and what was read from it and not yet taken.
pub(crate) struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

/// Status line and headers of an answer; names in lower case.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
}

/// What is left of the body of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rest {
    Length(usize),
    Chunked,
    UntilClosed,
    Done,
}

impl Ask {
    pub(crate) fn get(path: &str) -> Ask {
        Ask::with("GET", path)
    }

    /// A POST of JSON.
    pub(crate) fn post(path: &str, body: &Value) -> Ask {
        Ask::raw(path, body.to_string().into_bytes())
    }

    /// A POST of bytes that claim to be JSON.
    pub(crate) fn raw(path: &str, body: impl Into<Vec<u8>>) -> Ask {
        Ask::with("POST", path).header("content-type", "application/json").body(body)
    }

    pub(crate) fn with(method: &str, path: &str) -> Ask {
        let headers = vec![("host".into(), "localhost".into())];
        Ask { method: method.into(), path: path.into(), headers, body: None }
    }

    /// Sets a header; an earlier value of it is gone.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Ask {
        self.headers.retain(|(other, _)| other != name);
        self.headers.push((name.into(), value.into()));
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Ask {
        self.body = Some(body.into());
        self
    }

    fn head(&self) -> String {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head
    }

    /// The bytes on the wire, with the body's length.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head().into_bytes();
        if let Some(body) = &self.body {
            bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes());
            bytes.extend(body);
        } else {
            bytes.extend(b"\r\n");
        }
        bytes
    }

    /// The bytes on the wire, with the body in chunks of `sizes`, over and over.
    pub(crate) fn chunked(&self, sizes: &[usize]) -> Vec<u8> {
        let mut bytes = (self.head() + "transfer-encoding: chunked\r\n\r\n").into_bytes();
        let mut rest = &self.body.as_ref().expect("a body")[..];
        for &size in sizes.iter().cycle() {
            let (chunk, more) = rest.split_at(size.min(rest.len()));
            bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
            bytes.extend(chunk);
            bytes.extend(b"\r\n");
            if chunk.is_empty() {
                return bytes;
            }
            rest = more;
        }
        bytes
    }
}

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Connection {
        Connection::try_open(address).expect("the server takes connections")
    }

    pub(crate) fn try_open(address: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, read: Vec::new() })
    }

    /// How long reads wait from now on.
    pub(crate) fn patience(&self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).expect("a time-out that is not zero");
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a request and reads the whole answer.
    #[track_caller]
    pub(crate) fn ask(&mut self, ask: &Ask) -> Response {
        self.try_ask(ask).unwrap_or_else(|error| panic!("no answer to {}: {error}", ask.head()))
    }

    pub(crate) fn try_ask(&mut self, ask: &Ask) -> Result<Response> {
        self.send(&ask.bytes())?;
        self.response()
    }

    /// Says that no more will be sent.
    pub(crate) fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).expect("the connection is open");
    }

    /// The next whole answer.
    pub(crate) fn response(&mut self) -> Result<Response> {
        let (head, mut rest) = self.head()?;
        let mut body = Vec::new();
        while let Some(part) = self.part(&mut rest)? {
            body.extend(part);
        }
        Ok(Response { head, body })
    }

    /// The head of the next answer, and how its body will come.
    pub(crate) fn head(&mut self) -> Result<(Head, Rest)> {
        let end = loop {
            if let Some(end) = find(&self.read, b"\r\n\r\n") {
                break end;
            }
            self.more()?;
        };
        let head: Vec<u8> = self.read.drain(..end + 4).collect();
        let head = Head::parse(std::str::from_utf8(&head[..end]).map_err(|_| bad("head is not UTF-8"))?)?;
        let empty = head.status == 204 || head.status / 100 == 1;
        let rest = match (head.get("content-length"), head.get("transfer-encoding")) {
            _ if empty => Rest::Done,
            (Some(_), Some(_)) => return Err(bad("both a length and chunks")),
            (Some(length), None) => Rest::Length(length.parse().map_err(|_| bad("a length that is none"))?),
            (None, Some("chunked")) => Rest::Chunked,
            (None, Some(_)) => return Err(bad("an encoding that was not asked for")),
            (None, None) => Rest::UntilClosed,
        };
        Ok((head, rest))
    }

    /// The next part of a body; nothing at its end.
    pub(crate) fn part(&mut self, rest: &mut Rest) -> Result<Option<Vec<u8>>> {
        match *rest {
            Rest::Done | Rest::Length(0) => Ok(None),
            Rest::Length(length) => {
                if self.read.is_empty() {
                    self.more()?;
                }
                let part: Vec<u8> = self.read.drain(..self.read.len().min(length)).collect();
                *rest = Rest::Length(length - part.len());
                Ok(Some(part))
            }
            Rest::Chunked => {
                let line = loop {
                    match find(&self.read, b"\r\n") {
                        Some(end) => break end,
                        None => self.more()?,
                    }
                };
                let size = std::str::from_utf8(&self.read[..line]).ok();
                let size = size.and_then(|size| usize::from_str_radix(size, 16).ok());
                let size = size.ok_or_else(|| bad("a chunk without a size"))?;
                let end = line + 2 + size;
                while self.read.len() < end + 2 {
                    self.more()?;
                }
                if &self.read[end..end + 2] != b"\r\n" {
                    return Err(bad("a chunk without an end"));
                }
                let part = self.read[line + 2..end].to_vec();
                self.read.drain(..end + 2);
                if size == 0 {
                    *rest = Rest::Done;
                    return Ok(None);
                }
                Ok(Some(part))
            }
            Rest::UntilClosed => match self.more() {
                Ok(()) => Ok(Some(std::mem::take(&mut self.read))),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    *rest = Rest::Done;
                    Ok(None)
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Whether the server ends the connection within `patience`, sending nothing more.
    pub(crate) fn is_closed_within(&mut self, patience: Duration) -> bool {
        self.patience(patience);
        match self.more() {
            Ok(()) => false,
            Err(error) => !is_timeout(&error),
        }
    }

    /// Reads and forgets until the server ends the connection; how long that took, if it did.
    pub(crate) fn closed_after(&mut self, patience: Duration) -> Option<Duration> {
        let start = Instant::now();
        while start.elapsed() < patience {
            self.patience(Duration::from_millis(100));
            match self.more() {
                Ok(()) => self.read.clear(),
                Err(error) if is_timeout(&error) => {}
                Err(_) => return Some(start.elapsed()),
            }
        }
        None
    }

    fn more(&mut self) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        let read = loop {
            match self.stream.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        match read? {
            0 => Err(Error::new(ErrorKind::UnexpectedEof, "the server ended the connection")),
            length => {
                self.read.extend(&buffer[..length]);
                Ok(())
            }
        }
    }
}

impl Head {
    fn parse(text: &str) -> Result<Head> {
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 "));
        let status = status.and_then(|line| line.get(..3)?.parse().ok());
        let status = status.ok_or_else(|| bad("a status line that is none"))?;
        let header = |line: &str| {
            let (name, value) = line.split_once(':').ok_or_else(|| bad("a header without a colon"))?;
            Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        Ok(Head { status, headers: lines.map(header).collect::<Result<_>>()? })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// Whether the server says that it will end the connection.
    pub(crate) fn closes(&self) -> bool {
        self.get("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }
}

impl Response {
    pub(crate) fn status(&self) -> u16 {
        self.head.status
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("answers are UTF-8")
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        let kind = self.head.get("content-type").unwrap_or_default();
        assert!(kind.starts_with("application/json"), "content type {kind:?}: {}", self.text());
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Requires status 200; the JSON.
    #[track_caller]
    pub(crate) fn good(&self) -> Value {
        assert_eq!(self.status(), 200, "{}", self.text());
        self.json()
    }

    /// Requires an error of this status in the form that all errors have; the inner object.
    #[track_caller]
    pub(crate) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status(), status, "{}", self.text());
        error_object(&self.json())
    }

    /// Requires a 400 that names `field`, or a part of it.
    #[track_caller]
    pub(crate) fn names(&self, field: &str) -> Value {
        let error = self.error(400);
        let param = error["param"].as_str().unwrap_or_default();
        assert!(is_of(param, field), "{field} is to be named, not {param:?}: {error}");
        error
    }
}

/// Whether a path is that of a field or of a part of it.
pub(crate) fn is_of(path: &str, field: &str) -> bool {
    path.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// The error in a body; its form is the same for every status.
#[track_caller]
pub(crate) fn error_object(body: &Value) -> Value {
    let types =
        ["invalid_request_error", "authentication_error", "rate_limit_error", "server_error", "not_ready"];
    let error = &body["error"];
    let keys: Vec<&str> = error.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["message", "type", "param", "code"], "{body}");
    assert_eq!(body.as_object().map(|object| object.len()), Some(1), "{body}");
    assert!(error["message"].as_str().is_some_and(|message| message.len() > 5), "{body}");
    assert!(error["type"].as_str().is_some_and(|kind| types.contains(&kind)), "{body}");
    assert!(error["param"].is_null() || error["param"].is_string(), "{body}");
    let snake = |code: &str| code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    assert!(error["code"].is_null() || error["code"].as_str().is_some_and(snake), "{body}");
    error.clone()
}

pub(crate) fn is_timeout(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("the answer has {what}"))
}
