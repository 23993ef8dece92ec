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
    /// Whether some come from Kubernetes, for a service that is called as we are.
    pub(crate) of_kubernetes: bool,
}

/// What to do about settings that Kubernetes makes up.
pub(crate) const KUBERNETES: &str =
    "Kubernetes sets this for a service of that name; set enableServiceLinks: false in the pod's spec";

impl Variables {
    /// Those among variables, which are names and values.
    pub(crate) fn among(variables: impl Iterator<Item = (String, String)>) -> Variables {
        let readable = readable();
        let ours: Vec<(String, String)> = variables.filter(|(name, _)| name.starts_with(PREFIX)).collect();
        let of_kubernetes = ours.iter().any(|(name, value)| is_of_kubernetes(name, value));
        let (known, unknown) =
            ours.into_iter().map(|(name, _)| name).partition(|name| readable.contains(name));
        Variables { known, unknown, of_kubernetes }
    }
}

/// Whether a variable looks like those of a service: `X_SERVICE_HOST`, `X_PORT=tcp://10.0.0.1:8000`.
fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let link = ["tcp://", "udp://", "sctp://"].iter().any(|start| value.starts_with(start));
    name.contains("_SERVICE_HOST") || name.contains("_SERVICE_PORT") || (name.contains("_PORT") && link)
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
        let variables = Variables::among(names.map(|name| (name.into(), "x".into())).into_iter());
        assert_eq!(variables.known, ["ROUNDHOUSE_DTYPE", "ROUNDHOUSE_CACHE"]);
        assert_eq!(variables.unknown, ["ROUNDHOUSE_DTYPES", "ROUNDHOUSE_"]);
        assert!(!variables.of_kubernetes);
    }

    #[test]
    fn variables_of_a_service_are_known_by_name_or_value() {
        for (name, value, is) in [
            ("ROUNDHOUSE_PORT", "tcp://10.0.0.1:8000", true),
            ("ROUNDHOUSE_SERVICE_HOST", "10.0.0.1", true),
            ("ROUNDHOUSE_SERVICE_PORT_HTTP", "8000", true),
            ("ROUNDHOUSE_CHAT_PORT", "udp://10.0.0.1:1", true),
            ("ROUNDHOUSE_PORT", "8000", false),
            ("OTHER_SERVICE_HOST", "10.0.0.1", false),
        ] {
            let variables = Variables::among([(name.to_owned(), value.to_owned())].into_iter());
            assert_eq!(variables.of_kubernetes, is, "{name}={value}");
        }
    }
}
