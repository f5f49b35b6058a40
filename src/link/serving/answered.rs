//! The places in line of answered values, for values that come back.

use crate::wire::message::RequestId;

/// For each slot of the peer's table, the place in line of its last answer.
///
/// A peer has at most 2^20 slots, which bounds the table to 56 MiB.
#[derive(Debug)]
pub(in crate::link) struct AnsweredSlots {
    slots: Vec<Option<AnsweredValue>>,
}

#[derive(Clone, Copy, Debug)]
struct AnsweredValue {
    generation: u8,
    number: u64,
    of: WireKey,
}

/// A key in the peer's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct WireKey {
    pub route: u32,
    pub step: u64,
    pub frame: u64,
    pub iteration: u64,
}

impl AnsweredSlots {
    /// An empty table with memory for `slots` slots.
    pub fn with_capacity(slots: usize) -> Self {
        AnsweredSlots { slots: Vec::with_capacity(slots) }
    }

    /// Notes that a request was answered with the value of this number.
    #[inline]
    pub fn note(&mut self, request: RequestId, number: u64, of: WireKey) {
        let slot = request.slot.index() as usize;
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = Some(AnsweredValue { generation: request.generation, number, of });
    }

    /// Takes the number of the value that answered this request, if the key is right. Each answer
    /// can be taken once.
    pub fn take(&mut self, request: RequestId, of: WireKey) -> Option<u64> {
        let answer = self.slots.get_mut(request.slot.index() as usize)?;
        answer
            .take_if(|answer| answer.generation == request.generation && answer.of == of)
            .map(|answer| answer.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Slot;

    fn request(slot: u32, generation: u8) -> RequestId {
        RequestId { slot: Slot::new(slot).expect("20 bits"), generation }
    }

    const KEY: WireKey = WireKey { route: 3, step: 4, frame: 0, iteration: 0 };

    #[test]
    fn a_value_can_come_back_once_under_its_key_and_only_for_the_last_use_of_its_slot() {
        let mut answered = AnsweredSlots::with_capacity(2);
        answered.note(request(5, 1), 70, KEY);
        answered.note(request(0, 1), 71, KEY);
        assert_eq!(answered.take(request(5, 0), KEY), None, "an earlier use");
        assert_eq!(answered.take(request(4, 1), KEY), None, "never answered");
        assert_eq!(answered.take(request(9, 1), KEY), None, "beyond the table");
        assert_eq!(answered.take(request(5, 1), WireKey { step: 5, ..KEY }), None, "another key");
        assert_eq!(answered.take(request(5, 1), KEY), Some(70));
        assert_eq!(answered.take(request(5, 1), KEY), None, "twice");
        answered.note(request(0, 2), 72, KEY);
        assert_eq!(answered.take(request(0, 1), KEY), None);
        assert_eq!(answered.take(request(0, 2), KEY), Some(72));
    }
}
