//! Why a command ended early, and the exit status that says so.

use std::fmt;
use std::process::ExitCode;

/// The end of a command that did not do what it was asked.
#[derive(Debug)]
pub enum Failure {
    /// Something that must hold does not. Status 1.
    Check(String),
    /// The caller's fault: usage, a file, a prompt that does not fit. Status 2.
    Input(String),
    /// The device or its driver failed. Status 3.
    Device(String),
}

impl Failure {
    pub(crate) fn input(error: impl fmt::Display) -> Failure {
        Failure::Input(error.to_string())
    }

    /// The status of a process that ends this way.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Check(_) => ExitCode::from(1),
            Failure::Input(_) => ExitCode::from(2),
            Failure::Device(_) => ExitCode::from(3),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Check(message) | Failure::Input(message) | Failure::Device(message) => {
                f.write_str(message)
            }
        }
    }
}
