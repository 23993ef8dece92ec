//! Messages to bytes and back: exact, tolerant where it is promised, and bounded whatever comes.

use std::sync::Arc;

use planner::ClassId;
use proptest::prelude::*;
use runtime::ranks::wire::{Frames, HEADER, MAJOR, MAX_PAYLOAD, WireError, checksum, encode};
use runtime::ranks::{Command, Hello, How, Message, Settings};
use runtime::request::{Media, Submission};
use runtime::sampling::SamplingOptions;
use vision::{ContentKey, Grid, Patches, Span};

use crate::hello;

/// A frame with any payload.
fn frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = b"RHL".to_vec();
    frame.push(MAJOR);
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(checksum(payload).to_le_bytes());
    frame.extend(payload);
    frame
}

fn decode(bytes: &[u8]) -> Result<Option<Message>, WireError> {
    let mut frames = Frames::new(MAX_PAYLOAD);
    frames.push(bytes);
    frames.next_message()
}

/// The message of a JSON text.
fn parse(json: &str) -> Message {
    decode(&frame(json.as_bytes())).unwrap_or_else(|error| panic!("{json}: {error}")).expect("whole")
}

/// One message of each kind.
fn samples() -> Vec<Message> {
    let why = || "because \"so\"\n".to_owned();
    let turn = |how| Command::Turn { number: u64::MAX, round: "0f".into(), how, settled: "aa".into() };
    let sampling = SamplingOptions {
        temperature: 0.1,
        top_k: 3,
        top_p: 0.9,
        min_p: 1e-40,
        presence_penalty: -0.0,
        frequency_penalty: f32::NAN,
        repetition_penalty: f32::INFINITY,
        logit_bias: vec![(7, -100.0), (9, 0.3)],
        seed: Some(u64::MAX),
        logprobs: 5,
    };
    let submission = Submission {
        prompt: vec![0, u32::MAX],
        max_tokens: Some(1),
        sampling,
        stop_ids: vec![4],
        stop: vec!["\u{1F600}\0".into()],
        ignore_eos: true,
        class: ClassId(255),
        media: vec![shown(3, vec![(0, 7, 8, 9, u32::MAX)])],
    };
    vec![
        Message::Hello(hello(1)),
        Message::Welcome,
        Message::Command(Command::Submit { id: 1 << 63, submission }),
        Message::Command(Command::Cancel { id: 2 }),
        Message::Command(turn(How::Replay)),
        Message::Command(turn(How::Capture)),
        Message::Command(turn(How::Eager("prompt pass".into()))),
        Message::Done { number: 3, round: "ff".into() },
        Message::Answer { question: 1, yes: false, what: why() },
        Message::Number { question: 2, number: u64::MAX, what: why() },
        Message::Failed { why: why() },
        Message::Bye { why: why() },
        Message::Beat,
    ]
}

fn text() -> impl Strategy<Value = String> {
    any::<String>()
}

fn float() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits)
}

fn sampling() -> impl Strategy<Value = SamplingOptions> {
    let floats = prop::array::uniform6(float());
    let biases = prop::collection::vec((any::<u32>(), float()), 0..5);
    (floats, any::<u32>(), biases, any::<Option<u64>>(), any::<u32>()).prop_map(
        |(
            [temperature, top_p, min_p, presence, frequency, repetition],
            top_k,
            logit_bias,
            seed,
            logprobs,
        )| {
            SamplingOptions {
                temperature,
                top_k,
                top_p,
                min_p,
                presence_penalty: presence,
                frequency_penalty: frequency,
                repetition_penalty: repetition,
                logit_bias,
                seed,
                logprobs,
            }
        },
    )
}

/// A picture as it travels: without pixels.
fn shown(seed: u8, spans: Vec<(usize, usize, usize, u32, u32)>) -> Media {
    let grid = Grid { pairs: seed.into(), height: 2, width: u32::MAX };
    let span = |(medium, row, first, height, width)| Span { medium, row, first, height, width };
    Media {
        patches: Arc::new(Patches { grid, bytes: Vec::new() }),
        spans: spans.into_iter().map(span).collect(),
        key: ContentKey([seed; 16]),
    }
}

fn submission() -> impl Strategy<Value = Submission> {
    let ids = || prop::collection::vec(any::<u32>(), 0..20);
    let stop = prop::collection::vec(text(), 0..3);
    let spans = prop::collection::vec(any::<(usize, usize, usize, u32, u32)>(), 0..3);
    let media = prop::collection::vec((any::<u8>(), spans), 0..3);
    let media = media.prop_map(|all| all.into_iter().map(|(seed, spans)| shown(seed, spans)).collect());
    (ids(), any::<Option<u32>>(), sampling(), ids(), stop, any::<bool>(), any::<u8>(), media).prop_map(
        |(prompt, max_tokens, sampling, stop_ids, stop, ignore_eos, class, media)| Submission {
            prompt,
            max_tokens,
            sampling,
            stop_ids,
            stop,
            ignore_eos,
            class: ClassId(class),
            media,
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let settings = prop::collection::vec((text(), text()), 0..4).prop_map(Settings);
    let how = prop_oneof![Just(How::Replay), Just(How::Capture), text().prop_map(How::Eager)];
    let hello = (any::<(u8, u16)>(), text(), text(), any::<usize>(), any::<usize>(), settings, any::<u64>())
        .prop_map(|(version, binary, architecture, rank, ranks, settings, silence_ms)| Hello {
            version,
            binary,
            architecture,
            rank,
            ranks,
            settings,
            silence_ms,
        });
    let command = prop_oneof![
        (any::<u64>(), submission()).prop_map(|(id, submission)| Command::Submit { id, submission }),
        any::<u64>().prop_map(|id| Command::Cancel { id }),
        (any::<u64>(), text(), how, text()).prop_map(|(number, round, how, settled)| Command::Turn {
            number,
            round,
            how,
            settled
        }),
    ];
    prop_oneof![
        hello.prop_map(Message::Hello),
        Just(Message::Welcome),
        command.prop_map(Message::Command),
        (any::<u64>(), text()).prop_map(|(number, round)| Message::Done { number, round }),
        (any::<u64>(), any::<bool>(), text()).prop_map(|(question, yes, what)| Message::Answer {
            question,
            yes,
            what
        }),
        (any::<u64>(), any::<u64>(), text()).prop_map(|(question, number, what)| Message::Number {
            question,
            number,
            what
        }),
        text().prop_map(|why| Message::Failed { why }),
        text().prop_map(|why| Message::Bye { why }),
        Just(Message::Beat),
    ]
}

/// The message with its floats as bits, since NaN is not equal to itself.
fn exact(message: &Message) -> String {
    let mut text = format!("{message:?}");
    if let Message::Command(Command::Submit { submission, .. }) = message {
        let s = &submission.sampling;
        let penalties = [s.presence_penalty, s.frequency_penalty, s.repetition_penalty];
        let biases = s.logit_bias.iter().map(|(_, bias)| *bias);
        for float in [s.temperature, s.top_p, s.min_p].into_iter().chain(penalties).chain(biases) {
            text += &format!(" {:08x}", float.to_bits());
        }
    }
    text
}

fn assert_round_trip(messages: &[Message], step: usize) {
    let bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message).expect("fits")).collect();
    let (mut frames, mut read) = (Frames::new(MAX_PAYLOAD), Vec::new());
    for part in bytes.chunks(step) {
        frames.push(part);
        while let Some(message) = frames.next_message().expect("a message") {
            read.push(exact(&message));
        }
    }
    assert!(frames.is_empty());
    assert_eq!(read, messages.iter().map(exact).collect::<Vec<_>>());
}

#[test]
fn every_message_comes_out_as_it_went_in() {
    for step in [1, 5, 1 << 20] {
        assert_round_trip(&samples(), step);
    }
}

proptest! {
    #[test]
    fn any_messages_come_out_as_they_went_in(
        messages in prop::collection::vec(message(), 1..4),
        step in 1_usize..200,
    ) {
        assert_round_trip(&messages, step);
    }

    #[test]
    fn any_bytes_are_refused_or_wait(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(!matches!(decode(&bytes), Ok(Some(_))));
        let mut framed = frame(&bytes);
        let refused = matches!(decode(&framed), Err(WireError::Payload { .. }));
        prop_assert!(refused, "a payload of no message");
        framed.truncate(framed.len() - 1);
        prop_assert!(!matches!(decode(&framed), Ok(Some(_))));
    }
}

#[test]
fn an_older_message_takes_defaults() {
    let json = r#"{"Command":{"Submit":{"id":7,"submission":{"prompt":[1,2]}}}}"#;
    let submission = Submission::new(vec![1, 2]);
    assert_eq!(parse(json), Message::Command(Command::Submit { id: 7, submission: submission.clone() }));

    let json = r#"{"Command":{"Submit":{"id":7,"submission":{"prompt":[1,2],"sampling":{"top_k":4}}}}}"#;
    let sampling = SamplingOptions { top_k: 4, ..SamplingOptions::default() };
    let submission = Submission { sampling, ..submission };
    assert_eq!(parse(json), Message::Command(Command::Submit { id: 7, submission }));

    let json = r#"{"Command":{"Turn":{"number":1,"round":"ab","how":"Replay"}}}"#;
    let turn = Command::Turn { number: 1, round: "ab".into(), how: How::Replay, settled: String::new() };
    assert_eq!(parse(json), Message::Command(turn));
    let answer = Message::Answer { question: 4, yes: true, what: String::new() };
    assert_eq!(parse(r#"{"Answer":{"question":4,"yes":true}}"#), answer);
    let older = parse(
        r#"{"Hello":{"version":[1,0],"binary":"b","architecture":"host","rank":1,"ranks":2,"settings":[["a","1"]]}}"#,
    );
    let settings = Settings::default().with("a", 1);
    let expected = Hello { version: (1, 0), ..Hello::new(1, 2, "b", "host", settings) };
    assert_eq!(older, Message::Hello(expected));
}

#[test]
fn what_every_version_has_cannot_be_missing() {
    for json in [
        r#"{"Command":{"Submit":{"id":7,"submission":{}}}}"#,
        r#"{"Command":{"Turn":{"number":1,"how":"Replay"}}}"#,
        r#"{"Done":{"number":1}}"#,
        r#"{"Answer":{"question":4}}"#,
    ] {
        let refused = decode(&frame(json.as_bytes())).expect_err(json);
        assert!(refused.to_string().contains("missing field"), "{json}: {refused}");
    }
}

#[test]
fn a_newer_minor_may_say_more() {
    let json = r#"{"Done":{"number":1,"round":"ab","seconds":[0.5,{"deep":null}]}}"#;
    assert_eq!(parse(json), Message::Done { number: 1, round: "ab".into() });
    let json =
        r#"{"Command":{"Submit":{"id":1,"submission":{"prompt":[3],"pictures":[{"rows":2}]},"urgent":1}}}"#;
    let submission = Submission::new(vec![3]);
    assert_eq!(parse(json), Message::Command(Command::Submit { id: 1, submission }));
    // A message of an unknown kind cannot be ignored: what it asks for would not be done.
    let refused = decode(&frame(br#"{"Sing":{}}"#)).expect_err("unknown");
    assert!(refused.to_string().contains("Sing"), "{refused}");
}

/// All of a picture but its pixels; a message from before there were pictures has none.
#[test]
fn pictures_travel_without_pixels() {
    let case = tests::tower::prompts().into_iter().find(|case| case.id().ends_with("video_one"));
    let case = case.expect("a case");
    let media = tests::tower::media(&case);
    let submission = Submission { media: media.clone(), ..Submission::new(case.input_ids()) };
    let message = Message::Command(Command::Submit { id: 1, submission: submission.clone() });
    let bytes = encode(&message).expect("fits");
    assert!(bytes.len() < media[0].patches.bytes.len());
    let without = |media: &Media| Media {
        patches: Arc::new(Patches { bytes: Vec::new(), ..(*media.patches).clone() }),
        ..media.clone()
    };
    let expected = Submission { media: media.iter().map(without).collect(), ..submission };
    assert_eq!(decode(&bytes), Ok(Some(Message::Command(Command::Submit { id: 1, submission: expected }))));
    let older = parse(r#"{"Command":{"Submit":{"id":7,"submission":{"prompt":[1,2]}}}}"#);
    let submission = Submission::new(vec![1, 2]);
    assert_eq!(older, Message::Command(Command::Submit { id: 7, submission }));
}

#[test]
fn another_major_is_refused_with_both_values() {
    let mut bytes = encode(&Message::Beat).expect("fits");
    bytes[3] = 9;
    for length in 4..=bytes.len() {
        assert_eq!(decode(&bytes[..length]), Err(WireError::Major { ours: MAJOR, theirs: 9 }));
    }
    let text = WireError::Major { ours: MAJOR, theirs: 9 }.to_string();
    assert!(text.contains('9') && text.contains(&MAJOR.to_string()), "{text}");
}

#[test]
fn a_truncated_message_waits_at_every_byte() {
    for message in samples() {
        let bytes = encode(&message).expect("fits");
        for length in 0..bytes.len() {
            let mut frames = Frames::new(MAX_PAYLOAD);
            frames.push(&bytes[..length]);
            assert_eq!(frames.next_message(), Ok(None), "{} of {} bytes", length, message.name());
            assert_eq!(frames.is_empty(), length == 0);
        }
    }
}

#[test]
fn a_flipped_byte_never_passes() {
    for message in samples() {
        let bytes = encode(&message).expect("fits");
        for at in 0..bytes.len() {
            for flip in [1, 0x20, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                match decode(&damaged) {
                    // A length that grew waits for the rest.
                    Ok(None) => assert!((4..8).contains(&at), "byte {at} of {}", message.name()),
                    Ok(Some(other)) => panic!("byte {at} of {} makes {other:?}", message.name()),
                    Err(_) => {}
                }
            }
        }
    }
}

#[test]
fn a_damaged_payload_with_a_right_checksum_never_panics() {
    for message in samples() {
        let bytes = encode(&message).expect("fits");
        for at in HEADER..bytes.len() {
            for flip in [1, 0x20, 0x80, 0xff] {
                let mut payload = bytes[HEADER..].to_vec();
                payload[at - HEADER] ^= flip;
                if let Ok(Some(other)) = decode(&frame(&payload)) {
                    assert_eq!(other.name(), message.name());
                }
            }
        }
    }
}

#[test]
fn a_length_past_the_limit_is_refused_at_once() {
    let mut header = frame(b"")[..8].to_vec();
    for length in [MAX_PAYLOAD as u32 + 1, u32::MAX] {
        header[4..8].copy_from_slice(&length.to_le_bytes());
        let refused = Err(WireError::TooLong { length: length.into(), limit: MAX_PAYLOAD });
        assert_eq!(decode(&header), refused);
    }
    header[4..8].copy_from_slice(&(MAX_PAYLOAD as u32).to_le_bytes());
    assert_eq!(decode(&header), Ok(None));
}

#[test]
fn a_message_past_the_limit_is_not_sent() {
    let message = Message::Bye { why: "x".repeat(MAX_PAYLOAD) };
    assert!(matches!(encode(&message), Err(WireError::TooLong { limit: MAX_PAYLOAD, .. })));
}
