//! Options of a request: limits, and the row that is staged for them.

use kernels::table::Sampling;
use runtime::sampling::SamplingOptions;

tests::tests! {
    host: every_option_outside_its_limits_is_named_with_its_value, the_ends_of_the_limits_are_accepted, the_staged_row_says_what_the_options_say, without_a_seed_every_row_has_its_own;
}

fn refused(change: impl FnOnce(&mut SamplingOptions)) -> String {
    let mut options = SamplingOptions::default();
    change(&mut options);
    options.check(100).unwrap_err().to_string()
}

fn every_option_outside_its_limits_is_named_with_its_value() {
    let says = |error: String, words: &[&str]| {
        assert!(words.iter().all(|word| error.contains(word)), "{error:?} lacks one of {words:?}");
    };
    says(refused(|o| o.temperature = -0.5), &["temperature", "-0.5"]);
    says(refused(|o| o.temperature = f32::NAN), &["temperature", "NaN"]);
    says(refused(|o| o.temperature = f32::INFINITY), &["temperature", "inf"]);
    says(refused(|o| o.top_p = 0.0), &["top_p", "0"]);
    says(refused(|o| o.top_p = 1.01), &["top_p", "1.01"]);
    says(refused(|o| o.top_p = f32::NAN), &["top_p", "NaN"]);
    says(refused(|o| o.min_p = -0.1), &["min_p", "-0.1"]);
    says(refused(|o| o.min_p = 1.5), &["min_p", "1.5"]);
    says(refused(|o| o.presence_penalty = 2.1), &["presence_penalty", "2.1"]);
    says(refused(|o| o.frequency_penalty = -2.1), &["frequency_penalty", "-2.1"]);
    says(refused(|o| o.repetition_penalty = 0.0), &["repetition_penalty", "0"]);
    says(refused(|o| o.repetition_penalty = -1.0), &["repetition_penalty", "-1"]);
    says(refused(|o| o.logprobs = 21), &["logprobs", "21", "20"]);
    says(refused(|o| o.logit_bias = vec![(3, 100.5)]), &["logit_bias", "3", "100.5"]);
    says(refused(|o| o.logit_bias = vec![(3, f32::NAN)]), &["logit_bias", "3", "NaN"]);
    says(refused(|o| o.logit_bias = vec![(3, 1.0), (100, 1.0)]), &["logit_bias", "100"]);
    says(refused(|o| o.logit_bias = vec![(3, 1.0), (4, 1.0), (3, 2.0)]), &["logit_bias", "3", "twice"]);
    says(refused(|o| o.logit_bias = (0..513).map(|id| (id, 1.0)).collect()), &["logit_bias", "513", "512"]);
}

fn the_ends_of_the_limits_are_accepted() {
    let options = SamplingOptions {
        temperature: 2.0,
        top_k: u32::MAX,
        top_p: 1.0,
        min_p: 1.0,
        presence_penalty: 2.0,
        frequency_penalty: -2.0,
        repetition_penalty: f32::MIN_POSITIVE,
        logit_bias: (0..512).map(|id| (id, if id % 2 == 0 { 100.0 } else { -100.0 })).collect(),
        seed: Some(u64::MAX),
        logprobs: 20,
    };
    assert_eq!(options.check(512), Ok(()));
    assert_eq!(SamplingOptions::default().check(1), Ok(()));
}

fn the_staged_row_says_what_the_options_say() {
    let options = SamplingOptions {
        temperature: 0.7,
        top_k: 20,
        top_p: 0.8,
        min_p: 0.1,
        presence_penalty: 1.5,
        frequency_penalty: 0.5,
        repetition_penalty: 1.1,
        logit_bias: vec![(7, -1.0), (2, 3.0)],
        seed: Some(9),
        logprobs: 4,
    };
    let row = Sampling {
        seed: 9,
        temperature: 0.7,
        top_p: 0.8,
        min_p: 0.1,
        presence: 1.5,
        frequency: 0.5,
        repetition: 1.1,
        top_k: 20,
        logprobs: 4,
        biases: 2,
        zero: 0,
    };
    assert_eq!(options.to_row(), row);
    let biases: Vec<(u32, f32)> = options.biases().iter().map(|bias| (bias.id, bias.value)).collect();
    assert_eq!(biases, options.logit_bias);
    let greedy = SamplingOptions { seed: Some(0), ..SamplingOptions::default() };
    assert_eq!(greedy.to_row(), Sampling::default());
}

fn without_a_seed_every_row_has_its_own() {
    let options = SamplingOptions::default();
    assert_ne!(options.to_row().seed, options.to_row().seed);
}
