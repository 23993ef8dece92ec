//! Scenes: what happens, as text; what was decided, as a snapshot.

use planner::scene;
use tests::snap;

fn check(text: &str, snapshot: &str) {
    match scene::run(text) {
        Ok(played) => snap::check("plan", snapshot, &played),
        Err(error) => panic!("{snapshot}: {error}"),
    }
}

#[test]
fn one_request_runs_from_arrival_to_free_pages() {
    check(
        "
        slab slots=2
        arrive A prompt=3 max=3
        run all
        ",
        "one_request",
    );
}

#[test]
fn a_long_prompt_shares_the_device_with_running_lanes() {
    check(
        "
        limits piece=64
        slab slots=2
        arrive A prompt=3 max=8
        run 3
        arrive B prompt=200 max=1
        run all
        ",
        "long_prompt_shares",
    );
}

#[test]
fn a_decode_share_of_three_puts_three_decode_rounds_between_pieces() {
    check(
        "
        limits piece=64 share=3
        slab slots=2
        arrive A prompt=3 max=12
        run 5
        arrive B prompt=150 max=2
        run all
        ",
        "decode_share",
    );
}

#[test]
fn pieces_lie_on_the_grid_and_only_the_last_is_ragged() {
    check(
        "
        slab slots=4
        arrive EXACT prompt=256 max=1
        arrive OVER  prompt=257 max=1
        arrive UNDER prompt=63  max=1
        run all
        ",
        "pieces_on_the_grid",
    );
}

#[test]
fn prompts_are_finished_oldest_first() {
    check(
        "
        limits piece=64
        slab slots=3
        arrive A prompt=130 max=1
        arrive B prompt=65  max=2
        arrive C prompt=10  max=1
        run all
        ",
        "oldest_prompt_first",
    );
}

#[test]
fn two_rounds_are_in_flight_and_no_row_lies_beyond_max_tokens() {
    check(
        "
        limits ahead=2
        slab slots=2
        arrive A prompt=62 max=5
        arrive B prompt=10 max=3
        run all
        ",
        "two_in_flight",
    );
}

#[test]
fn a_row_booked_behind_a_stop_is_discarded_and_pages_are_freed_after_it() {
    check(
        "
        limits ahead=2
        slab slots=2
        arrive A prompt=63 max=9
        arrive B prompt=10 max=4
        stop A after=3
        run all
        ",
        "stop_while_booked",
    );
}

#[test]
fn cancelling_takes_waiting_requests_at_once_and_live_ones_after_their_rounds() {
    check(
        "
        limits ahead=2
        slab slots=1
        arrive A prompt=10 max=9
        arrive B prompt=10 max=9
        arrive C prompt=10 max=1
        run 3
        state
        cancel B
        cancel A
        cancel A
        settle
        run all
        ",
        "cancel",
    );
}

#[test]
fn cancelling_an_admission_in_flight_leaves_nothing_behind() {
    check(
        "
        limits ahead=2 piece=64
        slab slots=1
        arrive A prompt=300 max=9
        run 2
        cancel A
        run all
        ",
        "cancel_in_admission",
    );
}

#[test]
fn cancelling_a_lane_between_rounds_frees_it_at_once() {
    check(
        "
        limits piece=64
        slab slots=1
        arrive A prompt=300 max=9
        run 2
        cancel A
        ",
        "cancel_between_rounds",
    );
}

#[test]
fn a_head_that_waits_for_pages_is_not_overtaken() {
    check(
        "
        limits pages=4
        slab slots=4
        arrive LONG  prompt=128 max=10
        arrive BIG   prompt=100 max=28
        arrive SMALL prompt=5   max=2
        run 2
        state
        cancel BIG
        run all
        ",
        "head_waits_for_pages",
    );
}

#[test]
fn refusals_name_the_number_that_decided() {
    check(
        "
        limits context=256 pages=3,8 queue=2 rows=8
        slab slots=1
        arrive EMPTY   prompt=0   max=5
        arrive MUTE    prompt=5   max=0
        arrive LONG    prompt=200 max=57
        arrive HEAVY   prompt=190 max=3
        arrive FITS    prompt=190 max=2
        arrive WIDE    prompt=5   max=5 window=9
        arrive NOWHERE prompt=5   max=5 class=2
        arrive NOSLAB  prompt=5   max=5 class=1
        arrive SECOND  prompt=5   max=5
        arrive LATE    prompt=5   max=5
        ",
        "refusals",
    );
}

#[test]
fn a_slab_that_is_added_seats_the_head_and_lanes_stay_in_slab_order() {
    check(
        "
        slab slots=1
        arrive A prompt=5 max=6
        arrive B prompt=5 max=6
        run 2
        slab slots=2
        arrive C prompt=5 max=3
        run all
        ",
        "slab_growth",
    );
}

#[test]
fn cache_classes_have_pools_and_slabs_of_their_own() {
    check(
        "
        limits pages=2,3
        slab slots=1 class=1
        slab slots=2 class=0
        slab slots=1 class=1
        arrive A prompt=60 max=10 class=0
        arrive B prompt=60 max=10 class=1
        arrive C prompt=10 max=4  class=1
        run all
        ",
        "cache_classes",
    );
}

#[test]
fn image_bearing_and_pocketed_lanes_decode_apart_from_text() {
    check(
        "
        limits ahead=2
        slab slots=4
        arrive TEXT   prompt=5 max=6
        arrive IMAGE  prompt=5 max=4 image
        arrive POCKET prompt=5 max=3 pocket
        arrive MORE   prompt=5 max=3
        run all
        ",
        "eager_apart",
    );
}

#[test]
fn a_constrained_lane_waits_for_its_token_while_others_overlap() {
    check(
        "
        limits ahead=2 piece=64
        slab slots=2
        arrive FREE prompt=5 max=6
        arrive BOUND prompt=70 max=3 constrained
        run all
        ",
        "constrained",
    );
}

#[test]
fn more_lanes_than_rows_take_turns() {
    check(
        "
        limits rows=2
        slab slots=5
        arrive A prompt=5 max=9
        arrive B prompt=5 max=9
        arrive C prompt=5 max=9
        arrive D prompt=5 max=9
        arrive E prompt=5 max=9
        run all
        ",
        "taking_turns",
    );
}

#[test]
fn every_third_graph_round_is_audited() {
    check(
        "
        limits audit=3
        slab slots=2
        arrive A prompt=5 max=8
        arrive I prompt=5 max=3 image
        run all
        ",
        "audit",
    );
}

#[test]
fn without_graphs_the_rounds_are_the_same_and_say_so() {
    check(
        "
        limits graphs=off audit=3
        slab slots=2
        arrive A prompt=5 max=4
        arrive P prompt=5 max=3 pocket
        run all
        ",
        "graphs_off",
    );
}

#[test]
fn a_lane_that_is_not_finite_fails_alone() {
    check(
        "
        limits ahead=2
        slab slots=2
        arrive A prompt=5 max=5
        arrive B prompt=5 max=5
        fail A after=2
        run all
        ",
        "failed_lane",
    );
}

#[test]
fn a_window_that_is_accepted_in_part_gives_its_bound_back() {
    check(
        "
        limits ahead=2 rows=8
        slab slots=2
        arrive A prompt=60 max=14 window=4
        arrive B prompt=5 max=3
        accept A rows=3
        run all
        ",
        "window_in_part",
    );
}
