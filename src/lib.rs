//! tensorwire
#[allow(dead_code, unused_imports)] // until `node` uses it
pub(crate) mod bootstrap;
pub mod wire;
