//! Routes: numbers for edges, so that a request need not carry their names.

pub(super) mod announced;
pub(super) mod received;
