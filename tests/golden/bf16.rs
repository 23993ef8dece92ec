//! bf16 logits by the oracle's rule: as close to f32 as the other implementation's own bf16 run, and half as
//! much again. Routing flips dominate, so values are compared in aggregate.

use kernels::numerics::ElementType;
use tests::fixture::Fixture;
use tests::oracle::{cases, rms_relative};

use crate::one_lane;

#[test]
fn whole_prompts_are_as_close_to_f32_as_they_can_be() {
    for case in cases("prefill_logits") {
        let mut fixture = Fixture::open(&case.checkpoint(), ElementType::Bf16, one_lane());
        let mut lane = fixture.lane(0);
        let ids = case.input_ids();
        let logits = fixture.prompt(&mut lane, &ids);
        let vocab = logits.len() / ids.len();
        let positions = case.indices("positions").into_iter();
        let got: Vec<f32> = positions.flat_map(|p| logits[p as usize * vocab..][..vocab].to_vec()).collect();
        let distance = rms_relative(&got, &case.tensor("logits_f32").values);
        let allowed = 1.5 * case.number("/noise/bf16_sdpa_vs_f32/rms_rel") + 0.02;
        assert!(distance <= allowed, "{}: rms distance {distance:.4}, allowed {allowed:.4}", case.id());
    }
}
