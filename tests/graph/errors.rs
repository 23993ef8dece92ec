//! Errors as sentences: what was being done, with which sizes, and what to do.

use graph::error::FaultKind;
use graph::{Error, Fault};

#[test]
fn errors_are_sentences_with_sizes_and_a_way_out() {
    let cases = [
        (
            Error::Capturing { call: "allocation", capture: "decode 4 rows".into() },
            "allocation is not allowed while `decode 4 rows` is being captured; do it before the capture",
        ),
        (
            Error::CaptureFailed {
                capture: "decode 4 rows".into(),
                why: "allocation was called inside it".into(),
            },
            "capture `decode 4 rows` failed: allocation was called inside it; nothing of it ran, so run it \
             eagerly",
        ),
        (
            Error::OtherDevice { call: "a replay" },
            "a replay with an event, exec or arena of another device; use this device's own",
        ),
        (
            Error::OutOfMemory { label: "pages".into(), asked: 401, free: 400 },
            "out of memory: `pages` needs 401 bytes and 400 are free; ask for less or free something first",
        ),
        (
            Error::Launch { kernel: "add", why: "count is 0".into() },
            "launch of `add` refused: count is 0; nothing was queued",
        ),
        (Error::Size { call: "upload", why: "5 bytes do not fit 4".into() }, "upload: 5 bytes do not fit 4"),
    ];
    for (error, text) in cases {
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn faults_say_which_work_met_what() {
    let near = "4 bytes into freed `old` of 32 bytes".to_owned();
    let cases = [
        (
            FaultKind::Address { address: 0x1004, bytes: 32, near },
            "32 bytes at 0x1004 are not live memory (4 bytes into freed `old` of 32 bytes)",
        ),
        (FaultKind::Alignment { address: 0x1002, align: 4 }, "address 0x1002 is not a multiple of 4"),
        (
            FaultKind::Overlap { address: 0x1000, bytes: 8 },
            "8 bytes at 0x1000 overlap another range of the same work",
        ),
        (
            FaultKind::Overwritten { label: "table".into() },
            "pinned memory `table` was overwritten before the copy from it ran; fence its reuse",
        ),
        (FaultKind::Domain("id 9 of a table of 4 rows".into()), "id 9 of a table of 4 rows"),
        (FaultKind::Panicked("kernel bug".into()), "the kernel panicked: kernel bug"),
    ];
    for (kind, text) in cases {
        let fault = Fault { work: "gather".into(), kind };
        assert_eq!(fault.to_string(), format!("gather: {text}"));
        let end = "the device runs nothing more, so open a new one";
        assert_eq!(Error::from(fault).to_string(), format!("device work failed: gather: {text}; {end}"));
    }
}
