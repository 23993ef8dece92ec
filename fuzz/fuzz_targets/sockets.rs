//! Bytes on a connection, whatever they are: the server lives on, and answers the next client.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let address = roundhouse_fuzz::address();
    roundhouse_fuzz::exchange(address, input);
    let next =
        roundhouse_fuzz::exchange(address, b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    assert!(next.starts_with("HTTP/1.1 200 "), "{next}");
});
