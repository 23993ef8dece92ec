//! The roundhouse binary from outside: what it prints, what it writes, how it ends.

mod binary;
mod folder;
mod generate;
mod inspect;
mod json;
mod loading;
mod logits;
mod messages;
mod model_folders;
mod pipes;
mod prompts;
mod usage;
