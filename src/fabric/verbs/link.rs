//! One link: the meaning of its completions, and its end.

use super::VerbsShared;
use super::address::RailAddress;
use super::arrivals::{Arrivals, PartSet};
use super::buffers::LinkBuffer;
use super::control::{ControlMessage, ControlQueue};
use super::cq::{CompletionQueue, CqPlaces};
use super::data_queue::DataQueue;
use super::device::Gid;
use super::failover::Failover;
use super::failure::{is_of_path, status};
use super::grants::{MAX_GRANTS, VerbsGrants};
use super::port_resources::{PendingLink, PortResources};
use super::post_list::{operation, queue_of};
use super::rails::{LinkDevices, LinkRail, buffer_of};
use super::stripes::{Stripe, Stripes};
use super::sys::*;
use super::windows::LONGEST_WINDOW;
use crate::fabric::{
    Accept, Completions, Event, LinkFailure, LinkId, LinkLimits, LinkOptions, MAX_MESSAGE, NextMessage,
    PostError,
};
use crate::memory::Tensor;
use crate::wire::Immediate;
use std::iter;
use std::sync::Arc;

/// How long, in ticks of 100 ms, a queue pair that was flushed without a reason is given for the
/// reason to come.
const CAUSE_TICKS: u32 = 3;
/// The time, in ticks of 100 ms, that a detached link has to send its posted requests and its
/// disconnect.
const DETACH_TICKS: u32 = 20;

pub(super) enum VerbsLinkPhase {
    Up,
    /// The tick in which the peer has disconnected. Its earlier sends are still delivered.
    Draining(LinkFailure, u32),
    /// This side has ended it; the next poll tells.
    Failing(LinkFailure),
    Down,
}

impl VerbsLinkPhase {
    #[inline]
    pub fn is_up(&self) -> bool {
        matches!(self, VerbsLinkPhase::Up)
    }
}

pub(super) struct VerbsLinkInner {
    pub limits: LinkLimits,
    pub id: LinkId,
    pub phase: VerbsLinkPhase,
    // Dropped in this order: queue pairs, the memory that they name, their places in the completion
    // queue.
    pub main: DataQueue,
    pub stripes: Stripes,
    pub control: ControlQueue,
    pub local: LinkBuffer,
    pub words: LinkBuffer,
    /// The rails besides the first one.
    pub rails: Vec<LinkRail>,
    pub arrivals: Arrivals,
    pub grants: VerbsGrants,
    /// The peer's end of the first rail.
    pub peer: RailAddress,
    /// The keys of the peer's pool on earlier first rails.
    pub former_keys: Vec<u32>,
    /// The place of this side's device on the first rail, its GID, and its place in
    /// [`LinkDevices`].
    pub device: usize,
    pub gid: Gid,
    pub listed_at: usize,
    /// The bit of the main queue pair in the parts of a write.
    pub main_part: u8,
    /// The share of the main queue pair in a large write: see [`Stripe::weight`].
    pub weight: u64,
    pub devices: Arc<LinkDevices>,
    /// The number of returned receives that the peer is still to be told.
    unsent_credits: Option<u32>,
    /// The first rail is lost, and another one is to become the first.
    pub failover: Option<Failover>,
    /// A queue pair was flushed: the cause unless a better one is found, and the tick.
    pub suspect: Option<(LinkFailure, u32)>,
    /// The owner has let it go, at this tick.
    pub detached_at: Option<u32>,
    /// The tick in which it had something of a lost rail left to do, since then.
    pub recovered_at: Option<u32>,
    in_batch: bool,
    pub awaited: PendingLink,
    pub places: CqPlaces,
    pub resources: Arc<PortResources>,
    pub shared: Arc<VerbsShared>,
}

/// Grants of a link at a time. With memory windows there are at most as many as the device has
/// windows.
fn most_grants(shared: &VerbsShared, device: usize) -> u32 {
    let most = MAX_GRANTS as u32;
    let windows = u32::try_from(shared.devices[device].chosen.context.attr().max_mw).unwrap_or(0);
    if shared.options.memory_windows { most.min(windows) } else { most }
}

/// The parts from which an endpoint makes a link.
pub(super) struct VerbsLinkParts {
    pub gid: Gid,
    pub main: DataQueue,
    pub stripes: Vec<Stripe>,
    pub control: ControlQueue,
    pub local: LinkBuffer,
    pub words: LinkBuffer,
    pub rails: Vec<LinkRail>,
    pub peer: RailAddress,
    pub device: usize,
    pub weight: u64,
    pub devices: Arc<LinkDevices>,
    pub awaited: PendingLink,
    pub places: CqPlaces,
    pub port: Arc<PortResources>,
    pub shared: Arc<VerbsShared>,
}

impl VerbsLinkInner {
    pub fn new(options: &LinkOptions, parts: VerbsLinkParts) -> Self {
        let VerbsLinkParts { main, stripes, control, local, words, mut rails, peer, device, .. } = parts;
        let VerbsLinkParts { gid, weight, devices, awaited, places, port, shared, .. } = parts;
        rails.iter_mut().filter_map(|rail| rail.backup.as_mut()).for_each(|it| it.main.be_backup());
        let numbers = stripes.iter().map(|stripe| stripe.queue.number());
        let has_rails = !rails.is_empty();
        let mut link = VerbsLinkInner {
            arrivals: Arrivals::new(main.number(), numbers, options.depth),
            limits: LinkLimits {
                depth: options.depth,
                receives: options.receives.min(options.depth),
                max_message: MAX_MESSAGE,
                max_inline: MAX_MESSAGE,
                // One request goes before a write of several, with its length.
                max_write: u64::from((options.depth - 1).max(1)) * u64::from(shared.max_message),
                lends: false,
                registers: true,
                grants: most_grants(&shared, device),
                max_grant: if shared.options.memory_windows { LONGEST_WINDOW } else { u64::MAX },
            },
            id: awaited.link,
            phase: VerbsLinkPhase::Up,
            unsent_credits: None,
            failover: None,
            former_keys: Vec::new(),
            gid,
            listed_at: 0,
            main_part: main.number(),
            main,
            stripes: Stripes::new(stripes, weight),
            control,
            local,
            words,
            rails,
            grants: VerbsGrants::default(),
            peer,
            device,
            weight,
            devices,
            suspect: None,
            detached_at: None,
            recovered_at: None,
            in_batch: false,
            awaited,
            places,
            resources: port,
            shared,
        };
        link.queues().for_each(|queue| queue.is_redundant = has_rails);
        link.backups().for_each(|queue| queue.is_redundant = true);
        link
    }

    /// The queue pairs for data: the main one, then the stripes.
    pub(super) fn queues(&mut self) -> impl Iterator<Item = &mut DataQueue> {
        iter::once(&mut self.main).chain(self.stripes.queues.iter_mut().map(|stripe| &mut stripe.queue))
    }

    /// The region and the key by which the peer reaches the whole pool.
    pub fn pool_key(&self) -> (u16, u32) {
        (self.shared.region_id, self.shared.devices[self.device].pool_key(&self.shared.options))
    }

    /// Where `len` bytes of a source lie and by which key the first rail's device has them: in the
    /// pool, or by themselves.
    ///
    /// # Errors
    /// If they are neither in the pool nor registered.
    #[inline]
    pub fn source(&self, source: &Tensor, len: u64) -> Result<(u64, u64, u32), PostError> {
        if len == 0 {
            return Ok((0, 0, 0));
        }
        Ok((source.bytes().as_ptr() as u64, len, self.shared.local_key(source, self.device)?))
    }

    /// The name of this side's device on the first rail.
    pub fn device_name(&self) -> &str {
        self.shared.devices[self.device].name()
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        self.phase.is_up()
    }

    /// Whether the next poll has something to say without anything new.
    pub fn has_news(&self) -> bool {
        matches!(self.phase, VerbsLinkPhase::Draining(..) | VerbsLinkPhase::Failing(_))
            || self.suspect.is_some()
            || self.stripes.is_changed
    }

    /// Whether a look is needed besides completions.
    #[inline]
    pub fn needs_service(&self) -> bool {
        !self.is_up()
            || self.unsent_credits.is_some()
            || self.suspect.is_some()
            || self.detached_at.is_some()
            || self.stripes.is_recovering
            || self.failover.is_some()
    }

    /// Ends the link from this side; the next poll tells. From now on the device touches nothing
    /// for it.
    #[cold]
    pub fn fail(&mut self, why: LinkFailure) {
        if matches!(self.phase, VerbsLinkPhase::Up | VerbsLinkPhase::Draining(..)) {
            if self.is_up() {
                self.control.disconnect(&mut self.local, &why, None);
                self.disconnect_backup(&why);
            }
            self.phase = VerbsLinkPhase::Failing(why);
            self.destroy_queues();
        }
    }

    /// Ends all queue pairs through which the peer reaches memory.
    fn destroy_queues(&mut self) {
        self.queues().for_each(DataQueue::destroy);
        self.backups().for_each(DataQueue::destroy);
    }

    fn backups(&mut self) -> impl Iterator<Item = &mut DataQueue> {
        self.rails.iter_mut().filter_map(|rail| rail.backup.as_mut()).map(|backup| &mut backup.main)
    }

    /// A request could not be posted though there was room: its queue pair is broken. The reason
    /// comes by a completion.
    #[cold]
    pub fn refused(&mut self, queue: u8) {
        if self.is_up() && self.suspect.is_none() {
            let why = self.refusal_of(queue);
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// Later requests wait for [`VerbsLinkInner::end_batch`]. Returns whether a batch began.
    pub fn begin_batch(&mut self) -> bool {
        if std::mem::replace(&mut self.in_batch, true) {
            return false;
        }
        self.queues().for_each(DataQueue::begin_batch);
        true
    }

    /// Posts the requests of the batch, several by one call.
    pub fn end_batch(&mut self) {
        if !std::mem::take(&mut self.in_batch) {
            return;
        }
        let numbered = |queue: &mut DataQueue| queue.end_batch().is_err().then(|| queue.number());
        // Only numbers are kept, so this does not allocate while all goes well.
        let broken: Vec<u8> = self.queues().filter_map(numbered).collect();
        broken.into_iter().for_each(|number| self.refused(number));
    }

    pub fn completion(&self, queue_pair: u8, operation: &'static str, code: u32, vendor: u32) -> LinkFailure {
        let (name, cause) = status(code);
        LinkFailure::Completion { operation, queue_pair, status: name, code, vendor, cause }
    }

    /// Takes a completion in.
    #[inline]
    pub fn complete(&mut self, wc: &ibv_wc, out: &mut Completions) {
        let queue = queue_of(wc.wr_id);
        let is_receive = wc.wr_id & 1 != 0;
        if wc.status != IBV_WC_SUCCESS {
            return self.failed(queue, wc);
        }
        if queue == self.control.number() {
            return self.control_came(is_receive, wc, out);
        }
        if queue != self.main.number() {
            return self.stripe_completed(queue, is_receive, wc, out);
        }
        let (id, leaves) = (self.id, self.detached_at.is_some());
        if self.main.pair().is_none() {
            return;
        }
        if !is_receive {
            self.main.done(id, out);
            self.main.flush(&self.peer.region, leaves);
            return;
        }
        let Some((place, number)) = self.main.received() else { return };
        if wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM {
            match Immediate::from_bits(u32::from_be(wc.imm_data)) {
                Ok(immediate) => {
                    let first = self.peer.first_total();
                    let total = self.words.take_word(first + number as usize);
                    let (whole, parts) = PartSet::read(total);
                    let bytes = if total == 0 { u64::from(wc.byte_len) } else { whole };
                    if !self.arrivals.knows(parts) {
                        let why = "it announced parts on queue pairs that the link does not have";
                        return self.fail(LinkFailure::Protocol(why.into()));
                    }
                    self.arrivals.immediate(id, immediate, bytes, parts, out);
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
            self.arrivals.message(id, bytes, out);
        }
        self.main.refill(&self.local, false);
    }

    /// Takes a message from the completion of its receive, if `accept` does. The completion is not
    /// handled otherwise.
    #[inline]
    pub fn take_message<R>(&mut self, wc: &ibv_wc, accept: impl Accept<R>) -> Option<R> {
        let is_message = self.main.has_received(wc.wr_id)
            && wc.status == IBV_WC_SUCCESS
            && wc.opcode == IBV_WC_RECV
            && wc.byte_len as usize <= MAX_MESSAGE;
        let is_next = self.is_up() && self.detached_at.is_none() && self.arrivals.is_complete();
        let place = self.main.next_received().filter(|_| is_message && is_next)?;
        // SAFETY: this receive is complete, and its place is posted again only by the refill below.
        let bytes = unsafe { self.local.bytes(place, wc.byte_len as usize) };
        let taken = accept.accept(NextMessage::Bytes(bytes))?;
        self.main.received();
        self.main.refill(&self.local, false);
        Some(taken)
    }

    /// A completion of a stripe came: of its requests, or of a part that has landed there.
    fn stripe_completed(&mut self, number: u8, is_receive: bool, wc: &ibv_wc, out: &mut Completions) {
        let Some(at) = self.stripe_at(number) else {
            return self.backup_completed(number, is_receive, wc);
        };
        let (id, leaves) = (self.id, self.detached_at.is_some());
        let stripe = &mut self.stripes.queues[at];
        if stripe.queue.pair().is_none() {
            return;
        }
        if !is_receive {
            let before = stripe.queue.parts_done;
            stripe.queue.done(id, out);
            stripe.forget_done(before);
            let peer = stripe.rail.map_or(&self.peer, |rail| &self.rails[rail].peer);
            return stripe.queue.flush(&peer.region, leaves);
        }
        if stripe.queue.received().is_none() {
            return;
        }
        if wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM {
            return self.fail(LinkFailure::Protocol("it sent a message where parts of writes come".into()));
        }
        stripe.queue.allow_receives(1);
        stripe.queue.refill(buffer_of(stripe.rail, &mut self.local, &mut self.rails), false);
        self.arrivals.landed(id, at, out);
    }

    fn control_came(&mut self, is_receive: bool, wc: &ibv_wc, out: &mut Completions) {
        if is_receive { self.control_received(wc.byte_len, out) } else { self.control.done() }
    }

    /// The next message of the control queue pair, of so many bytes, has come.
    pub fn control_received(&mut self, len: u32, out: &mut Completions) {
        match self.control.received(&mut self.local, len) {
            Ok(ControlMessage::Nothing) => {}
            Ok(ControlMessage::Credits { returned }) => self.main.returned = returned,
            Ok(ControlMessage::FinalCount { count }) => self.main.expected = Some(count),
            Ok(ControlMessage::Disconnect(why)) => {
                if self.is_up() {
                    self.phase = VerbsLinkPhase::Draining(why, self.shared.watcher.ticks());
                }
            }
            Ok(ControlMessage::StripeLost { stripe, landed, done }) => {
                self.stripe_lost(stripe, landed, done);
            }
            Ok(ControlMessage::PartsWritten { stripe, count }) => self.parts_written(stripe, count, out),
            Ok(ControlMessage::TakenOver { arrived, is_exact }) => self.taken_over(arrived, is_exact, out),
            Err(why) => self.fail(LinkFailure::Protocol(why.into())),
        }
    }

    #[cold]
    fn failed(&mut self, queue: u8, wc: &ibv_wc) {
        let is_receive = wc.wr_id & 1 != 0;
        if queue == self.control.number() {
            let why = self.completion(0, "control message", wc.status, wc.vendor_err);
            self.control.flush(is_receive);
            return self.suspected(wc, why);
        }
        if let Some(at) = self.backup_at(queue) {
            let why = self.completion(queue, operation(wc.wr_id), wc.status, wc.vendor_err);
            return self.lose_rail(at, &why);
        }
        let Some(of) = self.queues().find(|of| of.number() == queue) else { return };
        if of.pair().is_none() {
            return;
        }
        if is_receive {
            of.receive_flushed();
        }
        if self.stripe_at(queue).is_some_and(|at| self.stripes.queues[at].is_draining()) {
            return;
        }
        let why = self.completion(queue, operation(wc.wr_id), wc.status, wc.vendor_err);
        match self.rail_of(queue) {
            Some(rail) if is_of_path(wc.status) => self.lose_rail(rail, &why),
            _ => self.suspected(wc, why),
        }
    }

    /// A completion queue can't be polled.
    #[cold]
    pub fn broken(&mut self, queue: &Arc<CompletionQueue>, event: &'static str) {
        let cause = "the device failed: see the kernel's log (`dmesg`)";
        if Arc::ptr_eq(&self.places.queue, queue) {
            let device = self.device_name().to_owned();
            return self.lose_first_rail(LinkFailure::Device { device, event, cause });
        }
        let of_rail = |rail: &LinkRail| Arc::ptr_eq(&rail.places.queue, queue);
        if let Some(at) = self.rails.iter().position(of_rail) {
            let device = self.shared.devices[self.rails[at].device].name().to_owned();
            self.lose_rail(at, &LinkFailure::Device { device, event, cause });
        }
    }

    fn suspected(&mut self, wc: &ibv_wc, why: LinkFailure) {
        if wc.status != IBV_WC_WR_FLUSH_ERR {
            if is_of_path(wc.status) { self.lose_first_rail(why) } else { self.fail(why) }
        } else if self.suspect.is_none() && !self.is_draining() {
            self.suspect = Some((why, self.shared.watcher.ticks()));
        }
    }

    /// Handles changes without completions. `emptied`: the queues are empty. `events`: asynchronous
    /// events have arrived. Returns whether the link can be dropped.
    pub fn service(&mut self, emptied: bool, events: bool, out: &mut Completions) -> bool {
        self.send_unsent_credits();
        if events && self.is_up() {
            // Before the first rail, so that none of them takes over that is lost, too.
            self.look_at_rails();
            let device = self.device_name();
            let of_first = self.stripes.queues.iter().filter(|stripe| stripe.rail.is_none());
            let mut queues = iter::once(&self.main).chain(of_first.map(|stripe| &stripe.queue));
            let of_data = queues.find_map(|queue| queue.failure(device));
            match of_data.or_else(|| self.control.failure(device)) {
                Some(why @ LinkFailure::Protocol(_)) => self.fail(why),
                Some(why) => self.lose_first_rail(why),
                None => {}
            }
        }
        self.go_on_over_another_rail(emptied, out);
        if self.stripes.is_recovering {
            self.recover_losses(emptied);
        }
        let ticks = self.shared.watcher.ticks();
        if let Some((why, since)) = &self.suspect
            && self.is_up()
            && ticks.wrapping_sub(*since) >= CAUSE_TICKS
        {
            let why = why.clone();
            self.lose_first_rail(why);
        }
        match &self.phase {
            VerbsLinkPhase::Failing(why) => {
                let why = why.clone();
                self.go_down(why, out);
            }
            VerbsLinkPhase::Draining(why, since)
                if emptied && self.has_all() || ticks.wrapping_sub(*since) > DETACH_TICKS =>
            {
                let why = why.clone();
                self.destroy_queues();
                self.go_down(why, out);
            }
            _ => {}
        }
        self.detached_at.is_some() && self.finish_detach()
    }

    /// Whether everything has come that the peer will have sent.
    fn has_all(&self) -> bool {
        self.main.has_all() && self.arrivals.is_complete()
    }

    #[cold]
    fn go_down(&mut self, why: LinkFailure, out: &mut Completions) {
        let id = self.id;
        self.queues().for_each(|queue| queue.fail_all(id, out));
        self.keep_what_is_lost();
        self.suspect = None;
        self.phase = VerbsLinkPhase::Down;
        out.push(self.id, Event::Down(why));
    }

    /// If a queue pair could not be stopped, the peer may write as long as this process lives, so
    /// the memory is leaked.
    fn keep_what_is_lost(&mut self) {
        if self.queues().any(|queue| queue.is_lost) || self.backups().any(|queue| queue.is_lost) {
            std::mem::forget((std::mem::take(&mut self.grants), Arc::clone(&self.shared)));
            self.local.keep();
            self.words.keep();
            for rail in &mut self.rails {
                rail.local.keep();
                rail.words.keep();
            }
        }
    }

    /// Continues a detached link. Returns whether it has ended.
    fn finish_detach(&mut self) -> bool {
        if self.is_up() && self.is_losing_in_time() {
            self.recovered_at = Some(self.shared.watcher.ticks());
            return false;
        }
        let has_time = self.has_time(DETACH_TICKS);
        if self.is_up() {
            // At once, because the port may not be polled for a while.
            let last = Some(self.main.consuming);
            self.control.disconnect(&mut self.local, &LinkFailure::Closed, last);
            self.disconnect_backup(&LinkFailure::Closed);
            if has_time && !self.is_flushed() {
                return false;
            }
        }
        let is_told = !self.control.is_disconnecting && !self.is_disconnecting_backup();
        is_told || !has_time
    }

    /// Lets the peer know of returned receives, now or as soon as there is room.
    pub fn publish_credits(&mut self, returned: u32) {
        // Receives are posted before the peer is told of them.
        self.main.refill(&self.local, true);
        for stripe in &mut self.stripes.queues {
            stripe.queue.refill(buffer_of(stripe.rail, &mut self.local, &mut self.rails), true);
        }
        if !self.is_up() {
            return;
        }
        self.unsent_credits = Some(returned);
        self.send_unsent_credits();
    }

    fn send_unsent_credits(&mut self) {
        // The receives of a queue that is stopped are posted by the one that takes over.
        if let Some(returned) = self.unsent_credits
            && !self.main.is_stopped()
            && self.control.send_credits(&mut self.local, returned)
        {
            self.unsent_credits = None;
        }
    }
}

impl Drop for VerbsLinkInner {
    fn drop(&mut self) {
        self.destroy_queues();
        self.keep_what_is_lost();
    }
}
