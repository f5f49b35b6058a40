//! Connecting two endpoints: addresses, hello messages, sockets and the handshake.

pub(crate) mod address;
pub(crate) mod foreign;
pub(crate) mod handshake;
pub(crate) mod hello;
#[cfg(test)]
mod other_user_tests;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
