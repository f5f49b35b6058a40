//! Batches of sends and of receives.

use crate::model::{CallNo, Violation, pattern};
use crate::program::{Form, Key};
use crate::world::World;
use std::time::Duration;
use tensorwire::{Error, TensorMut};

impl World {
    /// Sends all values, which belong to one process and step, or none.
    pub fn send_all(&mut self, values: &[(Key, Option<Form>)]) -> Result<(), Violation> {
        let Some((first, _)) = values.first().cloned() else { return Ok(()) };
        if self.processes[first.from].is_none() {
            return Ok(());
        }
        let mut given = Vec::new();
        for (key, form) in values {
            let number = self.model.next_value(*key);
            let Some(value) = self.value(*key, number, form.as_ref())? else { break };
            // The model is told first, because a receive may get the value within the call.
            self.model.sent(*key, form.clone());
            given.push((*key, value.map(TensorMut::freeze)));
        }
        let keys: Vec<Key> = given.iter().map(|(key, _)| *key).collect();
        let in_vain: Vec<Key> = keys.iter().filter(|key| self.is_link_gone(key)).copied().collect();
        let Some(process) = &mut self.processes[first.from] else { return Ok(()) };
        let sent = match given.len() == values.len() {
            true => process.send_all(first.step, given),
            // The pool is full. Nothing was sent.
            false => {
                keys.iter().rev().for_each(|key| self.model.unsent(*key));
                return Ok(());
            }
        };
        match sent {
            Ok(()) => {
                in_vain.into_iter().for_each(|key| self.model.sent_in_vain(key));
                Ok(())
            }
            Err(error) => {
                keys.iter().rev().for_each(|key| self.model.unsent(*key));
                self.refused(&keys, first.from, &error)
            }
        }
    }

    /// A value of this form; `None` if the pool is full.
    fn value(
        &self,
        key: Key,
        number: usize,
        form: Option<&Form>,
    ) -> Result<Option<Option<TensorMut>>, Violation> {
        let (Some(form), Some(process)) = (form, &self.processes[key.from]) else { return Ok(Some(None)) };
        match process.tensor(form) {
            Some(mut tensor) => {
                let words = tensor.bytes_mut().chunks_mut(8).zip(pattern(key, number, form.dtype));
                words.for_each(|(bytes, word)| bytes.copy_from_slice(&word[..bytes.len()]));
                Ok(Some(Some(tensor)))
            }
            None if self.settings.is_roomy() => Err("a roomy pool has no room".into()),
            None => Ok(None),
        }
    }

    /// Begins to receive all keys, which belong to one process and step.
    pub fn receive_all(&mut self, keys: &[Key], timeout: u64) -> Result<(), Violation> {
        let Some(first) = keys.first() else { return Ok(()) };
        let timeout = Duration::from_micros(timeout);
        let Some(calls) = self.begin_calls(keys, &[], timeout) else { return Ok(()) };
        let Some(process) = &mut self.processes[first.to] else { return Ok(()) };
        match process.receive_all(first.step, keys, &calls, timeout) {
            Ok(()) => Ok(()),
            Err(error) => {
                calls.into_iter().for_each(|call| self.model.unreceived(call));
                self.refused(keys, first.to, &error)
            }
        }
    }

    /// Waits for all keys, which belong to one process and step.
    pub fn wait_for_all(&mut self, keys: &[Key], into: &[Form], timeout: u64) -> Result<(), Violation> {
        let Some(first) = keys.first() else { return Ok(()) };
        let Some(process) = &self.processes[first.to] else { return Ok(()) };
        let given: Vec<TensorMut> = into.iter().map_while(|form| process.tensor(form)).collect();
        if given.len() < into.len() {
            return if self.settings.is_roomy() { Err("a roomy pool has no room".into()) } else { Ok(()) };
        }
        let timeout = Duration::from_micros(timeout);
        let Some(calls) = self.begin_calls(keys, into, timeout) else { return Ok(()) };
        let Some(process) = &mut self.processes[first.to] else { return Ok(()) };
        match process.wait_for_all(first.step, keys, &calls, given, timeout) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => self.model.batch_failed(&calls, self.network.now(), &error),
            Err(error) => {
                calls.into_iter().for_each(|call| self.model.unreceived(call));
                self.refused(keys, first.to, &error)
            }
        }
    }

    /// The numbers of receives that begin now; `None` if the receiver is dead.
    fn begin_calls(&mut self, keys: &[Key], into: &[Form], timeout: Duration) -> Option<Vec<CallNo>> {
        let now = self.network.now();
        let mut into = into.iter().cloned();
        let calls = keys.iter().map(|key| {
            let source_lives = self.source_lives(key)?;
            Some(self.model.received(*key, into.next(), source_lives, now, now + timeout))
        });
        calls.collect()
    }

    /// A batch was refused. The error must be right for at least one of its keys.
    fn refused(&self, keys: &[Key], at: usize, error: &Error) -> Result<(), Violation> {
        let verdicts = keys.iter().map(|key| self.model.refused(*key, at, error));
        verdicts.reduce(Result::or).unwrap_or(Ok(()))
    }
}
