//! How a link is made: addresses, hellos, and the connections between the two endpoints.
//!
//! Each endpoint listens on a port of its own and tells its address, which has a random token,
//! through the bootstrap service. The initiator opens all connections of the link. On each it says
//! a hello with the acceptor's token, and the acceptor answers with the initiator's. A connection
//! that does not say the right token in time is closed, and has no effect on the link.
//!
//! Both endpoints go on listening as long as the link is up. If a connection breaks, the initiator
//! replaces all of them by new ones. An acceptor that notices first asks it to. A host that refuses
//! the connection says that the peer's process has ended.

pub(super) mod address;
pub(super) mod arrivals;
pub(super) mod deadline;
mod dial;
pub(super) mod handshake;
pub(super) mod hello;
pub(super) mod repair;
mod set_up;
