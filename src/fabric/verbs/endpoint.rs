//! How a link is made. Queue pairs go to INIT, callers swap the addresses, and receives are posted.
//! Then come RTR, RTS, and a ping in both directions on each queue pair that carries data.
//!
//! A ping writes eight bytes into a word of the other side. The other side chose both in its
//! address and looks at the word, so a ping needs no completion. A ping that arrives shows that the
//! queue pair carries writes to this very endpoint. The acceptor pings when it was pinged: from
//! then on the initiator's queue pairs are known to accept writes.
//!
//! With several rails, the acceptor waits a moment for the pings of all of them. The first one that
//! works becomes the link's first rail, and its pings say so. Rails that do not work are lost from
//! the start.
#![allow(clippy::disallowed_methods)] // making a link may wait

use super::VerbsShared;
use super::address::LinkAddress;
use super::control;
use super::data_queue::SPARE;
use super::device::MAX_RAILS;
use super::failure::{os, peer};
use super::link::{VerbsLinkInner, VerbsLinkParts};
use super::options::refuse;
use super::port::VerbsLink;
use super::port_resources::{PendingLink, PortResources};
use super::rail_endpoint::{ConnectingRail, RailEndpoint};
use super::rails::LinkDevices;
use super::stripes::Stripe;
use crate::fabric::{Endpoint, FabricError, LinkOptions, Role};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two polls for a ping.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How long after the first rail is known to work the others are waited for, at most.
const RAIL_TIMEOUT: Duration = Duration::from_secs(2);

/// One side of a link that is not connected yet.
pub struct VerbsEndpoint {
    // Before the rest, as it has the queue pairs.
    rails: Vec<RailEndpoint>,
    awaited: PendingLink,
    resources: Arc<PortResources>,
    shared: Arc<VerbsShared>,
    options: LinkOptions,
    own: LinkAddress,
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

pub(super) fn not_posted(what: &str) -> FabricError {
    let error = std::io::Error::other("the driver refused it");
    os(format!("posting {what}"), error, "see the kernel's log (`dmesg`)")
}

/// Places that a link takes of the completion queues of each device. `data_queues`: with a backup.
pub(crate) fn link_completions(data_queues: u8, depth: u32) -> u64 {
    let of_control: u32 = control::ROOM.iter().sum();
    u64::from(data_queues) * (2 * u64::from(depth) + u64::from(SPARE)) + u64::from(of_control)
}

impl VerbsEndpoint {
    pub(super) fn new(
        shared: &Arc<VerbsShared>,
        port: usize,
        options: &LinkOptions,
    ) -> Result<Self, FabricError> {
        let LinkOptions { depth, receives: _, generation } = *options;
        let max_qp_wr = shared.devices.iter().map(|device| device.chosen.context.attr().max_qp_wr);
        let most = u32::try_from(max_qp_wr.min().unwrap_or(0)).unwrap_or(0).saturating_sub(SPARE);
        if depth == 0 || depth > most {
            let allowed = "1 to 4 less than the device's max_qp_wr (`ibv_devinfo -v`)";
            return Err(refuse("depth", depth.into(), allowed));
        }
        // A striped write takes two requests of the main queue: its length and its last part. A
        // memory window is of one queue pair.
        let may_stripe = depth > 1 && !shared.options.memory_windows;
        let data_queues = if may_stripe { shared.options.qps_per_peer } else { 1 };
        // The further rails of a link have backups of the first one.
        let has_backup = may_stripe && shared.devices.len() > 1;
        let places = u32::try_from(link_completions(data_queues + u8::from(has_backup), depth))
            .map_err(|_| refuse("depth", depth.into(), "so many that all queues have less than 2^32"))?;
        let resources = shared.ports.get(port, &shared.watcher)?;
        let make = |device| {
            let queues = (data_queues, has_backup);
            RailEndpoint::new(shared, &resources, device, places, depth, queues)
        };
        let rails = working_rails(shared, make)?;
        let own = LinkAddress {
            generation,
            depth,
            most_rails: if may_stripe { MAX_RAILS as u8 } else { 1 },
            rails: rails.iter().map(|rail| rail.own.clone()).collect(),
        };
        let address = own.to_bytes();
        Ok(VerbsEndpoint {
            rails,
            awaited: resources.await_link(),
            resources,
            shared: Arc::clone(shared),
            options: options.clone(),
            own,
            address,
        })
    }
}

/// The rails of the devices that work. Of several devices those are left out whose port is down.
///
/// # Errors
/// If there is none: why the first one does not work.
fn working_rails(
    shared: &VerbsShared,
    make: impl Fn(usize) -> Result<RailEndpoint, FabricError>,
) -> Result<Vec<RailEndpoint>, FabricError> {
    let is_alone = shared.devices.len() == 1;
    let (mut rails, mut refused) = (Vec::new(), Vec::new());
    for at in 0..shared.devices.len() {
        match make(at) {
            Ok(rail) if is_alone || rail.place.is_active => rails.push(rail),
            Ok(_) => {}
            Err(error) => refused.push(error),
        }
    }
    match (rails.is_empty(), refused.is_empty()) {
        (false, _) => Ok(rails),
        (true, false) => Err(refused.swap_remove(0)),
        // All ports are down: as with one device, the link is made once one is up.
        (true, true) => Ok(vec![make(0)?]),
    }
}

impl Endpoint for VerbsEndpoint {
    type Link = VerbsLink;

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(mut self, role: Role, peer: &[u8], timeout: Duration) -> Result<VerbsLink, FabricError> {
        let start = Instant::now();
        let theirs = LinkAddress::from_bytes(peer)?;
        let common = self.own.common(&theirs)?;
        // Both sides compute the same value: the limit of the smaller device.
        self.options.depth = self.own.depth.min(theirs.depth);
        let mut own: Vec<_> = self.rails.drain(..).map(Some).collect();
        let mut first_queue = 0;
        let mut rails = Vec::new();
        let is_alone = common.len() == 1;
        for (place, (at, of_peer)) in common.into_iter().enumerate() {
            let Some(rail) = own[at].take() else { unreachable!("each rail is common once") };
            let of_peer = theirs.rails[of_peer].clone();
            let depth = self.options.depth;
            let place = (place, is_alone);
            let rail = rail.begin(of_peer, self.awaited.link, place, first_queue, depth, &self.shared);
            first_queue += rail.queues.len() as u8;
            rails.push(rail);
        }
        drop(own);
        rails.iter_mut().for_each(|rail| rail.reach(&self.shared, self.options.receives));
        if role == Role::Initiator {
            rails.iter_mut().for_each(|rail| rail.ping(0));
        }
        let first = self.wait(&mut rails, role, start, timeout)?;
        if role == Role::Acceptor {
            rails.iter_mut().for_each(|rail| rail.ping(first));
        }
        self.link(rails, first)
    }
}

impl VerbsEndpoint {
    /// Waits until the peer has written this side's token on each queue pair, or on those of some
    /// rails and then no others. Returns the place of the rail that becomes the first.
    fn wait(
        &self,
        rails: &mut [ConnectingRail],
        role: Role,
        start: Instant,
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        let mut first_works_since = None;
        loop {
            rails.iter_mut().for_each(|rail| rail.look_for_failure(&self.awaited));
            // Before the look for a rail that works: a ping may come in between.
            let is_undecided = rails.iter().any(|rail| rail.failure.is_none() && !rail.is_pinged());
            let works = rails.iter().position(|rail| rail.is_pinged());
            if works.is_some() {
                first_works_since.get_or_insert_with(Instant::now);
            }
            let is_late = start.elapsed() >= timeout
                || first_works_since.is_some_and(|since: Instant| since.elapsed() >= RAIL_TIMEOUT);
            if is_undecided && !is_late {
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            let after = if start.elapsed() >= timeout { timeout } else { RAIL_TIMEOUT };
            rails.iter_mut().for_each(|rail| rail.give_up(after));
            // The acceptor has chosen.
            let chosen = match (role, works) {
                (Role::Initiator, Some(at)) => rails[at].first_of_peer(),
                (_, works) => works,
            };
            let chosen = chosen.filter(|at| rails.get(*at).is_some_and(|rail| rail.failure.is_none()));
            let failures = rails.iter_mut().filter_map(|rail| rail.failure.take_if(|_| chosen.is_none()));
            return match (chosen, failures.into_iter().next()) {
                (Some(chosen), _) => Ok(chosen),
                (None, Some(error)) => Err(error),
                (None, None) => Err(peer("its ping names a first rail that this side does not have")),
            };
        }
    }

    /// The link whose first rail is the one at this place.
    fn link(self, mut rails: Vec<ConnectingRail>, first: usize) -> Result<VerbsLink, FabricError> {
        let VerbsEndpoint { awaited, resources: port, shared, options, .. } = self;
        let depth = options.depth;
        let speeds_are_known = rails.iter().all(|rail| rail.megabits() > 0);
        let mut main_rail = rails.remove(first);
        if let Some(error) = main_rail.failure.take() {
            return Err(error);
        }
        let weight_of = |rail: &ConnectingRail| {
            let speed = if speeds_are_known { u64::from(rail.megabits()) } else { 1 };
            // Each of the queue pairs of a rail gets the same.
            ((speed << 8) / rail.queues.len() as u64).max(1)
        };
        let weight = weight_of(&main_rail);
        let mut queues = main_rail.queues.drain(..);
        let Some(mut main) = queues.next() else { unreachable!("an address has a data queue") };
        let has_rails = !rails.is_empty();
        if has_rails {
            main.keep_requests();
        }
        let stripe =
            |queue, rail, weight| Stripe::new(queue, rail, weight, if has_rails { depth } else { 0 });
        let mut stripes: Vec<_> = queues.map(|queue| stripe(queue, None, weight)).collect();
        let name = |rail: &ConnectingRail| shared.devices[rail.device].name().to_owned();
        let names = std::iter::once(name(&main_rail)).chain(rails.iter().map(name)).collect();
        let mut lost = Vec::new();
        let mut others = Vec::new();
        for (at, mut rail) in rails.into_iter().enumerate() {
            let weight = weight_of(&rail);
            stripes.extend(rail.queues.drain(..).map(|queue| stripe(queue, Some(at), weight)));
            lost.extend(rail.failure.take().map(|why| (at, why)));
            others.push(rail.into_link_rail(at + 1));
        }
        let parts = VerbsLinkParts {
            gid: main_rail.gid(),
            main,
            stripes,
            control: main_rail.control,
            local: main_rail.local,
            words: main_rail.words,
            rails: others,
            peer: main_rail.peer,
            device: main_rail.device,
            weight,
            devices: LinkDevices::new(names),
            awaited,
            places: main_rail.places,
            port,
            shared,
        };
        let mut link = VerbsLinkInner::new(&options, parts);
        lost.into_iter().for_each(|(at, why)| link.lose_rail(at, &why));
        Ok(VerbsLink(Box::new(link)))
    }
}
