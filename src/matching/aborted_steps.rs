//! Ranges of steps that were aborted together.

use crate::wire::Status;
use std::ops::RangeInclusive;

/// Ranges of aborted steps with their statuses, in the order of the aborts. They are few: each ends
/// with its sequence.
#[derive(Debug, Default)]
pub(crate) struct AbortedSteps(Vec<(RangeInclusive<u64>, Status)>);

impl AbortedSteps {
    /// Whether no range was aborted.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The status of a step that is in a range. The first abort wins.
    pub fn status(&self, step: u64) -> Option<&Status> {
        self.0.iter().find(|(steps, _)| steps.contains(&step)).map(|(_, status)| status)
    }

    /// Adds a range. Returns false if an earlier one includes it.
    pub fn add(&mut self, steps: &RangeInclusive<u64>, status: &Status) -> bool {
        let is_known = |(known, _): &(RangeInclusive<u64>, Status)| {
            known.contains(steps.start()) && known.contains(steps.end())
        };
        if self.0.iter().any(is_known) {
            return false;
        }
        self.0.push((steps.clone(), status.clone()));
        true
    }

    /// The ranges with their statuses, in the order of the aborts.
    pub fn iter(&self) -> impl Iterator<Item = (&RangeInclusive<u64>, &Status)> {
        self.0.iter().map(|(steps, status)| (steps, status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Code;

    #[test]
    fn a_step_has_the_status_of_the_first_range_that_includes_it() {
        let [first, second] = ["1", "2"].map(|text| Status::new(Code::Internal, text));
        let mut aborted = AbortedSteps::default();
        assert!(aborted.add(&(10..=20), &first) && aborted.add(&(5..=u64::MAX), &second));
        assert!(!aborted.add(&(12..=20), &second), "it is known");
        let statuses = [4, 5, 10, 20, 21, u64::MAX].map(|step| aborted.status(step));
        let [first, second] = [Some(&first), Some(&second)];
        assert_eq!(statuses, [None, second, first, first, second, second]);
        assert_eq!(aborted.iter().count(), 2);
    }
}
