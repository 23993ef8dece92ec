//! The other rank, as an engine sees it: both run the same engine on the same commands in the same order, and so
//! decide the same.
//!
//! ```text
//! leader                                   follower
//!   Submit, Cancel  ──►                      does the same
//!   plans, Turn     ──►                      plans, compares the digests
//!   runs            ◄──  Done                runs
//!   before it runs a round, the leader has the follower's word on the one before
//!   what one rank alone may fail at          Answer both ways, then both do it or neither does
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use graph::{Digest, Digester};
use kernels::table::Outcome;
use planner::{RequestId, Round};

use super::{Command, How, Link, LinkError, Message};
use crate::error::Error;
use crate::request::Submission;

/// How long a leader waits for the end of its follower.
const FAREWELL: Duration = Duration::from_secs(2);

/// The other rank.
pub struct Peer {
    link: Link,
    leads: bool,
    /// How long an answer may take.
    patience: Duration,
    turn: u64,
    /// Turns that the follower has answered.
    answered: u64,
    /// Digests of the rounds of the turns that it has not.
    asked: VecDeque<String>,
    question: u64,
    /// Digest of all outcomes so far.
    settled: Digest,
    /// What the leader said of the turn that comes.
    told: Option<Told>,
}

/// A turn as the leader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    number: u64,
    round: String,
    how: How,
    settled: String,
}

/// What a follower is to do.
pub(crate) enum Order {
    Submit(RequestId, Submission),
    Cancel(RequestId),
    Graphs(bool),
    Measure,
    Turn,
    /// The leader has ended, in good order.
    End,
}

impl Peer {
    /// The rank behind a link: the follower's if this one leads.
    pub fn new(link: Link, leads: bool, patience: Duration) -> Peer {
        Peer {
            link,
            leads,
            patience,
            turn: 0,
            answered: 0,
            asked: VecDeque::new(),
            question: 0,
            settled: Digest(0),
            told: None,
        }
    }

    /// Whether this rank leads.
    pub(crate) fn leads(&self) -> bool {
        self.leads
    }

    /// See [`Link::on_failure`].
    pub(crate) fn on_failure(&self, callback: impl FnOnce(&LinkError) + Send + 'static) {
        self.link.on_failure(callback);
    }

    /// Has the follower take a request too.
    pub(crate) fn submit(&self, id: RequestId, submission: &Submission) -> Result<(), Error> {
        self.command(Command::Submit { id: id.0, submission: submission.clone() })
    }

    /// Has the follower call a request off too.
    pub(crate) fn cancel(&self, id: RequestId) -> Result<(), Error> {
        self.command(Command::Cancel { id: id.0 })
    }

    /// Has the follower replay rounds too, or not.
    pub(crate) fn graphs(&self, on: bool) -> Result<(), Error> {
        self.command(Command::Graphs { on })
    }

    /// Has the follower measure collectives too.
    pub(crate) fn measure(&self) -> Result<(), Error> {
        self.command(Command::Measure)
    }

    fn command(&self, command: Command) -> Result<(), Error> {
        Ok(self.link.send(&Message::Command(command))?)
    }

    /// Begins a turn: the leader says which round it runs, and how, and waits for the word on the round before; the
    /// follower compares with its own, and answers.
    ///
    /// # Errors
    /// The two plan different rounds or had other outcomes; or the other rank is gone, or does not answer.
    pub(crate) fn turn(&mut self, round: Option<&Round>, how: How) -> Result<(), Error> {
        self.turn += 1;
        let text = round.map_or_else(|| "no round".to_owned(), Round::to_string);
        let here = Told {
            number: self.turn,
            round: Digester::of(text.as_bytes()).to_string(),
            how,
            settled: self.settled.to_string(),
        };
        if self.leads {
            let Told { number, round, how, settled } = here;
            self.asked.push_back(round.clone());
            self.link.send(&Message::Command(Command::Turn { number, round, how, settled }))?;
            return self.answers(number - 1);
        }
        let told =
            self.told.take().ok_or_else(|| Error::Peer("a turn that the leader did not order".into()))?;
        if told != here {
            return Err(Error::Peer(format!(
                "the ranks do not agree on turn {}, so both stop before it runs: the leader has {told:?}, this rank \
                 {here:?} for {text}",
                self.turn
            )));
        }
        self.link.send(&Message::Done { number: here.number, round: here.round })?;
        Ok(())
    }

    /// Waits until the follower has answered turn `number`.
    fn answers(&mut self, number: u64) -> Result<(), Error> {
        let asked = Instant::now();
        while self.answered < number {
            let message = self.receive(asked, "the word on a round")?;
            if !self.is_answer(&message) {
                return Err(unexpected(&message, "the word on a round"));
            }
        }
        Ok(())
    }

    /// Takes the word on the next round that was asked for, if that is what came.
    fn is_answer(&mut self, message: &Message) -> bool {
        let Message::Done { number, round } = message else { return false };
        let is = *number == self.answered + 1 && self.asked.front() == Some(round);
        if is {
            self.answered += 1;
            self.asked.pop_front();
        }
        is
    }

    /// Waits for the other rank to come this far, as long as it lives: what is done meanwhile takes as long as it takes.
    ///
    /// # Errors
    /// The other rank is gone, has failed, or asks something else.
    pub(crate) fn meet(&mut self, what: &str) -> Result<(), Error> {
        self.answer(what, true)?;
        loop {
            match self.link.receive(self.patience) {
                Ok(Message::Answer { question, what: theirs, .. }) if self.same(question, &theirs, what) => {
                    return Ok(());
                }
                Ok(other) => return Err(unexpected(&other, what)),
                Err(LinkError::Late { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The smallest of what the ranks have.
    ///
    /// # Errors
    /// The other rank is gone, does not answer, or asks something else.
    pub(crate) fn least(&mut self, what: &str, here: u64) -> Result<u64, Error> {
        self.question += 1;
        self.link.send(&Message::Number { question: self.question, number: here, what: what.into() })?;
        match self.receive(Instant::now(), what)? {
            Message::Number { question, number, what: theirs } if self.same(question, &theirs, what) => {
                Ok(here.min(number))
            }
            other => Err(unexpected(&other, what)),
        }
    }

    /// Says whether something succeeded here.
    fn answer(&mut self, what: &str, here: bool) -> Result<(), Error> {
        self.question += 1;
        Ok(self.link.send(&Message::Answer { question: self.question, yes: here, what: what.into() })?)
    }

    /// Whether the other rank means what this one asks.
    fn same(&self, question: u64, theirs: &str, ours: &str) -> bool {
        question == self.question && (theirs.is_empty() || theirs == ours)
    }

    /// Notes what a settled round left.
    pub(crate) fn settled(&mut self, outcomes: &[Outcome]) {
        let mut digest = Digester::new();
        digest.digest(self.settled).bytes(bytemuck::cast_slice(outcomes));
        self.settled = digest.finish();
    }

    /// Whether something succeeded here and at the other rank.
    ///
    /// # Errors
    /// The other rank is gone, does not answer, or asks something else.
    pub(crate) fn agree(&mut self, what: &str, here: bool) -> Result<bool, Error> {
        self.answer(what, here)?;
        let asked = Instant::now();
        loop {
            match self.receive(asked, what)? {
                Message::Answer { question, yes, what: theirs } if self.same(question, &theirs, what) => {
                    return Ok(here && yes);
                }
                other if self.leads && self.is_answer(&other) => {}
                other => return Err(unexpected(&other, what)),
            }
        }
    }

    /// The next message, which was asked for at `asked`.
    fn receive(&self, asked: Instant, what: &str) -> Result<Message, Error> {
        let left = self.patience.saturating_sub(asked.elapsed());
        self.link.receive(left).map_err(|error| match error {
            LinkError::Late { peer, .. } => Error::Peer(format!(
                "{peer} did not answer within {} s (--peer-timeout) when asked for {what}; look at its log",
                self.patience.as_secs()
            )),
            error => error.into(),
        })
    }

    /// What the leader orders next, however long it takes.
    ///
    /// # Errors
    /// The leader is gone, or has failed.
    pub(crate) fn order(&mut self) -> Result<Order, Error> {
        loop {
            let message = match self.link.receive(Duration::from_secs(60)) {
                Err(LinkError::Late { .. }) => continue,
                message => message?,
            };
            return Ok(match message {
                Message::Command(Command::Submit { id, submission }) => {
                    Order::Submit(RequestId(id), submission)
                }
                Message::Command(Command::Cancel { id }) => Order::Cancel(RequestId(id)),
                Message::Command(Command::Graphs { on }) => Order::Graphs(on),
                Message::Command(Command::Measure) => Order::Measure,
                Message::Command(Command::Turn { number, round, how, settled }) => {
                    self.told = Some(Told { number, round, how, settled });
                    Order::Turn
                }
                Message::Command(Command::End { settled }) if settled == self.settled.to_string() => {
                    Order::End
                }
                Message::Command(Command::End { settled }) => {
                    return Err(Error::Peer(format!(
                        "the ranks had other outcomes in their last rounds: digest {settled} there, {} here; what was told \
                         of them may be wrong",
                        self.settled
                    )));
                }
                other => return Err(unexpected(&other, "an order")),
            });
        }
    }

    /// Tells the other rank why this one ends: in good order, or not. A leader that ends in good order waits a little
    /// for the follower's end: a process that is gone with words unread takes back its own last ones.
    pub(crate) fn part(&self, failed: Option<&str>) {
        let farewell = match failed {
            Some(why) => Message::Failed { why: why.into() },
            None => Message::Command(Command::End { settled: self.settled.to_string() }),
        };
        // If it is gone, there is nobody to tell.
        let told = self.link.send(&farewell).is_ok();
        let until = Instant::now() + FAREWELL;
        let left = || until.saturating_duration_since(Instant::now());
        while told && self.leads && failed.is_none() && self.link.receive(left()).is_ok() {}
    }
}

fn unexpected(message: &Message, what: &str) -> Error {
    let came = match message {
        Message::Answer { question, what, .. } | Message::Number { question, what, .. } => {
            format!("{} to question {question}, about {what},", message.name())
        }
        other => other.name().to_owned(),
    };
    Error::Peer(format!(
        "the other rank sent {came} where {what} was due; both stop, since they are no longer in step"
    ))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Two ranks that ask each other about different things are no longer in step, whatever the answers.
    #[test]
    fn answers_about_something_else_are_none() {
        const SILENCE: Duration = Duration::from_secs(5);
        type Ask = fn(&mut Peer, &str) -> Result<(), Error>;
        let asks: [Ask; 3] = [
            |peer, what| peer.agree(what, true).map(|both| assert!(both)),
            |peer, what| peer.least(what, 3).map(|least| assert_eq!(least, 3)),
            |peer, what| peer.meet(what),
        ];
        for ask in asks {
            let both = |first: &str, second: &str| {
                let (leader, follower) = Link::pair(SILENCE).expect("sockets");
                let mut leader = Peer::new(leader, true, SILENCE);
                let mut follower = Peer::new(follower, false, SILENCE);
                thread::scope(|scope| {
                    let other = scope.spawn(|| ask(&mut follower, second).map_err(|error| error.to_string()));
                    let own = ask(&mut leader, first).map_err(|error| error.to_string());
                    [own, other.join().expect("it does not panic")]
                })
            };
            assert_eq!(both("a capture", "a capture"), [Ok(()), Ok(())]);
            for answer in both("a capture", "an audit") {
                let error = answer.expect_err("not the same");
                assert!(
                    ["a capture", "an audit", "no longer in step"].iter().all(|word| error.contains(word)),
                    "{error}"
                );
            }
        }
    }
}
