//! `roundhouse serve`: from the command line to a server.

use runtime::engine::{self, EngineOptions};

use super::{engine_failure, told};
use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::output::note;
use crate::serve::Server;

/// Binds the port, opens the model, and serves it.
pub(crate) fn serve(args: Box<ServeArgs>) -> Result<(), Failure> {
    let chosen = args.engine.run.choose()?;
    let settings = args.settings()?;
    // Who may run or wait is decided at the door, so the engine's own queue is never full.
    let queue = (settings.lanes + settings.queue) as u32;
    let options = EngineOptions { queue, ..args.engine.options(&chosen) };
    let server = Server::bind(settings)?;
    server.run(move || {
        note(chosen.opening(&args.model));
        engine::open(&args.model, &options, &mut told()).map_err(engine_failure)
    })
}
