//! The rules of the repository: its layers, names, documents, generated code, packaging and
//! scripts.

#[cfg(feature = "abi-check")]
mod abi_check;
mod codegen;
mod documents;
mod errors;
mod hints;
mod layers;
mod names;
mod packaging;
mod prose;
mod public_api;
mod secrets;
mod source;
mod text;
mod tuning;
