//! The command line: every command, every option, its default and its unit.
//!
//! Only what this build honours is here, so an option that is accepted has an effect.

mod convert;
mod engine;
mod file;
mod ranks;
mod sampling;
mod serve;
mod values;
mod variables;

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, Parser, Subcommand};

pub(crate) use convert::ConvertArgs;
pub(crate) use engine::{Chosen, ContextArgs, EngineArgs, RunArgs};
pub(crate) use file::under as under_file;
pub(crate) use ranks::{RankArgs, Role};
pub(crate) use sampling::{SamplingArgs, check as check_sampling};
pub(crate) use serve::ServeArgs;
pub(crate) use values::{
    Architecture, Biases, ByteSize, Count, Counts, Dense, Device, Dtype, Eyes, Ids, LoadFrom, Pieces,
    Projections, Seconds, Sha, Stored, Switch, Table,
};
pub(crate) use variables::{KUBERNETES, Variables};

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
    /// Answer prompts, all of them at once.
    Generate(Box<GenerateArgs>),
    /// Serve a model over HTTP, as OpenAI does.
    Serve(Box<ServeArgs>),
    /// Write the logits of every position of a token list to a safetensors file.
    Logits(LogitsArgs),
    /// Say what a model folder holds, without reading its weights.
    Inspect(InspectArgs),
    /// Show lanes that come and go, and prove that replayed rounds equal eager ones.
    Demo(DemoArgs),
    /// Prove graph = eager, crowded = alone and run = run on random schedules of requests; with --tp 2 also two ranks = one.
    Check(CheckArgs),
    /// Measure rounds, prompts and kernels against the bytes that they must move.
    Bench(BenchArgs),
    /// Write a model folder anew with its weights in other formats.
    Convert(ConvertArgs),
    /// Play a scene of requests through the planner and print every round; no model is needed.
    Plan(PlanArgs),
    /// The CUDA kernels of this build.
    #[command(subcommand)]
    Kernels(KernelsCommand),
}

impl Command {
    /// How its model is shared, if it may be.
    pub(crate) fn ranks(&self) -> Option<&RankArgs> {
        match self {
            Command::Generate(args) => Some(&args.engine.ranks),
            Command::Serve(args) => Some(&args.engine.ranks),
            Command::Demo(args) => Some(&args.engine.ranks),
            Command::Check(args) => Some(&args.ranks),
            Command::Bench(args) => Some(&args.ranks),
            Command::Logits(_)
            | Command::Inspect(_)
            | Command::Convert(_)
            | Command::Plan(_)
            | Command::Kernels(_) => None,
        }
    }
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
    #[arg(long, value_name = "IDS", allow_negative_numbers = true)]
    pub(crate) ids: Vec<Ids>,

    /// A JSON file: a list of messages, or an object with `messages` and optionally `tools`,
    /// `enable_thinking` and `reasoning_effort`.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// The folder whose files may be named by pictures and videos in --messages.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["prompt", "ids"])]
    pub(crate) image_root: Option<PathBuf>,

    /// A picture that comes before the text of --prompt; may be repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ids", "messages"])]
    pub(crate) image: Vec<PathBuf>,

    /// Take --prompt as it is, without the chat template.
    #[arg(long, conflicts_with_all = ["ids", "messages", "thinking", "image"])]
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

    /// A text that ends the answer and is not part of it; may be repeated.
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub(crate) stop: Vec<String>,

    /// Token ids that end the answer, beside the model's own; may be repeated.
    #[arg(long, value_name = "IDS", allow_negative_numbers = true)]
    pub(crate) stop_id: Vec<Ids>,

    /// Go on after the model's own stop tokens.
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Print one JSON object at the end (an array for several prompts), not the text as it is made.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// The model folder.
    pub(crate) model: PathBuf,

    /// The token ids, for example 1,2,3.
    #[arg(long, value_name = "IDS")]
    pub(crate) ids: Ids,

    /// A picture for the next placeholder of the ids; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,

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
    pub(crate) run: RunArgs,

    #[command(flatten)]
    pub(crate) context: ContextArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The model folder.
    pub(crate) model: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The model folder; models/tiny, looked for here and in the folders around the binary, if not given.
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The model folder.
    pub(crate) model: PathBuf,

    /// Random schedules for each equality.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) cases: u32,

    /// Where the schedules begin; equal seeds make equal schedules.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) run: RunArgs,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The model folder; with --load dummy, config.json in it is enough.
    pub(crate) model: PathBuf,

    /// Lanes of the decode rounds.
    #[arg(long, value_name = "LIST", default_value = "1,2,4,8,16")]
    pub(crate) rows: Counts,

    /// Positions that their rows see, made up; k stands for 1024.
    #[arg(long, value_name = "LIST", default_value = "1k,64k")]
    pub(crate) contexts: Counts,

    /// Rounds of each measurement.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 200,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) rounds: u32,

    /// Tokens of the prompt; 0 measures none.
    #[arg(long, value_name = "TOKENS", default_value = "8k")]
    pub(crate) prompt: Count,

    /// Rows of a prompt piece, a multiple of 64; 512 on the host device and 1024 on CUDA if not given.
    #[arg(long, value_name = "ROWS", allow_negative_numbers = true)]
    pub(crate) piece: Option<u32>,

    /// Measure each kind of kernel on its own too.
    #[arg(long)]
    pub(crate) kernels: bool,

    /// Write every result to this file too, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Memory for pages, in bytes or with K, M, G or T; what the contexts take if not given. With less, lanes share
    /// pages.
    #[arg(long, env = "ROUNDHOUSE_MEMORY", value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) memory: Option<ByteSize>,

    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The scene, a text file; - is stdin.
    pub(crate) scene: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile every kernel that the cache lacks, so that no start has to; no GPU is needed, only NVRTC.
    Build(BuildArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// What to compile for, for example sm_90a,sm_80; what this machine's first CUDA device is, if not given.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) arch: Vec<Architecture>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use kernels::numerics::ElementType;
    use runtime::checkpoint::layout::Format;
    use runtime::convert::Source;
    use runtime::place::Place;
    use runtime::sampling::SamplingOptions;
    use runtime::weights::TablePlace;

    use super::*;

    fn parse(line: &[&str]) -> Result<Command, clap::Error> {
        Cli::try_parse_from([&["roundhouse"], line].concat()).map(|cli| cli.command)
    }

    fn generate(options: &[&str]) -> GenerateArgs {
        match parse(&[&["generate", "M"], options].concat()) {
            Ok(Command::Generate(args)) => *args,
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
        assert_eq!((engine.run.device, engine.run.dtype), (Device::Auto, Dtype::Bf16));
        assert_eq!((engine.graphs, engine.lanes, engine.audit), (Switch::On, 16, 0));
        assert_eq!((engine.context.context, engine.memory), (None, None));
    }

    #[test]
    fn a_cuda_device_has_a_number_and_runs_bf16() {
        let run = |options: &[&str]| generate(&[&["--prompt", "a"], options].concat()).engine.run;
        for (name, ordinal) in [("cuda", 0), ("cuda:0", 0), ("cuda:7", 7)] {
            let chosen = run(&["--device", name]).choose().unwrap();
            assert_eq!((chosen.place, chosen.element), (Place::Cuda(ordinal), ElementType::Bf16));
        }
        let refused = run(&["--device", "cuda:7", "--dtype", "f32"]).choose().map(drop).unwrap_err();
        for word in ["--dtype f32", "--device cuda:7", "--device host"] {
            assert!(refused.to_string().contains(word), "{refused}");
        }
        let chosen = run(&["--dtype", "f32"]).choose().unwrap();
        assert_eq!(chosen.place, Place::Host);
        assert!(chosen.why.starts_with("auto: f32 runs on the host"), "{}", chosen.why);
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
        assert_eq!(args.engine.context.context, Some(128));
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
        refused(&["generate", "M", "--ids", "1", "--image", "f"], &["--image", "--ids"]);
        refused(&["generate", "M", "--messages", "f", "--image", "f"], &["--image", "--messages"]);
        refused(&["generate", "M", "--prompt", "a", "--raw", "--image", "f"], &["--image", "--raw"]);
        refused(&["generate", "M", "--prompt", "a", "--image-root", "d"], &["--image-root", "--prompt"]);
        refused(&["inspect", "M", "--dtype", "f32"], &["--dtype"]);
        refused(&["logits", "M", "--ids", "1", "--out", "f", "--lanes", "4"], &["--lanes"]);
        refused(&["check", "M", "--graphs", "off"], &["--graphs"]);
        refused(&["generate", "M", "--prompt", "a", "--logprobs", "2"], &["--json"]);
    }

    #[test]
    fn a_value_that_does_not_parse_is_named_with_its_option() {
        let with = |option, value| ["generate", "M", "--prompt", "a", option, value];
        for device in ["tpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            refused(&with("--device", device), &["--device", device, "auto, host, cuda or cuda:N"]);
        }
        refused(&with("--dtype", "f16"), &["--dtype", "f16", "bf16"]);
        refused(&with("--graphs", "maybe"), &["--graphs", "maybe", "off"]);
        refused(&with("--context", "0"), &["--context", "0"]);
        refused(&with("--context", "lots"), &["--context", "lots"]);
        refused(&with("--max-tokens", "-1"), &["--max-tokens"]);
        refused(&["generate", "M", "--ids", "1,x"], &["--ids", "`x` is not a token id"]);
        refused(&["generate", "M", "--ids", ""], &["--ids", "not a token id"]);
    }

    #[test]
    fn greedy_is_the_default() {
        let args = generate(&["--prompt", "a"]);
        assert_eq!(args.sampling.options().unwrap(), SamplingOptions::default());
    }

    #[test]
    fn every_sampling_option_reaches_the_engine() {
        let line = "--prompt a --json --temperature 0.5 --top-k 9 --top-p 0.75 --min-p 0.25 \
                    --presence-penalty -1 --frequency-penalty 1.5 --repetition-penalty 1.25 \
                    --logit-bias 3=-7,4=1 --logit-bias 5=2 --seed 18446744073709551615 --logprobs 3";
        let args = generate(&line.split_whitespace().collect::<Vec<_>>());
        let expected = SamplingOptions {
            temperature: 0.5,
            top_k: 9,
            top_p: 0.75,
            min_p: 0.25,
            presence_penalty: -1.0,
            frequency_penalty: 1.5,
            repetition_penalty: 1.25,
            logit_bias: vec![(3, -7.0), (4, 1.0), (5, 2.0)],
            seed: Some(u64::MAX),
            logprobs: 3,
        };
        assert_eq!(args.sampling.options().unwrap(), expected);
    }

    #[test]
    fn every_engine_option_reaches_the_engine() {
        let line = "--prompt a --dtype f32 --graphs off --lanes 3 --context 128 --memory 2M --audit 5 \
                    --table mmap";
        let engine = generate(&line.split_whitespace().collect::<Vec<_>>()).engine;
        let options = engine.options(&engine.run.choose().unwrap());
        assert_eq!((options.element, options.graphs, options.audit), (ElementType::F32, false, 5));
        assert_eq!((options.page_memory, options.table), (Some(2 << 20), TablePlace::Mapped));
        let [class] = &options.classes[..] else { panic!("{options:?}") };
        assert_eq!((class.context, class.lanes), (128, 3));
    }

    #[test]
    fn kernels_are_built_for_named_architectures() {
        let arch = |line: &[&str]| match parse(line) {
            Ok(Command::Kernels(KernelsCommand::Build(args))) => args.arch,
            other => panic!("{other:?}"),
        };
        assert_eq!(arch(&["kernels", "build"]), []);
        let both = ["sm_90a", "sm_80"].map(|name| Architecture(name.into()));
        assert_eq!(arch(&["kernels", "build", "--arch", "sm_90a,sm_80"]), both);
        assert_eq!(arch(&["kernels", "build", "--arch", "sm_90a", "--arch", "sm_80"]), both);
        refused(&["kernels", "build", "--arch", "hopper"], &["--arch", "hopper", "sm_90a"]);
    }

    #[test]
    fn a_conversion_names_formats() {
        let convert = |options: &[&str]| match parse(&[&["convert", "M", "OUT"], options].concat()) {
            Ok(Command::Convert(args)) => args.options(),
            other => panic!("{other:?}"),
        };
        let options = convert(&["--experts", "nvfp4", "--table", "fp8", "--file-size", "1M"]).unwrap();
        let stored = (Some(Format::Nvfp4), Some(Format::Fp8Tensor), None);
        assert_eq!((options.experts, options.table, options.dense), stored);
        assert_eq!((options.from, options.file_bytes), (Source::Checkpoint, 1 << 20));
        let made = convert(&["--load", "dummy", "--layers", "4"]).unwrap();
        assert!(matches!(made.from, Source::Made { layers: Some(4), .. }));
        let why = |options: &[&str]| convert(options).map(drop).unwrap_err().to_string();
        assert!(why(&[]).contains("--experts, --table or --dense"));
        assert!(why(&["--experts", "fp8", "--layers", "4"]).contains("--load dummy"));
        refused(&["convert", "M", "--experts", "fp8"], &["<OUT>"]);
        refused(&["convert", "M", "OUT", "--dense", "nvfp4"], &["--dense", "nvfp4", "bf16, fp8"]);
        refused(&["convert", "M", "OUT", "--experts", "int4"], &["--experts", "int4"]);
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
                assert_eq!((args.decode_from, args.run.dtype), (Some(2), Dtype::F32));
            }
            other => panic!("{other:?}"),
        }
    }
}
