//! One link: what its completions mean, and how it ends.

use super::Shared;
use super::address::End;
use super::buffers::Buffer;
use super::control::{CONTROL, Control, Said};
use super::cq::Places;
use super::failure::status;
use super::grants::{Grants, MAX_GRANTS};
use super::lane::{Lane, operation};
use super::slot::{Awaited, Slot};
use super::stripes::{STRIPED, Stripes};
use super::sys::*;
use crate::fabric::{
    Completions, Event, Lane as LaneId, LinkFailure, LinkId, LinkLimits, LinkOptions, MAX_MESSAGE,
};
use crate::wire::Immediate;
use std::sync::Arc;

/// How long, in ticks of 100 ms, a lane that was flushed without a reason is given for the reason to come.
const PATIENCE: u32 = 3;
/// How long, in ticks of 100 ms, a link that was detached may take to send what was posted, and its farewell.
const LINGER: u32 = 20;

enum Phase {
    Up,
    /// The peer takes no part any more, since this tick: what it had sent is still taken.
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
    // Queue pairs, then what they name, then their places in the completion queue.
    pub lanes: Vec<Lane>,
    pub stripes: Stripes,
    pub control: Control,
    pub local: Buffer,
    words: Buffer,
    pub grants: Grants,
    pub peer: End,
    /// For each lane, the number of returned receives that the peer is still to be told.
    untold: Vec<Option<u32>>,
    /// Some of those are there.
    is_behind: bool,
    /// A lane was flushed: why it will have been if nobody says otherwise, and since when.
    suspect: Option<(LinkFailure, u32)>,
    /// The owner has let it go, at this tick.
    pub left: Option<u32>,
    is_corked: bool,
    pub awaited: Awaited,
    pub places: Places,
    pub slot: Arc<Slot>,
    pub shared: Arc<Shared>,
}

/// What a half and a handshake make a link of.
pub(super) struct Parts {
    pub lanes: Vec<Lane>,
    pub stripes: Vec<Lane>,
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
        let Parts { lanes, stripes, control, local, words, peer, awaited, places, slot, shared } = parts;
        Link {
            limits: LinkLimits {
                lanes: options.lanes,
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
            untold: vec![None; lanes.len()],
            is_behind: false,
            lanes,
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

    /// Lanes and stripes.
    fn all_lanes(&mut self) -> impl Iterator<Item = &mut Lane> {
        self.lanes.iter_mut().chain(&mut self.stripes.lanes)
    }

    /// The lane, or behind them the stripe, of this number.
    #[inline]
    fn lane(&mut self, number: u8) -> Option<&mut Lane> {
        let number = usize::from(number);
        match number.checked_sub(self.lanes.len()) {
            None => self.lanes.get_mut(number),
            Some(stripe) => self.stripes.lanes.get_mut(stripe),
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
        !self.is_up() || self.is_behind || self.suspect.is_some() || self.left.is_some()
    }

    /// Ends the link from this side; the next poll tells. From now on the device touches nothing for it.
    #[cold]
    pub fn fail(&mut self, why: LinkFailure) {
        if matches!(self.phase, Phase::Up | Phase::Draining(..)) {
            if self.is_up() {
                self.control.part(&mut self.local, &why, std::iter::empty());
            }
            self.phase = Phase::Failing(why);
            self.all_lanes().for_each(Lane::destroy);
        }
    }

    /// A request could not be posted though there was room: its queue pair is broken. The reason comes by a completion.
    #[cold]
    pub fn refused(&mut self, lane: LaneId) {
        if self.is_up() && self.suspect.is_none() {
            let why = self.completion(lane.0, "request", IBV_WC_GENERAL_ERR, 0);
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// What is posted from now on waits for [`Link::uncork`]. Returns whether that is new.
    pub fn cork(&mut self) -> bool {
        if std::mem::replace(&mut self.is_corked, true) {
            return false;
        }
        self.all_lanes().for_each(Lane::cork);
        true
    }

    /// Posts what has waited, some requests by one call.
    pub fn uncork(&mut self) {
        if !std::mem::take(&mut self.is_corked) {
            return;
        }
        let broken = self.all_lanes().map(Lane::uncork).enumerate().filter(|(_, posted)| posted.is_err());
        if let Some(lane) = broken.map(|(lane, _)| lane).last() {
            self.refused(LaneId(lane as u8));
        }
    }

    /// Something needs more room than there is: what is done must be known to be.
    pub fn make_room(&mut self) {
        let region = self.peer.region;
        self.all_lanes().for_each(|lane| lane.flush(&region, true));
    }

    fn completion(&self, lane: u8, operation: &'static str, code: u32, vendor: u32) -> LinkFailure {
        let (name, cause) = status(code);
        LinkFailure::Completion { operation, lane, status: name, code, vendor, cause }
    }

    /// Takes a completion in.
    #[inline]
    pub fn complete(&mut self, wc: &ibv_wc, out: &mut Completions) {
        let lane = (wc.wr_id >> 8) as u8;
        let is_receive = wc.wr_id & 1 != 0;
        if wc.status != IBV_WC_SUCCESS {
            return self.failed(lane, wc);
        }
        if lane == CONTROL {
            return self.control_came(is_receive, wc);
        }
        let (id, region, leaves) = (self.id, self.peer.region, self.left.is_some());
        let Some(of) = self.lane(lane) else { return };
        if of.pair().is_none() {
            return;
        }
        if !is_receive {
            of.done(id, out);
            of.flush(&region, leaves);
            return;
        }
        let Some((place, number)) = of.received() else { return };
        if let Some(stripe) = usize::from(lane).checked_sub(self.lanes.len()) {
            return self.part_came(stripe, wc, out);
        }
        if wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM {
            match Immediate::from_bits(u32::from_be(wc.imm_data)) {
                Ok(immediate) => {
                    let first = self.peer.first_total(lane);
                    let total = self.words.take_word(first + number as usize);
                    let bytes = if total == 0 { u64::from(wc.byte_len) } else { total & !STRIPED };
                    if lane == LaneId::CONTROL.0 {
                        self.stripes.immediate(id, immediate, bytes, total & STRIPED != 0, out);
                    } else {
                        out.push(id, LaneId(lane), Event::Immediate { immediate, bytes });
                    }
                }
                Err(error) => return self.fail(LinkFailure::Protocol(error.to_string())),
            }
        } else {
            let len = wc.byte_len as usize;
            if len > MAX_MESSAGE {
                return self.fail(LinkFailure::Protocol(format!("a message has {len} bytes")));
            }
            // SAFETY: this receive is complete, and its place is posted again only by a later refill.
            let bytes = unsafe { self.local.bytes(place, len) };
            if lane == LaneId::CONTROL.0 {
                self.stripes.message(id, bytes, out);
            } else {
                out.push_message(id, LaneId(lane), bytes);
            }
        }
        if let Some(of) = self.lanes.get_mut(usize::from(lane)) {
            of.refill(&self.local, false);
        }
    }

    /// A part of a striped write has landed on the queue pair of this number.
    fn part_came(&mut self, stripe: usize, wc: &ibv_wc, out: &mut Completions) {
        if wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM {
            return self.fail(LinkFailure::Protocol("it sent a message where parts of writes come".into()));
        }
        let lane = &mut self.stripes.lanes[stripe];
        lane.allow_receives(1);
        lane.refill(&self.local, false);
        self.stripes.landed(self.id, stripe, out);
    }

    fn control_came(&mut self, is_receive: bool, wc: &ibv_wc) {
        if !is_receive {
            return self.control.done();
        }
        match self.control.received(&mut self.local, wc.byte_len) {
            Ok(Said::Nothing) => {}
            Ok(Said::Credits { lane, returned }) => match self.lanes.get_mut(usize::from(lane)) {
                Some(lane) => lane.returned = returned,
                None => self.fail(LinkFailure::Protocol(format!("it returned receives of lane {lane}"))),
            },
            Ok(Said::Last { lane, count }) => {
                if let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
                    lane.expected = Some(count);
                }
            }
            Ok(Said::Farewell(why)) => {
                if self.is_up() {
                    self.phase = Phase::Draining(why, self.shared.watcher.ticks());
                }
            }
            Err(why) => self.fail(LinkFailure::Protocol(why.into())),
        }
    }

    #[cold]
    fn failed(&mut self, lane: u8, wc: &ibv_wc) {
        if lane == CONTROL {
            let why = self.completion(0, "control message", wc.status, wc.vendor_err);
            if wc.status == IBV_WC_WR_FLUSH_ERR {
                self.control.flush()
            } else {
                self.control.destroy()
            }
            return self.suspected(wc, why);
        }
        if self.lane(lane).and_then(Lane::pair).is_none() {
            return;
        }
        let why = self.completion(lane, operation(wc.wr_id), wc.status, wc.vendor_err);
        self.suspected(wc, why);
    }

    fn suspected(&mut self, wc: &ibv_wc, why: LinkFailure) {
        if wc.status != IBV_WC_WR_FLUSH_ERR {
            self.fail(why);
        } else if self.suspect.is_none() {
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// Looks at what no completion tells. `emptied`: there was nothing more to poll. `events`: asynchronous events have come.
    /// Returns whether the link can be forgotten.
    pub fn look(&mut self, emptied: bool, events: bool, out: &mut Completions) -> bool {
        if self.is_behind {
            self.catch_up();
        }
        if events && self.is_up() {
            let device = &self.shared.chosen.context.name;
            let mut lanes = self.lanes.iter().chain(&self.stripes.lanes);
            let of_lanes = lanes.find_map(|lane| lane.failure(device));
            if let Some(why) = of_lanes.or_else(|| self.control.failure(device)) {
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
                self.all_lanes().for_each(Lane::destroy);
                self.go_down(why, out);
            }
            _ => {}
        }
        self.left.is_some_and(|since| self.take_leave(ticks.wrapping_sub(since)))
    }

    /// Whether everything has come that the peer will have sent.
    fn has_all(&self) -> bool {
        self.lanes.iter().all(Lane::has_all) && self.stripes.is_settled()
    }

    #[cold]
    fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
        let id = self.id;
        self.all_lanes().for_each(|lane| lane.fail_all(id, out));
        self.keep_what_is_lost();
        self.suspect = None;
        self.phase = Phase::Down;
        out.push(self.id, LaneId::CONTROL, Event::Down(why));
    }

    /// Where a queue pair could not be stopped, the peer may write as long as this process lives: nobody else may get that.
    fn keep_what_is_lost(&mut self) {
        if self.all_lanes().any(|lane| lane.is_lost) {
            std::mem::forget((std::mem::take(&mut self.grants), Arc::clone(&self.shared)));
            self.local.keep();
            self.words.keep();
        }
    }

    /// What a link that was detached still has to do. Returns whether it is over.
    fn take_leave(&mut self, ticks: u32) -> bool {
        if self.is_up() {
            // At once: it may be that nobody polls for a while.
            let counts = self.lanes.iter().map(|lane| lane.consuming);
            self.control.part(&mut self.local, &LinkFailure::Closed, counts);
            self.make_room();
            if ticks <= LINGER && !self.all_lanes().all(|lane| lane.is_idle()) {
                return false;
            }
        }
        !self.control.parting || ticks > LINGER
    }

    /// Lets the peer know of returned receives, now or as soon as there is room.
    pub fn publish_credits(&mut self, lane: LaneId, returned: u32) {
        let index = usize::from(lane.0);
        let Some(of) = self.lanes.get_mut(index) else { return };
        // Whoever is told of receives must find them.
        of.refill(&self.local, true);
        if lane == LaneId::CONTROL {
            for stripe in &mut self.stripes.lanes {
                stripe.refill(&self.local, true);
            }
        }
        if !self.is_up() {
            return;
        }
        self.untold[index] = Some(returned);
        self.catch_up();
    }

    fn catch_up(&mut self) {
        self.is_behind = false;
        for (lane, untold) in self.untold.iter_mut().enumerate() {
            if let Some(returned) = *untold {
                if self.control.send_credits(&mut self.local, lane as u8, returned) {
                    *untold = None;
                } else {
                    self.is_behind = self.control.is_usable();
                }
            }
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.all_lanes().for_each(Lane::destroy);
        self.keep_what_is_lost();
    }
}
