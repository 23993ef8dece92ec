//! The tiny model's text probes, id for id in both element types.

use kernels::numerics::ElementType;
use runtime::model::Picks;
use serde_json::Value;
use tests::fixture::{Fixture, Size, repository};
use tests::oracle::read_json;

#[test]
fn every_text_probe_in_f32() {
    run(ElementType::F32, "fp32");
}

#[test]
fn every_text_probe_in_bf16() {
    run(ElementType::Bf16, "bf16");
}

fn run(element: ElementType, recorded: &str) {
    let size = Size { slots: 1, context: 4096, rows: 512 };
    let mut fixture = Fixture::open(&repository("models/tiny"), element, size);
    let exec = fixture.capture_decode(1);
    let probes = read_json("tests/probes/tiny.json");
    let mut count = 0;
    for probe in probes["probes"].as_array().expect("a list of probes").iter().filter(|probe| is_text(probe))
    {
        let (prompt, expected) = (ids(&probe["prompt_ids"]), ids(&probe[recorded]["ids"]));
        let mut lane = fixture.lane(0);
        let mut outcome = None;
        for piece in prompt.chunks(512) {
            let emission = fixture.prompt_emission(&mut lane, piece, Picks::Last);
            fixture.runner.stream.run(emission, &[]).expect("queued");
            outcome = fixture.runner.outcomes(1).expect("the piece ran").pop();
        }
        let mut got = vec![outcome.expect("a prompt has a last row").id];
        while got.len() < expected.len() {
            got.push(fixture.decode(&mut [&mut lane], Some(&exec))[0].id);
        }
        assert_eq!(got, expected, "probe {} in {recorded}", probe["id"]);
        count += 1;
    }
    assert!(count >= 20, "only {count} text probes");
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Whether no message holds a picture or a clip.
fn is_text(probe: &Value) -> bool {
    let messages = probe["messages"].as_array().expect("messages");
    messages.iter().all(|message| {
        message["content"].as_array().is_none_or(|parts| parts.iter().all(|part| part["type"] == "text"))
    })
}
