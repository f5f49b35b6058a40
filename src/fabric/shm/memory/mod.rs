//! The memory that two processes share for a link: words, segments and their layout, slots and
//! rings, orders, state.

pub(crate) mod layout;
pub(crate) mod order;
pub(crate) mod ring;
pub(crate) mod segment;
pub(crate) mod slot;
pub(crate) mod state;
