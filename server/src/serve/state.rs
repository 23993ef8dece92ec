//! What every part of the server shares: the phase of its life, the model once there is one, and who is under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;
use runtime::chat::ChatTemplate;
use runtime::engine::Handle;
use runtime::pictures::Sight;
use runtime::tokenizer::Tokenizer;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::errors::ApiError;
use super::metrics::Metrics;
use super::settings::Settings;

/// Large bodies that may be in memory at once.
const LARGE_BODIES: usize = 64;
/// Pictures that are decoded at once.
const PICTURE_READERS: usize = 2;

/// The server's shared state.
pub(crate) struct App {
    pub(crate) settings: Settings,
    /// When the process started, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) metrics: Metrics,
    /// Running replies end now, with an error.
    pub(crate) cut: CancellationToken,
    /// One permit for every large body that may be in memory, until it is parsed.
    pub(crate) large_bodies: Arc<Semaphore>,
    /// The turn to read a large body: tokens of one take much memory, and small ones should not wait behind it.
    pub(crate) large_reader: Semaphore,
    /// The turns to decode a picture: one takes much memory, and texts should find a thread too.
    pub(crate) picture_reader: Arc<Semaphore>,
    /// One permit for each KiB that pictures of requests under way may hold.
    pub(crate) picture_memory: Arc<Semaphore>,
    /// Connections end as soon as they are idle.
    pub(crate) closing: CancellationToken,
    phase: RwLock<Phase>,
    model: OnceLock<Model>,
    /// One permit for every reply that may run or wait.
    seats: Arc<Semaphore>,
    active: AtomicUsize,
    idle: Notify,
}

/// Where the server is in its life.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    /// Weights are read.
    Loading,
    /// The first reply is made.
    Warming,
    Ready,
    /// Running replies end; no other begins.
    Stopping,
    /// The engine has failed, and why.
    Failed(String),
}

/// A model that can be asked.
pub(crate) struct Model {
    pub(crate) handle: Handle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) chat: ChatTemplate,
    /// How it sees, if it does.
    pub(crate) sight: Option<Arc<Sight>>,
    /// Rows of the vocabulary.
    pub(crate) vocab: usize,
    /// Positions that one reply can have, its prompt included.
    pub(crate) context: usize,
}

/// A place among the replies that run or wait; free again when it is dropped.
pub(crate) type Seat = OwnedSemaphorePermit;

/// A request that is being answered, until it is dropped.
pub(crate) struct Active(Arc<App>);

impl App {
    pub(crate) fn new(settings: Settings) -> App {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        App {
            started,
            metrics: Metrics::new(started),
            cut: CancellationToken::new(),
            closing: CancellationToken::new(),
            large_bodies: Arc::new(Semaphore::new(LARGE_BODIES)),
            large_reader: Semaphore::new(1),
            picture_reader: Arc::new(Semaphore::new(PICTURE_READERS)),
            picture_memory: Arc::new(Semaphore::new(settings.picture_memory_kib())),
            phase: RwLock::new(Phase::Loading),
            model: OnceLock::new(),
            seats: Arc::new(Semaphore::new(settings.lanes + settings.queue)),
            active: AtomicUsize::new(0),
            idle: Notify::new(),
            settings,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.read().clone()
    }

    /// Goes on to a later phase. Nothing follows a failure.
    pub(crate) fn enter(&self, next: Phase) {
        let mut phase = self.phase.write();
        if !matches!(*phase, Phase::Failed(_)) {
            *phase = next;
        }
    }

    /// Puts the model in its place, once.
    pub(crate) fn install(&self, model: Model) -> &Model {
        self.model.get_or_init(|| model)
    }

    /// The model, in whatever phase, if it is loaded.
    pub(crate) fn loaded(&self) -> Option<&Model> {
        self.model.get()
    }

    /// The model, if it takes requests.
    pub(crate) fn model(&self) -> Result<&Model, ApiError> {
        match (&*self.phase.read(), self.model.get()) {
            (Phase::Ready, Some(model)) => Ok(model),
            (Phase::Stopping, _) => {
                Err(ApiError::unavailable("stopping", "the server is stopping; ask another one").closing())
            }
            (Phase::Failed(why), _) => {
                let message = format!("the engine has failed and the server will end: {why}");
                Err(ApiError::unavailable("engine_failed", message).closing())
            }
            (phase, _) => {
                let message = format!("the model is {}; /ready says when it can be asked", phase.word());
                Err(ApiError::unavailable("not_ready", message))
            }
        }
    }

    /// Takes places for `count` more replies, or none.
    pub(crate) fn seats(&self, count: usize) -> Result<Vec<Seat>, ApiError> {
        let wanted = u32::try_from(count).unwrap_or(u32::MAX);
        let mut all = self.seats.clone().try_acquire_many_owned(wanted).map_err(|_| self.full())?;
        let mut seats: Vec<Seat> = (1..count).filter_map(|_| all.split(1)).collect();
        if count > 0 {
            seats.push(all);
        }
        Ok(seats)
    }

    /// Most replies that may run or wait.
    pub(crate) fn most_replies(&self) -> usize {
        self.settings.lanes + self.settings.queue
    }

    /// The answer to who comes when all places are taken.
    pub(crate) fn full(&self) -> ApiError {
        let Settings { lanes, queue, .. } = self.settings;
        ApiError::full(format!(
            "{lanes} replies may run and {queue} wait, and there is no place left; try again later"
        ))
    }

    /// Counts a request in.
    pub(crate) fn begin(self: &Arc<App>) -> Active {
        self.active.fetch_add(1, Ordering::Relaxed);
        Active(self.clone())
    }

    /// Requests that are being answered.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    /// Waits until nothing is being answered.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.active() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if self.0.active.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl Phase {
    /// The phase in one word.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Phase::Loading => "loading",
            Phase::Warming => "warming",
            Phase::Ready => "ready",
            Phase::Stopping => "stopping",
            Phase::Failed(_) => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_taken_together_or_not_at_all() {
        let app = App::new(Settings { lanes: 2, queue: 2, ..Settings::default() });
        let three = app.seats(3).unwrap();
        assert_eq!(three.len(), 3);
        assert!(app.seats(2).is_err());
        let one = app.seats(1).unwrap();
        drop(three);
        assert_eq!(app.seats(3).unwrap().len(), 3);
        drop(one);
        assert_eq!(app.seats(4).unwrap().len(), 4);
    }

    #[test]
    fn nothing_follows_a_failure() {
        let app = App::new(Settings::default());
        app.enter(Phase::Failed("x".into()));
        app.enter(Phase::Stopping);
        assert_eq!(app.phase(), Phase::Failed("x".into()));
        assert!(app.model().is_err());
    }
}
