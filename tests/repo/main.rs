//! The rules of the repository itself: its layers, generated code, packaging and scripts.

#[cfg(feature = "abi-check")]
mod abi_check;
mod codegen;
mod layers;
mod packaging;
mod tuning;
