//! Waking a peer whose poller does not look at a link: idle marks, doorbells and sleeps.

pub(crate) mod barrier;
pub(crate) mod doorbell;
pub(crate) mod doorbells;
pub(crate) mod idle;
pub(crate) mod ringer;
pub(crate) mod sleeper;
