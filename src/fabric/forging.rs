//! Forged fields, for the tests of each fabric: a hostile peer changes one field of what it posts,
//! or two.

use crate::memory::Pool;

/// A field that a peer may forge.
pub(crate) struct ForgedField {
    pub name: &'static str,
    pub bits: u32,
    /// What an honest peer says.
    pub honest: u64,
    /// Values that mean something elsewhere: of another link, of what was revoked, the ends of
    /// ranges.
    pub known: Vec<u64>,
}

/// What a forgery changes: fields by their places in a table, with the places of their values.
pub(crate) type Forgery = Vec<(usize, usize)>;

/// Boundaries of every field.
const BOUNDARIES: usize = 6;

impl ForgedField {
    /// A value that a hostile peer says instead. `None` if it is the honest one, or came before.
    fn forged(&self, nth: usize) -> Option<u64> {
        let (honest, max) = (self.honest, u64::MAX >> (64 - self.bits));
        let boundaries: [u64; BOUNDARIES] =
            [0, 1, honest.wrapping_sub(1), honest.wrapping_add(1), honest ^ (max / 2 + 1), max];
        let mut values = boundaries.into_iter().chain(self.known.iter().copied()).map(|value| value & max);
        let before: Vec<u64> = values.by_ref().take(nth).collect();
        values.next().filter(|value| *value != honest && !before.contains(value))
    }
}

/// Every forgery of one field and of two. The first one changes nothing.
pub(crate) fn forgeries(fields: &[ForgedField]) -> Vec<Forgery> {
    let of = |at: usize| (0..BOUNDARIES + fields[at].known.len()).map(move |nth| (at, nth));
    let mut all = vec![Vec::new()];
    for first in (0..fields.len()).flat_map(of) {
        all.push(vec![first]);
        all.extend((first.0 + 1..fields.len()).flat_map(of).map(|second| vec![first, second]));
    }
    all
}

/// The changed fields of a forgery, with their values. `None` if it says the same as another one.
pub(crate) fn changes(fields: &[ForgedField], forgery: &Forgery) -> Option<Vec<(&'static str, u64)>> {
    let change = |(at, nth): &(usize, usize)| Some((fields[*at].name, fields[*at].forged(*nth)?));
    forgery.iter().map(change).collect()
}

/// All bytes of a pool's region.
pub(crate) fn image(pool: &Pool) -> Vec<u8> {
    let region = pool.region();
    let mut bytes = vec![0; region.len() as usize];
    let mut read = 0;
    while read < bytes.len() {
        let count = rustix::io::pread(region.fd(), &mut bytes[read..], read as u64).expect("a memfd");
        assert!(count > 0, "the region is shorter than it says");
        read += count;
    }
    bytes
}
