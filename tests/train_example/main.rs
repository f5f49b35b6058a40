//! The example `train` as its users run it: the built program, its output, its files, its exit status.

mod engine;
mod program;
mod single;
