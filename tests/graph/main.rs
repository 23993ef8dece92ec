//! The host device: memory, streams, captures and faults, seen from outside the crate.

mod access;
mod bank;
mod capture;
mod communicator;
mod emission;
mod errors;
mod faults;
mod files;
mod memory;
mod readback;
mod rig;
mod staging;
mod streams;
