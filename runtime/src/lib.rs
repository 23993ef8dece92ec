//! The model and its loop.
