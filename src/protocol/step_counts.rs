//! The number of things that each step still has.

/// Steps that are counted without a search, if their ids are consecutive.
const NEAR: usize = 16;
/// Other steps for which memory is allocated at the start.
const FAR: usize = 64;

/// The number of values, waiters and needs of each step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepCounts {
    /// The step and its count, at the lowest bits of the step.
    near: [(u64, u32); NEAR],
    /// Counts of steps whose place another step had.
    far: Vec<(u64, u32)>,
}

impl Default for StepCounts {
    fn default() -> Self {
        StepCounts { near: [(0, 0); NEAR], far: Vec::with_capacity(FAR) }
    }
}

impl StepCounts {
    /// Counts one thing of a step.
    #[inline]
    pub fn add(&mut self, step: u64) {
        let near = &mut self.near[step as usize % NEAR];
        if near.1 == 0 || near.0 == step {
            return *near = (step, near.1 + 1);
        }
        match self.far.iter_mut().find(|far| far.0 == step) {
            Some(far) => far.1 += 1,
            None => self.far.push((step, 1)),
        }
    }

    /// Takes back one [`StepCounts::add`] of the step.
    #[inline]
    pub fn remove(&mut self, step: u64) {
        let near = &mut self.near[step as usize % NEAR];
        if near.0 == step && near.1 > 0 {
            near.1 -= 1;
        } else if let Some(at) = self.far.iter().position(|far| far.0 == step) {
            self.far[at].1 -= 1;
            if self.far[at].1 == 0 {
                self.far.swap_remove(at);
            }
        }
    }

    /// Takes back everything.
    pub fn clear(&mut self) {
        self.near = [(0, 0); NEAR];
        self.far.clear();
    }

    /// Whether the step has nothing.
    #[inline]
    pub fn is_empty(&self, step: u64) -> bool {
        let near = self.near[step as usize % NEAR];
        (near.0 != step || near.1 == 0) && self.far.iter().all(|far| far.0 != step)
    }

    /// Whether any of the steps that `is` one has something.
    pub fn has_any(&self, is: impl Fn(u64) -> bool) -> bool {
        self.near.iter().chain(&self.far).any(|(step, count)| *count > 0 && is(*step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_share_a_place_are_counted_apart() {
        let mut counts = StepCounts::default();
        let steps = [3, 3 + NEAR as u64, u64::MAX];
        for step in steps {
            counts.add(step);
            counts.add(step);
        }
        counts.remove(3);
        counts.remove(3);
        counts.add(3 + NEAR as u64);
        assert!(counts.is_empty(3) && !counts.is_empty(3 + NEAR as u64));
        (0..3).for_each(|_| counts.remove(3 + NEAR as u64));
        assert!(counts.is_empty(3 + NEAR as u64) && !counts.is_empty(u64::MAX));
        assert!(!counts.has_any(|step| step < u64::MAX) && counts.has_any(|step| step == u64::MAX));
        counts.add(5);
        assert!(!counts.has_any(|step| step < 5) && counts.has_any(|step| step == 5));
    }
}
