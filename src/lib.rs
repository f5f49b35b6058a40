//! tensorwire
pub mod config;
pub mod telemetry;
pub mod wire;
