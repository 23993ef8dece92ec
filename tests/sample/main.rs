//! Sampling on the host device. `tests/gpu` runs the same tests with CUDA beside it.

#[path = "mod.rs"]
mod sample;

fn main() -> std::process::ExitCode {
    tests::listed::run_on_host(sample::all())
}
