//! The memory that a peer may write or read.

/// Leave to access `len` bytes at `offset` of a region of the granting process.
///
/// No raw address is in it: a region is known by number since the link was made. The side that
/// resolves a grant checks region, key and bounds one by one (specification 3.1a).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Which of the granter's regions.
    pub region: u16,
    /// Proof of the leave: an rkey on verbs, an entry of the granter's table on software fabrics.
    pub key: u32,
    /// Where it starts, in bytes from the start of the region.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

impl Grant {
    /// `len` bytes of this grant, `skip` bytes after its start; `None` if they are not inside it.
    pub fn part(&self, skip: u64, len: u64) -> Option<Grant> {
        let end = skip.checked_add(len)?;
        if end > self.len {
            return None;
        }
        let offset = self.offset.checked_add(skip)?;
        Some(Grant { offset, len, ..*self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Grant = Grant { region: 1, key: 7, offset: 100, len: 50 };

    #[test]
    fn a_part_lies_inside_the_whole() {
        assert_eq!(WHOLE.part(10, 40), Some(Grant { offset: 110, len: 40, ..WHOLE }));
        assert_eq!(WHOLE.part(50, 0), Some(Grant { offset: 150, len: 0, ..WHOLE }));
        assert_eq!(WHOLE.part(10, 41), None);
    }

    #[test]
    fn a_part_whose_end_overflows_is_refused() {
        assert_eq!(WHOLE.part(u64::MAX, 2), None);
        let high = Grant { offset: u64::MAX - 1, len: 50, ..WHOLE };
        assert_eq!(high.part(10, 1), None);
    }
}
