//! The model and its loop.

pub mod chat;
pub mod sha;
pub mod tokenizer;
