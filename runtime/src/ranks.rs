//! The control link between two ranks: messages on a TCP connection of their own, beside the collectives.
//!
//! Rank 0 leads and rank 1 follows. [`Link::listen`] and [`Link::connect`] meet in either order of starting and
//! compare a [`Hello`] on both sides; from then on [`Link::send`] and [`Link::receive`] carry [`Message`]s, and a
//! peer that dies, stops or speaks nonsense is found without any help of the collectives.

mod call;
mod error;
mod form;
mod hello;
mod link;
mod listen;
mod meet;
mod message;
mod peer;
mod rank;
mod socket;
pub mod wire;

pub use error::LinkError;
pub use hello::{Difference, Hello, Settings};
pub use link::Link;
pub use listen::Listener;
pub use message::{Command, How, Message};
pub(crate) use peer::Order;
pub use peer::Peer;
pub use rank::{Patience, Rank};
