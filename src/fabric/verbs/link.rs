//! One link: the meaning of its completions, and its end.

use super::Shared;
use super::address::End;
use super::buffers::Buffer;
use super::control::{CONTROL, Control, Said};
use super::cq::Places;
use super::data_queue::{DataQueue, operation};
use super::failure::status;
use super::grants::{Grants, MAX_GRANTS};
use super::slot::{Awaited, Slot};
use super::stripes::{STRIPED, Stripes};
use super::sys::*;
use crate::fabric::{Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, MAX_MESSAGE};
use crate::wire::Immediate;
use std::iter;
use std::sync::Arc;

/// How long, in ticks of 100 ms, a queue pair that was flushed without a reason is given for the
/// reason to come.
const PATIENCE: u32 = 3;
/// The time, in ticks of 100 ms, that a detached link has to send its posted requests and its
/// disconnect.
const LINGER: u32 = 20;

enum Phase {
    Up,
    /// The tick in which the peer has disconnected. Its earlier sends are still delivered.
    Draining(LinkFailure, u32),
    /// This side has ended it; the next poll tells.
    Failing(LinkFailure),
    Down,
}

/// One link.
pub(super) struct Link {
    pub limits: LinkLimits,
    pub id: LinkId,
    phase: Phase,
    // Dropped in this order: queue pairs, the memory that they name, their places in the completion
    // queue.
    pub main: DataQueue,
    pub stripes: Stripes,
    pub control: Control,
    pub local: Buffer,
    words: Buffer,
    pub grants: Grants,
    pub peer: End,
    /// The number of returned receives that the peer is still to be told.
    untold: Option<u32>,
    /// A queue pair was flushed: the cause unless a better one is found, and the tick.
    suspect: Option<(LinkFailure, u32)>,
    /// The owner has let it go, at this tick.
    pub left: Option<u32>,
    is_corked: bool,
    pub awaited: Awaited,
    pub places: Places,
    pub slot: Arc<Slot>,
    pub shared: Arc<Shared>,
}

/// The parts from which an endpoint makes a link.
pub(super) struct Parts {
    pub main: DataQueue,
    pub stripes: Vec<DataQueue>,
    pub control: Control,
    pub local: Buffer,
    pub words: Buffer,
    pub peer: End,
    pub awaited: Awaited,
    pub places: Places,
    pub slot: Arc<Slot>,
    pub shared: Arc<Shared>,
}

impl Link {
    pub fn new(options: &LinkOptions, parts: Parts) -> Self {
        let Parts { main, stripes, control, local, words, peer, awaited, places, slot, shared } = parts;
        Link {
            limits: LinkLimits {
                depth: options.depth,
                receives: options.receives.min(options.depth),
                max_inline: MAX_MESSAGE,
                // One request goes before a write of several, with its length.
                max_write: u64::from(options.depth - 1) * u64::from(shared.chosen.max_message),
                lends: false,
                grants: MAX_GRANTS as u32,
            },
            id: awaited.link,
            phase: Phase::Up,
            untold: None,
            main,
            stripes: Stripes::new(stripes, options.depth),
            control,
            local,
            words,
            grants: Grants::default(),
            peer,
            suspect: None,
            left: None,
            is_corked: false,
            awaited,
            places,
            slot,
            shared,
        }
    }

    /// The queue pairs for data: the main one, then the stripes.
    fn queues(&mut self) -> impl Iterator<Item = &mut DataQueue> {
        iter::once(&mut self.main).chain(&mut self.stripes.queues)
    }

    /// The data queue of this number.
    #[inline]
    fn queue(&mut self, number: u8) -> Option<&mut DataQueue> {
        match number.checked_sub(1) {
            None => Some(&mut self.main),
            Some(stripe) => self.stripes.queues.get_mut(usize::from(stripe)),
        }
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up)
    }

    /// Whether the next poll has something to say without anything new.
    pub fn has_news(&self) -> bool {
        matches!(self.phase, Phase::Draining(..) | Phase::Failing(_)) || self.suspect.is_some()
    }

    /// Whether a look is needed besides completions.
    #[inline]
    pub fn wants_look(&self) -> bool {
        !self.is_up() || self.untold.is_some() || self.suspect.is_some() || self.left.is_some()
    }

    /// Ends the link from this side; the next poll tells. From now on the device touches nothing
    /// for it.
    #[cold]
    pub fn fail(&mut self, why: LinkFailure) {
        if matches!(self.phase, Phase::Up | Phase::Draining(..)) {
            if self.is_up() {
                self.control.part(&mut self.local, &why, None);
            }
            self.phase = Phase::Failing(why);
            self.queues().for_each(DataQueue::destroy);
        }
    }

    /// A request could not be posted though there was room: its queue pair is broken. The reason
    /// comes by a completion.
    #[cold]
    pub fn refused(&mut self, queue: u8) {
        if self.is_up() && self.suspect.is_none() {
            let why = self.completion(queue, "request", IBV_WC_GENERAL_ERR, 0);
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// What is posted from now on waits for [`Link::uncork`]. Returns whether that is new.
    pub fn cork(&mut self) -> bool {
        if std::mem::replace(&mut self.is_corked, true) {
            return false;
        }
        self.queues().for_each(DataQueue::cork);
        true
    }

    /// Posts what has waited, some requests by one call.
    pub fn uncork(&mut self) {
        if !std::mem::take(&mut self.is_corked) {
            return;
        }
        let broken = self.queues().map(DataQueue::uncork).enumerate().filter(|(_, posted)| posted.is_err());
        if let Some((queue, _)) = broken.last() {
            self.refused(queue as u8);
        }
    }

    /// A post lacks room: asks for completions of finished requests.
    pub fn make_room(&mut self) {
        let region = self.peer.region;
        self.queues().for_each(|queue| queue.flush(&region, true));
    }

    fn completion(&self, queue_pair: u8, operation: &'static str, code: u32, vendor: u32) -> LinkFailure {
        let (name, cause) = status(code);
        LinkFailure::Completion { operation, queue_pair, status: name, code, vendor, cause }
    }

    /// Takes a completion in.
    #[inline]
    pub fn complete(&mut self, wc: &ibv_wc, out: &mut Completions) {
        let queue = (wc.wr_id >> 8) as u8;
        let is_receive = wc.wr_id & 1 != 0;
        if wc.status != IBV_WC_SUCCESS {
            return self.failed(queue, wc);
        }
        if queue == CONTROL {
            return self.control_came(is_receive, wc);
        }
        let (id, region, leaves) = (self.id, self.peer.region, self.left.is_some());
        let Some(of) = self.queue(queue) else { return };
        if of.pair().is_none() {
            return;
        }
        if !is_receive {
            of.done(id, out);
            of.flush(&region, leaves);
            return;
        }
        let Some((place, number)) = of.received() else { return };
        if let Some(stripe) = queue.checked_sub(1) {
            return self.part_came(usize::from(stripe), wc, out);
        }
        if wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM {
            match Immediate::from_bits(u32::from_be(wc.imm_data)) {
                Ok(immediate) => {
                    let first = self.peer.first_total();
                    let total = self.words.take_word(first + number as usize);
                    let bytes = if total == 0 { u64::from(wc.byte_len) } else { total & !STRIPED };
                    self.stripes.immediate(id, immediate, bytes, total & STRIPED != 0, out);
                }
                Err(error) => return self.fail(LinkFailure::Protocol(error.to_string())),
            }
        } else {
            let len = wc.byte_len as usize;
            if len > MAX_MESSAGE {
                return self.fail(LinkFailure::Protocol(format!("a message has {len} bytes")));
            }
            // SAFETY: this receive is complete, and its place is posted again only by a later
            // refill.
            let bytes = unsafe { self.local.bytes(place, len) };
            self.stripes.message(id, bytes, out);
        }
        self.main.refill(&self.local, false);
    }

    /// A part of a striped write has landed on the queue pair of this number.
    fn part_came(&mut self, stripe: usize, wc: &ibv_wc, out: &mut Completions) {
        if wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM {
            return self.fail(LinkFailure::Protocol("it sent a message where parts of writes come".into()));
        }
        let queue = &mut self.stripes.queues[stripe];
        queue.allow_receives(1);
        queue.refill(&self.local, false);
        self.stripes.landed(self.id, stripe, out);
    }

    fn control_came(&mut self, is_receive: bool, wc: &ibv_wc) {
        if !is_receive {
            return self.control.done();
        }
        match self.control.received(&mut self.local, wc.byte_len) {
            Ok(Said::Nothing) => {}
            Ok(Said::Credits { returned }) => self.main.returned = returned,
            Ok(Said::Last { count }) => self.main.expected = Some(count),
            Ok(Said::Farewell(why)) => {
                if self.is_up() {
                    self.phase = Phase::Draining(why, self.shared.watcher.ticks());
                }
            }
            Err(why) => self.fail(LinkFailure::Protocol(why.into())),
        }
    }

    #[cold]
    fn failed(&mut self, queue: u8, wc: &ibv_wc) {
        if queue == CONTROL {
            let why = self.completion(0, "control message", wc.status, wc.vendor_err);
            if wc.status == IBV_WC_WR_FLUSH_ERR {
                self.control.flush()
            } else {
                self.control.destroy()
            }
            return self.suspected(wc, why);
        }
        if self.queue(queue).and_then(DataQueue::pair).is_none() {
            return;
        }
        let why = self.completion(queue, operation(wc.wr_id), wc.status, wc.vendor_err);
        self.suspected(wc, why);
    }

    fn suspected(&mut self, wc: &ibv_wc, why: LinkFailure) {
        if wc.status != IBV_WC_WR_FLUSH_ERR {
            self.fail(why);
        } else if self.suspect.is_none() {
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// Handles changes without completions. `emptied`: the queues are empty. `events`: asynchronous
    /// events have arrived. Returns whether the link can be dropped.
    pub fn look(&mut self, emptied: bool, events: bool, out: &mut Completions) -> bool {
        self.catch_up();
        if events && self.is_up() {
            let device = &self.shared.chosen.context.name;
            let mut queues = iter::once(&self.main).chain(&self.stripes.queues);
            let of_data = queues.find_map(|queue| queue.failure(device));
            if let Some(why) = of_data.or_else(|| self.control.failure(device)) {
                self.fail(why);
            }
        }
        let ticks = self.shared.watcher.ticks();
        if let Some((why, since)) = &self.suspect
            && self.is_up()
            && ticks.wrapping_sub(*since) >= PATIENCE
        {
            let why = why.clone();
            self.fail(why);
        }
        match &self.phase {
            Phase::Failing(why) => {
                let why = why.clone();
                self.go_down(why, out);
            }
            Phase::Draining(why, since)
                if emptied && self.has_all() || ticks.wrapping_sub(*since) > LINGER =>
            {
                let why = why.clone();
                self.queues().for_each(DataQueue::destroy);
                self.go_down(why, out);
            }
            _ => {}
        }
        self.left.is_some_and(|since| self.take_leave(ticks.wrapping_sub(since)))
    }

    /// Whether everything has come that the peer will have sent.
    fn has_all(&self) -> bool {
        self.main.has_all() && self.stripes.is_settled()
    }

    #[cold]
    fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
        let id = self.id;
        self.queues().for_each(|queue| queue.fail_all(id, out));
        self.keep_what_is_lost();
        self.suspect = None;
        self.phase = Phase::Down;
        out.push(self.id, Event::Down(why));
    }

    /// If a queue pair could not be stopped, the peer may write as long as this process lives, so
    /// the memory is leaked.
    fn keep_what_is_lost(&mut self) {
        if self.queues().any(|queue| queue.is_lost) {
            std::mem::forget((std::mem::take(&mut self.grants), Arc::clone(&self.shared)));
            self.local.keep();
            self.words.keep();
        }
    }

    /// Continues a detached link. Returns whether it has ended.
    fn take_leave(&mut self, ticks: u32) -> bool {
        if self.is_up() {
            // At once, because the port may not be polled for a while.
            let last = Some(self.main.consuming);
            self.control.part(&mut self.local, &LinkFailure::Closed, last);
            self.make_room();
            if ticks <= LINGER && !self.queues().all(|queue| queue.is_idle()) {
                return false;
            }
        }
        !self.control.parting || ticks > LINGER
    }

    /// Lets the peer know of returned receives, now or as soon as there is room.
    pub fn publish_credits(&mut self, returned: u32) {
        // Receives are posted before the peer is told of them.
        self.main.refill(&self.local, true);
        for stripe in &mut self.stripes.queues {
            stripe.refill(&self.local, true);
        }
        if !self.is_up() {
            return;
        }
        self.untold = Some(returned);
        self.catch_up();
    }

    fn catch_up(&mut self) {
        if let Some(returned) = self.untold
            && (self.control.send_credits(&mut self.local, returned) || !self.control.is_usable())
        {
            self.untold = None;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.queues().for_each(DataQueue::destroy);
        self.keep_what_is_lost();
    }
}
