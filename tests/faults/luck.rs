//! Bad luck on the host device: captures and launches that fail, memory that is gone.

use runtime::engine::Place;
use tests::luck;

#[test]
fn a_capture_that_fails_at_any_entry_costs_nothing_but_the_graph() {
    luck::captures_fail_at_every_entry(Place::Host);
}

#[test]
fn a_launch_that_fails_ends_every_request_and_the_engine() {
    luck::launches_fail(Place::Host, 53);
}

#[test]
fn a_failed_engine_takes_nothing() {
    luck::a_failed_engine_takes_nothing(Place::Host);
}

#[test]
fn more_lanes_that_find_no_memory_are_not_missed() {
    luck::more_lanes_find_no_memory(Place::Host);
}
