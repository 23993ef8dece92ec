//! The life of a server: load, make a first reply, serve, and end in one of two ways.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use runtime::engine::OpenEngine;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout, timeout_at};

use super::settings::Settings;
use super::state::{App, Model, Phase};
use super::{listen, routes, sanity};
use crate::failure::Failure;
use crate::output::note;

/// How long the last words of streams and connections may take, and then the engine's end.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Positions of a page.
const PAGE: usize = 64;

/// Lives until a signal, or until the engine fails.
pub(crate) async fn live(
    app: Arc<App>,
    listener: std::net::TcpListener,
    open: impl FnOnce() -> Result<OpenEngine, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let started = Instant::now();
    let mut signals = Signals::new().map_err(lost)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(lost)?;
    // Whoever reads this may send a signal at once.
    note(format_args!("listening on http://{}", listener.local_addr().map_err(lost)?));
    let accepting = tokio::spawn(listen::accept(listener, routes::router(&app), app.clone()));

    let opened = tokio::select! {
        opened = load(open) => opened?,
        () = signals.next() => {
            note("stopping: the model is not loaded yet");
            return Ok(());
        }
    };
    let mut engine = start(&app, opened);
    app.enter(Phase::Warming);
    let served = async {
        sanity::reply(&app).await?;
        app.enter(Phase::Ready);
        note(format_args!("ready after {:.1} s", started.elapsed().as_secs_f64()));
        std::future::pending::<Result<(), Failure>>().await
    };
    tokio::select! {
        failure = served => match timeout(LAST_WORDS / 2, &mut engine).await {
            // An engine that failed is the reason, and the status says so.
            Ok(Ok(Some(why))) => Err(Failure::Device(why)),
            _ => failure,
        },
        why = &mut engine => fail(&app, why.ok().flatten(), &mut signals).await,
        () = signals.next() => drain(&app, accepting, &mut engine, &mut signals).await,
    }
}

/// Opens the model on a thread of its own. Threads that compute inherit its name.
async fn load(
    open: impl FnOnce() -> Result<OpenEngine, Failure> + Send + 'static,
) -> Result<OpenEngine, Failure> {
    let (said, opened) = oneshot::channel();
    let thread = thread::Builder::new().name("engine-load".into());
    // Nobody waits for it any more if the server has ended.
    thread.spawn(move || drop(said.send(open()))).map_err(lost)?;
    opened
        .await
        .unwrap_or_else(|_| Err(Failure::Device("loading met a fault of its own and has ended".into())))
}

/// Starts the engine; what comes is its end, with the reason if it failed.
fn start(app: &App, opened: OpenEngine) -> oneshot::Receiver<Option<String>> {
    let OpenEngine { engine, tokenizer, chat, sight } = opened;
    let vocab = engine.runner().model.config.vocab_size;
    // A reply can have no more positions than there are pages for.
    let pages = engine.stats().pages_total as usize;
    let context = (pages * PAGE).min(engine.state().limits().context as usize);
    note(room(pages, context, &app.settings));
    let (handle, engine) = engine.spawn();
    app.install(Model { handle, tokenizer, chat, sight, vocab, context });
    let (said, ended) = oneshot::channel();
    let watch = move || {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.wait()));
        let why = match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("the engine met a fault of its own and has ended".to_owned()),
        };
        // Nobody may be there any more.
        let _ = said.send(why);
    };
    // Without the thread nobody would see the engine's end: then it is seen at once.
    drop(thread::Builder::new().name("engine-watch".into()).spawn(watch));
    ended
}

/// How many replies have room at once; a warning if that may be less than there are lanes.
fn room(pages: usize, context: usize, settings: &Settings) -> String {
    let (lanes, tokens) = (settings.lanes, context.min(settings.max_tokens_default as usize));
    let fit = |positions: usize| pages / positions.div_ceil(PAGE).max(1);
    let (whole, usual) = (fit(context), fit(tokens));
    match whole < lanes {
        false => format!("{whole} whole contexts of {context} fit, for {lanes} lanes"),
        true => format!(
            "warning: {whole} whole contexts of {context} fit, for {lanes} lanes; a request without max_tokens asks for \
             {tokens} tokens, and {usual} such replies fit (--max-tokens-default, --memory, --context)"
        ),
    }
}

/// Refuses what comes, lets run what runs for a while, and ends, all of it within the time that the settings give.
async fn drain(
    app: &App,
    accepting: JoinHandle<()>,
    engine: &mut oneshot::Receiver<Option<String>>,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let started = tokio::time::Instant::now();
    app.enter(Phase::Stopping);
    let (active, (patience, words)) = (app.active(), split(app.settings.drain));
    let cut = sleep(patience);
    accepting.abort();
    let _ = accepting.await;
    note(format_args!("stopping: {active} requests are under way and have {} s", patience.as_secs_f32()));
    tokio::select! {
        () = app.idle() => {}
        () = cut => note("stopping: time is up; what still runs is cut"),
        () = signals.next() => note("stopping at once: what still runs is cut"),
        why = &mut *engine => return fail(app, why.ok().flatten(), signals).await,
    }
    farewell(app, words / 2).await;
    if let Some(model) = app.loaded() {
        model.handle.stop();
        // Two ranks end their collectives together, which takes a while: a process must not end in the middle of that.
        let _ = timeout_at(started + app.settings.drain, engine).await;
    }
    note("stopped");
    Ok(())
}

/// Says for a while that the engine has failed, so that those who look see it, and ends.
async fn fail(app: &App, why: Option<String>, signals: &mut Signals) -> Result<(), Failure> {
    let why = why.unwrap_or_else(|| "the engine has stopped".into());
    app.enter(Phase::Failed(why.clone()));
    let time = app.settings.failure_exit;
    let (patience, words) = split(time);
    note(format_args!("the engine has failed: {why}; ending within {} s", time.as_secs_f32()));
    tokio::select! {
        () = sleep(patience) => {}
        () = signals.next() => note("ending at once"),
    }
    farewell(app, words / 2).await;
    Err(Failure::Device(why))
}

/// A time to the end of the process, parted: what comes before the last words, and the time for these.
fn split(time: Duration) -> (Duration, Duration) {
    let words = LAST_WORDS.min(time / 4);
    (time - words, words)
}

/// Ends replies with an error, and connections once their last byte is sent.
async fn farewell(app: &App, time: Duration) {
    let start = tokio::time::Instant::now();
    app.cut.cancel();
    let _ = timeout_at(start + time / 2, app.idle()).await;
    app.closing.cancel();
    let closed = async {
        while app.metrics.connections.get() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let _ = timeout_at(start + time, closed).await;
}

/// The signals that ask a process to end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Signals { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn lost(error: std::io::Error) -> Failure {
    Failure::Device(format!("cannot start to serve: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_room_is_a_warning_with_the_settings_that_change_it() {
        let settings =
            |lanes, max_tokens_default| Settings { lanes, max_tokens_default, ..Settings::default() };
        assert_eq!(room(1024, 4096, &settings(16, 7)), "16 whole contexts of 4096 fit, for 16 lanes");
        let told = room(992, 32_768, &settings(16, 4096));
        assert!(told.starts_with("warning: 1 whole contexts of 32768 fit, for 16 lanes; "), "{told}");
        assert!(told.contains("4096 tokens, and 15 such replies fit (--max-tokens-default, "), "{told}");
        assert!(room(1, 64, &settings(2, 4096)).contains("64 tokens, and 1 such replies fit"));
    }

    #[test]
    fn last_words_are_part_of_the_time() {
        for (seconds, words) in [(25.0, 3.0), (4.0, 1.0), (0.0, 0.0)] {
            let whole = Duration::from_secs_f64(seconds);
            let (before, last) = split(whole);
            assert_eq!((before + last, last), (whole, Duration::from_secs_f64(words)));
        }
    }
}
