//! The examples as a user runs them: the built programs, their output, files and exit status.

#[path = "../processes/hosts/network.rs"]
#[allow(dead_code)] // no host is cut off here
mod network;
mod program;
mod short;
mod train_engine;
mod train_single;
mod two_hosts;
