//! f32 logits of whole prompts and of prompts in pieces.

use kernels::numerics::ElementType;
use tests::fixture::Fixture;
use tests::oracle::{assert_close, cases};

use crate::{LOGIT_MARGIN, LOGITS, one_lane};

#[test]
fn whole_prompts_agree_at_every_position() {
    for case in cases("prefill_logits") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
        let mut lane = fixture.lane(0);
        let ids = case.input_ids();
        let logits = fixture.prompt(&mut lane, &ids);
        let vocab = logits.len() / ids.len();
        for (row, position) in case.indices("positions").into_iter().enumerate() {
            let what = format!("{} position {position}", case.id());
            let got = &logits[position as usize * vocab..][..vocab];
            assert_close(&what, got, case.tensor("logits_f32").row(row), LOGITS);
        }
        // The other positions are recorded by their five best ids.
        for (position, got) in logits.chunks_exact(vocab).enumerate() {
            let what = format!("{} best ids at {position}", case.id());
            let best: Vec<usize> =
                case.tensor("top5_ids").row(position).iter().map(|id| *id as usize).collect();
            let expected = case.tensor("top5_logprobs").row(position);
            let sum: f64 = got.iter().map(|l| f64::from(*l).exp()).sum();
            let logprobs: Vec<f32> = best.iter().map(|id| (f64::from(got[*id]) - sum.ln()) as f32).collect();
            assert_close(&what, &logprobs, expected, 10.0 * LOGITS);
            if case.tensor("logit_margin").values[position] > LOGIT_MARGIN {
                let argmax = (0..vocab).max_by(|a, b| got[*a].total_cmp(&got[*b])).expect("a vocabulary");
                assert_eq!(argmax, best[0], "{what}");
            }
        }
    }
}

#[test]
fn prompts_in_pieces_agree() {
    for case in cases("chunked_prefill") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::F32, one_lane());
        let mut lane = fixture.lane(0);
        let ids = case.input_ids();
        let mut rest = ids.as_slice();
        for (row, size) in case.indices("chunks").into_iter().enumerate() {
            let (piece, after) = rest.split_at(size as usize);
            rest = after;
            let logits = fixture.prompt(&mut lane, piece);
            let vocab = logits.len() / piece.len();
            let what = format!("{} piece {row}", case.id());
            assert_close(&what, &logits[logits.len() - vocab..], case.tensor("logits_f32").row(row), LOGITS);
        }
    }
}
