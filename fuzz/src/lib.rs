//! A server of the demo model in this process, so that the fuzzer sees which of its code an input reaches.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use runtime::engine::{self, Class, EngineOptions};
use server::Failure;
use server::serve::{Server, Settings};

/// Where the server listens; the first call starts it. Its contexts are short, so that no input takes long.
pub fn address() -> SocketAddr {
    static ADDRESS: OnceLock<SocketAddr> = OnceLock::new();
    *ADDRESS.get_or_init(|| {
        let settings = Settings {
            port: 0,
            served_name: "tiny".into(),
            max_tokens_default: 1,
            header_timeout: Duration::from_millis(200),
            idle_timeout: Duration::from_millis(200),
            ..Settings::default()
        };
        let server = Server::bind(settings).expect("a free port");
        let address = server.address();
        thread::spawn(move || {
            let classes = vec![Class { context: 128, lanes: 16, pages: 32 }];
            let options = EngineOptions { classes, ..EngineOptions::default() };
            let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
            server.run(move || {
                engine::open(&model, &options, &mut |_| {})
                    .map_err(|error| Failure::Device(error.to_string()))
            })
        });
        while !exchange(address, b"GET /ready HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            .contains(" 200 ")
        {
            thread::sleep(Duration::from_millis(10));
        }
        address
    })
}

/// Sends bytes on a connection of their own; all that comes back until the server ends it.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("the server takes connections");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    // It may end the connection while the rest is under way.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Sends `body` as JSON, and requires a reply, or a refusal that names a field or says what is wrong.
pub fn answered(path: &str, body: &[u8]) {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let answer = exchange(address(), &[head.as_bytes(), body].concat());
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer to {path}"));
    let status = head.split(' ').nth(1).unwrap_or_default();
    if status == "200" {
        return;
    }
    assert!(["400", "404", "413", "429"].contains(&status), "{head}");
    let error: serde_json::Value = serde_json::from_str(text).expect("a refusal is JSON");
    let error = &error["error"];
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{text}");
    let whole = ["invalid_json", "body_too_large", "queue_full"];
    let named = error["param"].is_string() || error["code"].as_str().is_some_and(|code| whole.contains(&code));
    assert!(named, "a refusal that names nothing: {text}");
}
