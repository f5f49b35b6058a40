//! A scripted bootstrap service: it links members, links them again after a loss, and reports
//! deaths.

use crate::network::Network;
use crate::process::Process;
use crate::program::{At, Settings};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tensorwire::internals::fabric::{Endpoint, Fabric, LinkOptions, Role};
use tensorwire::internals::matching::{LinkTag, LostPeer, PeerEnd, PeerIndex, PeerObserver, RemoteCommand};
use tensorwire::internals::rendezvous::Losses;
use tensorwire::internals::wire::Time;
use tensorwire::{Incarnation, LossCause};

/// Delay until a lost link is made again.
const RELINK: Duration = Duration::from_millis(1);

/// The silence bound.
const BOUND: Duration = Duration::from_secs(1);

/// Changes of links at one member that the service has not processed yet.
pub type Ends = Arc<Mutex<Vec<(PeerIndex, LinkTag)>>>;

/// Watches the links of a member: passes events to its rendezvous, and records them for the
/// bootstrap service.
pub struct Watch {
    pub losses: Arc<Losses>,
    pub ends: Ends,
}

impl PeerObserver for Watch {
    fn up(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.up(peer, tag);
    }

    fn down(&self, lost: &LostPeer) {
        self.losses.down(lost);
        self.ends.lock().expect("no panic").push((lost.peer, lost.tag));
    }

    fn failed_before_ready(&self, peer: PeerIndex, tag: LinkTag) {
        self.losses.failed_before_ready(peer, tag);
        self.ends.lock().expect("no panic").push((peer, tag));
    }
}

type Tried = Arc<Mutex<Option<Result<(), String>>>>;

enum Pair {
    /// Not linked; the service links the two from this time on.
    Apart(Time),
    /// Both sides ping each other over a new link.
    Trying([Tried; 2]),
    Linked,
}

/// The report of the end of a life, on its way to one member.
struct News {
    when: Time,
    to: Incarnation,
    about: At,
    tag: LinkTag,
}

pub struct Bootstrap {
    pairs: BTreeMap<(At, At), (u64, Pair)>,
    news: Vec<News>,
    /// The options of every link, apart from its generation.
    options: LinkOptions,
}

impl Bootstrap {
    pub fn new(settings: &Settings) -> Self {
        let options = LinkOptions { depth: settings.depth, receives: 0, generation: 0 };
        Bootstrap { pairs: BTreeMap::new(), news: Vec::new(), options }
    }

    /// Links a new life of a member with all others.
    pub fn joins(&mut self, at: At, members: usize, now: Time) {
        for other in (0..members).filter(|other| *other != at) {
            let (_, pair) = self.pairs.entry((at.min(other), at.max(other))).or_insert((0, Pair::Apart(now)));
            *pair = Pair::Apart(now);
        }
    }

    /// A life has ended. The others are told after `told`.
    pub fn dies(&mut self, dead: &Process, others: &[Option<Process>], now: Time, told: Duration) {
        for other in others.iter().flatten().filter(|other| other.at != dead.at) {
            let pair = (dead.at.min(other.at), dead.at.max(other.at));
            let generation = self.pairs.get(&pair).map_or(0, |(generation, _)| *generation);
            let tag = LinkTag { incarnation: dead.incarnation, generation: generation.into() };
            self.news.push(News { when: now + told, to: other.incarnation, about: dead.at, tag });
        }
    }

    /// Whether two members have a link that is ready.
    pub fn is_linked(&self, a: At, b: At) -> bool {
        matches!(self.pairs.get(&(a.min(b), a.max(b))), Some((_, Pair::Linked)))
    }

    /// Whether links or reports are outstanding.
    pub fn is_busy(&self, members: &[Option<Process>]) -> bool {
        let alive = |at: &At| members[*at].is_some();
        let linking = self
            .pairs
            .iter()
            .any(|((a, b), (_, pair))| alive(a) && alive(b) && !matches!(pair, Pair::Linked));
        linking || !self.news.is_empty()
    }

    /// The time of the next link or report, if it is known.
    pub fn next_event(&self, now: Time) -> Option<Time> {
        let apart = self.pairs.values().filter_map(|(_, pair)| match pair {
            Pair::Apart(when) => Some(*when),
            Pair::Trying(_) | Pair::Linked => None,
        });
        apart.chain(self.news.iter().map(|news| news.when)).filter(|when| *when > now).min()
    }

    /// Makes the links and the reports that are due.
    pub fn work(&mut self, members: &[Option<Process>], network: &Network) {
        let now = network.now();
        self.tell(members, now);
        self.hear_of_ends(members, now);
        for ((a, b), (generation, pair)) in &mut self.pairs {
            let (Some(a), Some(b)) = (&members[*a], &members[*b]) else { continue };
            let next = match pair {
                Pair::Apart(when) if *when <= now => {
                    *generation += 1;
                    Some(Pair::Trying(connect([a, b], &self.options, *generation)))
                }
                Pair::Trying(tried) => {
                    match [0, 1].map(|side: usize| tried[side].lock().expect("no panic").clone()) {
                        [Some(Ok(())), Some(Ok(()))] => {
                            ready([a, b], *generation);
                            Some(Pair::Linked)
                        }
                        tried => {
                            let failed = tried.iter().flatten().any(Result::is_err);
                            failed.then_some(Pair::Apart(now + RELINK))
                        }
                    }
                }
                Pair::Apart(_) | Pair::Linked => None,
            };
            if let Some(next) = next {
                *pair = next;
            }
        }
        // Failures that were found when the two were told that both are ready.
        self.hear_of_ends(members, now);
    }

    fn tell(&mut self, members: &[Option<Process>], now: Time) {
        let due: Vec<News> = self.news.extract_if(.., |news| news.when <= now).collect();
        for News { to, about, tag, .. } in due {
            let Some(to) = members.iter().flatten().find(|member| member.incarnation == to) else { continue };
            let cause = LossCause::Silent { after: BOUND, bound: BOUND };
            let gone = RemoteCommand::Gone(PeerEnd { peer: PeerIndex(about as u32), tag, cause });
            to.engine.submit(gone).expect("usable");
        }
    }

    fn hear_of_ends(&mut self, members: &[Option<Process>], now: Time) {
        for member in members.iter().flatten() {
            for (peer, tag) in std::mem::take(&mut *member.ends.lock().expect("no panic")) {
                let other = peer.0 as At;
                let pair = (member.at.min(other), member.at.max(other));
                if let Some((generation, pair)) = self.pairs.get_mut(&pair)
                    && *generation == tag.generation.get()
                {
                    *pair = Pair::Apart(now + RELINK);
                }
            }
        }
    }
}

fn connect(sides: [&Process; 2], options: &LinkOptions, generation: u64) -> [Tried; 2] {
    let options = LinkOptions { generation: generation as u8, ..options.clone() };
    let endpoints = sides.map(|side| side.fabric.endpoint(0, &options).expect("an endpoint"));
    let [a, b] = [0, 1].map(|side: usize| endpoints[side].address().to_vec());
    let [endpoint_a, endpoint_b] = endpoints;
    let try_link = |endpoint: <tensorwire::internals::fabric::sim::SimFabric as Fabric>::Endpoint,
                    role,
                    to: &[u8],
                    own: usize| {
        let link = endpoint.connect(role, to, Duration::ZERO).expect("connected");
        let tried = Tried::default();
        let told = tried.clone();
        let peer = sides[1 - own];
        let attach = RemoteCommand::Attach {
            peer: PeerIndex(peer.at as u32),
            tag: LinkTag { incarnation: peer.incarnation, generation: generation.into() },
            link,
            done: Box::new(move |result| *told.lock().expect("no panic") = Some(result)),
        };
        sides[own].engine.submit(attach).expect("usable");
        tried
    };
    [try_link(endpoint_a, Role::Initiator, &b, 0), try_link(endpoint_b, Role::Acceptor, &a, 1)]
}

fn ready(sides: [&Process; 2], generation: u64) {
    for (own, peer) in [(sides[0], sides[1]), (sides[1], sides[0])] {
        let tag = LinkTag { incarnation: peer.incarnation, generation: generation.into() };
        own.engine.submit(RemoteCommand::Ready { peer: PeerIndex(peer.at as u32), tag }).expect("usable");
    }
}
