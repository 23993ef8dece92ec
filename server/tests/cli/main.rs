//! The roundhouse binary from outside: what it prints, what it writes, how it ends.

mod bench;
mod binary;
mod convert;
mod crowd;
mod demo;
mod folder;
mod generate;
mod inspect;
mod json;
mod kernels;
mod limits;
mod loading;
mod logits;
mod messages;
mod model_folders;
mod pictures;
mod pipes;
mod plan;
mod prompts;
mod ranks;
mod sampling;
mod usage;
