//! A case: the programs of both ends.

use super::{Key, Waiter};
use crate::protocol::WindowOptions;

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// The sender sends the next value.
    Send(Key, u64),
    /// The sender cleans a step up.
    End(u64),
    /// The sender aborts a step.
    Abort(u64),
    /// The sender asks which of its values were taken.
    Flush,
    /// The receiver begins the next receive.
    Receive(Key, u64),
    /// As `Receive`, into a tensor that no value fits.
    ReceiveMismatch(Key, u64),
    /// As `Receive`, for a value that is there now.
    TryReceive(Key, u64),
    /// As `Receive`, for a value that is on its way after it was taken.
    ReceiveRemote(Key, u64),
    /// The receiver announces an edge with a window of two.
    Widen(Key),
    /// A receive gives up, if it waits.
    GiveUp(Waiter),
    /// The receiver cleans a step up.
    EndHere(u64),
    /// The receiver retires an edge, if it is idle.
    Retire(Key),
    /// The connection breaks, and what is under way is lost.
    Break,
    /// The sender sees the new connection.
    SenderRepaired,
    /// The receiver sees the new connection.
    ReceiverRepaired,
    /// The sender dies and returns.
    SenderReturns,
    /// The receiver dies and returns.
    ReceiverReturns,
}

/// What a receive asks for.
#[derive(Clone, Copy, Debug)]
pub struct Receive {
    pub key: Key,
    pub step: u64,
    /// Whether values fit its tensor.
    pub fits: bool,
    /// Whether it waits for a value that is not there.
    pub waits: bool,
    /// Whether its value is on its way after it was taken.
    pub is_remote: bool,
}

pub struct Case {
    pub name: &'static str,
    pub options: WindowOptions,
    pub programs: Vec<Vec<Act>>,
}

impl Case {
    /// The key and the step of each value, in the order of the programs.
    pub fn values(&self) -> Vec<(Key, u64)> {
        let acts = self.programs.iter().flatten();
        acts.filter_map(|act| if let Act::Send(key, step) = act { Some((*key, *step)) } else { None })
            .collect()
    }

    /// Whether a receive may give up while its value is on its way. Later receives may have later
    /// values then.
    pub fn may_leave(&self) -> bool {
        let has = |is: fn(&Act) -> bool| self.programs.iter().flatten().any(is);
        has(|act| matches!(act, Act::ReceiveRemote(..))) && has(|act| matches!(act, Act::GiveUp(_)))
    }

    pub fn calls(&self) -> Vec<Receive> {
        let acts = self.programs.iter().flatten();
        let usual = |key, step| Receive { key, step, fits: true, waits: true, is_remote: false };
        acts.filter_map(|act| match *act {
            Act::Receive(key, step) => Some(usual(key, step)),
            Act::ReceiveMismatch(key, step) => Some(Receive { fits: false, ..usual(key, step) }),
            Act::TryReceive(key, step) => Some(Receive { waits: false, ..usual(key, step) }),
            Act::ReceiveRemote(key, step) => Some(Receive { is_remote: true, ..usual(key, step) }),
            _ => None,
        })
        .collect()
    }
}
