//! Sampling options through whole replies of the tiny model.

use crossbeam_channel::unbounded;
use planner::RequestId;
use runtime::engine::{Class, Engine, EngineOptions, Event, open as open_engine};
use runtime::request::Submission;
use runtime::sampling::SamplingOptions;
use tests::fixture::repository;

tests::tests! {
    host: a_seed_decides_a_generation_with_graphs_or_without, a_bias_bans_and_forces_ids, penalties_see_the_ids_of_the_sequence_and_no_others;
}

const PROMPT: [u32; 5] = [40, 41, 42, 43, 44];

fn open(graphs: bool) -> Engine {
    let classes = vec![Class { context: 1024, lanes: 1, pages: 0 }];
    let options = EngineOptions { graphs, classes, ..EngineOptions::default() };
    open_engine(&repository("models/tiny"), &options, &mut |_| {}).expect("the tiny model opens").engine
}

fn ids(engine: &mut Engine, prompt: &[u32], sampling: &SamplingOptions) -> Vec<u32> {
    let (sender, events) = unbounded();
    let submission = Submission {
        max_tokens: Some(24),
        ignore_eos: true,
        sampling: sampling.clone(),
        ..Submission::new(prompt.to_vec())
    };
    engine.submit(RequestId(1), submission, sender);
    while !engine.is_idle() {
        engine.turn().expect("the round runs");
    }
    let id = |event| match event {
        Event::Token(token) => Some(token.id),
        Event::Finished(_) => None,
        other => panic!("{other:?}"),
    };
    events.try_iter().filter_map(id).collect()
}

fn hot(seed: u64) -> SamplingOptions {
    SamplingOptions {
        temperature: 1.0,
        top_k: 50,
        top_p: 0.95,
        presence_penalty: 1.5,
        repetition_penalty: 1.1,
        logit_bias: vec![(11, 4.0), (12, -100.0)],
        seed: Some(seed),
        logprobs: 3,
        ..SamplingOptions::default()
    }
}

fn a_seed_decides_a_generation_with_graphs_or_without() {
    let (mut graphs, mut eager) = (open(true), open(false));
    let first = ids(&mut graphs, &PROMPT, &hot(1));
    assert_eq!(ids(&mut eager, &PROMPT, &hot(1)), first);
    assert_ne!(ids(&mut graphs, &PROMPT, &hot(2)), first);
    // Options are not frozen in the captured round, and nothing of another request is left in the slot.
    let greedy = ids(&mut graphs, &PROMPT, &SamplingOptions::default());
    assert_eq!(ids(&mut eager, &PROMPT, &SamplingOptions::default()), greedy);
    assert_eq!(ids(&mut graphs, &PROMPT, &hot(1)), first);
}

fn a_bias_bans_and_forces_ids() {
    let mut engine = open(true);
    let greedy = ids(&mut engine, &PROMPT, &SamplingOptions::default());
    let ban = SamplingOptions { logit_bias: vec![(greedy[0], -100.0)], ..SamplingOptions::default() };
    assert!(!ids(&mut engine, &PROMPT, &ban).contains(&greedy[0]));
    let force = SamplingOptions { logit_bias: vec![(77, 100.0)], ..SamplingOptions::default() };
    assert_eq!(ids(&mut engine, &PROMPT, &force), [77; 24]);
    assert_eq!(ids(&mut engine, &PROMPT, &SamplingOptions::default()), greedy);
}

/// Biased ids that a huge repetition penalty lets through once each, best first. The prompt comes in two
/// pieces and holds the best of them; what the head would pick after the first piece is no id of the sequence
/// and must not count.
fn penalties_see_the_ids_of_the_sequence_and_no_others() {
    let mut engine = open(true);
    let mut prompt: Vec<u32> = (0..700).map(|i| 100 + i % 300).collect();
    prompt[3] = 29;
    let sampling = SamplingOptions {
        logit_bias: vec![(32, 55.0), (30, 85.0), (29, 100.0), (31, 70.0)],
        repetition_penalty: 1e6,
        ..SamplingOptions::default()
    };
    assert_eq!(ids(&mut engine, &prompt, &sampling)[..3], [30, 31, 32]);
    prompt[3] = 99;
    assert_eq!(ids(&mut engine, &prompt, &sampling)[..4], [29, 30, 31, 32]);
}
