//! The example `train` as a user runs it: the built program, its output, files and exit status.

mod engine;
mod program;
mod single;
