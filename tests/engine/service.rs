//! The engine behind its handle: events, cancels, refusals, stop texts, ends.

use kernels::numerics::ElementType;
use runtime::engine::{Class, EngineOptions, Event, OpenEngine, Reason, open};
use runtime::request::Submission;
use runtime::sampling::SamplingOptions;
use tests::fixture::repository;

fn tiny(options: EngineOptions) -> OpenEngine {
    open(&repository("models/tiny"), &options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

fn few_lanes() -> EngineOptions {
    EngineOptions {
        element: ElementType::Bf16,
        classes: vec![Class { context: 1024, lanes: 4, pages: 0 }],
        ..EngineOptions::default()
    }
}

/// The ids, the text and the last event of a request.
fn collect(events: &crossbeam_channel::Receiver<Event>) -> (Vec<u32>, String, Event) {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for event in events {
        match event {
            Event::Token(token) => {
                assert!(token.logprob <= 0.0);
                ids.push(token.id);
                text += &token.text;
            }
            Event::Finished(finished) => {
                text += &finished.text;
                if finished.reason != Reason::Cancelled {
                    assert_eq!(finished.completion_tokens as usize, ids.len());
                }
                return (ids, text, Event::Finished(finished));
            }
            other => return (ids, text, other),
        }
    }
    panic!("the engine went away");
}

fn ask(open: &OpenEngine, text: &str) -> Submission {
    let prompt = open.chat.render(&runtime::chat::ChatRequest::user(text)).expect("a prompt");
    Submission::new(open.tokenizer.encode(&prompt).expect("ids"))
}

#[test]
fn many_prompts_at_once_answer_as_each_alone() {
    let open = tiny(few_lanes());
    let questions = [
        "What is 27 + 58?",
        "Spell garden backwards.",
        "Hello!",
        "Repeat this list: lamp, owl, river.",
        "What is 9 x 7?",
        "Count from 3 to 9.",
    ];
    let submissions: Vec<Submission> = questions.iter().map(|question| ask(&open, question)).collect();
    let (handle, thread) = open.engine.spawn();
    let tickets: Vec<_> = submissions.iter().map(|s| handle.submit(s.clone()).expect("taken")).collect();
    let together: Vec<_> = tickets.iter().map(|ticket| collect(&ticket.events)).collect();
    assert_eq!(together[0].1, "27 + 58 = 85.");
    assert_eq!(together[1].1, "n-e-d-r-a-g.");
    for (submission, together) in submissions.into_iter().zip(&together) {
        let alone = collect(&handle.submit(submission).expect("taken").events);
        assert_eq!((&alone.0, &alone.1), (&together.0, &together.1));
        assert!(matches!(&alone.2, Event::Finished(finished) if finished.reason == Reason::Stop));
    }
    thread.stop().expect("a good end");
    assert!(handle.submit(Submission::new(vec![1])).is_err(), "an engine that has ended takes nothing");
}

#[test]
fn stop_texts_end_replies_and_never_show() {
    let open = tiny(few_lanes());
    let mut submission = ask(&open, "Tell me a short story about Mia the fox and the lamp.");
    let (handle, _thread) = open.engine.spawn();
    let whole = collect(&handle.submit(submission.clone()).expect("taken").events).1;
    for stop in ["forest", "never in", "Mia lived in the", ". "] {
        submission.stop = vec!["not there".into(), stop.into()];
        let (_, text, end) = collect(&handle.submit(submission.clone()).expect("taken").events);
        assert_eq!(text, whole[..whole.find(stop).expect("the story has it")], "{stop}");
        assert!(matches!(end, Event::Finished(finished) if finished.reason == Reason::Stop));
    }
}

#[test]
fn a_cancelled_request_frees_its_lane() {
    let open =
        tiny(EngineOptions { classes: vec![Class { context: 1024, lanes: 1, pages: 0 }], ..few_lanes() });
    let mut long = ask(&open, "Tell me a short story about Mia the fox and the lamp.");
    long.ignore_eos = true;
    let short = ask(&open, "Hello!");
    let (handle, _thread) = open.engine.spawn();
    let running = handle.submit(long.clone()).expect("taken");
    assert!(matches!(running.events.recv(), Ok(Event::Token(_))));
    let waiting = handle.submit(short.clone()).expect("taken");
    running.cancel();
    assert!(
        matches!(collect(&running.events).2, Event::Finished(finished) if finished.reason == Reason::Cancelled)
    );
    assert_eq!(collect(&waiting.events).1, "Hello! How can I help you?");
    // A caller that goes away is a cancel too.
    let gone = handle.submit(long).expect("taken");
    assert!(matches!(gone.events.recv(), Ok(Event::Token(_))));
    drop(gone);
    assert_eq!(collect(&handle.submit(short).expect("taken").events).1, "Hello! How can I help you?");
}

#[test]
fn what_cannot_run_is_refused_with_the_number_that_decided() {
    let open = tiny(EngineOptions { queue: 1, ..few_lanes() });
    let (handle, _thread) = open.engine.spawn();
    let refuse =
        |submission: Submission, word: &str| match collect(&handle.submit(submission).expect("taken").events)
            .2
        {
            Event::Refused(why) => assert!(why.contains(word), "{why}"),
            other => panic!("{other:?}"),
        };
    let with = |sampling: SamplingOptions| Submission { sampling, ..Submission::new(vec![1]) };
    refuse(Submission::new(vec![]), "empty");
    refuse(Submission::new(vec![1, 2048]), "2048");
    refuse(Submission::new(vec![1; 1025]), "1024");
    refuse(Submission { max_tokens: Some(0), ..Submission::new(vec![1]) }, "max_tokens");
    refuse(Submission { max_tokens: Some(1024), ..Submission::new(vec![1]) }, "1024");
    refuse(Submission { stop: vec![String::new()], ..Submission::new(vec![1]) }, "empty stop");
    refuse(Submission { class: planner::ClassId(3), ..Submission::new(vec![1]) }, "class 3");
    refuse(with(SamplingOptions { temperature: f32::NAN, ..Default::default() }), "temperature");
    refuse(with(SamplingOptions { temperature: -1.0, ..Default::default() }), "temperature");
    refuse(with(SamplingOptions { top_p: 0.0, ..Default::default() }), "top_p");
    refuse(with(SamplingOptions { top_p: 1.5, ..Default::default() }), "top_p");
    refuse(with(SamplingOptions { logit_bias: vec![(2048, 1.0)], ..Default::default() }), "2048");
}

#[test]
fn settings_that_cannot_work_are_named() {
    let wrong = |options: EngineOptions, word: &str| {
        let error =
            open(&repository("models/tiny"), &options, &mut |_| {}).err().expect("refused").to_string();
        assert!(error.contains(word), "{error}");
    };
    wrong(EngineOptions { classes: vec![], ..few_lanes() }, "lanes");
    wrong(
        EngineOptions { classes: vec![Class { context: 1 << 20, ..Class::default() }], ..few_lanes() },
        "32768",
    );
    wrong(EngineOptions { piece_rows: 100, ..few_lanes() }, "100");
    wrong(EngineOptions { queue: 0, ..few_lanes() }, "queue");
    wrong(EngineOptions { depth: 3, ..few_lanes() }, "3");
    wrong(EngineOptions { trace: true, ..few_lanes() }, "depth");
}
