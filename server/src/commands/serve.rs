//! `roundhouse serve`: from the command line to a server.

use runtime::engine::EngineOptions;

use super::open;
use crate::args::{Role, ServeArgs};
use crate::failure::Failure;
use crate::ranks::{self, Begun};
use crate::serve::Server;

/// Binds the port, opens the model, and serves it.
pub(crate) fn serve(args: Box<ServeArgs>) -> Result<(), Failure> {
    let chosen = args.engine.run.choose()?;
    let settings = args.settings()?;
    // Who may run or wait is decided at the door, so the engine's own queue is never full.
    let queue = (settings.lanes + settings.queue) as u32;
    let options = EngineOptions { queue, ..args.engine.options(&chosen) };
    if let Role::Follower(_) = args.engine.ranks.role()? {
        return ranks::begin(&args.engine.ranks, &args.model, &options).map(drop);
    }
    let server = Server::bind(settings)?;
    server.run(move || match ranks::begin(&args.engine.ranks, &args.model, &options)? {
        Begun::Leads(rank) => open(&args.model, &options, &chosen, rank),
        Begun::Followed => unreachable!("the role was asked for before"),
    })
}
