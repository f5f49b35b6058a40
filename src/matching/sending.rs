//! The sending side.

use super::ended_steps::{EndedSteps, StepEnd};
use super::{Lanes, Matching};
use crate::link::windows::WindowRefusal;
use crate::link::{EdgeKey, TensorKeyRef, Value};
use crate::matching::PeerIndex;
use crate::protocol::{ToReceiver, ToSender, WindowViolation};
use crate::telemetry::Counter;
use crate::wire::Status;
use std::sync::atomic::Ordering;

impl Matching {
    /// Sends a value that counts as outstanding. A value of a step that has ended is dropped.
    /// Returns how many values do not count any more, for [`Matching::left`].
    #[inline]
    pub fn send(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        key: TensorKeyRef<'_>,
        value: Value,
    ) -> usize {
        if !self.steps.goes_on(key.step) {
            return 1;
        }
        let entry = &mut self.peers[peer.0 as usize];
        let index = entry.outgoing_edge(key);
        let out = &mut entry.out;
        let mut tensor = value.into_tensor();
        if tensor.is_some()
            && let Some(record) = out.next_record(index, key.step)
            && lanes.send_packed(peer, record, &mut tensor)
        {
            out.left(index);
            return 1;
        }
        let value = Value::of_tensor(tensor);
        let (mut records, mut staying) = (0, 0);
        let is_first = out.offer(index, key.step, value, &mut |message| {
            records += usize::from(matches!(message, ToReceiver::Record(_)));
            staying += usize::from(lanes.to_receiver(peer, message));
        });
        if records == 0 {
            lanes.counters().increment(Counter::SendsWaited);
            if is_first {
                self.note_wait_on(peer, index);
            }
        }
        records - staying
    }

    /// Handles a message of a peer that receives. `refusal` is the reason why an announced edge is
    /// not served.
    ///
    /// # Errors
    /// If the peer breaks the protocol. Its link must end.
    pub fn handle_receiver(
        &mut self,
        lanes: &mut impl Lanes,
        peer: PeerIndex,
        message: ToSender<EdgeKey>,
        refusal: Option<Status>,
    ) -> Result<(), WindowViolation> {
        if matches!(message, ToSender::Announce { .. }) {
            self.note_announcement(lanes, peer);
        }
        let Matching { peers, steps, long_waits, .. } = self;
        let mut records = 0;
        let mut post = |message| {
            let is_record = matches!(message, ToReceiver::Record(_));
            let stays = lanes.to_receiver(peer, message);
            records += usize::from(is_record && !stays);
        };
        let out = &mut peers[peer.0 as usize].out;
        let refusal = refusal.map(WindowRefusal::from);
        let resumes = matches!(message, ToSender::Announce { resume: Some(_), .. });
        let index = if resumes || long_waits.has_sends() { out.index_of(&message) } else { None };
        let dropped = out.receive(message, |step| end_of(steps, step), |_| refusal.clone(), &mut post);
        if let Some(index) = index {
            self.note_wait_end(lanes, peer, index, records);
            // Values that were lost may wait again, also after a violation.
            if resumes {
                self.note_wait_on(peer, index);
            }
        }
        self.left(records + dropped?.len());
        Ok(())
    }

    /// Values have left for good, or were dropped.
    pub fn left(&self, count: usize) {
        if count > 0 {
            self.outstanding.fetch_sub(count, Ordering::Relaxed);
        }
    }
}

/// Why receives that ask this process for values of a step get none; `None` if the step is not over
/// here.
fn end_of(steps: &EndedSteps, step: u64) -> Option<WindowRefusal> {
    Some(match steps.end_of(step)? {
        StepEnd::Aborted(status) => status.clone().into_derived().into(),
        StepEnd::CleanedUp => WindowRefusal::CleanedUp,
    })
}
