//! Opening model folders: the good ones in all their dialects, and every kind of bad one with an error that names it.

mod claims;
mod config;
mod dialects;
mod experts;
mod files;
mod folder;
mod generation;
mod misfits;
mod opens;
mod scale;
mod sketch;
mod tensors;
