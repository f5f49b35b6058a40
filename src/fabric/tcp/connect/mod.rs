//! How a link is made: addresses, hellos, and the connections between the two endpoints.
//!
//! Each endpoint listens on a port of its own and tells its address, which has a random token,
//! through the bootstrap service. The initiator opens all connections of the link. On each it says
//! a hello with the acceptor's token, and the acceptor answers with the initiator's. A connection
//! that does not say the right token in time is closed, and has no effect on the link.

pub(super) mod address;
pub(super) mod deadline;
pub(super) mod handshake;
pub(super) mod hello;
