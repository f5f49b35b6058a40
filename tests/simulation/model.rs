//! The reference: the values of each key in their order, and the results that each receive may
//! have.

use super::program::{At, Form, Key, Settings, UNLIMITED};
use super::random::mix;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use tensorwire::internals::wire::{Time, checksum_of};
use tensorwire::{Code, DType, Error, Tensor};

/// A violation of the model, in words.
pub type Violation = String;

/// The number of a receive.
pub type CallNo = usize;

/// The actions of a program, and their results.
pub struct Model {
    settings: Settings,
    lives: Vec<u64>,
    pub channels: BTreeMap<Key, Channel>,
    pub calls: Vec<Call>,
    /// Pairs of processes, the smaller first, whose link was cut or of which one died.
    disturbed: BTreeSet<(At, At)>,
    aborted: BTreeSet<Place>,
    cleaned: BTreeSet<Place>,
    /// Edges with standing requests, as keys of step 0, each with the life of its receiver.
    stood: BTreeSet<(Key, u64)>,
}

/// A process, its life, and a step.
type Place = (At, u64, u64);

#[derive(Default)]
pub struct Channel {
    pub values: Vec<Sent>,
    pub calls: Vec<CallNo>,
    /// Upper bound of values that were lost ahead of their receives.
    ahead: usize,
}

/// A value that was sent.
pub struct Sent {
    pub form: Option<Form>,
    /// The life of its sender.
    life: u64,
    pub got_by: Option<CallNo>,
    /// Its sender has died or ended the step, so it may come or not.
    pub orphan: bool,
}

/// A receive.
pub struct Call {
    pub key: Key,
    pub life: u64,
    pub into: Option<Form>,
    /// The lives of the sender whose values it may get: that of the link, or those of earlier
    /// links.
    source_lives: RangeInclusive<u64>,
    pub began: Time,
    pub deadline: Time,
    pub cancelled: Option<Time>,
    pub end: Option<End>,
    /// Whether all earlier receives of its key had ended when it began.
    alone: bool,
}

/// How a receive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this value, or with the error that its bytes were corrupted. Both consume the value.
    Got { at: Time, value: usize },
    /// With an error; no value was consumed.
    Failed { at: Time },
    /// It was dropped. A value that arrives for it belongs to the next receive.
    Dropped,
    /// Its process has died, or its batch has failed, so its result is unknown.
    Unheard,
}

impl Model {
    pub fn new(settings: &Settings) -> Self {
        Model {
            settings: settings.clone(),
            lives: vec![0; settings.processes],
            channels: BTreeMap::new(),
            calls: Vec::new(),
            disturbed: BTreeSet::new(),
            aborted: BTreeSet::new(),
            cleaned: BTreeSet::new(),
            stood: BTreeSet::new(),
        }
    }

    pub fn stands(&mut self, key: Key) {
        self.stood.insert((Key { step: 0, ..key }, self.lives[key.to]));
    }

    /// Whether an edge has had standing requests in this life of its receiver.
    pub fn has_stood(&self, key: &Key) -> bool {
        self.stood.contains(&(Key { step: 0, ..*key }, self.lives[key.to]))
    }

    pub fn sent(&mut self, key: Key, form: Option<Form>) {
        let orphan = self.is_over(key.from, self.lives[key.from], key.step);
        let life = self.lives[key.from];
        self.channel(key).values.push(Sent { form, life, got_by: None, orphan });
    }

    /// The last send was refused.
    pub fn unsent(&mut self, key: Key) {
        self.channel(key).values.pop();
    }

    /// The last receive was refused.
    pub fn unreceived(&mut self, call: CallNo) {
        let key = self.calls[call].key;
        self.channel(key).calls.retain(|other| *other != call);
        self.calls[call].end = Some(End::Unheard);
    }

    /// The number that the next value of a key has.
    pub fn next_value(&mut self, key: Key) -> usize {
        self.channel(key).values.len()
    }

    /// The life of the sender that has sent a value.
    pub fn life_of_value(&self, key: &Key, value: usize) -> u64 {
        self.channels[key].values[value].life
    }

    /// A receive begins, with a link to one of these lives of its sender, or without a link.
    pub fn received(
        &mut self,
        key: Key,
        into: Option<Form>,
        source_lives: RangeInclusive<u64>,
        began: Time,
        deadline: Time,
    ) -> CallNo {
        let call = self.calls.len();
        let life = self.lives[key.to];
        let earlier = self.channel(key).calls.clone();
        let alone = earlier.iter().all(|call| self.calls[*call].end.is_some());
        self.calls.push(Call {
            key,
            life,
            into,
            source_lives,
            began,
            deadline,
            cancelled: None,
            end: None,
            alone,
        });
        self.channel(key).calls.push(call);
        call
    }

    pub fn cancelled(&mut self, call: CallNo, now: Time) {
        self.calls[call].cancelled.get_or_insert(now);
    }

    /// A receive is cancelled by a drop.
    pub fn dropped(&mut self, call: CallNo, now: Time) {
        self.cancelled(call, now);
        self.calls[call].end = Some(End::Dropped);
    }

    pub fn aborted(&mut self, at: At, step: u64) {
        self.aborted.insert((at, self.lives[at], step));
        self.orphan(|key| key.from == at && key.step == step);
    }

    pub fn cleaned(&mut self, at: At, step: u64) {
        self.cleaned.insert((at, self.lives[at], step));
        self.orphan(|key| key.from == at && key.step == step);
    }

    /// The link of two processes is lost. Each value may have been on its way, or in a window.
    pub fn cut(&mut self, a: At, b: At) {
        self.disturbed.insert((a.min(b), a.max(b)));
        self.lose_ahead(|key| (key.from, key.to) == (a, b) || (key.from, key.to) == (b, a));
    }

    /// A value was sent over a link whose loss its sender did not know.
    pub fn sent_in_vain(&mut self, key: Key) {
        self.channel(key).ahead += 1;
    }

    fn lose_ahead(&mut self, of: impl Fn(&Key) -> bool) {
        let keys: Vec<Key> = self.channels.keys().filter(|key| of(key)).copied().collect();
        for key in keys {
            let left = self.left(&key).len();
            self.channel(key).ahead += left;
        }
    }

    pub fn died(&mut self, at: At) {
        for other in (0..self.settings.processes).filter(|other| *other != at) {
            // Its sent values are orphans, and values on their way to it are lost.
            self.cut(at, other);
        }
        self.lose_ahead(|key| key.to == at);
        self.lives[at] += 1;
        self.orphan(|key| key.from == at);
        for call in self.calls.iter_mut().filter(|call| call.key.to == at) {
            call.end.get_or_insert(End::Unheard);
        }
    }

    /// A receive ended with a value. Returns the number of the value.
    pub fn got(
        &mut self,
        call: CallNo,
        now: Time,
        tensor: &Tensor,
        is_dead: bool,
    ) -> Result<usize, Violation> {
        let Call { key, into, .. } = &self.calls[call];
        let (key, into) = (*key, into.clone());
        if let Some(into) = into
            && !is_dead
            && into.meta() != *tensor.meta()
        {
            return Err(format!("{key}: {} came into a tensor that was {into}", tensor.meta()));
        }
        let what = match is_dead {
            true => "a dead value, which nobody sent".to_owned(),
            false => format!("{}, and no value of it has these bytes", tensor.meta()),
        };
        self.took(call, now, &what, |number, sent| match &sent.form {
            None => is_dead,
            Some(form) => !is_dead && *tensor.meta() == form.meta() && is_pattern(tensor, key, number),
        })
    }

    /// A receive failed because the bytes were corrupted, which consumes the value.
    fn corrupted(
        &mut self,
        call: CallNo,
        now: Time,
        bytes: u64,
        sent: u64,
        came: u64,
    ) -> Result<usize, Violation> {
        let key = self.calls[call].key;
        self.may_be_corrupted(&key, bytes, sent, came)?;
        let what = format!("an error for {bytes} corrupted bytes, and no value has the checksum {sent:x}");
        self.took(call, now, &what, |number, value| has_checksum(key, number, value, bytes, sent))
    }

    /// Checks that a bit may have been flipped on the way of a value.
    fn may_be_corrupted(&self, key: &Key, bytes: u64, sent: u64, came: u64) -> Result<(), Violation> {
        let possible = self.settings.flip_per_mille > 0 && self.settings.validates(key.to) && !key.is_local();
        if !possible || came == sent || bytes == 0 {
            return Err(format!(
                "a receive of {key} was corrupted although no bit was flipped: {sent:x}, {came:x}"
            ));
        }
        Ok(())
    }

    /// Finds the sent value for which `equals` holds. Without one, `what` describes the result in
    /// the error.
    fn took(
        &mut self,
        call: CallNo,
        now: Time,
        what: &str,
        equals: impl Fn(usize, &Sent) -> bool,
    ) -> Result<usize, Violation> {
        let Call { key, source_lives, end, .. } = &self.calls[call];
        let (key, source_lives) = (*key, source_lives.clone());
        if end.is_some() {
            return Err(format!("the receive of {key} ended twice"));
        }
        let fits = |(number, sent): (usize, &Sent)| source_lives.contains(&sent.life) && equals(number, sent);
        let values = &self.channels[&key].values;
        let open = (0..values.len()).filter(|at| values[*at].got_by.is_none() && fits((*at, &values[*at])));
        // Among equal values, the one that must come is preferred.
        let Some(value) = open.min_by_key(|at| values[*at].orphan) else {
            let again = (0..values.len()).rev().find(|at| equals(*at, &values[*at]));
            let what = match again {
                Some(value) if !source_lives.contains(&values[value].life) => {
                    format!("value {value}, which another life of its sender had sent")
                }
                Some(value) => format!("value {value}, which another had got"),
                None => what.to_owned(),
            };
            return Err(format!("a receive of {key} got {what}"));
        };
        self.channel(key).values[value].got_by = Some(call);
        self.calls[call].end = Some(End::Got { at: now, value });
        match self.passed_over(&self.calls[call], value) {
            Some(earlier) => Err(format!(
                "a receive of {key}, alone when it began, got value {value} while value {earlier} was left"
            )),
            None => Ok(value),
        }
    }

    /// An earlier value that no receive has got or lost, if this receive was alone when it began.
    fn passed_over(&self, call: &Call, value: usize) -> Option<usize> {
        let key = &call.key;
        let excused = !call.alone || self.is_disturbed(key) || self.is_closed(key);
        if excused || !self.is_unique(*key, value) {
            return None;
        }
        let calls = &self.channels[key].calls;
        let lost = calls.iter().filter(|call| self.calls[**call].end == Some(End::Unheard)).count();
        let is_earlier = |earlier: &usize| *earlier < value && self.is_unique(*key, *earlier);
        self.left(key).into_iter().filter(is_earlier).nth(lost)
    }

    /// A receive ended with an error.
    fn failed(&mut self, call: CallNo, now: Time, error: &Error) -> Result<(), Violation> {
        if self.calls[call].end.is_some() {
            return Err(format!("the receive of {} ended twice", self.calls[call].key));
        }
        if let Err(why) = self.allows(&self.calls[call], now, error) {
            return Err(format!("a receive of {} failed ({why}): {error}", self.calls[call].key));
        }
        self.calls[call].end = Some(End::Failed { at: now });
        Ok(())
    }

    /// A receive ended with an error, which may say that the bytes were corrupted.
    pub fn ended_with(&mut self, call: CallNo, now: Time, error: &Error) -> Result<(), Violation> {
        match error {
            Error::Corrupted { bytes, sent, actual, .. } => {
                self.corrupted(call, now, *bytes, *sent, *actual).map(drop)
            }
            error => self.failed(call, now, error),
        }
    }

    /// Checks that a receive may end with an error.
    fn may_end_with(&self, call: CallNo, now: Time, error: &Error) -> Result<(), Violation> {
        let call = &self.calls[call];
        let Error::Corrupted { bytes, sent, actual, .. } = error else {
            return self.allows(call, now, error).map_err(str::to_owned);
        };
        self.may_be_corrupted(&call.key, *bytes, *sent, *actual)?;
        let mut values = self.channels[&call.key].values.iter().enumerate();
        let is_sent = values.any(|(number, value)| {
            value.got_by.is_none() && has_checksum(call.key, number, value, *bytes, *sent)
        });
        is_sent.then_some(()).ok_or_else(|| "no value has this checksum".to_owned())
    }

    /// The wait for a batch failed because one of its receives did. The values that had come for
    /// the others are lost.
    pub fn batch_failed(&mut self, calls: &[CallNo], now: Time, error: &Error) -> Result<(), Violation> {
        let verdicts = calls.iter().map(|call| self.may_end_with(*call, now, error));
        let verdict = verdicts.reduce(Result::or).unwrap_or(Ok(()));
        verdict.map_err(|why| format!("a batch failed ({why}): {error}"))?;
        let mut lost = BTreeMap::new();
        for call in calls {
            let key = self.calls[*call].key;
            let lost = lost.entry(key).or_insert(0);
            *lost += 1;
            let had_come = *lost <= self.left(&key).len();
            self.calls[*call].end = Some(if had_come { End::Unheard } else { End::Failed { at: now } });
        }
        Ok(())
    }

    /// A receive was refused. Receives of batches are refused as sends are.
    pub fn refused_receive(&self, key: Key, error: &Error) -> Result<(), Violation> {
        match error {
            Error::ResourceExhausted { .. } if self.settings.max_requests < UNLIMITED => Ok(()),
            error => self.refused(key, key.to, error),
        }
    }

    /// A receive or a send was refused.
    pub fn refused(&self, key: Key, at: At, error: &Error) -> Result<(), Violation> {
        let place = (at, self.lives[at], key.step);
        let allowed = match error {
            Error::Aborted { .. } => self.aborted.contains(&place),
            Error::StepGone { .. } => self.cleaned.contains(&place),
            Error::PeerLost { .. } | Error::NotConnected { .. } => {
                self.is_disturbed(&key) || self.may_be_over(at)
            }
            Error::ResourceExhausted { .. } | Error::BatchTooLarge { .. } => {
                self.settings.max_outstanding_sends < UNLIMITED
            }
            Error::NoRoom { .. } => !self.settings.is_roomy(),
            _ => false,
        };
        if allowed { Ok(()) } else { Err(format!("{at} was refused {key} for no reason: {error}")) }
    }

    fn allows(&self, call: &Call, now: Time, error: &Error) -> Result<(), &'static str> {
        let Call { key, life, .. } = call;
        let here = (key.to, *life, key.step);
        let ok = |allowed: bool, why| if allowed { Ok(()) } else { Err(why) };
        match error {
            Error::Cancelled { .. } => ok(call.cancelled.is_some(), "nobody cancelled it"),
            Error::DeadlineExceeded { .. } => ok(now >= call.deadline, "before its deadline"),
            Error::Aborted { .. } => ok(self.aborted.contains(&here), "nobody aborted the step"),
            Error::StepGone { .. } => ok(self.cleaned.contains(&here), "nobody cleaned the step up"),
            Error::PeerLost { .. } | Error::NotConnected { .. } => ok(
                self.is_disturbed(key) || self.may_be_over(key.to),
                "nothing happened to the peer or the link",
            ),
            Error::NoRoom { .. } => ok(!self.settings.is_roomy(), "there is room"),
            Error::ResourceExhausted { .. } => Err("a receive beyond a limit fails when it begins"),
            Error::ShapeMismatch { sent, .. } => {
                let values = &self.channels[key].values;
                let fits = call.into.as_ref().is_none_or(|into| into.meta() == **sent);
                let any = values.iter().any(|value| value.form.as_ref().is_some_and(|f| f.meta() == **sent));
                ok(!fits && any, "no value in line has the sent shape")
            }
            Error::Remote { status, .. } => {
                let there = |ended: &BTreeSet<Place>| {
                    ended.iter().any(|(at, _, step)| *at == key.from && *step == key.step)
                };
                match status.code {
                    Code::Internal => ok(there(&self.aborted), "nobody aborted the step there"),
                    Code::NotFound => ok(there(&self.cleaned), "nobody cleaned the step up there"),
                    Code::DeadlineExceeded => ok(now >= call.deadline, "before its deadline"),
                    _ => Err("no sender says this"),
                }
            }
            _ => Err("never"),
        }
    }

    /// Upper bound of a key's values that went to receives with unknown results.
    pub fn may_be_missing(&self, key: &Key) -> usize {
        let Some(channel) = self.channels.get(key) else { return 0 };
        let lost = |call: &Call| match call.end {
            Some(End::Got { .. }) => false,
            Some(End::Unheard) => true,
            Some(End::Failed { .. } | End::Dropped) | None => {
                self.is_over(key.to, call.life, key.step) || self.lives[key.to] != call.life
            }
        };
        channel.ahead + channel.calls.iter().filter(|call| lost(&self.calls[**call])).count()
    }

    /// The values of a key that no receive has got and that are not orphans.
    pub fn left(&self, key: &Key) -> Vec<usize> {
        let Some(channel) = self.channels.get(key) else { return Vec::new() };
        let is_left = |sent: &Sent| sent.got_by.is_none() && !sent.orphan;
        (0..channel.values.len()).filter(|at| is_left(&channel.values[*at])).collect()
    }

    /// Whether a value differs from all others of its key.
    pub fn is_unique(&self, key: Key, value: usize) -> bool {
        let content = self.content(key, value);
        (0..self.channels[&key].values.len())
            .all(|other| other == value || self.content(key, other) != content)
    }

    /// The identity of a value within its key: type, shape and first bytes.
    fn content(&self, key: Key, value: usize) -> (String, Vec<u8>) {
        let Some(form) = &self.channels[&key].values[value].form else { return ("dead".into(), Vec::new()) };
        let bytes = form.meta().bytes().min(8) as usize;
        (form.to_string(), pattern(key, value, form.dtype).flatten().take(bytes).collect())
    }

    /// Whether the step of a key has ended at one of its ends.
    pub fn is_closed(&self, key: &Key) -> bool {
        [key.from, key.to].into_iter().any(|at| self.is_over(at, self.lives[at], key.step))
    }

    pub fn is_disturbed(&self, key: &Key) -> bool {
        self.disturbed.contains(&(key.from.min(key.to), key.from.max(key.to)))
    }

    /// Whether the loss of a peer may have ended all calls of a process.
    pub fn may_be_over(&self, at: At) -> bool {
        self.settings.loss_is_fatal && self.disturbed.iter().any(|(a, b)| *a == at || *b == at)
    }

    fn is_over(&self, at: At, life: u64, step: u64) -> bool {
        let place = (at, life, step);
        self.aborted.contains(&place) || self.cleaned.contains(&place)
    }

    fn orphan(&mut self, of: impl Fn(&Key) -> bool) {
        let channels = self.channels.iter_mut().filter(|(key, _)| of(key));
        channels.flat_map(|(_, channel)| &mut channel.values).for_each(|value| value.orphan = true);
    }

    fn channel(&mut self, key: Key) -> &mut Channel {
        self.channels.entry(key).or_default()
    }
}

/// The bytes of a key's `number`th value, eight at a time.
pub fn pattern(key: Key, number: usize, dtype: DType) -> impl Iterator<Item = [u8; 8]> {
    let place = key.from as u64 | (key.to as u64) << 8 | key.name << 16 | key.step << 24 | key.frame << 32;
    let start = mix(place | (number as u64) << 40);
    let mask = if dtype == DType::Bool { 0x0101_0101_0101_0101 } else { u64::MAX };
    (0u64..).map(move |word| (mix(start.wrapping_add(word)) & mask).to_le_bytes())
}

/// Whether a value has these bytes and this checksum.
fn has_checksum(key: Key, number: usize, value: &Sent, bytes: u64, checksum: u64) -> bool {
    let form = value.form.as_ref().filter(|form| form.meta().bytes() == bytes);
    form.is_some_and(|form| {
        let content = pattern(key, number, form.dtype).flatten().take(bytes as usize);
        checksum_of(&content.collect::<Vec<u8>>()) == checksum
    })
}

pub fn is_pattern(tensor: &Tensor, key: Key, number: usize) -> bool {
    let words = tensor.bytes().chunks(8).zip(pattern(key, number, tensor.dtype()));
    words.into_iter().all(|(bytes, word)| *bytes == word[..bytes.len()])
}
