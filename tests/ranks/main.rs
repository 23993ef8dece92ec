//! Two ranks: the messages between them as bytes, how they meet, how a link lives and ends; engines in step, in one process
//! and in two.

mod engine;
mod life;
mod meet;
mod pair;
mod pictures;
mod processes;
mod wire;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use runtime::ranks::wire::{Frames, MAX_PAYLOAD, encode};
use runtime::ranks::{Hello, Link, LinkError, Listener, Message, Settings};

/// Longer than anything takes here, so that a test which waits for it fails.
const LONG: Duration = Duration::from_secs(10);

/// The hello of one of two ranks that fit together.
fn hello(rank: usize) -> Hello {
    let settings = Settings::default().with("model", "a1b2").with("lanes", 8).with("graphs", true);
    Hello { silence_ms: 1000, ..Hello::new(rank, 2, "c0ffee", "host", settings) }
}

fn leader(hello: &Hello) -> Listener {
    assert_eq!(hello.rank, 0);
    Listener::bind("127.0.0.1:0").expect("a free port")
}

/// Lets two ranks meet, and returns what each made of it.
fn meet(first: Hello, second: Hello) -> (Result<Link, LinkError>, Result<Link, LinkError>) {
    let listener = leader(&first);
    let address = listener.address().to_string();
    let follower = thread::spawn(move || Link::connect(&address, &second, LONG));
    (listener.accept(&first, LONG, || None), follower.join().expect("connect does not panic"))
}

/// Two ends that met over TCP.
fn linked() -> (Link, Link) {
    let (leader, follower) = meet(hello(0), hello(1));
    (leader.expect("leads"), follower.expect("follows"))
}

/// A rank that is played by hand: it says what it is told to and beats only if it is told to.
struct Puppet {
    stream: TcpStream,
    frames: Frames,
}

impl Puppet {
    fn call(listener: &Listener) -> Puppet {
        Puppet::of(TcpStream::connect(listener.address()).expect("listens"))
    }

    fn of(stream: TcpStream) -> Puppet {
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        Puppet { stream, frames: Frames::new(MAX_PAYLOAD) }
    }

    /// A follower by hand, and the leader that it met.
    fn followed() -> (Link, Puppet) {
        let listener = leader(&hello(0));
        let mut puppet = Puppet::call(&listener);
        let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
        puppet.say(&Message::Hello(hello(1)));
        assert!(matches!(puppet.hear(), Some(Message::Hello(_))));
        assert_eq!(puppet.hear(), Some(Message::Welcome));
        puppet.say(&Message::Welcome);
        (leader.join().expect("no panic").expect("meets"), puppet)
    }

    fn say(&mut self, message: &Message) {
        self.write(&encode(message).expect("fits"));
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("somebody reads");
    }

    /// The next message that is no heartbeat; none once the other side has closed.
    fn hear(&mut self) -> Option<Message> {
        let mut chunk = [0; 4096];
        loop {
            match self.frames.next_message().expect("a message") {
                Some(Message::Beat) => continue,
                Some(message) => return Some(message),
                None => {}
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return None,
                Ok(bytes) => self.frames.push(&chunk[..bytes]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("nothing to hear: {error}"),
            }
        }
    }
}

/// Why a link ends, as its callback is told, and after how long.
fn end_of(link: &Link) -> (LinkError, Duration) {
    let (began, (tell, told)) = (Instant::now(), mpsc::channel());
    link.on_failure(move |error| tell.send(error.clone()).expect("the test waits"));
    let error = told.recv_timeout(LONG).expect("the link ends");
    assert_eq!(link.failure().as_ref(), Some(&error));
    (error, began.elapsed())
}

/// Asserts that `text` has every one of `parts`.
fn assert_says(text: impl ToString, parts: &[&str]) {
    let text = text.to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
}
