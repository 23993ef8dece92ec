//! Opening model folders: the good ones in all their dialects, and every kind of bad one with an error that names it.

mod config;
mod experts;
mod files;
mod folder;
mod generation;
mod opens;
mod scale;
mod tensors;
