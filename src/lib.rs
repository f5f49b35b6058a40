//! tensorwire
pub mod memory;
pub mod wire;
