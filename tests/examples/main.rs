//! The examples as a user runs them: the built programs, their output, files and exit status.

mod program;
mod short;
mod train_engine;
mod train_single;
