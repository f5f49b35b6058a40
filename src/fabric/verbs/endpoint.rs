//! How a link is made. Queue pairs go to INIT, callers swap the addresses, and receives are posted.
//! Then come RTR, RTS, and a ping in both directions on each queue pair that carries data.
//!
//! A ping writes eight bytes into a word of the other side. The other side chose both in its
//! address and looks at the word, so a ping needs no completion. A ping that arrives shows that the
//! queue pair carries writes to this very endpoint. The acceptor pings when it was pinged: from
//! then on the initiator's queue pairs are known to accept writes.
#![allow(clippy::disallowed_methods)] // making a link may wait

use super::VerbsShared;
use super::address::{EndpointInfo, PingTarget, RemoteRegion};
use super::buffers::LinkBuffer;
use super::chosen::PortAddress;
use super::context::ProtectionDomain;
use super::control::{self, ControlQueue};
use super::cq::CqPlaces;
use super::data_queue::{self, DataQueue, RemoteAddr, SPARE};
use super::failure::{os, peer, status};
use super::link::{VerbsLinkInner, VerbsLinkParts};
use super::options::refuse;
use super::port::VerbsLink;
use super::port_resources::{PendingLink, PortResources};
use super::qp::QueuePair;
use super::sys::*;
use crate::fabric::{Endpoint, FabricError, FabricKind, LinkOptions, Role};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The rights of the peer on a data queue pair.
const POOL_ACCESS: c_int = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
/// Time between two polls for a ping.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One side of a link that is not connected yet.
pub struct VerbsEndpoint {
    // Dropped in this order: queue pairs, the memory that they name, their places in the completion
    // queue.
    pairs: Vec<QueuePair>,
    local: LinkBuffer,
    words: LinkBuffer,
    awaited: PendingLink,
    places: CqPlaces,
    resources: Arc<PortResources>,
    shared: Arc<VerbsShared>,
    options: LinkOptions,
    /// Where the port is.
    place: PortAddress,
    own: EndpointInfo,
    address: Vec<u8>,
}

pub(super) fn random<const N: usize>() -> Result<[u8; N], FabricError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        os(
            "drawing random numbers",
            std::io::Error::other(error.to_string()),
            "let the process call getrandom(2)",
        )
    })?;
    Ok(bytes)
}

fn not_posted(what: &str) -> FabricError {
    let error = std::io::Error::other("the driver refused it");
    os(format!("posting {what}"), error, "see the kernel's log (`dmesg`)")
}

/// Where the pieces of a link's buffer are: the control queue pair's, then each data queue's, last
/// the ping to be sent.
fn places_of(queue: usize, depth: u32) -> usize {
    control::PLACE_BYTES.next_multiple_of(64) + queue * data_queue::bytes_of_places(depth)
}

impl VerbsEndpoint {
    pub(super) fn new(
        shared: &Arc<VerbsShared>,
        port: usize,
        options: &LinkOptions,
    ) -> Result<Self, FabricError> {
        let LinkOptions { depth, receives: _, generation } = *options;
        // A striped write takes two requests of the main queue: its length and its last part. A
        // memory window is of one queue pair.
        let may_stripe = depth > 1 && !shared.options.memory_windows;
        let data_queues = if may_stripe { shared.options.qps_per_peer } else { 1 };
        let device = &shared.chosen.context;
        let most = u32::try_from(device.attr().max_qp_wr).unwrap_or(0).saturating_sub(SPARE);
        if depth == 0 || depth > most {
            let allowed = "1 to 4 less than the device's max_qp_wr (`ibv_devinfo -v`)";
            return Err(refuse("depth", depth.into(), allowed));
        }
        let place = shared.chosen.address()?;
        let resources = shared.ports.get(port, &shared.domain, &shared.watcher)?;
        let places = (u32::from(data_queues))
            .checked_mul(2 * depth + SPARE)
            .and_then(|places| places.checked_add(control::ROOM.iter().sum()))
            .ok_or_else(|| refuse("depth", depth.into(), "so many that all queues have less than 2^32"))?;
        let places = resources.reserve(places)?;
        // Of this link alone: this thread uses it until the link is made, and then the port's.
        let domain = ProtectionDomain::for_one_thread(&shared.domain);
        let make = |room, rights| {
            QueuePair::new(&domain, &places.queue, &shared.watcher, room, rights, &shared.chosen)
        };
        let mut pairs = vec![make(control::ROOM, IBV_ACCESS_LOCAL_WRITE)?];
        for _ in 0..data_queues {
            pairs.push(make([depth + SPARE, depth], POOL_ACCESS)?);
        }
        let local = LinkBuffer::new(&shared.domain, places_of(usize::from(data_queues), depth) + 8, false)?;
        let words = LinkBuffer::new(&shared.domain, 8 * (usize::from(data_queues) + depth as usize), true)?;
        let token = u64::from_le_bytes(random()?) | 1; // a word that nobody wrote is 0
        let psn = || random().map(|bytes| u32::from_le_bytes(bytes) & 0xFF_FFFF);
        let numbers =
            pairs.iter().map(|pair| Ok((pair.number, psn()?))).collect::<Result<Vec<_>, FabricError>>()?;
        let chosen = &shared.chosen;
        let own = EndpointInfo {
            gid_kind: chosen.gid_kind,
            global: chosen.global,
            lid: place.lid,
            gid: place.gid,
            mtu: place.mtu,
            reads: u8::try_from(device.attr().max_qp_rd_atom.clamp(1, 255)).unwrap_or(1),
            depth,
            generation,
            region: RemoteRegion { id: shared.region_id, base: shared.base, rkey: shared.pool_key() },
            hello: PingTarget { addr: words.piece(0, 8).addr, rkey: words.rkey(), token },
            pairs: numbers,
        };
        let address = own.to_bytes();
        Ok(VerbsEndpoint {
            pairs,
            local,
            words,
            awaited: resources.await_link(),
            places,
            resources,
            shared: Arc::clone(shared),
            options: options.clone(),
            place,
            own,
            address,
        })
    }

    /// Moves each queue pair to RTS.
    fn reach(
        &self,
        control: &mut ControlQueue,
        queues: &mut [DataQueue],
        peer: &EndpointInfo,
    ) -> Result<(), FabricError> {
        let (chosen, options) = (&self.shared.chosen, &self.shared.options);
        let pairs = control.pair().into_iter().chain(queues.iter_mut().flat_map(DataQueue::pair));
        for (at, pair) in pairs.enumerate() {
            pair.connect(chosen, &self.place, options, self.own.pairs[at].1, peer, peer.pairs[at])?;
        }
        Ok(())
    }

    /// Writes the peer's token to its word for each queue pair for data.
    fn ping(&mut self, queues: &mut [DataQueue], peer: &EndpointInfo) -> Result<(), FabricError> {
        let at = places_of(queues.len(), self.options.depth);
        self.local.write(at, &peer.hello.token.to_le_bytes());
        for (index, queue) in queues.iter_mut().enumerate() {
            let there =
                RemoteAddr { addr: peer.hello.addr.wrapping_add(8 * index as u64), rkey: peer.hello.rkey };
            if queue.post_ping(self.local.piece(at, 8), there).is_err() {
                return Err(not_posted("a ping to the peer"));
            }
        }
        Ok(())
    }

    /// Waits until the peer has written this side's token on `count` queue pairs.
    fn wait(&self, pairs: usize, start: Instant, timeout: Duration) -> Result<(), FabricError> {
        let token = self.own.hello.token;
        let missing = || (0..pairs).filter(|at| self.words.look(*at) != token);
        while missing().next().is_some() {
            if let Some(wc) = self.awaited.failed() {
                let (name, cause) = status(wc.status);
                return Err(peer(format!(
                    "a ping to it failed: {name} (error {}, vendor's {:#x}): usually {cause}",
                    wc.status, wc.vendor_err
                )));
            }
            if start.elapsed() >= timeout {
                let (chosen, count) = (&self.shared.chosen, missing().count());
                return Err(FabricError::Timeout {
                    fabric: FabricKind::Verbs,
                    tried: format!(
                        "waiting for the peer's ping on {count} of {pairs} queue pairs of {} port {}, {} \
                         GID index {}",
                        chosen.context.name, chosen.port, chosen.gid_kind, self.place.gid_index
                    ),
                    after: timeout,
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl VerbsEndpoint {
    /// Turns the queue pairs into the link's control queue and its data queues, the main one first.
    fn queues(&mut self) -> (ControlQueue, Vec<DataQueue>) {
        let (options, link) = (&self.options, self.awaited.link);
        let mut pairs = self.pairs.drain(..);
        let Some(first) = pairs.next() else { unreachable!("the control queue pair is always made") };
        let queues = pairs.enumerate().map(|(at, pair)| {
            let places = places_of(at, options.depth);
            DataQueue::new(pair, link, at as u8, options.depth, places, self.shared.options.signal_every)
        });
        (ControlQueue::new(first, link, 0), queues.collect())
    }

    /// Posts the receives that the peer may consume at once. `false` if the device refuses them.
    fn post_receives(&self, control: &mut ControlQueue, queues: &mut [DataQueue]) -> bool {
        let LinkOptions { depth, receives, .. } = self.options;
        for (at, queue) in queues.iter_mut().enumerate() {
            queue.allow_receives(if at == 0 { receives.min(depth) } else { depth });
        }
        control.post_receives(&self.local) && queues.iter_mut().all(|queue| queue.refill(&self.local, true))
    }
}

impl Endpoint for VerbsEndpoint {
    type Link = VerbsLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(mut self, role: Role, peer: &[u8], timeout: Duration) -> Result<VerbsLink, FabricError> {
        let start = Instant::now();
        let mut peer = EndpointInfo::from_bytes(peer)?;
        peer.check_fits(&self.own)?;
        // Both sides compute the same value: the limit of the smaller device.
        self.options.depth = self.own.depth.min(peer.depth);
        peer.depth = self.options.depth;
        let stripes = self.own.stripes().min(peer.stripes());
        self.own.keep_stripes(stripes);
        peer.keep_stripes(stripes);
        self.pairs.truncate(peer.pairs.len());
        let (mut control, mut queues) = self.queues();
        if !self.post_receives(&mut control, &mut queues) {
            return Err(not_posted("receives for the peer"));
        }
        self.reach(&mut control, &mut queues, &peer)?;
        if role == Role::Initiator {
            self.ping(&mut queues, &peer)?;
        }
        self.wait(queues.len(), start, timeout)?;
        if role == Role::Acceptor {
            self.ping(&mut queues, &peer)?;
        }
        let stripes = queues.split_off(1);
        let Some(main) = queues.pop() else { unreachable!("an address has the main data queue") };
        let VerbsEndpoint { local, words, awaited, places, resources: port, shared, options, .. } = self;
        let parts =
            VerbsLinkParts { main, stripes, control, local, words, peer, awaited, places, port, shared };
        Ok(VerbsLink(Box::new(VerbsLinkInner::new(&options, parts))))
    }
}
