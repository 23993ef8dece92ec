//! Bodies of requests: the first byte chooses the route, the rest is the body.
#![no_main]

use libfuzzer_sys::fuzz_target;

const PATHS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"];

fuzz_target!(|input: &[u8]| {
    if let Some((choice, body)) = input.split_first() {
        roundhouse_fuzz::answered(PATHS[*choice as usize % PATHS.len()], body);
    }
});
