//! Values that are on their way after a receive has taken them.

use super::case::{Case, Receive};
use super::{Call, Error, Value, Waiter, World};

impl World {
    /// The receives whose values are on their way, with the values.
    pub(super) fn under_way(&self) -> impl Iterator<Item = (Waiter, Value)> {
        let calls = self.calls.iter().enumerate();
        calls.filter_map(|(waiter, call)| match call {
            Call::Took(value) => Some((waiter as Waiter, *value)),
            _ => None,
        })
    }

    fn taken_by(&self, waiter: Waiter) -> Option<Value> {
        self.under_way().find(|(of, _)| *of == waiter).map(|(_, value)| value)
    }

    /// The value that a receive has taken lands.
    pub(super) fn land(&mut self, case: &Case, waiter: Waiter) {
        let Receive { key, .. } = case.calls()[waiter as usize];
        let Some(value) = self.taken_by(waiter) else { return };
        let index = self.receiver.edge(&key);
        self.receiver.remove_taken(index, |held| *held == value);
        self.got(case, waiter, value);
        let mut posted = Vec::new();
        self.receiver.send_due(index, &mut |message| posted.push(message));
        self.post_to_sender(posted);
    }

    /// A receive gives up, if its value is on its way. The next one takes the value.
    pub(super) fn leave(&mut self, case: &Case, waiter: Waiter) {
        let Receive { key, step, .. } = case.calls()[waiter as usize];
        let Some(value) = self.taken_by(waiter) else { return };
        let index = self.receiver.edge(&key);
        self.calls[waiter as usize] = Call::GaveUp;
        if let Some(next) = self.receiver.leave_taken(index, step, |held| *held == value) {
            assert_eq!(self.calls[next as usize], Call::Waits, "{next} takes a value");
            self.calls[next as usize] = Call::Took(value);
        }
    }

    /// Fails the receives that have taken these values.
    pub(super) fn fail_taken(&mut self, values: &[Value], error: Error) {
        for call in &mut self.calls {
            if let Call::Took(value) = *call
                && values.contains(&value)
            {
                *call = Call::Failed(error);
            }
        }
    }
}
