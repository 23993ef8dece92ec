//! Scenes: a small language that plays requests against the planner, and prints every decision.
//!
//! ```text
//! # one command a line; what is left out has its default
//! limits context=4096 pages=64 piece=128 rows=64 share=1 queue=64 audit=0 graphs=on ahead=1
//! slab   slots=2 class=0          # before the first request: a slab to start with; later: growth
//! arrive A prompt=100 max=3 class=0 window=1 image pocket constrained
//! stop   A after=2                # its 2nd token is a stop token
//! fail   A after=2                # the row after its 2nd token is not finite
//! accept A rows=1                 # of a window, at most so many rows are accepted
//! cancel A
//! run    4                        # plan and book 4 rounds; settle as late as `ahead` allows
//! run    all                      # until nothing can be planned and nothing is in flight
//! settle                          # settle what is in flight
//! state                           # show the state; the end of a scene shows it too
//! ```
//!
//! `pages=8,4` gives two cache classes. Requests are numbered in the order in which the scene names them, and
//! the k-th token of request n is `1000 n + k`. `ahead` is how many rounds may be booked and not settled.

mod stage;

use crate::ids::{ClassId, RequestId};
use crate::limits::{DEPTH, Limits, Slab};
use crate::request::Request;
use stage::{Stage, Turn};
use std::fmt;
use std::str::FromStr;

const FIRST: &str = "it is the first command, if it is given";

/// Plays a scene; returns its commands, rounds, effects and final state as text.
pub fn run(text: &str) -> Result<String, SceneError> {
    let mut names = Names::default();
    let mut opening = Opening::default();
    let mut stage: Option<Stage> = None;
    let mut last = Words::of(1, "");
    for (number, line) in text.lines().enumerate() {
        let words = Words::of(number + 1, line);
        let Some(command) = names.command(&words)? else { continue };
        match (command, &mut stage) {
            (Command::Limits(limits, ahead), None) => opening.limits(&words, limits, ahead)?,
            (Command::Limits(..), Some(_)) => return Err(words.wrong("limits", FIRST)),
            (Command::Slab(slab), None) => opening.slab(&words, slab)?,
            (Command::Slab(slab), Some(stage)) => {
                stage.echo(&words.text);
                stage.grow(slab).map_err(|error| words.wrong("slab", error))?;
            }
            (Command::Turn(turn), stage) => {
                let stage = match stage {
                    Some(stage) => stage,
                    None => stage.insert(opening.stage(&words)?),
                };
                stage.echo(&words.text);
                stage.play(turn);
            }
        }
        last = words;
    }
    let stage = stage.map_or_else(|| opening.stage(&last), Ok)?;
    Ok(stage.finish())
}

/// Why a scene cannot be played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SceneError {
    /// The line, counted from 1.
    pub line: usize,
    /// The word that is wrong.
    pub word: String,
    /// What is wrong with it.
    pub problem: String,
}

impl fmt::Display for SceneError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scene line {}, `{}`: {}", self.line, self.word, self.problem)
    }
}

impl std::error::Error for SceneError {}

/// What one line asks for.
enum Command {
    Limits(Limits, usize),
    Slab(Slab),
    Turn(Turn),
}

/// What the lines before the first request set up.
struct Opening {
    limits: Limits,
    ahead: usize,
    slabs: Vec<Slab>,
    lines: Vec<String>,
}

impl Default for Opening {
    fn default() -> Self {
        let limits = Limits {
            context: 4096,
            piece_rows: 128,
            round_rows: 64,
            decode_share: 1,
            queue: 64,
            audit: 0,
            graphs: true,
            pages: vec![64],
        };
        Self { limits, ahead: 1, slabs: Vec::new(), lines: Vec::new() }
    }
}

impl Opening {
    fn limits(&mut self, words: &Words<'_>, limits: Limits, ahead: usize) -> Result<(), SceneError> {
        limits.check().map_err(|error| words.wrong("limits", error))?;
        if !self.lines.is_empty() {
            return Err(words.wrong("limits", FIRST));
        }
        (self.limits, self.ahead) = (limits, ahead);
        self.lines.push(words.text.clone());
        Ok(())
    }

    fn slab(&mut self, words: &Words<'_>, slab: Slab) -> Result<(), SceneError> {
        let checked = self.limits.check_slab(slab, self.slabs.len());
        checked.map_err(|error| words.wrong("slab", error))?;
        self.slabs.push(slab);
        self.lines.push(words.text.clone());
        Ok(())
    }

    fn stage(&self, words: &Words<'_>) -> Result<Stage, SceneError> {
        let stage = Stage::new(self.limits.clone(), &self.slabs, self.ahead);
        let mut stage = stage.map_err(|error| words.wrong(words.name(), error))?;
        self.lines.iter().for_each(|line| stage.echo(line));
        Ok(stage)
    }
}

/// The names of the requests, in the order in which they were given.
#[derive(Default)]
struct Names<'a>(Vec<&'a str>);

impl<'a> Names<'a> {
    fn command(&mut self, words: &Words<'a>) -> Result<Option<Command>, SceneError> {
        let turn = match words.name() {
            "" => return Ok(None),
            "limits" => return limits(words).map(Some),
            "slab" => return slab(words).map(Some),
            "arrive" => self.arrive(words)?,
            "stop" => Turn::Stop { request: self.request(words)?, after: words.only_number("after")? },
            "fail" => Turn::Fail { request: self.request(words)?, after: words.only_number("after")? },
            "accept" => Turn::Accept { request: self.request(words)?, rows: words.only_number("rows")? },
            "cancel" => {
                words.end(2)?;
                Turn::Cancel(self.request(words)?)
            }
            "run" => {
                words.end(2)?;
                match words.get(1) {
                    "" => return Err(words.wrong("run", "say how many rounds, or `all`")),
                    "all" => Turn::Run(u32::MAX),
                    count => Turn::Run(words.number(count, count)?),
                }
            }
            "settle" => {
                words.end(1)?;
                Turn::Settle
            }
            "state" => {
                words.end(1)?;
                Turn::Show
            }
            other => return Err(words.wrong(other, "no such command")),
        };
        Ok(Some(Command::Turn(turn)))
    }

    fn arrive(&mut self, words: &Words<'a>) -> Result<Turn, SceneError> {
        let name = words.get(1);
        if name.is_empty() || name.contains('=') {
            return Err(words.wrong(words.name(), "name the request first"));
        }
        if self.0.contains(&name) {
            return Err(words.wrong(name, "a request has this name already"));
        }
        self.0.push(name);
        let mut request = Request::text(RequestId(self.0.len() as u64), 0, 0);
        let (mut prompt, mut max_tokens) = (None, None);
        for word in words.from(2) {
            match word.split_once('=') {
                Some(("prompt", value)) => prompt = Some(words.number(word, value)?),
                Some(("max", value)) => max_tokens = Some(words.number(word, value)?),
                Some(("class", value)) => request.class = ClassId(words.number(word, value)?),
                Some(("window", value)) => request.window = words.number(word, value)?,
                None if word == "image" => request.image_bearing = true,
                None if word == "pocket" => request.pocketed = true,
                None if word == "constrained" => request.constrained = true,
                _ => return Err(words.wrong(word, "a request has no such property")),
            }
        }
        request.prompt = prompt.ok_or_else(|| words.wrong(name, "`prompt=` is missing"))?;
        request.max_tokens = max_tokens.ok_or_else(|| words.wrong(name, "`max=` is missing"))?;
        Ok(Turn::Arrive(request))
    }

    fn request(&self, words: &Words<'_>) -> Result<RequestId, SceneError> {
        let name = words.get(1);
        match self.0.iter().position(|known| *known == name) {
            Some(at) => Ok(RequestId(at as u64 + 1)),
            None if name.is_empty() => Err(words.wrong(words.name(), "name a request")),
            None => Err(words.wrong(name, "no request has this name")),
        }
    }
}

fn limits(words: &Words<'_>) -> Result<Command, SceneError> {
    let Opening { mut limits, mut ahead, .. } = Opening::default();
    for word in words.from(1) {
        match word.split_once('=') {
            Some(("context", value)) => limits.context = words.number(word, value)?,
            Some(("piece", value)) => limits.piece_rows = words.number(word, value)?,
            Some(("rows", value)) => limits.round_rows = words.number(word, value)?,
            Some(("share", value)) => limits.decode_share = words.number(word, value)?,
            Some(("queue", value)) => limits.queue = words.number(word, value)?,
            Some(("audit", value)) => limits.audit = words.number(word, value)?,
            Some(("graphs", "on")) => limits.graphs = true,
            Some(("graphs", "off")) => limits.graphs = false,
            Some(("graphs", _)) => return Err(words.wrong(word, "graphs are `on` or `off`")),
            Some(("pages", value)) => {
                let pools = value.split(',').map(|pages| words.number(word, pages));
                limits.pages = pools.collect::<Result<_, _>>()?;
            }
            Some(("ahead", value)) => {
                ahead = words.number(word, value)?;
                if ahead == 0 || ahead > DEPTH {
                    return Err(
                        words.wrong(word, format!("1 to {DEPTH} rounds may be booked and not settled"))
                    );
                }
            }
            _ => return Err(words.wrong(word, "no such limit")),
        }
    }
    Ok(Command::Limits(limits, ahead))
}

fn slab(words: &Words<'_>) -> Result<Command, SceneError> {
    let mut slab = Slab { class: ClassId(0), slots: 0 };
    for word in words.from(1) {
        match word.split_once('=') {
            Some(("slots", value)) => slab.slots = words.number(word, value)?,
            Some(("class", value)) => slab.class = ClassId(words.number(word, value)?),
            _ => return Err(words.wrong(word, "a slab has no such property")),
        }
    }
    Ok(Command::Slab(slab))
}

/// One line as words, without its comment.
struct Words<'a> {
    line: usize,
    words: Vec<&'a str>,
    /// The words again, evenly spaced.
    text: String,
}

impl<'a> Words<'a> {
    fn of(line: usize, text: &'a str) -> Self {
        let words: Vec<&str> = text.split('#').next().unwrap_or("").split_whitespace().collect();
        let text = words.join(" ");
        Self { line, words, text }
    }

    fn name(&self) -> &'a str {
        self.get(0)
    }

    /// The word at a place, or nothing's word.
    fn get(&self, at: usize) -> &'a str {
        self.words.get(at).copied().unwrap_or("")
    }

    fn from(&self, at: usize) -> impl Iterator<Item = &'a str> {
        self.words.iter().copied().skip(at)
    }

    /// The number of a command of the form `command NAME key=number`.
    fn only_number(&self, key: &str) -> Result<u32, SceneError> {
        self.end(3)?;
        match self.get(2).split_once('=') {
            Some((found, value)) if found == key => self.number(self.get(2), value),
            _ => {
                let word = self.words.get(2).unwrap_or(&self.words[0]);
                Err(self.wrong(word, format!("`{key}=` and a number should stand here")))
            }
        }
    }

    fn number<T: FromStr>(&self, word: &str, value: &str) -> Result<T, SceneError> {
        value.parse().map_err(|_| self.wrong(word, "not a number that fits here"))
    }

    /// Nothing may stand at `at` or after.
    fn end(&self, at: usize) -> Result<(), SceneError> {
        match self.words.get(at) {
            Some(word) => Err(self.wrong(word, "nothing should stand here")),
            None => Ok(()),
        }
    }

    fn wrong(&self, word: &str, problem: impl ToString) -> SceneError {
        SceneError { line: self.line, word: word.to_string(), problem: problem.to_string() }
    }
}
