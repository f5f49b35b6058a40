//! tensorwire
pub mod fabric;
pub mod memory;
pub mod wire;
