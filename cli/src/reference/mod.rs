//! Raw memory and the processor's clock: what the references of `perf` measure with.
//!
//! This module holds all `unsafe` code of the program, and knows nothing of the tests.

pub mod landing;
pub mod memcpy;
pub mod stopwatch;
pub mod word_mapping;
