//! `roundhouse demo`: requests that come and go, what the rounds did, and one receipt.

mod cast;
mod picture;
mod view;

use std::io::{IsTerminal, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, iter};

use crossbeam_channel::Select;
use runtime::chat::ChatTemplate;
use runtime::engine::{Event, Handle, OpenEngine, Stats, Ticket};
use runtime::memory::Size;
use runtime::pictures::{Decoded, Sight};
use runtime::receipts;
use runtime::tokenizer::Tokenizer;

use super::check::passed;
use super::{engine_failure, open};
use crate::args::DemoArgs;
use crate::failure::Failure;
use crate::output::Output;
use crate::ranks::{self, Begun};
use cast::{CAST, Part};
use view::{Lane, View};

/// Where the model lies in the repository.
const MODEL: &str = "models/tiny";

/// Plays the cast, then says what was done and proves one equality.
pub(crate) fn demo(args: &DemoArgs) -> Result<(), Failure> {
    let model = args.model.clone().map_or_else(repository_model, Ok)?;
    let chosen = args.engine.run.choose()?;
    let options = args.engine.options(&chosen);
    let Begun::Leads(rank) = ranks::begin(&args.engine.ranks, &model, &options)? else { return Ok(()) };
    let OpenEngine { engine, tokenizer, chat, sight } = open(&model, &options, &chosen, rank)?;
    let mut out = Output::stdout();
    out.print(&format!("device     {} ({})\n", chosen.place, chosen.why));

    let (handle, thread) = engine.spawn();
    let mut play =
        Play { handle, tokenizer: &tokenizer, chat: &chat, sight, seats: Vec::new(), told: Told::default() };
    let played = play.run(&mut View::new(&mut out));
    thread.stop().map_err(engine_failure)?;
    played?;
    out.print(&summary(&play.told, &play.handle.stats()));

    let receipt = receipts::graph_equals_eager(&model, &chosen.receipts(2, 7));
    let receipt = receipt.map_err(engine_failure)?;
    out.print(&format!("receipt    {receipt}\n"));
    out.finish()?;
    passed(&[receipt])
}

/// The demo model of the repository: seen from here, or from the binary.
fn repository_model() -> Result<PathBuf, Failure> {
    let binary = env::current_exe().unwrap_or_default();
    let around = binary.ancestors().skip(1).map(|dir| dir.join(MODEL));
    iter::once(PathBuf::from(MODEL)).chain(around).find(|dir| dir.join("config.json").is_file()).ok_or_else(
        || {
            let from = binary.parent().unwrap_or(Path::new("")).display();
            Failure::Input(format!("there is no {MODEL} here nor around {from}; name a MODEL folder"))
        },
    )
}

/// A performance under way.
struct Play<'a> {
    handle: Handle,
    tokenizer: &'a Tokenizer,
    chat: &'a ChatTemplate,
    sight: Option<Arc<Sight>>,
    seats: Vec<Seat>,
    told: Told,
}

/// A part that has entered and not left.
struct Seat {
    part: &'static Part,
    ticket: Ticket,
    lane: Lane,
    text: String,
    tokens: u32,
}

/// What the requests were told in sum.
#[derive(Default)]
struct Told {
    tokens: u32,
    ends: u32,
    most_at_once: usize,
    took: Duration,
}

impl Play<'_> {
    fn run(&mut self, view: &mut View<'_>) -> Result<(), Failure> {
        let started = Instant::now();
        let sees = self.sight.is_some();
        let mut coming = CAST.iter().filter(|part| sees || !part.sees);
        let mut next = coming.next();
        loop {
            while let Some(part) =
                next.filter(|part| self.seats.is_empty() || self.told.tokens >= part.enters)
            {
                self.enter(part, view)?;
                next = coming.next();
            }
            if self.seats.is_empty() {
                self.told.took = started.elapsed();
                return Ok(());
            }
            self.listen(view)?;
        }
    }

    /// Asks for a part, and shows what it brings.
    fn enter(&mut self, part: &'static Part, view: &mut View<'_>) -> Result<(), Failure> {
        let text = self.chat.render(&part.chat()).map_err(Failure::input)?;
        let (mut prompt, mut media) = (self.tokenizer.encode(&text).map_err(Failure::input)?, Vec::new());
        let picture = self.sight.as_ref().filter(|_| part.sees).map(|sight| (picture::drawn(), sight));
        if let Some((picture, sight)) = &picture {
            let shown = [Decoded::Picture(picture.clone())];
            (prompt, media) =
                sight.place(&prompt, &shown, |text| self.tokenizer.encode(text)).map_err(Failure::input)?;
        }
        let ticket = self.handle.submit(part.submission(prompt, media)).map_err(engine_failure)?;
        view.line(&format!("{:>4}  {:<8} joins   {}", self.told.tokens, part.name, part.asks()));
        if let Some((picture, _)) = &picture {
            let lines = picture::lines(picture, stdout().is_terminal());
            lines.iter().for_each(|line| view.line(format!("      {line}").trim_end()));
        }
        let lane = view.lane(part.name);
        self.seats.push(Seat { part, ticket, lane, text: String::new(), tokens: 0 });
        self.told.most_at_once = self.told.most_at_once.max(self.seats.len());
        Ok(())
    }

    /// Waits for the next thing that a request is told.
    fn listen(&mut self, view: &mut View<'_>) -> Result<(), Failure> {
        let mut select = Select::new();
        self.seats.iter().for_each(|seat| {
            select.recv(&seat.ticket.events);
        });
        let ready = select.select();
        let at = ready.index();
        let event = ready.recv(&self.seats[at].ticket.events);
        let seat = &mut self.seats[at];
        let end = match event {
            Ok(Event::Token(token)) => {
                seat.text += &token.text;
                seat.tokens += 1;
                self.told.tokens += 1;
                seat.lane.show(&seat.text);
                if seat.part.called_off_after == Some(seat.tokens) {
                    seat.ticket.cancel();
                }
                return Ok(());
            }
            Ok(Event::Finished(finished)) => {
                seat.text += &finished.text;
                format!("({} after {} tokens)", finished.reason, finished.completion_tokens)
            }
            Ok(Event::Refused(why)) => format!("refused: {why}"),
            Ok(Event::Full { waiting }) => format!("refused: {waiting} requests wait already"),
            Ok(Event::Failed(why)) => return Err(Failure::Device(why)),
            Err(_) => return Err(Failure::Device("the engine ended before it answered".into())),
        };
        let seat = self.seats.remove(at);
        self.told.ends += 1;
        seat.lane.end();
        let text = view::one_line(&seat.text);
        view.line(&format!("{:>4}  {:<8} leaves  {text} {end}", self.told.tokens, seat.part.name));
        Ok(())
    }
}

fn summary(told: &Told, stats: &Stats) -> String {
    let seconds = told.took.as_secs_f64();
    format!(
        "requests   {}, up to {} at once\n\
         rounds     {}\n\
         tokens     {} in {seconds:.2} s, {:.0} tok/s in sum\n\
         graphs     {} of {}\n\
         pages      {} of {} free\n",
        told.ends,
        told.most_at_once,
        stats.rounds,
        told.tokens,
        f64::from(told.tokens) / seconds,
        stats.graphs,
        Size(stats.graph_bytes),
        stats.pages_free,
        stats.pages_total,
    )
}
