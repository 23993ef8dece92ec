//! `runtime`: checkpoint to weights, the model as a list of launches, and the loop that runs it.
//!
//! Reading order: [`config`], [`checkpoint`], [`weights`], [`memory`], [`lanes`], [`bundle`], [`scratch`],
//! [`model`], [`tower`], [`runner`], [`open`], [`engine`], [`receipts`], [`probe`], [`quality`], [`ranks`], [`convert`]; requests: [`request`], [`sampling`], [`reply`]; text: [`tokenizer`], [`chat`], [`sha`].

pub mod bench;
pub mod bundle;
pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod engine;
pub mod error;
pub mod inspect;
pub mod json;
pub mod lanes;
pub mod memory;
pub mod model;
pub mod open;
pub mod pictures;
pub mod place;
pub mod probe;
pub mod quality;
pub mod ranks;
pub mod receipts;
pub mod reply;
pub mod request;
pub mod runner;
pub mod sampling;
pub mod scratch;
pub mod sha;
pub mod share;
mod system;
pub mod tokenizer;
pub mod tower;
pub mod weights;
