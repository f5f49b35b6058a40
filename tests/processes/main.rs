//! Nodes in processes of their own, which are killed, stopped, forked and started again. A child is
//! this test program in a role. A role is a test that is ignored otherwise.

mod borrowed;
mod broken_connections;
mod calls;
mod cancellation;
#[path = "../common/mod.rs"]
mod common;
mod early_deaths;
mod floods;
mod fork;
mod hosts;
mod kill_matrix;
mod lifecycle;
mod network_down;
mod other_user;
mod outages;
mod pid_namespaces;
mod programs;
mod rails;
mod resources;
mod returns;
mod tcp_connections;
