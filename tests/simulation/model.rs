//! The reference: what was sent, who asked, and what may come of it.

use crate::program::{Key, Setup, Want};
use crate::run::is_limit;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tensorwire::wire::Time;
use tensorwire::{Code, Error};

/// Whether values of a key come in the order in which they were sent also where calls for it were given up.
pub const ORDER_SURVIVES_GIVING_UP: bool = false;

/// A value that was sent.
struct Sent {
    bytes: Option<usize>,
    /// The call that got it.
    to: Option<usize>,
}

/// A call, as the model sees it.
pub struct Asked {
    key: Key,
    want: Want,
    at: Time,
    patience: Duration,
    pub cancelled: bool,
    pub dropped: bool,
    got: Option<usize>,
    no_room: bool,
}

/// What a call brought.
pub enum Seen<'a> {
    Dead,
    Bytes(&'a [u8]),
}

pub struct Model {
    is_tight: bool,
    values: BTreeMap<Key, Vec<Sent>>,
    pub calls: Vec<Asked>,
    /// Keys for which a call was given up or failed.
    disturbed: BTreeSet<Key>,
    ended_steps: BTreeSet<u64>,
    /// Members that died or whose links were cut.
    troubled: BTreeSet<usize>,
}

/// The bytes of the n-th value of a key: like no other's, from 8 bytes on.
fn content(key: Key, number: usize, bytes: usize) -> Vec<u8> {
    let name = (key.from as u64) << 48 | (key.to as u64) << 40 | (key.edge as u64) << 32 | key.step << 24;
    let first = (name | number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..bytes)
        .map(|at| {
            (first.wrapping_add((at as u64 / 8).wrapping_mul(0xD1B5_4A32_D192_ED03)) >> (8 * (at % 8))) as u8
        })
        .collect()
}

impl Model {
    pub fn new(setup: &Setup) -> Model {
        Model {
            is_tight: setup.pool < 1 << 20
                || setup.max_requests < 64
                || setup.max_routes < 64
                || setup.max_deferred < 64,
            values: BTreeMap::new(),
            calls: Vec::new(),
            disturbed: BTreeSet::new(),
            ended_steps: BTreeSet::new(),
            troubled: BTreeSet::new(),
        }
    }

    pub fn next_content(&self, key: Key, bytes: usize) -> Vec<u8> {
        content(key, self.values.get(&key).map_or(0, Vec::len), bytes)
    }

    pub fn sent(&mut self, key: Key, bytes: Option<usize>) {
        self.values.entry(key).or_default().push(Sent { bytes, to: None });
    }

    pub fn asked(&mut self, key: Key, want: Want, at: Time, patience: Duration) -> usize {
        self.calls.push(Asked {
            key,
            want,
            at,
            patience,
            cancelled: false,
            dropped: false,
            got: None,
            no_room: false,
        });
        self.calls.len() - 1
    }

    pub fn disturb(&mut self, key: Key) {
        self.disturbed.insert(key);
    }

    pub fn end_step(&mut self, step: u64) {
        self.ended_steps.insert(step);
    }

    pub fn trouble(&mut self, member: usize) {
        self.troubled.insert(member);
    }

    fn is_troubled(&self, key: Key) -> bool {
        self.troubled.contains(&key.from) || self.troubled.contains(&key.to)
    }

    /// A call brought this. Says which value it is.
    pub fn arrived(&mut self, call: usize, seen: &Seen<'_>) -> Result<usize, String> {
        let key = self.calls[call].key;
        let values = self.values.entry(key).or_default();
        let fits = |number: usize, sent: &Sent| match (seen, sent.bytes) {
            (Seen::Dead, None) => true,
            (Seen::Bytes(bytes), Some(len)) => bytes.len() == len && content(key, number, len) == *bytes,
            _ => false,
        };
        let found =
            (0..values.len()).find(|number| values[*number].to.is_none() && fits(*number, &values[*number]));
        let Some(number) = found else {
            let what = match seen {
                Seen::Dead => "a dead value".to_owned(),
                Seen::Bytes(bytes) => format!("{} bytes", bytes.len()),
            };
            return Err(format!("call {call} for {key:?} got {what} that was not sent, or came before"));
        };
        values[number].to = Some(call);
        self.calls[call].got = Some(number);
        if let (Want::Into(len), Seen::Bytes(bytes)) = (self.calls[call].want, seen)
            && bytes.len() != len
        {
            return Err(format!("call {call} gave {len} bytes and got {}", bytes.len()));
        }
        Ok(number)
    }

    /// A call failed.
    pub fn failed(&mut self, call: usize, error: &Error, now: Time) -> Result<(), String> {
        let asked = &self.calls[call];
        let (key, over) = (asked.key, now.since(asked.at) >= asked.patience);
        let step_ended = self.ended_steps.contains(&key.step);
        let is_allowed = match error {
            Error::Cancelled { .. } => asked.cancelled,
            Error::DeadlineExceeded { .. } => over,
            Error::PeerLost { .. } | Error::NotConnected { .. } => self.is_troubled(key),
            Error::Aborted { .. } | Error::StepGone { .. } => step_ended,
            Error::Misfit { .. } => matches!(asked.want, Want::Into(_)),
            Error::Remote { status, .. } => match status.code {
                Code::Aborted | Code::NotFound => step_ended,
                Code::DeadlineExceeded => over,
                Code::ResourceExhausted => self.is_tight,
                Code::FailedPrecondition => self.is_troubled(key),
                _ => false,
            },
            limit if is_limit(limit) => self.is_tight,
            _ => false,
        };
        self.disturbed.insert(key);
        self.calls[call].no_room = matches!(error, Error::NoRoom { .. });
        match is_allowed {
            true => Ok(()),
            false => Err(format!("call {call} for {key:?} failed without a reason: {error}")),
        }
    }

    /// Where nothing has befallen a key, its i-th call gets its i-th value, and its surplus calls nothing.
    pub fn check_order(&self) -> Result<(), String> {
        for (key, values) in &self.values {
            if self.is_troubled(*key) || self.ended_steps.contains(&key.step) {
                continue;
            }
            let calls: Vec<&Asked> = self.calls.iter().filter(|call| call.key == *key).collect();
            let early =
                |call: &&&Asked| call.cancelled || call.dropped || call.patience < crate::program::PATIENCE;
            if calls.iter().any(|call| early(&call)) || self.is_tight {
                continue;
            }
            if calls.iter().any(|call| matches!(call.want, Want::Into(_))) {
                continue;
            }
            for (number, call) in calls.iter().enumerate().take(values.len()) {
                if call.got != Some(number) {
                    return Err(format!("call {number} for {key:?} got {:?} of {}", call.got, values.len()));
                }
            }
        }
        Ok(())
    }

    /// The keys of which every value must come in the end.
    pub fn whole_keys(&self) -> Vec<Key> {
        let is_whole = |key: &Key| !self.is_troubled(*key) && !self.ended_steps.contains(&key.step);
        self.values.keys().copied().filter(is_whole).collect()
    }

    /// Values that have not come. One that was on its way to a call that was dropped comes to the next.
    pub fn left(&self, key: Key) -> usize {
        self.values.get(&key).map_or(0, |values| values.iter().filter(|value| value.to.is_none()).count())
    }

    /// Whether the last call failed as there was no room for its value.
    pub fn ended_for_want_of_room(&self) -> bool {
        self.calls.last().is_some_and(|call| call.no_room)
    }

    /// The values of a key came in the order in which they were sent, as far as that is promised.
    pub fn check_drained(&self, key: Key) -> Result<(), String> {
        if self.disturbed.contains(&key) && !ORDER_SURVIVES_GIVING_UP {
            return Ok(());
        }
        let got: Vec<usize> =
            self.calls.iter().filter(|call| call.key == key).filter_map(|call| call.got).collect();
        match got.is_sorted() {
            true => Ok(()),
            false => Err(format!("the values of {key:?} came in the order {got:?}")),
        }
    }
}
