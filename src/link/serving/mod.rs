//! The requests of the peer, from their arrival to their answer.

pub(super) mod answered;
pub(super) mod serve;
