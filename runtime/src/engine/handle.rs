//! The engine's thread, and the handle that anyone may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use planner::RequestId;

use super::{Engine, Event, Stats};
use crate::error::Error;
use crate::request::Submission;

/// Speaks to an engine thread. Clones speak to the same one.
#[derive(Clone)]
pub struct Handle {
    mail: Sender<Mail>,
    next: Arc<AtomicU64>,
    stats: Arc<Mutex<Stats>>,
}

/// A request under way: its number and what it is told. Dropping it calls the request off.
pub struct Ticket {
    /// Its number.
    pub id: RequestId,
    /// What it is told, in order.
    pub events: Receiver<Event>,
    mail: Sender<Mail>,
}

enum Mail {
    Submit(RequestId, Box<Submission>, Sender<Event>),
    Cancel(RequestId),
    Stop,
}

/// The thread of an engine. It ends when it is told to stop and nothing is left to do, when every handle is
/// gone, or when the device fails.
pub struct EngineThread {
    thread: JoinHandle<Result<(), Error>>,
    mail: Sender<Mail>,
}

impl Engine {
    /// Moves the engine to a thread of its own.
    pub fn spawn(self) -> (Handle, EngineThread) {
        let (mail, inbox) = unbounded();
        let stats = Arc::new(Mutex::new(self.stats()));
        let handle = Handle { mail: mail.clone(), next: Arc::new(AtomicU64::new(1)), stats: stats.clone() };
        let thread = std::thread::Builder::new().name("engine".into());
        let thread = thread.spawn(move || serve(self, &inbox, &stats)).expect("a thread can be started");
        (handle, EngineThread { thread, mail })
    }
}

/// The life of the engine thread: take the mail, turn, until told to stop.
fn serve(mut engine: Engine, inbox: &Receiver<Mail>, stats: &Mutex<Stats>) -> Result<(), Error> {
    let mut stopping = false;
    loop {
        // Waits only if there is truly nothing to do.
        if engine.is_idle() {
            if stopping {
                return Ok(());
            }
            match inbox.recv() {
                Ok(mail) => stopping |= receive(&mut engine, mail),
                Err(_) => return Ok(()),
            }
        }
        while let Ok(mail) = inbox.try_recv() {
            stopping |= receive(&mut engine, mail);
        }
        if let Err(error) = engine.turn() {
            engine.fail_all(&error);
            *stats.lock() = engine.stats();
            return Err(error);
        }
        *stats.lock() = engine.stats();
    }
}

/// Whether it was the word to stop.
fn receive(engine: &mut Engine, mail: Mail) -> bool {
    match mail {
        Mail::Submit(id, submission, events) => engine.submit(id, *submission, events),
        Mail::Cancel(id) => engine.cancel(id),
        Mail::Stop => return true,
    }
    false
}

impl Handle {
    /// Hands a request to the engine. Refusals come as events.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, Error> {
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = unbounded();
        let mail = Mail::Submit(id, Box::new(submission), sender);
        self.mail.send(mail).map_err(|_| Error::Ended)?;
        Ok(Ticket { id, events, mail: self.mail.clone() })
    }

    /// What the engine has done so far.
    pub fn stats(&self) -> Stats {
        self.stats.lock().clone()
    }
}

impl Ticket {
    /// Calls the request off: its lane is free after the round or piece under way.
    pub fn cancel(&self) {
        // If the engine has ended, so has the request.
        let _ = self.mail.send(Mail::Cancel(self.id));
    }
}

impl Drop for Ticket {
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
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
