//! tensorwire
pub mod config;
pub mod wire;
