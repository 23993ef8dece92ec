//! The engine's thread, and the handle that anyone may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Mutex, RwLock};
use planner::RequestId;

use super::{Engine, Event, Sink, Stats};
use crate::error::Error;
use crate::request::Submission;

/// Speaks to an engine thread. Clones speak to the same one.
#[derive(Clone)]
pub struct Handle {
    mail: Mailbox,
    next: Arc<AtomicU64>,
    stats: Arc<Mutex<Stats>>,
}

/// A request under way: its number and what it is told. Dropping it calls the request off.
pub struct Ticket {
    /// Its number.
    pub id: RequestId,
    /// What it is told, in order.
    pub events: Receiver<Event>,
    hold: Hold,
}

/// A hold on a request under way. Dropping it calls the request off.
pub struct Hold {
    /// The request's number.
    pub id: RequestId,
    mail: Mailbox,
}

/// Where an engine gets its mail. What it takes is read, also if the engine ends.
#[derive(Clone)]
struct Mailbox {
    mail: Sender<Mail>,
    /// Whether it takes mail; who sends holds it open.
    open: Arc<RwLock<bool>>,
}

enum Mail {
    Submit(RequestId, Box<Submission>, Sink),
    Cancel(RequestId),
    Stop,
    /// The other rank is gone: nothing more can be done.
    Lost(String),
}

/// The thread of an engine. It ends when it is told to stop and nothing is left to do, or when the device
/// fails.
pub struct EngineThread {
    thread: JoinHandle<Result<(), Error>>,
    mail: Mailbox,
}

impl Engine {
    /// Moves the engine to a thread of its own.
    pub fn spawn(self) -> (Handle, EngineThread) {
        let (mail, inbox) = Mailbox::new();
        if let Some(peer) = &self.peer {
            let mail = mail.clone();
            // If the engine has ended, there is nobody to tell.
            peer.on_failure(move |error| drop(mail.send(Mail::Lost(error.to_string()))));
        }
        let open = mail.open.clone();
        let stats = Arc::new(Mutex::new(self.stats()));
        let handle = Handle { mail: mail.clone(), next: Arc::new(AtomicU64::new(1)), stats: stats.clone() };
        let thread = std::thread::Builder::new().name("engine".into());
        let thread =
            thread.spawn(move || serve(self, &inbox, &open, &stats)).expect("a thread can be started");
        (handle, EngineThread { thread, mail })
    }
}

/// The life of the engine thread: take the mail, turn, until told to stop. However it ends, every request
/// that was taken is told its end.
fn serve(
    mut engine: Engine,
    inbox: &Receiver<Mail>,
    open: &RwLock<bool>,
    stats: &Mutex<Stats>,
) -> Result<(), Error> {
    let turns = std::panic::AssertUnwindSafe(|| turns(&mut engine, inbox, stats));
    let ended = std::panic::catch_unwind(turns);
    let why = match &ended {
        Ok(Ok(())) => "the engine has stopped".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the engine met a fault of its own and has ended".to_owned(),
    };
    let failed = !matches!(ended, Ok(Ok(())));
    engine.part(failed.then_some(&*why));
    engine.fail_all(&why);
    for mail in close(open, inbox) {
        if let Mail::Submit(_, _, mut events) = mail {
            // If nobody listens, there is nobody to tell.
            let _ = events.tell(Event::Failed(why.clone()));
        }
    }
    *stats.lock() = engine.stats();
    engine.close();
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Turns until there is nothing left to do and the word to stop was given.
fn turns(engine: &mut Engine, inbox: &Receiver<Mail>, stats: &Mutex<Stats>) -> Result<(), Error> {
    let mut stopping = false;
    loop {
        // Waits only if there is truly nothing to do.
        if engine.is_idle() {
            if stopping {
                return Ok(());
            }
            match inbox.recv() {
                Ok(mail) => stopping |= receive(engine, mail, stopping)?,
                Err(_) => return Ok(()),
            }
        }
        while let Ok(mail) = inbox.try_recv() {
            stopping |= receive(engine, mail, stopping)?;
        }
        engine.turn()?;
        *stats.lock() = engine.stats();
    }
}

/// Takes one piece of mail; whether it was the word to stop. An engine that is stopping takes no requests.
///
/// # Errors
/// The other rank is gone.
fn receive(engine: &mut Engine, mail: Mail, stopping: bool) -> Result<bool, Error> {
    match mail {
        Mail::Submit(_, _, mut events) if stopping => {
            // If nobody listens, there is nobody to tell.
            let _ = events.tell(Event::Failed("the engine is stopping".into()));
        }
        Mail::Submit(id, submission, events) => engine.submit(id, *submission, events),
        Mail::Cancel(id) => engine.cancel(id),
        Mail::Stop => return Ok(true),
        Mail::Lost(why) => {
            let error = Error::Peer(why);
            engine.fail(&error);
            return Err(error);
        }
    }
    Ok(false)
}

impl Mailbox {
    fn new() -> (Mailbox, Receiver<Mail>) {
        let (mail, inbox) = unbounded();
        (Mailbox { mail, open: Arc::new(RwLock::new(true)) }, inbox)
    }

    /// Puts mail in, unless the mailbox is closed.
    fn send(&self, mail: Mail) -> Result<(), Error> {
        let open = self.open.read();
        if !*open {
            return Err(Error::Ended);
        }
        self.mail.send(mail).map_err(|_| Error::Ended)
    }
}

/// Closes a mailbox; what came before is still there to be read.
fn close<'a>(open: &RwLock<bool>, inbox: &'a Receiver<Mail>) -> impl Iterator<Item = Mail> + 'a {
    *open.write() = false;
    inbox.try_iter()
}

impl Handle {
    /// Hands a request to the engine. Refusals come as events.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, Error> {
        let (sender, events) = unbounded();
        let hold = self.submit_to(submission, sender)?;
        Ok(Ticket { id: hold.id, events, hold })
    }

    /// As [`Handle::submit`], with events that go straight from the engine's thread to `sink`.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn submit_to(&self, submission: Submission, sink: impl Into<Sink>) -> Result<Hold, Error> {
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let mail = Mail::Submit(id, Box::new(submission), sink.into());
        self.mail.send(mail)?;
        Ok(Hold { id, mail: self.mail.clone() })
    }

    /// Tells the engine to finish what it has, to take nothing more, and to end.
    pub fn stop(&self) {
        // If the engine has ended, it has stopped.
        let _ = self.mail.send(Mail::Stop);
    }

    /// What the engine has done so far.
    pub fn stats(&self) -> Stats {
        self.stats.lock().clone()
    }
}

impl Ticket {
    /// See [`Hold::cancel`].
    pub fn cancel(&self) {
        self.hold.cancel();
    }
}

impl Hold {
    /// Calls the request off: its lane is free after the round or piece under way.
    pub fn cancel(&self) {
        // If the engine has ended, so has the request.
        let _ = self.mail.send(Mail::Cancel(self.id));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl EngineThread {
    /// Lets the engine finish what it has, and waits for its end.
    ///
    /// # Errors
    /// The device failed.
    pub fn stop(self) -> Result<(), Error> {
        // If the engine has ended already, its result says how.
        let _ = self.mail.send(Mail::Stop);
        self.wait()
    }

    /// Waits for the engine's end, which comes when someone stops it or the device fails.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(self) -> Result<(), Error> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that is taken while the engine ends is read, or its sender knows that it was not taken.
    #[test]
    fn a_mailbox_that_closes_loses_nothing() {
        for _ in 0..50 {
            let (mailbox, inbox) = Mailbox::new();
            let sender = |first: u64| {
                let mailbox = mailbox.clone();
                move || (first..).take_while(|id| mailbox.send(Mail::Cancel(RequestId(*id))).is_ok()).count()
            };
            let senders: Vec<_> = (0..3).map(|_| std::thread::spawn(sender(0))).collect();
            let early = inbox.iter().take(100).count();
            let read = early + close(&mailbox.open, &inbox).count();
            drop(inbox);
            let sent: usize = senders.into_iter().map(|sender| sender.join().expect("it counts")).sum();
            assert_eq!(sent, read);
        }
    }
}
