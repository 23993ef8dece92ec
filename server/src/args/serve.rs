//! The options of `serve`. Each is a flag, a variable of the environment, and a key of the settings file.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{ByteSize, EngineArgs, Seconds, Sha, Switch};
use crate::failure::Failure;
use crate::serve::{Secret, Settings};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The model folder.
    pub(crate) model: PathBuf,

    /// A TOML file with any of these settings under the names of their options.
    #[arg(long, env = "ROUNDHOUSE_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Server options")]
pub(crate) struct ServerArgs {
    /// The address to listen on.
    #[arg(long, env = "ROUNDHOUSE_HOST", value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,

    /// The port to listen on; 0 takes a free one.
    #[arg(
        long,
        env = "ROUNDHOUSE_PORT",
        value_name = "PORT",
        default_value_t = 8000,
        allow_negative_numbers = true
    )]
    port: u16,

    /// The key that clients must show as a bearer token; none is needed if not given.
    #[arg(long, env = "ROUNDHOUSE_API_KEY", hide_env_values = true, value_name = "KEY", value_parser = unseen)]
    api_key: Option<Secret>,

    /// An origin whose pages may call, such as https://example.org, or * for all; may be repeated.
    #[arg(long, env = "ROUNDHOUSE_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',', value_parser = origin)]
    cors_origin: Vec<String>,

    /// The name that clients call the model by; the folder's own if not given.
    #[arg(long, env = "ROUNDHOUSE_SERVED_NAME", value_name = "NAME", value_parser = name)]
    served_name: Option<String>,

    /// Replies that may wait for a lane; who comes later is told to try again.
    #[arg(long, env = "ROUNDHOUSE_QUEUE", value_name = "REPLIES", default_value_t = 256, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    queue: u32,

    /// The most tokens of a reply whose request does not say, as far as the context has room.
    #[arg(long, env = "ROUNDHOUSE_MAX_TOKENS_DEFAULT", value_name = "TOKENS", default_value_t = 4096, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens_default: u32,

    /// Whether chat replies begin with reasoning when a request does not say; the template decides if not given.
    #[arg(long, env = "ROUNDHOUSE_DEFAULT_THINKING", value_name = "SWITCH")]
    default_thinking: Option<Switch>,

    /// The most replies to one prompt.
    #[arg(long, env = "ROUNDHOUSE_MAX_N", value_name = "REPLIES", default_value_t = 16, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_n: u32,

    /// The largest body of a request, in bytes or with K, M, G or T.
    #[arg(
        long,
        env = "ROUNDHOUSE_BODY_LIMIT",
        value_name = "SIZE",
        default_value = "4M",
        allow_negative_numbers = true
    )]
    body_limit: ByteSize,

    /// The most pictures of a request; frames of a video are pictures.
    #[arg(long, env = "ROUNDHOUSE_MAX_PICTURES", value_name = "PICTURES", default_value_t = 1024, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_pictures: u32,

    /// The most pixels of all pictures of a request as they are sent, a number or one with K, M, G or T.
    #[arg(
        long,
        env = "ROUNDHOUSE_MAX_PICTURE_PIXELS",
        value_name = "PIXELS",
        default_value = "256M",
        allow_negative_numbers = true
    )]
    max_picture_pixels: ByteSize,

    /// Memory for the pictures of all requests that run or wait, in bytes or with K, M, G or T.
    #[arg(
        long,
        env = "ROUNDHOUSE_PICTURE_MEMORY",
        value_name = "SIZE",
        default_value = "2G",
        allow_negative_numbers = true
    )]
    picture_memory: ByteSize,

    /// How long a client may take nothing of what is ready for it, in seconds.
    #[arg(
        long,
        env = "ROUNDHOUSE_WRITE_TIMEOUT",
        value_name = "SECONDS",
        default_value = "30",
        allow_negative_numbers = true,
        value_parser = some_time
    )]
    write_timeout: Seconds,

    /// How long a client may take to send the head of a request, and then its body, in seconds.
    #[arg(
        long,
        env = "ROUNDHOUSE_HEADER_TIMEOUT",
        value_name = "SECONDS",
        default_value = "30",
        allow_negative_numbers = true,
        value_parser = some_time
    )]
    header_timeout: Seconds,

    /// How long a connection may be idle between requests, in seconds; more than a proxy in front keeps its own idle.
    #[arg(
        long,
        env = "ROUNDHOUSE_IDLE_TIMEOUT",
        value_name = "SECONDS",
        default_value = "75",
        allow_negative_numbers = true,
        value_parser = some_time
    )]
    idle_timeout: Seconds,

    /// How long a stream may be silent before a comment is sent, in seconds; 0 is for ever.
    #[arg(
        long,
        env = "ROUNDHOUSE_KEEP_ALIVE",
        value_name = "SECONDS",
        default_value = "15",
        allow_negative_numbers = true
    )]
    keep_alive: Seconds,

    /// The longest time from the word to stop to the end of the process, in seconds: what runs has it, but for its last
    /// quarter or two seconds.
    #[arg(
        long,
        env = "ROUNDHOUSE_DRAIN",
        value_name = "SECONDS",
        default_value = "25",
        allow_negative_numbers = true
    )]
    drain: Seconds,

    /// The longest time from a failure of the engine to the end of the process, in seconds.
    #[arg(
        long,
        env = "ROUNDHOUSE_FAILURE_EXIT",
        value_name = "SECONDS",
        default_value = "10",
        allow_negative_numbers = true
    )]
    failure_exit: Seconds,

    /// The token_sha that the reply at the start must have; it is only printed if not given.
    #[arg(long, env = "ROUNDHOUSE_SANITY_SHA", value_name = "HEX")]
    sanity_sha: Option<Sha>,
}

impl ServeArgs {
    /// The server's own form of them.
    ///
    /// # Errors
    /// The key is none; it is not shown.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let folder = || self.model.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned);
        let ServerArgs { host, port, api_key, cors_origin, served_name, sanity_sha, .. } = &self.server;
        let duration = |seconds: &Seconds| -> Duration { seconds.0 };
        if let Some(Secret(key)) = api_key {
            check_key(key).map_err(|why| Failure::Input(format!("--api-key (ROUNDHOUSE_API_KEY): {why}")))?;
        }
        Ok(Settings {
            host: host.clone(),
            port: *port,
            api_key: api_key.clone(),
            cors_origins: cors_origin.clone(),
            served_name: served_name.clone().or_else(folder).unwrap_or_else(|| "model".into()),
            lanes: self.engine.lanes.into(),
            queue: self.server.queue as usize,
            max_tokens_default: self.server.max_tokens_default,
            default_thinking: self.server.default_thinking.map(Switch::is_on),
            max_n: self.server.max_n as usize,
            body_limit: usize::try_from(self.server.body_limit.0).unwrap_or(usize::MAX >> 1),
            max_pictures: self.server.max_pictures as usize,
            max_picture_pixels: self.server.max_picture_pixels.0,
            picture_memory: self.server.picture_memory.0,
            write_timeout: duration(&self.server.write_timeout),
            header_timeout: duration(&self.server.header_timeout),
            idle_timeout: duration(&self.server.idle_timeout),
            keep_alive: duration(&self.server.keep_alive),
            drain: duration(&self.server.drain),
            failure_exit: duration(&self.server.failure_exit),
            sanity_sha: sanity_sha.as_ref().map(|sha| sha.0.clone()),
            config_hash: self.config_hash(),
        })
    }

    /// A short digest of all settings, the key left out.
    fn config_hash(&self) -> String {
        format!("{:.12}", graph::Digester::of(format!("{self:?}").as_bytes()))
    }
}

fn some_time(text: &str) -> Result<Seconds, String> {
    let time: Seconds = text.parse()?;
    if time.0.is_zero() { Err("no client is that fast; give more than 0 seconds".into()) } else { Ok(time) }
}

/// Takes any text: what is refused here is printed, and a key must not be.
fn unseen(text: &str) -> Result<Secret, Infallible> {
    Ok(Secret(text.to_owned()))
}

/// Whether a text can be a key. What is said of one that cannot does not show it.
pub(super) fn check_key(key: &str) -> Result<(), String> {
    match key.is_empty() || key.trim() != key || key.contains(char::is_control) {
        true => Err("a key is not empty, has no space around it, and no line end in it".into()),
        false => Ok(()),
    }
}

fn name(text: &str) -> Result<String, String> {
    match text.trim().is_empty() {
        true => Err("a name is not empty".into()),
        false => Ok(text.to_owned()),
    }
}

fn origin(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let plain =
        |host: &str| !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    match text == "*" || host.is_some_and(plain) {
        true => Ok(text.to_owned()),
        false => Err("not an origin; give one like https://example.org, without a path, or *".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::args::{Cli, Command};

    fn settings(options: &[&str]) -> Result<Settings, Failure> {
        // What the environment of the test says is not asked for.
        let cli = Cli::command().mut_subcommand("serve", |serve| {
            serve.mut_args(|option| option.env(clap::builder::Resettable::<clap::builder::OsStr>::Reset))
        });
        let line = [&["roundhouse", "serve", "no/such/model"], options].concat();
        match Cli::from_arg_matches(&cli.try_get_matches_from(line).unwrap()).unwrap().command {
            Command::Serve(args) => args.settings(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_defaults_of_the_line_are_those_of_the_server() {
        let parsed = settings(&[]).unwrap();
        let expected = Settings { config_hash: parsed.config_hash.clone(), ..Settings::default() };
        assert_eq!(format!("{parsed:?}"), format!("{expected:?}"));
    }

    #[test]
    fn a_key_that_is_none_is_refused_and_not_shown() {
        for key in ["", " sesame", "sesame ", "sesame\n", "sesame\nopen", "\tsesame"] {
            let why = settings(&["--api-key", key]).unwrap_err().to_string();
            assert!(why.contains("--api-key") && !why.contains("sesame"), "{why}");
        }
        assert!(settings(&["--api-key", "open sesame"]).is_ok());
    }
}
