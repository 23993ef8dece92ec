//! The command line of two ranks: the leader finds its follower, which may be a process that it starts; the follower
//! opens its share of the model and does what the leader says.

use std::env;
use std::fmt::Display;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Command, Stdio};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

use graph::Digester;
use runtime::engine::{EngineOptions, OpenEngine, open_rank};
use runtime::open::Progress;
use runtime::place::Place;
use runtime::ranks::{Hello, Listener, Patience, Rank, Settings};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{RankArgs, Role};
use crate::commands::engine_failure;
use crate::failure::Failure;
use crate::output::note;

/// What became of a process that may be one of two ranks.
pub(crate) enum Begun {
    /// It leads another one; or there is no other.
    Leads(Option<Box<Rank>>),
    /// It followed the leader until that ended.
    Followed,
}

/// Connects this process with the other rank, if there is one. A follower then opens its share of the model and does
/// what the leader says, until the leader ends.
///
/// # Errors
/// The options contradict each other; the device has no collectives; the other rank does not come, does not fit or
/// fails; a follower's model cannot be opened, or its device failed.
pub(crate) fn begin(args: &RankArgs, model: &Path, options: &EngineOptions) -> Result<Begun, Failure> {
    let role = args.role()?;
    let patience = Patience { start: args.timeout(), answer: args.timeout() };
    let hello = |rank, place: Place| -> Result<Hello, Failure> {
        let architecture = place.architecture().map_err(engine_failure)?;
        Ok(Hello::new(rank, 2, &own_digest()?, &architecture, settings(model, options)?))
    };
    match role {
        Role::Alone => Ok(Begun::Leads(None)),
        Role::Leader(address) => {
            let own = address.is_none();
            if own {
                options.place.next().map_err(engine_failure)?;
            }
            let listener =
                Listener::bind(address.as_deref().unwrap_or("127.0.0.1:0")).map_err(Failure::input)?;
            let at = listener.address();
            note(format_args!("rank 0 of 2: waiting for rank 1 at {at}"));
            let ended = if own { start_follower(&at.to_string())? } else { Arc::default() };
            let rank = Rank::lead(listener, &hello(0, options.place)?, patience, || ended.get().cloned());
            Ok(Begun::Leads(Some(Box::new(rank.map_err(engine_failure)?))))
        }
        Role::Follower(leader) => {
            note(format_args!("rank 1 of 2: calling rank 0 at {leader}"));
            let mut options = options.clone();
            if let Some(owner) = args.owner() {
                end_with_leader(owner)?;
                options.place = options.place.next().map_err(engine_failure)?;
            }
            let rank = Rank::follow(&leader, &hello(1, options.place)?, patience).map_err(engine_failure)?;
            // The leader tells the rest, which is the same here.
            let mut told = |progress: Progress| {
                if let Progress::Collectives(_) = progress {
                    note(format_args!("rank 1 of 2: {progress}"));
                }
            };
            let opened = open_rank(model, &options, rank, &mut told);
            let OpenEngine { engine, .. } = opened.map_err(engine_failure)?;
            engine.follow().map_err(engine_failure)?;
            note("rank 1 of 2: rank 0 has ended in good order");
            Ok(Begun::Followed)
        }
    }
}

/// Starts this process again with the variables that collectives of CUDA devices need, if it lacks some: they are read
/// when the library is loaded, and a process with threads must not set its own.
///
/// # Errors
/// The system cannot start it again.
pub(crate) fn prepare(args: &RankArgs) -> Result<(), Failure> {
    let lacks = graph::nccl_environment();
    if args.role()? == Role::Alone || lacks.is_empty() {
        return Ok(());
    }
    let failed = |error: io::Error| Failure::Device(format!("starting again with {lacks:?}: {error}"));
    let program = env::current_exe().map_err(failed)?;
    // Returns only if it fails.
    Err(failed(Command::new(program).args(env::args_os().skip(1)).envs(lacks.iter().copied()).exec()))
}

/// Starts rank 1 on this host, with the command line of this process. Tells, once it has ended, how.
fn start_follower(leader: &str) -> Result<Arc<OnceLock<String>>, Failure> {
    let failed = |error: io::Error| Failure::Device(format!("starting rank 1 on this host: {error}"));
    let mut follower = Command::new(env::current_exe().map_err(failed)?);
    // Behind the command and before what it is given: whatever follows a `--` is no option.
    let mut line = env::args_os().skip(1);
    follower
        .args(line.next())
        .args(["--rank", "1", "--leader", leader, "--owned", &process::id().to_string()])
        .args(line);
    // In a group of its own, so that a key that stops the leader lets it end its replies with the follower there.
    follower.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    let ended = Arc::<OnceLock<String>>::default();
    let (tell, (started, start)) = (ended.clone(), mpsc::channel());
    // A process that ends with its parent ends with the thread that started it, so this one stays.
    thread::spawn(move || {
        let child = follower.spawn();
        let mut child = match child {
            Ok(child) => child,
            // Whoever waits for the start is there.
            Err(error) => return started.send(Err(error)).unwrap_or_default(),
        };
        started.send(Ok(())).unwrap_or_default();
        let how = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        tell.get_or_init(|| {
            format!("rank 1, which was started on this host, has ended: {how}; its last lines say why")
        });
    });
    start.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())).map_err(failed)?;
    Ok(ended)
}

/// Has the system end this process when the leader, which started it, has ended, also if it is stopped or hangs then.
/// Signals that ask for an end are the leader's to answer: it still needs its follower for the replies under way.
fn end_with_leader(leader: u32) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::Device(format!("asking to end with rank 0: {error}"));
    let set = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    set.map_err(io::Error::from).map_err(failed)?;
    // Of one that had ended before that was asked for, nothing tells.
    if std::os::unix::process::parent_id() != leader {
        return Err(Failure::Device("rank 0, which started this process, has ended".into()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let _context = runtime.enter();
    // A signal that was once taken no longer ends the process.
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        drop(signal(kind).map_err(failed)?);
    }
    Ok(())
}

/// A digest of this very program: ranks of different builds are refused.
fn own_digest() -> Result<String, Failure> {
    let read = env::current_exe().and_then(fs::read);
    let bytes =
        read.map_err(|error| Failure::Device(format!("reading this program to compare it: {error}")))?;
    Ok(Digester::of(&bytes).to_string())
}

/// What must be the same on both ranks.
fn settings(model: &Path, options: &EngineOptions) -> Result<Settings, Failure> {
    fn set(value: Option<impl Display>) -> String {
        value.map_or_else(|| "not set".into(), |value| value.to_string())
    }
    let class = &options.classes[0];
    Ok(Settings::default()
        .with("model", model_digest(model)?)
        .with("--dtype", options.element.name())
        .with("--load", options.load)
        .with("--table", options.table)
        .with("--graphs", options.graphs)
        .with("--exchange", options.exchange)
        .with("--lanes", class.lanes)
        .with("--context", set((class.context > 0).then_some(class.context)))
        .with("--memory", set(options.page_memory))
        .with("--vision", options.vision)
        .with("--feature-memory", set(options.feature_bytes))
        .with("--audit", options.audit)
        .with("waiting requests", options.queue)
        .with("rows of a piece", options.piece_rows))
}

/// A digest of a model's settings and texts, and of the names and sizes of its weight files.
fn model_digest(model: &Path) -> Result<String, Failure> {
    let failed = |error: io::Error| Failure::Input(format!("reading {}: {error}", model.display()));
    let mut files = Vec::new();
    for entry in fs::read_dir(model).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // What a link leads to counts, not the link.
        let file = fs::metadata(&path).map_err(failed)?;
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json" | "jinja") if file.is_file() => {
                files.push((path.clone(), fs::read(&path).map_err(failed)?))
            }
            Some("safetensors") if file.is_file() => files.push((path, file.len().to_le_bytes().to_vec())),
            _ => {}
        }
    }
    files.sort();
    let mut digest = Digester::new();
    for (path, content) in files {
        digest.text(&path.file_name().unwrap_or_default().to_string_lossy()).bytes(&content);
    }
    Ok(digest.finish().to_string())
}
