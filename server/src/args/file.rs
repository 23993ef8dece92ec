//! A settings file under the command line: TOML whose keys are the names of options. A flag wins over the environment,
//! the environment over the file, and the file over the default.

use std::fs;
use std::path::{Path, PathBuf};

use clap::builder::{OsStr, Resettable};
use clap::{ArgMatches, Command};

use super::serve::check_key;
use crate::failure::Failure;

/// The command that reads a settings file.
const READER: &str = "serve";
/// The option whose value is never shown.
const SECRET: &str = "api-key";
/// The option that names the file.
const OPTION: &str = "config";

/// The command line with the values of a file as its defaults, if the line or the environment names a file.
///
/// # Errors
/// The file cannot be read, or holds a key that is no setting or a value that is none; names file, key and value.
pub(crate) fn under(cli: Command) -> Result<Command, Failure> {
    // Only the name of the file is asked for here; whatever else is wrong with the line is said when it is read.
    let asked = cli.clone().ignore_errors(true).try_get_matches();
    match asked.ok().and_then(|matches| named(&matches)) {
        Some(path) => layered(cli, &path),
        None => Ok(cli),
    }
}

/// The file that the line or the environment names.
fn named(matches: &ArgMatches) -> Option<PathBuf> {
    matches.subcommand_matches(READER)?.try_get_one::<PathBuf>(OPTION).ok()?.cloned()
}

fn layered(cli: Command, path: &Path) -> Result<Command, Failure> {
    let name = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::Input(format!("cannot read {name}: {error}; check --config")))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error| Failure::Input(format!("{name} is not TOML: {}", at_line(&error, &text, &cli))))?;
    table.into_iter().try_fold(cli, |cli, (key, value)| {
        let shown = if may_be_shown(&cli, &key) { format!("{key} = {value}") } else { key.clone() };
        set(cli, &key, value).map_err(|why| Failure::Input(format!("{name}: {shown}: {why}")))
    })
}

/// What is wrong with a text, and where. The reader's own message shows the line, and a key may be in it.
fn at_line(error: &toml::de::Error, text: &str, cli: &Command) -> String {
    let Some(span) = error.span() else { return error.message().to_owned() };
    let line = 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count();
    match text.get(span).filter(|name| is_setting(cli, name)) {
        Some(name) => format!("line {line}: {name}: {}", error.message()),
        None => format!("line {line}: {}", error.message()),
    }
}

/// Whether an error may repeat the value under `key`: it must not be the key of the server, nor what may be meant as
/// one under a name that is none.
fn may_be_shown(cli: &Command, key: &str) -> bool {
    key != SECRET && is_setting(cli, key)
}

fn is_setting(cli: &Command, name: &str) -> bool {
    let command = cli.find_subcommand(READER);
    command.is_some_and(|command| command.get_arguments().any(|option| option.get_long() == Some(name)))
}

/// Makes a value the default of the option that is called `key`, if the option would take it.
fn set(cli: Command, key: &str, value: toml::Value) -> Result<Command, String> {
    let command = cli.find_subcommand(READER).ok_or("nothing reads it")?;
    let options = || command.get_arguments().filter(|option| option.get_env().is_some());
    let named = |option: &&clap::Arg| option.get_long() == Some(key) && key != OPTION;
    let Some(option) = options().find(named) else {
        let names = options().filter_map(clap::Arg::get_long).filter(|name| *name != OPTION);
        return Err(format!("there is no such setting; there are {}", names.collect::<Vec<_>>().join(", ")));
    };
    let quoted = matches!(value, toml::Value::String(_) | toml::Value::Array(_));
    let takes_many = matches!(option.get_action(), clap::ArgAction::Append);
    let texts = match value {
        toml::Value::Array(values) if takes_many => {
            values.into_iter().map(text).collect::<Result<Vec<_>, _>>()?
        }
        value => vec![text(value)?],
    };
    let id = option.get_id().clone();
    let lone = command.clone().mut_args(|option| option.env(Resettable::<OsStr>::Reset));
    let takes = |text: &str| {
        let line = [READER.to_owned(), "model".to_owned(), format!("--{key}={text}")];
        lone.clone().try_get_matches_from(line).map(drop).map_err(|error| first_line(&error))
    };
    texts.iter().try_for_each(|text| takes(text))?;
    // What takes any word is a text, and a text has quotes here.
    if !quoted && takes("word").is_ok() {
        return Err("this setting is a text; put it in quotes".into());
    }
    if key == SECRET {
        texts.iter().try_for_each(|text| check_key(text))?;
    }
    let defaults: Vec<OsStr> = texts.into_iter().map(OsStr::from).collect();
    Ok(cli.mut_subcommand(READER, |command| command.mut_arg(id, |option| option.default_values(defaults))))
}

/// A value as it would stand on the line.
fn text(value: toml::Value) -> Result<String, String> {
    match value {
        toml::Value::String(text) => Ok(text),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(true) => Ok("on".into()),
        toml::Value::Boolean(false) => Ok("off".into()),
        _ => Err("a setting is a string, a number, true or false, or a list where an option may be repeated"
            .into()),
    }
}

/// What clap says of a value, without the advice about the line.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::args::{Cli, Command as Parsed, ServeArgs};

    fn read(file: &str, line: &[&str]) -> Result<Box<ServeArgs>, String> {
        let mut settings = tempfile::NamedTempFile::new().unwrap();
        settings.write_all(file.as_bytes()).unwrap();
        let cli = layered(Cli::command(), settings.path()).map_err(|failure| failure.to_string())?;
        let line = [&["roundhouse", "serve", "M"], line].concat();
        let matches = cli.try_get_matches_from(line).map_err(|error| error.to_string())?;
        match Cli::from_arg_matches(&matches).unwrap().command {
            Parsed::Serve(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_stands_between_the_line_and_the_defaults() {
        let file = "port = 9000\nlanes = 3\ndefault-thinking = true\ncors-origin = [\"http://a\", \"http://b\"]\n\
                    drain = 1.5\nmemory = \"64M\"";
        let args = read(file, &["--lanes", "5"]).unwrap();
        let settings = args.settings().unwrap();
        assert_eq!((settings.port, settings.lanes), (9000, 5));
        assert_eq!(settings.default_thinking, Some(true));
        assert_eq!(settings.cors_origins, ["http://a", "http://b"]);
        assert_eq!(settings.drain.as_millis(), 1500);
        assert_eq!(args.engine.memory.map(|size| size.0), Some(64 << 20));
        assert_eq!(settings.queue, 256);
    }

    #[test]
    fn what_a_file_gets_wrong_is_named() {
        for (file, words) in [
            ("prot = 1", ["prot", "no such setting"]),
            ("port = 99999", ["port = 99999", "99999"]),
            ("lanes = 0", ["lanes = 0", "0"]),
            ("graphs = \"maybe\"", ["graphs", "maybe"]),
            ("config = \"x\"", ["config", "no such setting"]),
            ("model = \"x\"", ["model", "no such setting"]),
            ("port = [1]", ["port", "a setting is"]),
            ("host = 5", ["host = 5", "quotes"]),
            ("api-key = true", ["api-key: ", "quotes"]),
            ("cors-origin = [5]", ["cors-origin = [5]", "not an origin"]),
            ("port 1", ["not TOML", "line 1"]),
            ("port = 1\nport = 2", ["not TOML: line 2: port: ", "duplicate"]),
        ] {
            let why = read(file, &[]).map(drop).unwrap_err();
            words.iter().for_each(|word| assert!(why.contains(word), "{word} is not in {why}"));
        }
    }

    #[test]
    fn a_key_is_not_shown_whatever_is_wrong_with_it() {
        for file in [
            "api_key = \"sesame\"",
            "apikey = \"sesame\"",
            "API-KEY = \"sesame\"",
            "api-key = \"sesame \"",
            "api-key = \"sesame\\n\"",
            "api-key = [\"sesame\"]",
            "api-key = {sesame = 1}",
            "[server]\napi-key = \"sesame\"",
            "port = 1\napi-key = \"sesame",
            "api-key = sesame",
            "api-key = \"sesame\" \"",
            "api-key = \"sesame\\q\"",
            "api-key = \"a\"\napi-key = \"sesame\"",
        ] {
            let why = read(file, &[]).map(drop).unwrap_err();
            assert!(!why.contains("sesame"), "{file}: {why}");
        }
        let why = read("port = 1\napi-key = \"sesame", &[]).map(drop).unwrap_err();
        assert!(why.contains("line 2"), "{why}");
    }
}
