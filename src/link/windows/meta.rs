//! The meta-data of a connection, by number: told once, named by each record.

use crate::mutants::{Mutant, is_on};
use crate::wire::message::{Placement, VersionedMeta};
use crate::wire::{MAX_INLINE_RANK, TensorMeta};
use foldhash::HashMap;
use std::sync::{Arc, Weak};

/// Numbers of a connection. The next meta-data beyond them take the oldest number.
pub(super) const MAX_METAS: u16 = 4096;
/// Shapes outside [`KnownMetas`] that values may keep, of those with memory of their own.
const MAX_KEPT_SHAPES: usize = 8192;

/// The meta-data that were told to the peer.
#[derive(Debug, Default)]
pub(super) struct ToldMetas {
    numbers: HashMap<(TensorMeta, u8), u16>,
    /// The meta-data of each number, from 1 on.
    of_number: Vec<(TensorMeta, u8)>,
    /// The number that was given last.
    last: u16,
    /// The number that was asked for last: most tensors are as the one before.
    latest: u16,
}

impl ToldMetas {
    /// Bytes that the tables have allocated, without large shapes.
    pub fn heap_bytes(&self) -> usize {
        let entry = size_of::<((TensorMeta, u8), u16)>();
        self.numbers.capacity() * entry + self.of_number.capacity() * size_of::<(TensorMeta, u8)>()
    }

    /// The number of meta-data, if they are those that were asked for last.
    #[inline(always)] // on the short path
    pub fn latest(&self, meta: &TensorMeta, placement: Placement) -> Option<u16> {
        let (known, of) = self.of_number.get(usize::from(self.latest).wrapping_sub(1))?;
        let is_same = *of == placement.allocator as u8 && (known == meta || is_on(Mutant::MetaNumberKept));
        is_same.then_some(self.latest)
    }

    /// The number of meta-data, and whether the peer must be told of it.
    pub fn number(&mut self, meta: &TensorMeta, placement: Placement) -> (u16, bool) {
        if let Some(latest) = self.latest(meta, placement) {
            return (latest, false);
        }
        let named = (meta.clone(), placement.allocator as u8);
        if let Some(number) = self.numbers.get(&named) {
            self.latest = *number;
            return (*number, false);
        }
        self.last = if self.last == MAX_METAS { 1 } else { self.last + 1 };
        let place = usize::from(self.last) - 1;
        match self.of_number.get_mut(place) {
            Some(old) => {
                let old = std::mem::replace(old, named.clone());
                self.numbers.remove(&old);
            }
            None => self.of_number.push(named.clone()),
        }
        self.numbers.insert(named, self.last);
        self.latest = self.last;
        (self.last, true)
    }
}

/// Meta-data that a peer has told.
#[derive(Debug, PartialEq, Eq)]
pub struct ToldMeta {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// The placement at the sender.
    pub sender: Placement,
}

/// The meta-data that the peer has told, by number.
#[derive(Debug, Default)]
pub(super) struct KnownMetas {
    by_number: Vec<Option<Arc<ToldMeta>>>,
    /// Replaced meta-data whose shapes have memory of their own, which values may keep.
    kept: Vec<Weak<ToldMeta>>,
}

impl KnownMetas {
    /// Bytes that the tables have allocated, without large shapes.
    pub fn heap_bytes(&self) -> usize {
        let known = self.by_number.iter().flatten().count() * size_of::<ToldMeta>();
        let kept = self.kept.capacity() * size_of::<Weak<ToldMeta>>();
        self.by_number.capacity() * size_of::<Option<Arc<ToldMeta>>>() + kept + known
    }

    /// Notes meta-data under their number.
    ///
    /// # Errors
    /// If the number is beyond the largest. If values keep too many large shapes.
    pub fn learn(&mut self, told: VersionedMeta) -> Result<(), String> {
        let VersionedMeta { version, placement, meta } = told;
        if version > u32::from(MAX_METAS) {
            return Err(format!("meta-data came under number {version}, of at most {MAX_METAS}"));
        }
        let place = version as usize;
        if self.by_number.len() <= place {
            self.by_number.resize(place + 1, None);
        }
        let told = Arc::new(ToldMeta { meta, sender: placement });
        match self.by_number[place].replace(told) {
            Some(old) if !old.meta.shape().is_inline() => self.keep(&old),
            _ => Ok(()),
        }
    }

    #[cold]
    fn keep(&mut self, replaced: &Arc<ToldMeta>) -> Result<(), String> {
        self.kept.push(Arc::downgrade(replaced));
        if self.kept.len() < MAX_KEPT_SHAPES {
            return Ok(());
        }
        // The caller has the one that was replaced just now.
        self.kept.retain(|kept| kept.strong_count() > usize::from(kept.as_ptr() == Arc::as_ptr(replaced)));
        // Half of them, so that the next search is as far away as this one took.
        if self.kept.len() <= MAX_KEPT_SHAPES / 2 {
            return Ok(());
        }
        Err(format!(
            "it replaced the meta-data of {} tensors that wait here, of more than {MAX_INLINE_RANK} \
             dimensions each: at most {} are allowed",
            self.kept.len(),
            MAX_KEPT_SHAPES / 2
        ))
    }

    /// The meta-data of a number.
    ///
    /// # Errors
    /// If the number was never told.
    #[inline]
    pub fn get(&self, number: u16) -> Result<&Arc<ToldMeta>, String> {
        let known = self.by_number.get(usize::from(number)).and_then(Option::as_ref);
        known.ok_or_else(|| format!("a record has meta-data {number}, which were never told"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{DType, Shape};

    fn meta(dim: u64) -> TensorMeta {
        TensorMeta::new(DType::F32, Shape::new(&[dim]).expect("a shape")).expect("a size")
    }

    #[test]
    fn meta_data_are_told_once_and_the_oldest_make_room() {
        let mut told = ToldMetas::default();
        let mut known = KnownMetas::default();
        for round in 0..2 {
            for dim in 0..=u64::from(MAX_METAS) {
                let (number, is_new) = told.number(&meta(dim), Placement::POOL);
                assert!((1..=MAX_METAS).contains(&number) && is_new, "{round} {dim}");
                let versioned =
                    VersionedMeta { version: number.into(), placement: Placement::POOL, meta: meta(dim) };
                known.learn(versioned).expect("in range");
                assert_eq!(told.number(&meta(dim), Placement::POOL), (number, false));
                assert_eq!(known.get(number).expect("told").meta, meta(dim));
            }
        }
        let (number, is_new) = told.number(&meta(7), Placement::HEAP);
        assert!(is_new && told.number(&meta(7), Placement::HEAP) == (number, false));
        assert!(known.get(0).is_err() && KnownMetas::default().get(1).is_err());
        let beyond =
            VersionedMeta { version: u32::from(MAX_METAS) + 1, placement: Placement::POOL, meta: meta(1) };
        assert!(known.learn(beyond).is_err());
    }

    /// Replaces one meta-data again and again. Values keep the replaced ones that `is_kept`.
    fn replace_shapes(rank: usize, count: usize, is_kept: impl Fn(usize) -> bool) -> Result<(), String> {
        let (mut known, mut values) = (KnownMetas::default(), Vec::new());
        let meta = TensorMeta::new(DType::U8, Shape::new(&vec![1; rank]).expect("a shape")).expect("a size");
        for nth in 0..count {
            known.learn(VersionedMeta { version: 1, placement: Placement::POOL, meta: meta.clone() })?;
            if is_kept(nth) {
                values.push(known.get(1)?.clone());
            }
            assert!(known.kept.len() <= MAX_KEPT_SHAPES);
        }
        Ok(())
    }

    #[test]
    fn the_large_shapes_that_values_keep_are_bounded() {
        let many = 10 * MAX_KEPT_SHAPES;
        replace_shapes(254, many, |_| false).expect("no value keeps one");
        replace_shapes(254, many, |nth| nth % 24 == 0).expect("few values keep one");
        replace_shapes(6, many, |_| true).expect("small shapes have no memory of their own");
        let error = replace_shapes(254, many, |_| true).expect_err("too many");
        assert!(error.contains("8192 tensors that wait here, of more than 6 dimensions"), "{error}");
        replace_shapes(7, many, |nth| nth % 2 == 0).expect_err("too many, in time");
    }
}
