//! tensorwire
pub mod config;
pub mod engine;
pub mod fabric;
pub mod link;
pub mod memory;
pub mod protocol;
pub mod rendezvous;
pub mod telemetry;
pub mod wire;
