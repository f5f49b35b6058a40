//! The receives of a process as its user has them: begun, and not ended.

use super::model::CallNo;
use std::sync::Mutex;
use tensorwire::{CancelToken, Delivery, Error, Pending, PendingBatch, Tensor, TensorMut};

/// The result of a receive as its user sees it: the tensor, and whether it is dead.
pub type Outcome = Result<(Tensor, bool), Error>;

/// A receive that has not ended, or a batch of them.
pub struct Open {
    /// `None` for each receive that has ended.
    calls: Vec<Option<CallNo>>,
    pub wait: Wait,
}

pub enum Wait {
    Fresh(Pending<Tensor>),
    Into(Pending<TensorMut>),
    CalledBack(CancelToken),
    Batch(PendingBatch),
}

/// Takes the receives that have ended out of `open`, with their results. Those of `called_back`
/// have ended too.
pub fn ended(open: &mut Vec<Open>, called_back: &Mutex<Vec<(CallNo, Outcome)>>) -> Vec<(CallNo, Outcome)> {
    let mut ended = std::mem::take(&mut *called_back.lock().expect("no panic"));
    let called_back: Vec<CallNo> = ended.iter().map(|(call, _)| *call).collect();
    open.retain(|open| !open.calls().any(|call| called_back.contains(&call)));
    open.iter_mut().for_each(|open| ended.extend(open.take_ended()));
    for open in open.extract_if(.., |open| open.is_done()) {
        ended.extend(open.outcome());
    }
    ended
}

/// The tensor of a delivery, and whether it is dead.
pub fn fresh(got: Delivery<Tensor>) -> (Tensor, bool) {
    (got.tensor, got.is_dead)
}

/// As [`fresh`], of a given tensor.
pub fn filled(got: Delivery<TensorMut>) -> (Tensor, bool) {
    (got.tensor.freeze(), got.is_dead)
}

impl Wait {
    pub fn cancel(&self) {
        match self {
            Wait::Fresh(pending) => pending.cancel_token().cancel(),
            Wait::Into(pending) => pending.cancel_token().cancel(),
            Wait::CalledBack(token) => token.cancel(),
            Wait::Batch(pending) => pending.cancel(),
        }
    }
}

impl Open {
    pub fn one(call: CallNo, wait: Wait) -> Open {
        Open::batch(&[call], wait)
    }

    pub fn batch(calls: &[CallNo], wait: Wait) -> Open {
        Open { calls: calls.iter().copied().map(Some).collect(), wait }
    }

    /// The numbers of receives that have not ended.
    pub fn calls(&self) -> impl Iterator<Item = CallNo> {
        self.calls.iter().flatten().copied()
    }

    /// Takes the results of a batch that have arrived.
    fn take_ended(&mut self) -> Vec<(CallNo, Outcome)> {
        let Wait::Batch(pending) = &mut self.wait else { return Vec::new() };
        let all = self.calls.iter_mut().enumerate();
        all.filter_map(|(at, call)| {
            (*call)?;
            let outcome = pending.take(at)?.map(fresh);
            Some((call.take()?, outcome))
        })
        .collect()
    }

    fn is_done(&self) -> bool {
        match &self.wait {
            Wait::Batch(_) => self.calls().next().is_none(),
            Wait::Fresh(pending) => pending.is_done(),
            Wait::Into(pending) => pending.is_done(),
            Wait::CalledBack(_) => false,
        }
    }

    /// The result of a call that is done.
    fn outcome(self) -> Option<(CallNo, Outcome)> {
        let outcome = match self.wait {
            Wait::Fresh(pending) => pending.wait().map(fresh),
            Wait::Into(pending) => pending.wait().map(filled),
            Wait::CalledBack(_) | Wait::Batch(_) => return None,
        };
        Some((self.calls[0]?, outcome))
    }
}
