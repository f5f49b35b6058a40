//! The example `train` as its users run it: the built program, its output, its files, its exit status.
#![cfg(feature = "cli")]

mod engine;
mod program;
mod single;
