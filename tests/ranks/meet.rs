//! How ranks meet: in either order, past strangers, never with a rank that does not fit, never without a bound.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use runtime::ranks::wire::encode;
use runtime::ranks::{Hello, Link, LinkError, Listener, Message, Settings};

use crate::{LONG, Puppet, assert_says, hello, leader, linked, meet};

const SHORT: Duration = Duration::from_millis(300);

/// A host of this machine that no other test takes ports of.
const ALONE: &str = if cfg!(target_os = "linux") { "127.0.0.2:0" } else { "127.0.0.1:0" };

fn free_address() -> String {
    Listener::bind(ALONE).expect("a free port").address().to_string()
}

#[test]
fn two_ranks_meet_and_talk_both_ways() {
    let (leader, follower) = linked();
    assert_says(leader.peer(), &["rank 1 at 127.0.0.1:"]);
    assert_says(follower.peer(), &["rank 0 at 127.0.0.1:"]);
    for number in 0..100 {
        let done = Message::Done { number, round: "ab".into() };
        leader.send(&done).expect("sent");
        assert_eq!(follower.receive(LONG), Ok(done.clone()));
        follower.send(&done).expect("sent");
        assert_eq!(leader.receive(LONG), Ok(done));
    }
}

#[test]
fn the_follower_may_start_first() {
    let address = free_address();
    let calling = address.clone();
    let follower = thread::spawn(move || Link::connect(&calling, &hello(1), LONG));
    thread::sleep(SHORT);
    let leader = Link::listen(&address, &hello(0), LONG).expect("meets");
    let follower = follower.join().expect("no panic").expect("meets");
    leader.send(&Message::Welcome).expect("sent");
    assert_eq!(follower.receive(LONG), Ok(Message::Welcome));
}

#[test]
fn the_leader_may_start_first() {
    let listener = leader(&hello(0));
    let address = listener.address().to_string();
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    thread::sleep(SHORT);
    let _follower = Link::connect(&address, &hello(1), LONG).expect("meets");
    leader.join().expect("no panic").expect("meets");
}

#[test]
fn a_lookup_finds_names_too() {
    let listener = leader(&hello(0));
    let address = format!("localhost:{}", listener.address().port());
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    let _follower = Link::connect(&address, &hello(1), LONG).expect("meets");
    leader.join().expect("no panic").expect("meets");
}

#[test]
fn nobody_comes() {
    let listener = leader(&hello(0));
    let address = listener.address().to_string();
    let began = Instant::now();
    let error = listener.accept(&hello(0), SHORT, || None).err().expect("nobody came");
    assert!(began.elapsed() < 5 * SHORT);
    assert!(matches!(error, LinkError::Nobody { listening: true, .. }));
    assert_says(error, &[&address, "0.3 s", "start rank 1"]);

    let address = free_address();
    let began = Instant::now();
    let error = Link::connect(&address, &hello(1), SHORT).err().expect("nobody is there");
    assert!(began.elapsed() < 5 * SHORT);
    assert!(matches!(error, LinkError::Nobody { listening: false, .. }));
    assert_says(error, &[&address, "0.3 s", "start rank 0", "refused"]);
}

#[test]
fn a_leader_that_takes_the_call_and_says_nothing_is_bounded() {
    let dumb = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = dumb.local_addr().expect("an address").to_string();
    let began = Instant::now();
    let error = Link::connect(&address, &hello(1), SHORT).err().expect("nobody answers");
    assert!(began.elapsed() < 5 * SHORT);
    assert_says(error, &[&address, "did not answer", "0.3 s"]);
}

#[test]
fn what_is_no_leader_is_told() {
    let web = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = web.local_addr().expect("an address").to_string();
    let server = thread::spawn(move || {
        let (mut stream, _) = web.accept().expect("called");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("read");
        stream
    });
    let error = Link::connect(&address, &hello(1), LONG).err().expect("no leader");
    assert!(matches!(error, LinkError::Garbled { .. }), "{error}");
    assert_says(error, &[&address, "HTTP/1.1 400", "control port"]);
    drop(server.join());
}

#[test]
fn a_port_in_use_is_named() {
    let listener = leader(&hello(0));
    let address = listener.address().to_string();
    let error = Link::listen(&address, &hello(0), LONG).err().expect("taken");
    assert_eq!(error, LinkError::InUse { address: address.clone() });
    assert_says(error, &[&address, "in use", "another port"]);
}

#[test]
fn a_wrong_address_is_named() {
    for address in ["", "7700", "localhost", "localhost:", "localhost:70000", "host:port", ":7700"] {
        for error in
            [Link::listen(address, &hello(0), LONG).err(), Link::connect(address, &hello(1), LONG).err()]
        {
            let error = error.expect("no address");
            assert!(matches!(error, LinkError::Address { .. }), "{error}");
            assert_says(error, &[address, "as in 10.0.0.1:7700"]);
        }
    }
    // An address of another machine.
    let error = Link::listen("192.0.2.1:0", &hello(0), LONG).err().expect("not ours");
    assert!(matches!(error, LinkError::Address { .. }), "{error}");
}

#[test]
fn strangers_do_not_stand_in_the_way() {
    let listener = leader(&hello(0));
    let address = listener.address();
    let say = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).expect("listens");
        stream.write_all(bytes).expect("sent");
        stream
    };
    let hello_bytes = encode(&Message::Hello(hello(1))).expect("fits");
    let mut endless = hello_bytes[..4].to_vec();
    endless.extend([0xff; 8]);
    // Nothing; a request of another protocol; half a hello; a claim of 4 GB; a message that is no hello.
    let beat = encode(&Message::Beat).expect("fits");
    let strangers = [b"" as &[u8], b"GET / HTTP/1.1\r\n\r\n", &hello_bytes[..40], &endless, &beat].map(say);
    drop(say(b"gone"));
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    thread::sleep(SHORT);
    let _follower = Link::connect(&address.to_string(), &hello(1), LONG).expect("meets");
    leader.join().expect("no panic").expect("meets");
    drop(strangers);
}

#[test]
fn more_strangers_than_are_heard_do_not_stand_in_the_way() {
    let listener = leader(&hello(0));
    let address = listener.address();
    let strangers: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(address).expect("listens")).collect();
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    let _follower = Link::connect(&address.to_string(), &hello(1), LONG).expect("meets");
    leader.join().expect("no panic").expect("meets");
    drop(strangers);
}

#[test]
fn strangers_are_told_when_nobody_else_came() {
    let listener = leader(&hello(0));
    let mut stranger = Puppet::call(&listener);
    stranger.write(b"GET / HTTP/1.1\r\n");
    let error = listener.accept(&hello(0), SHORT, || None).err().expect("only a stranger came");
    assert_says(error, &["connections dropped: 1", "GET / HTTP/1.1"]);
}

#[test]
fn a_follower_that_dies_in_the_handshake_makes_room() {
    let listener = leader(&hello(0));
    let address = listener.address().to_string();
    let mut first = Puppet::call(&listener);
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    first.say(&Message::Hello(hello(1)));
    assert!(matches!(first.hear(), Some(Message::Hello(_))));
    let second = thread::spawn(move || Link::connect(&address, &hello(1), LONG));
    thread::sleep(SHORT);
    drop(first);
    let _second = second.join().expect("no panic").expect("meets");
    leader.join().expect("no panic").expect("meets");
}

#[test]
fn the_second_of_two_followers_is_not_taken() {
    let listener = leader(&hello(0));
    let address = listener.address().to_string();
    let call = || {
        let address = address.clone();
        thread::spawn(move || Link::connect(&address, &hello(1), Duration::from_secs(1)))
    };
    let calls = [call(), call()];
    let _leader = listener.accept(&hello(0), LONG, || None).expect("meets");
    let links = calls.map(|call| call.join().expect("no panic"));
    let refused: Vec<_> = links.iter().filter_map(|link| link.as_ref().err()).collect();
    assert_eq!(refused.len(), 1);
    assert!(matches!(refused[0], LinkError::Nobody { listening: false, .. }), "{}", refused[0]);
}

/// Asserts that both sides refuse, and that each names all of `parts`.
fn assert_refused(first: Hello, second: Hello, parts: &[&str]) {
    let (leader, follower) = meet(first, second);
    for error in [leader.err().expect("refuses"), follower.err().expect("refuses")] {
        assert!(matches!(error, LinkError::Refused { .. }), "{error}");
        assert_says(error, parts);
    }
}

#[test]
fn what_differs_is_named_on_both_sides_with_both_values() {
    assert_refused(hello(0), Hello { binary: "decaf".into(), ..hello(1) }, &["binary", "c0ffee", "decaf"]);
    let other = Hello { architecture: "sm_90a".into(), ..hello(1) };
    assert_refused(hello(0), other, &["architecture is", "sm_90a", "host"]);
    let settings = Settings::default().with("model", "a1b2").with("lanes", 9).with("context", 512);
    let parts = ["lanes is", "8", "9", "context is", "512", "graphs is", "true", "(not set)"];
    assert_refused(hello(0), Hello { settings, ..hello(1) }, &parts);
    assert_refused(hello(0), Hello { ranks: 4, ..hello(1) }, &["number of ranks is", "2", "4"]);
    assert_refused(hello(0), Hello { rank: 0, ..hello(1) }, &["rank (each needs its own) is 0"]);
    assert_refused(hello(0), Hello { silence_ms: 5000, ..hello(1) }, &["silence in ms is", "1000", "5000"]);
    let everything = Hello { binary: "decaf".into(), architecture: "sm_90a".into(), ..hello(1) };
    assert_refused(hello(0), everything, &["binary", "decaf", "architecture", "sm_90a"]);
    let twice = hello(1).settings.with("lanes", 9);
    assert_refused(hello(0), Hello { settings: twice, ..hello(1) }, &["lanes is", "8 and 9"]);
}

#[test]
fn settings_in_another_order_agree() {
    let settings = Settings::default().with("graphs", true).with("lanes", 8).with("model", "a1b2");
    let (leader, follower) = meet(hello(0), Hello { settings, ..hello(1) });
    assert!(leader.is_ok() && follower.is_ok());
}

#[test]
fn another_minor_is_no_difference() {
    let (leader, follower) = meet(hello(0), Hello { version: (1, 77), ..hello(1) });
    assert!(leader.is_ok() && follower.is_ok());
}

#[test]
fn the_leader_refuses_another_major_and_says_why() {
    let listener = leader(&hello(0));
    let mut puppet = Puppet::call(&listener);
    let mut bytes = encode(&Message::Hello(hello(1))).expect("fits");
    bytes[3] = 2;
    puppet.write(&bytes);
    let error = listener.accept(&hello(0), LONG, || None).err().expect("refuses");
    assert_says(error, &["wire version is 1 here and 2 there"]);
    assert!(matches!(puppet.hear(), Some(Message::Hello(_))));
    let Some(Message::Bye { why }) = puppet.hear() else { panic!("no word of why") };
    assert_says(why, &["rank 0 says", "wire version is 1 here and 2 there"]);
}

#[test]
fn the_follower_refuses_another_major() {
    let other = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = other.local_addr().expect("an address").to_string();
    let server = thread::spawn(move || {
        let mut puppet = Puppet::of(other.accept().expect("called").0);
        let mut bytes = encode(&Message::Hello(hello(0))).expect("fits");
        bytes[3] = 2;
        puppet.write(&bytes);
        assert!(matches!(puppet.hear(), Some(Message::Hello(_))));
        puppet.hear()
    });
    let error = Link::connect(&address, &hello(1), LONG).err().expect("refuses");
    assert_says(error, &["wire version is 1 here and 2 there"]);
    assert!(matches!(server.join(), Ok(Some(Message::Bye { .. }))));
}

#[test]
fn a_refusal_of_the_other_side_alone_is_told() {
    let listener = leader(&hello(0));
    let mut puppet = Puppet::call(&listener);
    let leader = thread::spawn(move || listener.accept(&hello(0), LONG, || None));
    puppet.say(&Message::Hello(hello(1)));
    assert!(matches!(puppet.hear(), Some(Message::Hello(_))));
    assert_eq!(puppet.hear(), Some(Message::Welcome));
    puppet.say(&Message::Bye { why: "the moon is full".into() });
    let error = leader.join().expect("no panic").err().expect("refused");
    assert!(matches!(error, LinkError::RefusedByPeer { .. }));
    assert_says(error, &["rank 1 at 127.0.0.1", "the moon is full"]);
}
