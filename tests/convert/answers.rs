//! The converted tiny model runs: receipts in every format, and answers that are still good.

use kernels::numerics::ElementType;
use runtime::checkpoint::layout::Format;
use runtime::model::Picks;
use runtime::open::Load;
use runtime::place::Place;
use runtime::receipts::{self, CheckOptions};
use runtime::weights::TablePlace;
use serde_json::Value;
use tests::fixture::{Fixture, Size};
use tests::oracle::read_json;

use crate::{Converted, MATRICES, TABLES, tiny, to};

#[test]
fn receipts_hold_in_every_format() {
    let options = CheckOptions {
        exchange: graph::Exchange::Auto,
        place: Place::Host,
        element: ElementType::Bf16,
        load: Load::default(),
        table: TablePlace::Device,
        cases: 1,
        seed: 3,
    };
    for experts in MATRICES {
        for table in TABLES {
            let converted = Converted::new(&tiny(), &to(experts, Format::Fp8, table));
            // All three equalities where every format is met once, and the first one everywhere.
            let met = MATRICES.iter().position(|format| *format == experts);
            let receipts = match met == TABLES.iter().position(|format| *format == table) {
                true => receipts::check(&converted.path(), &options, None, &mut |_| {}),
                false => receipts::graph_equals_eager(&converted.path(), &options).map(|one| vec![one]),
            };
            let receipts = receipts.unwrap_or_else(|error| panic!("{error}"));
            let [graph, eager] = &receipts[0].rounds;
            assert!(graph.replayed > 0 && eager.replayed + eager.captured == 0, "{}", receipts[0]);
            for receipt in receipts {
                let counts = [receipt.ids, receipt.pictured];
                assert!(
                    receipt.passed && !counts.contains(&0),
                    "experts {experts}, table {table}: {receipt}"
                );
            }
        }
    }
}

/// All 28 when this was written.
#[test]
fn fp8_answers_as_bf16() {
    answers(Format::Fp8, Format::Fp8, Format::Fp8Tensor, 26);
}

/// All 28 when this was written.
#[test]
fn nvfp4_answers_as_bf16() {
    answers(Format::Nvfp4, Format::Bf16, Format::Nvfp4, 25);
}

/// Requires that of the text probes at least `least` are answered id for id as recorded.
fn answers(experts: Format, dense: Format, table: Format, least: usize) {
    let converted = Converted::new(&tiny(), &to(experts, dense, table));
    let size = Size { slots: 1, context: 4096, rows: 512 };
    let mut fixture = Fixture::open(&converted.path(), ElementType::Bf16, size);
    let exec = fixture.capture_decode(1);
    let probes = read_json("tests/probes/tiny.json");
    let (mut right, mut wrong) = (0, Vec::new());
    for probe in probes["probes"].as_array().expect("a list of probes").iter().filter(|probe| is_text(probe))
    {
        let (prompt, expected) = (ids(&probe["prompt_ids"]), ids(&probe["bf16"]["ids"]));
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
        match got == expected {
            true => right += 1,
            false => wrong.push(probe["id"].to_string()),
        }
    }
    assert!(right >= least, "{right} of {} probes; not {}", right + wrong.len(), wrong.join(", "));
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
