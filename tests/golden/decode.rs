//! Greedy continuations: a prompt pass, then one row at a time.

use kernels::numerics::ElementType;
use kernels::table::Outcome;
use tests::fixture::Fixture;
use tests::oracle::{assert_close, cases, read_json};

use crate::{LOGIT_MARGIN, LOGITS, ROUTER_MARGIN, SELECT_MARGIN, one_lane};

#[test]
fn greedy_ids_agree_where_margins_allow() {
    let (mut compared, mut recorded) = (0, 0);
    for case in cases("greedy") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
        let mut lane = fixture.lane(0);
        fixture.prompt(&mut lane, &case.input_ids());
        let expected = case.indices("greedy.tokens");
        let exec = fixture.capture_decode(1);
        let steps = expected.len();
        recorded += steps;
        let last = case.input_ids().len() - 1;
        let first = fixture.runner.outcomes(last + 1).expect("the prompt ran")[last];
        let mut outcome: Outcome = first;
        for (step, token) in expected.iter().enumerate() {
            let margin = |name: &str| case.tensor(name).values[step];
            let clear = margin("greedy.logit_margin") >= LOGIT_MARGIN
                && margin("greedy.router_margin") >= ROUTER_MARGIN
                && margin("greedy.qsa_margin") >= SELECT_MARGIN;
            if !clear {
                eprintln!("{}: a near tie at step {step} of {steps}; the rest may differ", case.id());
                break;
            }
            assert_eq!(i64::from(outcome.id), *token, "{} step {step}", case.id());
            compared += 1;
            if step + 1 == steps {
                let what = format!("{} last step", case.id());
                // The logits that chose the last id lie behind those of the row before.
                let logits = fixture.runner.logits(1).expect("the round ran");
                assert_close(&what, &logits, &case.tensor("last_step_logits_f32").values, LOGITS);
                break;
            }
            outcome = fixture.decode(&mut [&mut lane], Some(&exec))[0];
        }
    }
    assert!(compared * 2 > recorded, "only {compared} of {recorded} steps stand clear of ties");
}

#[test]
fn chats_continue_as_recorded() {
    for case in cases("chat_greedy") {
        let path = format!("tests/oracle/{}", case.manifest["expected"].as_str().expect("a path"));
        for chat in read_json(&path).as_array().expect("a list of chats") {
            let ids = |name: &str| -> Vec<u32> {
                let ids = chat[name].as_array().expect("ids").iter();
                ids.map(|id| id.as_u64().expect("an id") as u32).collect()
            };
            let (prompt, expected) = (ids("prompt_ids"), ids("tokens"));
            let margin = |name: &str| chat["margins"][name].as_f64().expect("a margin");
            assert!(margin("min_logit_margin") > LOGIT_MARGIN && margin("min_router_margin") > ROUTER_MARGIN);
            assert!(margin("min_qsa_margin") > SELECT_MARGIN, "{}: a near tie", chat["name"]);
            let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
            let mut lane = fixture.lane(0);
            fixture.prompt(&mut lane, &prompt);
            let mut id = fixture.runner.outcomes(prompt.len()).expect("the prompt ran")[prompt.len() - 1].id;
            for (step, token) in expected.iter().enumerate() {
                assert_eq!(id, *token, "{} step {step}", chat["name"]);
                id = fixture.decode(&mut [&mut lane], None)[0].id;
            }
        }
    }
}
