//! The number of one life of a process.

use std::fmt;
use std::num::NonZeroU64;

/// The random number of one life of a process, drawn at start. With it messages for an earlier life
/// are recognised.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::Incarnation;
/// let life = node.incarnation();
/// assert_eq!(Incarnation::new(life.get()), Some(life));
/// let other = Incarnation::new(0xB5C).unwrap();
/// assert_eq!(format!("{other}, {other:?}"), "0000000000000b5c, 0000000000000b5c");
/// assert_eq!(Incarnation::new(0), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation(NonZeroU64);

impl Incarnation {
    /// The life with this number; `None` for 0, which is not used.
    pub const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Incarnation(number)),
            None => None,
        }
    }

    /// The number; never 0.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The hexadecimal digits of `Display`, by which errors and logs name a life.
impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
