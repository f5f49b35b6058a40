//! The requests of this side, from the slot table to the value's delivery.

pub(super) mod arrivals;
pub(super) mod checksum;
pub(super) mod destination;
pub(super) mod request;
pub(super) mod slots;
pub(super) mod standing;
pub(super) mod stash;
