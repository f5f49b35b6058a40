//! The `tensorwire` program.
fn main() {}
