//! Bad luck on CUDA, and the n-gram tables wherever they live: what the host's suites check, here.

use kernels::numerics::ElementType;
use runtime::engine::{EngineOptions, Place, open};
use tests::fixture::repository;
use tests::luck;

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_capture_that_fails_at_any_entry_costs_nothing_but_the_graph", captures),
    ("a_launch_that_fails_ends_every_request_and_the_engine", launches),
    ("a_failed_engine_takes_nothing", failed),
    ("more_lanes_that_find_no_memory_are_not_missed", memory),
    ("tables_leave_the_same_bytes_wherever_they_live", tables),
];

pub(crate) const WITHOUT_DRIVER: &[(&str, fn())] =
    &[("an_engine_without_a_driver_says_what_is_missing", without_driver)];

const HERE: Place = Place::Cuda(0);

fn without_driver() {
    let options = EngineOptions { place: HERE, ..EngineOptions::default() };
    let opened = open(&repository("models/tiny"), &options, &mut |_| {}).map(drop);
    let error = opened.expect_err("there is no driver");
    assert!(error.is_device() && error.to_string().starts_with("the CUDA driver is not usable"), "{error}");
}

fn captures() {
    luck::captures_fail_at_every_entry(HERE);
}

fn launches() {
    luck::launches_fail(HERE, 17);
}

fn failed() {
    luck::a_failed_engine_takes_nothing(HERE);
}

fn memory() {
    luck::more_lanes_find_no_memory(HERE);
}

fn tables() {
    let models = [
        ("models/tiny", ElementType::Bf16, 2000),
        ("tests/oracle/checkpoints/base_bf16", ElementType::Bf16, 1009),
        ("tests/oracle/checkpoints/two_ple", ElementType::Bf16, 300),
    ];
    luck::tables_leave_the_same_everywhere(HERE, &models);
}
