//! The roundhouse binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    server::main()
}
