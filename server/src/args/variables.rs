//! The settings that come from the environment.

use clap::CommandFactory;
use graph::cuda::code::FOLDER;

use super::Cli;

/// Every environment variable with this start must be a setting.
const PREFIX: &str = "ROUNDHOUSE_";

/// The environment variables that `names` holds, told apart into settings and look-alikes.
pub(crate) struct Variables {
    /// Those that some command reads.
    pub(crate) known: Vec<String>,
    /// Those that nothing reads, though they begin like a setting.
    pub(crate) unknown: Vec<String>,
}

impl Variables {
    pub(crate) fn among(names: impl Iterator<Item = String>) -> Variables {
        let readable = readable();
        let (known, unknown) =
            names.filter(|name| name.starts_with(PREFIX)).partition(|name| readable.contains(name));
        Variables { known, unknown }
    }
}

fn readable() -> Vec<String> {
    let commands = Cli::command();
    let arguments = commands.get_subcommands().flat_map(clap::Command::get_arguments);
    let mut names: Vec<String> =
        arguments.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned())).collect();
    // Where compiled kernels are kept is no option of a command: whatever opens a CUDA device reads it.
    names.push(FOLDER.into());
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_settings_that_nothing_reads_are_found() {
        let names = ["PATH", "ROUNDHOUSE_DTYPE", "ROUNDHOUSE_CACHE", "ROUNDHOUSE_DTYPES", "ROUNDHOUSE_"];
        let variables = Variables::among(names.map(String::from).into_iter());
        assert_eq!(variables.known, ["ROUNDHOUSE_DTYPE", "ROUNDHOUSE_CACHE"]);
        assert_eq!(variables.unknown, ["ROUNDHOUSE_DTYPES", "ROUNDHOUSE_"]);
    }
}
