//! Receiving.

use super::{
    AHEAD, BATCH_WINDOW, Cell, Destination, META, NUMBER_BITS, Node, Payload, Slow, WINDOW, loan_word,
};
use crate::link::{Arrived, BATCH_CREDIT, CREDIT, INLINE, LENT, VALUE, head, order};
use crate::pool::{Tensor, Use};
use crate::process::prefetch_for_write;
use std::sync::atomic::Ordering;

impl Node {
    #[inline(never)]
    pub fn recv(&mut self, edge: u32, step: u64, destination: Destination) -> Result<Tensor, Slow> {
        self.enter()?;
        self.check_step(step)?;
        let number = edge as usize;
        let received = self.recv_one(number, step, destination)?;
        let edge_taken = self.in_edges[number].taken;
        if edge_taken.is_multiple_of(WINDOW / 2) {
            self.credit_due.push(edge);
        }
        self.exit()?;
        Ok(received)
    }

    /// Receives one value of each edge, in the order of the edges.
    #[inline(never)]
    pub fn recv_batch(&mut self, step: u64, values: &mut Vec<Tensor>) -> Result<(), Slow> {
        self.enter()?;
        self.check_step(step)?;
        for number in 0..self.in_edges.len() {
            if let Some(later) = self.in_edges.get(number + AHEAD) {
                prefetch_for_write(later);
            }
            values.push(self.recv_one(number, step, Destination::Fresh)?);
        }
        self.batches_taken += 1;
        let limit = self.batches_taken + BATCH_WINDOW;
        let mut looks = 0;
        while !self.link.has_room() && !self.link.look_for_room() {
            self.check_looks(&mut looks)?;
        }
        self.link.post([head(BATCH_CREDIT, 0, 0, 0), limit, 0], [0; 4]);
        self.exit()
    }

    /// The short receive: it compares the next record with the one that it expects.
    #[inline(always)]
    fn recv_one(&mut self, number: usize, step: u64, destination: Destination) -> Result<Tensor, Slow> {
        let edge = &self.in_edges[number];
        if edge.epoch != self.epoch {
            return Err(Slow::Epoch);
        }
        if edge.held_and_waiters != 0 || edge.head == 0 {
            return self.recv_from_cell(number, step, destination);
        }
        let expected = [edge.head, step, order(edge.generation, edge.came, edge.len)];
        let (len, n) = (edge.len, edge.came);
        let is_lent = len > INLINE;
        // The destination is ready before the value comes.
        let destination = match destination {
            Destination::Fresh => Destination::Into(self.pool.take(Use::Landing, len, META)),
            Destination::Into(tensor) if tensor.len() != len => return Err(Slow::MetaData),
            given => given,
        };
        let mut looks = 0;
        let record = loop {
            if let Some(record) = self.link.look() {
                break record;
            }
            if looks == 0 {
                self.finish_takes();
            }
            self.check_looks(&mut looks)?;
        };
        if !record.has_head(expected) {
            return self.recv_from_cell(number, step, destination);
        }
        let edge = &mut self.in_edges[number];
        edge.came += 1;
        edge.taken += 1;
        self.counters.received += 1;
        self.counters.received_bytes += u64::from(len);
        if is_lent {
            let word = loan_word(number, n);
            prefetch_for_write(&self.own.words.loans[word as usize]);
            let received = self.take_lent(destination, word, n, record.payload(0), len);
            return if self.link.consume(record) { received } else { Err(Slow::Protocol) };
        }
        let Destination::Into(tensor) = destination else { return Err(Slow::Protocol) };
        let data = tensor.data().cast::<u64>();
        for at in 0..len.div_ceil(8) as usize {
            // SAFETY: the value has at most `INLINE` bytes, and blocks have more.
            unsafe { data.add(at).write(record.payload(at)) };
        }
        match self.link.consume(record) {
            true => Ok(tensor),
            false => Err(Slow::Protocol),
        }
    }

    /// Copies or borrows a value that the peer has lent, and gives the loan back or moves it.
    #[inline(always)]
    fn take_lent(
        &mut self,
        destination: Destination,
        word: u32,
        n: u64,
        place: u64,
        len: u32,
    ) -> Result<Tensor, Slow> {
        let source = self.peer.value(place, len).ok_or(Slow::Protocol)?;
        let number = n + 1;
        match destination {
            Destination::Into(tensor) if tensor.len() == len => {
                // SAFETY: the source lies in the peer's segment, as was checked, and the tensor has
                // this many bytes. The peer does not write a value that it has lent.
                unsafe { std::ptr::copy_nonoverlapping(source, tensor.data(), len as usize) };
                self.answer_loan(word, number);
                Ok(tensor)
            }
            Destination::Borrow if self.may_lend => {
                let place = self.free_places.pop().ok_or(Slow::Room)?;
                self.answer_loan(word, number | u64::from(place + 1) << NUMBER_BITS);
                Ok(self.pool.borrowed(source, len, META, place, number))
            }
            _ => Err(Slow::MetaData),
        }
    }

    #[inline(always)]
    fn answer_loan(&mut self, word: u32, answer: u64) {
        match self.lazy_loans {
            true => self.loans_due.push((word, answer)),
            false => self.own.words.loans[word as usize].store(answer, Ordering::Release),
        }
    }

    /// Drops a received value. A borrowed one goes back to its sender.
    #[inline(always)]
    pub fn release(&mut self, value: Tensor) {
        if let Some((place, number)) = value.loan() {
            self.own.words.loan_places[place as usize].store(number, Ordering::Release);
            self.free_places.push(place);
        }
        self.pool.release(value);
    }

    /// The receive of an edge that holds values, or whose next record is not the expected one.
    #[inline(never)]
    fn recv_from_cell(&mut self, number: usize, step: u64, destination: Destination) -> Result<Tensor, Slow> {
        let mut looks = 0;
        loop {
            let edge = &mut self.in_edges[number];
            let cell = &mut self.cells[number * WINDOW as usize + (edge.taken % WINDOW) as usize];
            if edge.held_and_waiters > 0 {
                if cell.step != step {
                    return Err(Slow::Step);
                }
                break;
            }
            match self.link.look() {
                Some(record) => self.arrive(record)?,
                None => self.check_looks(&mut looks)?,
            }
        }
        let edge = &mut self.in_edges[number];
        let at = number * WINDOW as usize + (edge.taken % WINDOW) as usize;
        let cell = &mut self.cells[at];
        let (len, flags) = (cell.len, cell.flags);
        let payload = std::mem::replace(&mut cell.payload, Payload::None);
        let n = edge.taken;
        edge.taken += 1;
        edge.held_and_waiters -= 1;
        edge.len = len;
        edge.head = head(VALUE, flags, META, number as u32);
        self.step_word(step).fetch_sub(1, Ordering::Relaxed);
        let destination = match destination {
            Destination::Fresh => Destination::Into(self.pool.take(Use::Landing, len, META)),
            given => given,
        };
        match (payload, destination) {
            (Payload::Place(place), destination) => {
                self.take_lent(destination, loan_word(number, n), n, place, len)
            }
            (Payload::Inline(words), Destination::Into(tensor)) => {
                // SAFETY: blocks have more than 32 bytes.
                unsafe { tensor.data().cast::<[u64; 4]>().write(words) };
                Ok(tensor)
            }
            _ => Err(Slow::Protocol),
        }
    }

    /// Takes in a record that no receive expects.
    #[inline(never)]
    fn arrive(&mut self, record: Arrived) -> Result<(), Slow> {
        let [first, step, order_word] = record.head();
        let (kind, flags, meta) = (first as u8, (first >> 8) as u8, (first >> 16) as u16);
        let number = (first >> 32) as usize;
        match kind {
            CREDIT => {
                let edge = self.out_edges.get_mut(number).ok_or(Slow::Protocol)?;
                if step <= edge.limit || step > edge.sent + WINDOW {
                    return Err(Slow::Protocol);
                }
                edge.limit = step;
            }
            BATCH_CREDIT if step > self.batch_limit && step <= self.batches_sent + BATCH_WINDOW => {
                self.batch_limit = step;
            }
            VALUE => {
                let edge = self.in_edges.get_mut(number).ok_or(Slow::Protocol)?;
                let len = (order_word >> 32) as u32;
                let is_next = order_word == order(edge.generation, edge.came, len);
                let is_lent = flags & LENT != 0;
                let fits = meta == edge.meta && is_lent == (len > INLINE);
                if !is_next || !fits || edge.came - edge.taken >= WINDOW {
                    return Err(Slow::Protocol);
                }
                let payload = match is_lent {
                    true => Payload::Place(record.payload(0)),
                    false => Payload::Inline([0, 1, 2, 3].map(|word| record.payload(word))),
                };
                let at = number * WINDOW as usize + (edge.came % WINDOW) as usize;
                self.cells[at] = Cell { step, flags, len, payload };
                edge.came += 1;
                edge.held_and_waiters += 1;
                self.counters.received += 1;
                self.counters.received_bytes += u64::from(len);
                self.step_word(step).fetch_add(1, Ordering::Relaxed);
            }
            _ => return Err(Slow::Protocol),
        }
        match self.link.consume(record) {
            true => Ok(()),
            false => Err(Slow::Protocol),
        }
    }
}
