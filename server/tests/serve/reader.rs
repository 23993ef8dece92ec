//! The readers of these tests themselves: fed byte by byte they see what they see at once, and they are strict.

use crate::events::{Event, EventParser};
use crate::exposition::Metrics;
use crate::prompts::byte_token;

crate::tests! {
    events_do_not_depend_on_how_bytes_are_cut,
    what_is_no_event_is_an_error,
    what_is_no_metric_is_an_error,
    bytes_have_their_tokens;
}

const STREAM: &str =
    ": keep-alive\n\ndata: {\"a\":\"🙂\"}\n\ndata: {}\n\nevent: error\ndata: {\"error\":{}}\n\n";

fn events_do_not_depend_on_how_bytes_are_cut() {
    let mut whole = EventParser::default();
    let expected = whole.feed(STREAM.as_bytes()).unwrap();
    assert_eq!((expected.len(), whole.comments), (3, 1));
    assert_eq!(expected[2], Event { kind: Some("error".into()), data: "{\"error\":{}}".into() });
    for cut in 0..STREAM.len() {
        let mut parser = EventParser::default();
        let mut events = parser.feed(&STREAM.as_bytes()[..cut]).unwrap();
        events.extend(parser.feed(&STREAM.as_bytes()[cut..]).unwrap());
        assert_eq!(events, expected, "cut at {cut}");
        assert!(parser.is_empty());
    }
    let mut parser = EventParser::default();
    let mut events = Vec::new();
    STREAM.bytes().for_each(|byte| events.extend(parser.feed(&[byte]).unwrap()));
    assert_eq!(events, expected);
}

fn what_is_no_event_is_an_error() {
    for text in
        ["data:{}\n\n", "data: a\ndata: b\n\n", "{}\n", "event: error\n\n", "id: 5\n", "data: a\r\n\r\n\n"]
    {
        let mut parser = EventParser::default();
        let read = parser.feed(text.as_bytes());
        assert!(read.is_err() || text.contains('\r'), "{text:?}");
    }
    assert!(EventParser::default().feed(b"data: \xF0\x9F\n").is_err());
    let mut parser = EventParser::default();
    parser.feed(b"data: half").unwrap();
    assert!(!parser.is_empty());
}

fn what_is_no_metric_is_an_error() {
    let good = "# HELP roundhouse_x_total Xs.\n# TYPE roundhouse_x_total counter\nroundhouse_x_total{a=\"b\\\"\",c=\"\"} 5\nroundhouse_x_total{a=\"d\",c=\"\"} 1\n";
    let metrics = Metrics::parse(good).unwrap();
    assert_eq!(metrics.sum("roundhouse_x_total", &[("a", "b\"")]), 5.0);
    assert_eq!(metrics.value("roundhouse_x_total"), 6.0);
    assert_eq!(metrics.outline(), "roundhouse_x_total counter\n");
    let histogram = |buckets: &str, count: u32| {
        format!(
            "# HELP roundhouse_h_seconds Hs.\n# TYPE roundhouse_h_seconds histogram\n{buckets}roundhouse_h_seconds_sum 1\nroundhouse_h_seconds_count {count}\n"
        )
    };
    let buckets = "roundhouse_h_seconds_bucket{le=\"0.5\"} 1\nroundhouse_h_seconds_bucket{le=\"+Inf\"} 2\n";
    Metrics::parse(&histogram(buckets, 2)).unwrap();
    let bad = [
        good.trim_end().to_owned(),
        good.replace(" counter", " gauge"),
        good.replace("_total", ""),
        good.replace("# HELP roundhouse_x_total Xs.\n", ""),
        good.replace("# TYPE roundhouse_x_total counter\n", ""),
        good.replace("\"d\"", "\"b\\\"\""),
        good.replace("} 1\n", "} one\n"),
        good.replace("} 1\n", "} 1 1700000000\n"),
        good.replace("} 1\n", "} -1\n"),
        good.replace("} 1\n", "} NaN\n"),
        good.replace("a=\"d\"", "a=d"),
        good.replace("roundhouse_", "other_"),
        histogram(buckets, 3),
        histogram(&buckets.replace("+Inf", "1"), 2),
        histogram(&buckets.replace("} 1\n", "} 7\n"), 2),
        histogram("", 2),
    ];
    for text in bad {
        assert!(Metrics::parse(&text).is_err(), "taken: {text}");
    }
}

fn bytes_have_their_tokens() {
    assert_eq!([b'!', b'0', b'a', b'~', 0xA1, 0xAE, 0xFF].map(byte_token), [0, 15, 64, 93, 94, 106, 187]);
    assert_eq!([0, b'\n', b' ', 0x7F, 0x80, 0xA0, 0xAD].map(byte_token), [188, 198, 220, 221, 222, 254, 255]);
}
