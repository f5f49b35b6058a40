//! A set of fabrics.

use super::FabricKind;
use std::fmt;

/// The fabrics that a node may use: the setting `fabric`. Never empty.
///
/// ```
/// use tensorwire::{Config, FabricKind, FabricSet};
/// let both: FabricSet = [FabricKind::Verbs, FabricKind::Shm].into_iter().collect();
/// assert_eq!(both.to_string(), "shm,verbs");
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let settings = settings.set("cluster", "worker=127.0.0.1:7000").fabric(FabricKind::Shm);
/// assert_eq!(settings.build()?.fabric, Some(FabricKind::Shm.into()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FabricSet(u8);

impl FabricSet {
    /// Whether the set has this fabric.
    pub fn has(self, kind: FabricKind) -> bool {
        self.0 & bit(kind) != 0
    }

    /// The fabrics of the set, the fastest first.
    pub fn kinds(self) -> impl Iterator<Item = FabricKind> {
        FabricKind::NAMED.into_iter().filter(move |kind| self.has(*kind))
    }
}

fn bit(kind: FabricKind) -> u8 {
    1 << kind as u8
}

impl From<FabricKind> for FabricSet {
    fn from(kind: FabricKind) -> Self {
        FabricSet(bit(kind))
    }
}

impl From<FabricKind> for Option<FabricSet> {
    fn from(kind: FabricKind) -> Self {
        Some(kind.into())
    }
}

/// # Panics
/// Without any fabric.
impl FromIterator<FabricKind> for FabricSet {
    fn from_iter<I: IntoIterator<Item = FabricKind>>(kinds: I) -> Self {
        let bits = kinds.into_iter().fold(0, |bits, kind| bits | bit(kind));
        assert!(bits != 0, "a set of fabrics has at least one");
        FabricSet(bits)
    }
}

impl fmt::Display for FabricSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, kind) in self.kinds().enumerate() {
            write!(f, "{}{kind}", if number == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
