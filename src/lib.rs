//! tensorwire
pub mod wire;
