//! `generate` with sampling options, stop texts and logprobs.

use serde_json::Value;

use crate::binary::generate_json;

/// A prompt of no meaning, on which the model is unsure, and the two ids it likes best after it are close.
const UNSURE: &[&str] = &["--ids", "700,31,1207,5", "--ignore-eos", "--max-tokens", "16"];
const GARDEN: &[&str] = &["--prompt", "Spell garden backwards."];

fn unsure(options: &[&str]) -> Value {
    generate_json(&[UNSURE, options].concat())
}

fn ids(answer: &Value) -> Vec<u64> {
    answer["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn a_seed_draws_the_same_tokens_again_and_another_draws_others() {
    let seeded = |seed: &str| unsure(&["--temperature", "1", "--seed", seed]);
    let first = seeded("1");
    assert_eq!(first, seeded("1"));
    assert_ne!(first["ids"], seeded("2")["ids"]);
    assert_ne!(first["ids"], unsure(&[])["ids"], "drawn, not the likeliest");
    let eager = unsure(&["--temperature", "1", "--seed", "1", "--graphs", "off"]);
    assert_eq!(first["token_sha"], eager["token_sha"]);
}

#[test]
fn without_a_seed_every_prompt_draws_its_own_tokens() {
    // One pair of replies may agree by chance; a dozen do not.
    let again = ["--ids", UNSURE[1], "--ids", UNSURE[1], "--ids", UNSURE[1], "--ids", UNSURE[1]];
    let line = [UNSURE, &again, &again, &again, &["--temperature", "1.5"]].concat();
    let answers = generate_json(&line);
    let all: std::collections::HashSet<String> =
        answers.as_array().unwrap().iter().map(|answer| answer["ids"].to_string()).collect();
    assert!(all.len() > 6, "{} different replies", all.len());
    assert_ne!(answers, generate_json(&line));
}

#[test]
fn a_draw_from_one_token_is_greedy() {
    let greedy = unsure(&[])["ids"].clone();
    let hot = ["--temperature", "1.7", "--seed", "4", "--logprobs", "1"];
    for narrow in [["--top-k", "1"], ["--top-p", "0.000001"]] {
        assert_eq!(unsure(&[&hot[..], &narrow].concat())["ids"], greedy, "{narrow:?}");
    }
    // Of equally likely tokens, any may be drawn.
    for row in unsure(&[&hot[..], &["--min-p", "1"]].concat())["logprobs"].as_array().unwrap() {
        assert_eq!(row["logprob"], row["top"][0][1], "{row}");
    }
}

#[test]
fn biases_force_and_forbid_tokens() {
    assert_eq!(ids(&unsure(&["--logit-bias", "99=100"])), [99; 16]);
    let first = ids(&unsure(&[]))[0];
    let other = ids(&unsure(&["--logit-bias", &format!("{first}=-100")]));
    assert!(!other.contains(&first), "{first} is in {other:?}");
}

#[test]
fn penalties_work_against_repetition() {
    // The bias alone would pick 99 each time; each penalty is stronger than what is left of it.
    let with = |options: &[&str]| ids(&unsure(&[&["--logit-bias", "99=24"], options].concat()));
    let plain = with(&[]).iter().filter(|id| **id == 99).count();
    assert!(plain > 8, "{plain} of 16");
    for penalty in [["--frequency-penalty", "2"], ["--repetition-penalty", "9"]] {
        let penalised = with(&penalty).iter().filter(|id| **id == 99).count();
        assert!(penalised < plain, "{penalised} of {plain} with {penalty:?}");
    }
    assert_ne!(ids(&unsure(&["--presence-penalty", "2"])), ids(&unsure(&["--presence-penalty", "-2"])));
}

#[test]
fn a_stop_text_is_never_shown() {
    let whole = "n-e-d-r-a-g.";
    // Across tokens, at the start, in the middle of a token; the earliest of several counts.
    for (stops, shown) in [
        (&["d-r"][..], "n-e-"),
        (&["n"], ""),
        (&["g.", "-a"], "n-e-d-r"),
        (&["e-d-r-a-x", "q"], whole),
        (&["g.?"], whole),
    ] {
        let options: Vec<&str> = stops.iter().flat_map(|stop| ["--stop", stop]).collect();
        let answer = generate_json(&[GARDEN, &options].concat());
        assert_eq!(answer["text"], shown, "{stops:?}");
        assert_eq!(answer["finish_reason"], "stop");
        let printed = crate::binary::generate(&[GARDEN, &options].concat()).good().stdout;
        assert_eq!(printed, format!("{shown}\n"), "{stops:?}");
    }
}

#[test]
fn a_stop_id_ends_the_answer_and_is_its_last_id() {
    let whole = ids(&generate_json(GARDEN));
    let cut = generate_json(&[GARDEN, &["--stop-id", &format!("5,{}", whole[3])]].concat());
    assert_eq!(ids(&cut), whole[..4]);
    assert_eq!(cut["finish_reason"], "stop");
    let own = generate_json(&[GARDEN, &["--ignore-eos", "--stop-id", "2016"]].concat());
    assert_eq!(ids(&own), whole);
}

#[test]
fn logprobs_are_logarithms_of_probabilities_in_order() {
    let answer = unsure(&["--logprobs", "5"]);
    let rows = answer["logprobs"].as_array().unwrap();
    assert_eq!(rows.len(), 16);
    for (row, id) in rows.iter().zip(ids(&answer)) {
        assert_eq!(row["id"], id);
        let number = |value: &Value| value.as_f64().unwrap();
        let own = number(&row["logprob"]);
        let top: Vec<(u64, f64)> = row["top"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_u64().unwrap(), number(&pair[1])))
            .collect();
        assert_eq!(top.len(), 5);
        assert_eq!(top[0], (id, own), "greedy picks the likeliest");
        assert!(own <= 0.0 && top.is_sorted_by(|a, b| a.1 >= b.1), "{top:?}");
        assert!(top.iter().map(|pair| pair.1.exp()).sum::<f64>() < 1.0 + 1e-5, "{top:?}");
    }
    let none = unsure(&["--logprobs", "0"]);
    assert_eq!(none["logprobs"][0]["top"], serde_json::json!([]));
    assert!(none["logprobs"][0]["logprob"].as_f64().unwrap() <= 0.0);
    assert!(unsure(&[]).get("logprobs").is_none());
}
