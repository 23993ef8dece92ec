//! The command line: every command, every option, its default and its unit.
//!
//! Only what this build honours is here, so an option that is accepted has an effect.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};

/// Every environment variable with this start must be a setting.
const SETTING_PREFIX: &str = "ROUNDHOUSE_";

/// A decode runtime for Qwen3.8-Flash-Next.
#[derive(Debug, Parser)]
#[command(name = "roundhouse", version)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer prompts.
    Generate(GenerateArgs),
    /// Write the logits of every position of a token list to a safetensors file.
    Logits(LogitsArgs),
    /// Say what a model folder holds, without reading its weights.
    Inspect(InspectArgs),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true).args(["prompt", "ids", "messages"]))]
pub(crate) struct GenerateArgs {
    /// The model folder.
    pub(crate) model: PathBuf,

    /// One user message, put through the chat template; may be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Vec<String>,

    /// A prompt as token ids, for example 1,2,3; may be repeated.
    #[arg(long, value_name = "IDS")]
    pub(crate) ids: Vec<Ids>,

    /// A JSON file: a list of messages, or an object with `messages` and optionally `tools`,
    /// `enable_thinking` and `reasoning_effort`.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// Take --prompt as it is, without the chat template.
    #[arg(long, conflicts_with_all = ["ids", "messages", "thinking"])]
    pub(crate) raw: bool,

    /// Whether the answer begins with reasoning; the template decides if not given.
    #[arg(long, value_name = "SWITCH", conflicts_with = "ids")]
    pub(crate) thinking: Option<Switch>,

    /// The most tokens of an answer; what the context holds if not given.
    #[arg(
        long,
        value_name = "TOKENS",
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_tokens: Option<u32>,

    /// Go on after a stop token.
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Print one JSON object at the end (an array for several prompts), not the text as it is made.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) engine: EngineOptions,
}

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// The model folder.
    pub(crate) model: PathBuf,

    /// The token ids, for example 1,2,3.
    #[arg(long, value_name = "IDS")]
    pub(crate) ids: Ids,

    /// Sizes of the prompt pieces, for example 64,64,5.
    #[arg(long, value_name = "SIZES")]
    pub(crate) pieces: Option<Pieces>,

    /// Feed the ids from this position on one by one, as decode rounds.
    #[arg(long, value_name = "POSITION", allow_negative_numbers = true)]
    pub(crate) decode_from: Option<usize>,

    /// The file to write: one tensor `logits`, f32, [positions, vocabulary].
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,

    #[command(flatten)]
    pub(crate) engine: EngineOptions,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The model folder.
    pub(crate) model: PathBuf,
}

/// How the model is run; the same for every command that runs it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine options")]
pub(crate) struct EngineOptions {
    /// Where to run: auto or host.
    #[arg(long, env = "ROUNDHOUSE_DEVICE", default_value = "auto")]
    pub(crate) device: Device,

    /// Precision of the arithmetic.
    #[arg(long, env = "ROUNDHOUSE_DTYPE", value_enum, default_value = "bf16")]
    pub(crate) dtype: Dtype,

    /// Whether rounds may be captured and replayed.
    #[arg(long, env = "ROUNDHOUSE_GRAPHS", value_enum, default_value = "on")]
    pub(crate) graphs: Switch,

    /// The most positions of a sequence, prompt and answer together; the model's own, at most 32768, if not
    /// given.
    #[arg(
        long,
        env = "ROUNDHOUSE_CONTEXT",
        value_name = "TOKENS",
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) context: Option<u32>,
}

/// The device that a run gets: what `auto` comes to is decided when the command line is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Device {
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Token ids, written with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

/// Sizes of prompt pieces, written with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pieces(pub(crate) Vec<usize>);

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Switch::On
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Host => f.write_str("host"),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        })
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(name: &str) -> Result<Device, String> {
        match name {
            "auto" | "host" => Ok(Device::Host),
            "cuda" => Err("this build has no CUDA device; use host or auto".to_string()),
            _ => Err("not a device; use host or auto".to_string()),
        }
    }
}

impl FromStr for Ids {
    type Err = String;

    fn from_str(list: &str) -> Result<Ids, String> {
        let id = |part: &str| {
            part.trim().parse().map_err(|_| format!("`{part}` is not a token id; give ids like 1,2,3"))
        };
        list.split(',').map(id).collect::<Result<_, _>>().map(Ids)
    }
}

impl FromStr for Pieces {
    type Err = String;

    fn from_str(list: &str) -> Result<Pieces, String> {
        let size = |part: &str| match part.trim().parse() {
            Ok(size) if size > 0 => Ok(size),
            _ => Err(format!("`{part}` is not a piece size; give sizes above zero like 64,64,5")),
        };
        list.split(',').map(size).collect::<Result<_, _>>().map(Pieces)
    }
}

/// The environment variables that `names` holds, told apart into settings and look-alikes.
pub(crate) struct Settings {
    /// Those that some command reads.
    pub(crate) known: Vec<String>,
    /// Those that nothing reads, though they begin like a setting.
    pub(crate) unknown: Vec<String>,
}

impl Settings {
    pub(crate) fn among(names: impl Iterator<Item = String>) -> Settings {
        let readable = readable_settings();
        let (known, unknown) =
            names.filter(|name| name.starts_with(SETTING_PREFIX)).partition(|name| readable.contains(name));
        Settings { known, unknown }
    }
}

fn readable_settings() -> Vec<String> {
    let commands = Cli::command();
    let arguments = commands.get_subcommands().flat_map(clap::Command::get_arguments);
    let mut names: Vec<String> =
        arguments.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned())).collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Command, clap::Error> {
        Cli::try_parse_from([&["roundhouse"], line].concat()).map(|cli| cli.command)
    }

    fn generate(options: &[&str]) -> GenerateArgs {
        match parse(&[&["generate", "M"], options].concat()) {
            Ok(Command::Generate(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    /// The line must be refused as usage (status 2) with every one of `words` in the message.
    fn refused(line: &[&str], words: &[&str]) {
        let error = parse(line).expect_err("the line must be refused");
        let message = error.to_string();
        assert_eq!(error.exit_code(), 2, "{message}");
        assert!(message.starts_with("error: "), "{message}");
        for word in words {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_are_bf16_with_graphs_on_the_host() {
        let engine = generate(&["--prompt", "a"]).engine;
        assert_eq!((engine.device, engine.dtype, engine.graphs), (Device::Host, Dtype::Bf16, Switch::On));
        assert_eq!(engine.context, None);
    }

    #[test]
    fn prompts_and_ids_repeat_in_order() {
        let args = generate(&["--prompt", "b", "--prompt", "-1 + 1?", "--raw", "--max-tokens", "3"]);
        assert_eq!(args.prompt, ["b", "-1 + 1?"]);
        assert!(args.raw);
        assert_eq!(args.max_tokens, Some(3));
        let args = generate(&["--ids", "3,2, 1", "--ids", "7", "--ignore-eos", "--json"]);
        assert_eq!(args.ids, [Ids(vec![3, 2, 1]), Ids(vec![7])]);
        assert!(args.ignore_eos && args.json);
        let args = generate(&["--messages", "chat.json", "--thinking", "off", "--context", "128"]);
        assert_eq!(args.messages, Some("chat.json".into()));
        assert_eq!(args.thinking, Some(Switch::Off));
        assert_eq!(args.engine.context, Some(128));
    }

    #[test]
    fn exactly_one_kind_of_input_is_needed() {
        refused(&["generate", "M"], &["--prompt", "--ids", "--messages"]);
        refused(&["generate", "M", "--prompt", "a", "--ids", "1"], &["--prompt", "--ids"]);
        refused(&["generate", "M", "--messages", "a", "--messages", "b"], &["--messages"]);
        refused(&["generate", "M", "--ids", "1", "--prompt", "a"], &["--prompt", "--ids"]);
    }

    #[test]
    fn an_option_without_effect_is_refused() {
        refused(&["generate", "M", "--ids", "1", "--raw"], &["--raw", "--ids"]);
        refused(&["generate", "M", "--messages", "f", "--raw"], &["--raw", "--messages"]);
        refused(&["generate", "M", "--ids", "1", "--thinking", "on"], &["--thinking"]);
        refused(&["generate", "M", "--prompt", "a", "--raw", "--thinking", "on"], &["--thinking"]);
        refused(&["inspect", "M", "--dtype", "f32"], &["--dtype"]);
        refused(&["generate", "M", "--prompt", "a", "--lanes", "4"], &["--lanes"]);
    }

    #[test]
    fn a_value_that_does_not_parse_is_named_with_its_option() {
        let with = |option, value| ["generate", "M", "--prompt", "a", option, value];
        refused(&with("--device", "cuda"), &["--device", "cuda", "this build has no CUDA device"]);
        refused(&with("--device", "tpu"), &["--device", "tpu", "host or auto"]);
        refused(&with("--dtype", "f16"), &["--dtype", "f16", "bf16"]);
        refused(&with("--graphs", "maybe"), &["--graphs", "maybe", "off"]);
        refused(&with("--context", "0"), &["--context", "0"]);
        refused(&with("--context", "lots"), &["--context", "lots"]);
        refused(&with("--max-tokens", "-1"), &["--max-tokens"]);
        refused(&["generate", "M", "--ids", "1,x"], &["--ids", "`x` is not a token id"]);
        refused(&["generate", "M", "--ids", ""], &["--ids", "not a token id"]);
    }

    #[test]
    fn logits_reads_its_pieces_and_needs_a_file_to_write() {
        let line = ["logits", "M", "--ids", "1,2,3", "--pieces", "2,1", "--decode-from", "2"];
        refused(&line, &["--out"]);
        refused(&["logits", "M", "--out", "f"], &["--ids"]);
        refused(&["logits", "M", "--ids", "1", "--out", "f", "--pieces", "64,0"], &["--pieces", "`0`"]);
        match parse(&[&line[..], &["--out", "f", "--dtype", "f32"]].concat()) {
            Ok(Command::Logits(args)) => {
                assert_eq!((args.ids, args.pieces), (Ids(vec![1, 2, 3]), Some(Pieces(vec![2, 1]))));
                assert_eq!((args.decode_from, args.engine.dtype), (Some(2), Dtype::F32));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn environment_settings_that_nothing_reads_are_found() {
        let names = ["PATH", "ROUNDHOUSE_DTYPE", "ROUNDHOUSE_DTYPES", "ROUNDHOUSE_"];
        let settings = Settings::among(names.map(String::from).into_iter());
        assert_eq!(settings.known, ["ROUNDHOUSE_DTYPE"]);
        assert_eq!(settings.unknown, ["ROUNDHOUSE_DTYPES", "ROUNDHOUSE_"]);
    }
}
