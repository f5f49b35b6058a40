//! One side of a rail, while a link is made.

use super::VerbsShared;
use super::address::{PingTarget, RailAddress, RemoteRegion};
use super::buffers::LinkBuffer;
use super::chosen::PortAddress;
use super::context::ProtectionDomain;
use super::control::{self, CONTROL, ControlQueue};
use super::cq::CqPlaces;
use super::data_queue::{self, DataQueue, RemoteAddr, SPARE};
use super::device::Gid;
use super::endpoint::{not_posted, random};
use super::failover::Backup;
use super::failure::{peer, status};
use super::port_resources::{PendingLink, PortResources};
use super::qp::QueuePair;
use super::rails::LinkRail;
use super::sys::*;
use crate::fabric::{FabricError, FabricKind, LinkId};
use std::ffi::c_int;
use std::time::Duration;

/// The number of the backup's queue on the rail at place 0, behind those of all other queues.
const BACKUP: u8 = 128;

/// The rights of the peer on a data queue pair.
const POOL_ACCESS: c_int = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

/// This side of a rail, before the peer's address is known.
pub(super) struct RailEndpoint {
    // Dropped in this order: queue pairs, the memory that they name, their places in the completion
    // queue.
    pairs: Vec<QueuePair>,
    backup: Option<QueuePair>,
    local: LinkBuffer,
    words: LinkBuffer,
    places: CqPlaces,
    device: usize,
    /// Where the port is.
    pub place: PortAddress,
    pub own: RailAddress,
}

/// Where the pieces of a rail's buffer are: the control queue pair's, then each data queue's and
/// the backup's, last the ping to be sent.
fn places_of(queue: usize, depth: u32) -> usize {
    control::PLACE_BYTES.next_multiple_of(64) + queue * data_queue::bytes_of_places(depth)
}

/// Bytes of the buffers of a rail: its own, and the words that the peer writes. `data_queues`: with
/// a backup.
fn buffer_bytes(data_queues: usize, depth: u32) -> [usize; 2] {
    [places_of(data_queues, depth) + 8, 8 * (data_queues + depth as usize)]
}

/// Bytes that one link locks on each device. `data_queues`: with a backup.
pub(crate) fn link_bytes(data_queues: u8, depth: u32) -> u64 {
    buffer_bytes(data_queues.into(), depth).into_iter().map(|len| LinkBuffer::size(len) as u64).sum()
}

impl RailEndpoint {
    /// On the device at this place. It has `data_queues` queue pairs for data, one more if
    /// `has_backup`, and takes `places` places of a completion queue.
    pub fn new(
        shared: &VerbsShared,
        resources: &PortResources,
        device: usize,
        places: u32,
        depth: u32,
        (data_queues, has_backup): (u8, bool),
    ) -> Result<Self, FabricError> {
        let of_device = &shared.devices[device];
        let chosen = &of_device.chosen;
        let place = chosen.address()?;
        let places = resources.reserve(device, places)?;
        // Of this link alone: this thread uses it until the link is made, and then the port's.
        let domain = ProtectionDomain::for_one_thread(&of_device.domain);
        let make =
            |room, rights| QueuePair::new(&domain, &places.queue, &shared.watcher, room, rights, chosen);
        let mut pairs = vec![make(control::ROOM, IBV_ACCESS_LOCAL_WRITE)?];
        let for_data = || make([depth + SPARE, depth], POOL_ACCESS);
        for _ in 0..data_queues {
            pairs.push(for_data()?);
        }
        let backup = has_backup.then(for_data).transpose()?;
        let data_queues = usize::from(data_queues) + usize::from(has_backup);
        let [own_bytes, word_bytes] = buffer_bytes(data_queues, depth);
        let local = LinkBuffer::new(&of_device.domain, own_bytes, false)?;
        let words = LinkBuffer::new(&of_device.domain, word_bytes, true)?;
        let psn = || random().map(|bytes| u32::from_le_bytes(bytes) & 0xFF_FFFF);
        let number = |pair: &QueuePair| Ok::<_, FabricError>((pair.number, psn()?));
        let numbers = pairs.iter().map(number).collect::<Result<Vec<_>, _>>()?;
        let token = PingTarget::token(u64::from_le_bytes(random()?));
        let reads = chosen.context.attr().max_qp_rd_atom.clamp(1, 255);
        let rkey = of_device.pool_key(&shared.options);
        let own = RailAddress {
            number: chosen.choice.rail,
            is_far: !chosen.choice.is_near,
            megabits: place.megabits,
            gid_kind: chosen.gid_kind,
            global: chosen.global,
            lid: place.lid,
            gid: place.gid,
            mtu: place.mtu,
            reads: u8::try_from(reads).unwrap_or(1),
            region: RemoteRegion { id: shared.region_id, base: shared.base, rkey },
            hello: PingTarget { addr: words.piece(0, 8).addr, rkey: words.rkey(), token },
            pairs: numbers,
            backup: backup.as_ref().map(number).transpose()?,
        };
        Ok(RailEndpoint { pairs, backup, local, words, places, device, place, own })
    }

    /// The rail with the peer's end. It is the one at `place` among the common ones, and its queue
    /// pairs for data have the numbers from `first` on. `is_alone`: it is the only rail.
    pub fn begin(
        mut self,
        mut peer: RailAddress,
        link: LinkId,
        (place, is_alone): (usize, bool),
        first: u8,
        depth: u32,
        shared: &VerbsShared,
    ) -> ConnectingRail {
        let stripes = self.own.stripes().min(peer.stripes());
        self.own.keep_stripes(stripes);
        peer.keep_stripes(stripes);
        self.pairs.truncate(peer.pairs.len());
        let mut pairs = self.pairs.drain(..);
        let Some(of_control) = pairs.next() else { unreachable!("the control queue pair is always made") };
        let signal_every = shared.options.signal_every;
        let chosen = &shared.devices[self.device].chosen;
        let (gid_kind, gid_index) = (chosen.gid_kind, self.place.gid_index);
        let queue = |at: usize, number: u8, pair: QueuePair| {
            DataQueue::new(pair, link, number, depth, places_of(at, depth), signal_every)
        };
        let queues: Vec<_> = pairs.enumerate().map(|(at, pair)| queue(at, first + at as u8, pair)).collect();
        let backup = self.backup.take().filter(|_| !is_alone && peer.backup.is_some());
        ConnectingRail {
            // There are few rails.
            backup: backup.map(|pair| queue(queues.len(), BACKUP + place as u8, pair)),
            queues,
            control: ControlQueue::new(of_control, link, CONTROL - place as u8, 0),
            local: self.local,
            words: self.words,
            places: self.places,
            device: self.device,
            place: self.place,
            own: self.own,
            peer,
            depth,
            failure: None,
            port: format!("{} port {}, {gid_kind} GID index {gid_index}", chosen.context.name, chosen.port),
        }
    }
}

/// A rail that is being connected.
pub(super) struct ConnectingRail {
    // Dropped in this order: queue pairs, the memory that they name, their places in the completion
    // queue.
    pub queues: Vec<DataQueue>,
    /// The main queue, if the first rail is lost. No ping comes on it.
    backup: Option<DataQueue>,
    pub control: ControlQueue,
    pub local: LinkBuffer,
    pub words: LinkBuffer,
    pub places: CqPlaces,
    pub device: usize,
    place: PortAddress,
    own: RailAddress,
    pub peer: RailAddress,
    depth: u32,
    /// Why it does not work.
    pub failure: Option<FabricError>,
    /// This side's port, for messages.
    port: String,
}

impl ConnectingRail {
    /// Posts receives, and moves each queue pair to RTS.
    pub fn reach(&mut self, shared: &VerbsShared, receives: u32) {
        let done = self.post_receives(receives).and_then(|()| self.connect(shared));
        self.failure = done.err();
    }

    /// Posts the receives that the peer may consume at once.
    fn post_receives(&mut self, receives: u32) -> Result<(), FabricError> {
        for queue in &mut self.queues {
            // The parts of striped writes are no receives of the link's owner.
            queue.allow_receives(if queue.number() == 0 { receives.min(self.depth) } else { self.depth });
        }
        let mut queues = self.queues.iter_mut();
        match self.control.post_receives(&self.local) && queues.all(|queue| queue.refill(&self.local, true)) {
            true => Ok(()),
            false => Err(not_posted("receives for the peer")),
        }
    }

    fn connect(&mut self, shared: &VerbsShared) -> Result<(), FabricError> {
        let (chosen, options) = (&shared.devices[self.device].chosen, &shared.options);
        let pairs = self.control.pair().into_iter().chain(self.queues.iter_mut().flat_map(DataQueue::pair));
        let numbers = self.own.pairs.iter().chain(&self.own.backup);
        let of_peer = self.peer.pairs.iter().chain(&self.peer.backup);
        let pairs = pairs.chain(self.backup.iter_mut().flat_map(DataQueue::pair));
        for ((pair, own), theirs) in pairs.zip(numbers).zip(of_peer) {
            pair.connect(chosen, &self.place, options, own.1, &self.peer, *theirs)?;
        }
        Ok(())
    }

    /// Writes the peer's token to its word for each queue pair for data, with the place of the rail
    /// that becomes the first one.
    pub fn ping(&mut self, first: usize) {
        if self.failure.is_some() {
            return;
        }
        let at = places_of(self.queues.len() + usize::from(self.backup.is_some()), self.depth);
        let target = self.peer.hello;
        self.local.write(at, &target.ping(first).to_le_bytes());
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let there = RemoteAddr { addr: target.addr.wrapping_add(8 * index as u64), rkey: target.rkey };
            if queue.post_ping(self.local.piece(at, 8), there).is_err() {
                self.failure = Some(not_posted("a ping to the peer"));
                return;
            }
        }
    }

    /// The queue pairs on which no ping has come.
    fn unpinged(&self) -> usize {
        let is_missing = |at: &usize| self.own.hello.read(self.words.look(*at)).is_none();
        (0..self.queues.len()).filter(is_missing).count()
    }

    /// Whether pings have come on all queue pairs.
    pub fn is_pinged(&self) -> bool {
        self.failure.is_none() && self.unpinged() == 0
    }

    /// The place of the rail that the peer's ping makes the first one.
    pub fn first_of_peer(&self) -> Option<usize> {
        self.own.hello.read(self.words.look(0))
    }

    /// Looks whether a ping of this side has failed.
    pub fn look_for_failure(&mut self, awaited: &PendingLink) {
        if self.failure.is_some() || self.unpinged() == 0 {
            return;
        }
        let first = self.queues.first().map_or(0, DataQueue::number);
        if let Some(wc) = awaited.failed(first..first + self.queues.len() as u8) {
            let (name, cause) = status(wc.status);
            self.failure = Some(peer(format!(
                "a ping to it failed: {name} (error {}, vendor's {:#x}): usually {cause}",
                wc.status, wc.vendor_err
            )));
        }
    }

    /// Waits no longer for pings.
    pub fn give_up(&mut self, after: Duration) {
        let missing = self.unpinged();
        if self.failure.is_none() && missing > 0 {
            self.failure = Some(FabricError::Timeout {
                fabric: FabricKind::Verbs,
                tried: format!(
                    "waiting for the peer's ping on {missing} of {} queue pairs of {}",
                    self.queues.len(),
                    self.port
                ),
                after,
            });
        }
    }

    /// Megabits per second between both ends; 0 if one of them does not say.
    pub fn megabits(&self) -> u32 {
        self.own.megabits.min(self.peer.megabits)
    }

    pub fn gid(&self) -> Gid {
        Gid(self.own.gid.raw)
    }

    /// What a link keeps of a rail besides its first one. Its queue pairs for data were taken.
    pub fn into_link_rail(self, listed_at: usize) -> LinkRail {
        debug_assert!(self.queues.is_empty());
        let gid = self.gid();
        let ConnectingRail { backup, control, local, words, places, device, peer, .. } = self;
        let backup = backup.map(|main| Backup { main, control, control_messages: 0 });
        LinkRail { backup, local, words, device, listed_at, gid, peer, is_lost: false, places }
    }
}
