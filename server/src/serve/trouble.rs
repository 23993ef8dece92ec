//! What ends replies without a finish, and what is said of it: to the client, and in the metrics.

use axum::http::StatusCode;

use super::errors::ApiError;
use super::state::App;

/// Why the replies end without a finish.
#[derive(Debug)]
pub(crate) enum Trouble {
    Full,
    Refused(String),
    Failed(String),
    /// The channel was full: the client reads too slowly.
    Slow,
    /// The server stops.
    Stopping,
}

impl Trouble {
    /// How the metrics call a reply that ends so.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Trouble::Full | Trouble::Refused(_) => "refused",
            Trouble::Failed(_) => "failed",
            Trouble::Slow => "slow",
            Trouble::Stopping => "stopped",
        }
    }

    /// What the client is told.
    pub(crate) fn told(self, app: &App) -> ApiError {
        match self {
            Trouble::Full => app.full(),
            Trouble::Refused(why) => ApiError::refused(StatusCode::BAD_REQUEST, "refused", why),
            Trouble::Failed(why) => ApiError::failed("engine_failed", why),
            Trouble::Slow => {
                ApiError::failed("slow_reader", "the reply was read too slowly and was called off")
            }
            Trouble::Stopping => {
                ApiError::unavailable("stopping", "the server stopped before the reply was complete")
                    .closing()
            }
        }
    }
}
