//! Links between two sides in one process, made and unmade as the bootstrap service does it.

use super::*;
use crate::engine::Engine;
use crate::fabric::multi::{FabricParts, MultiPort};
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::link::LinkSettings;
use crate::matching::{RemoteSettings, WindowHandler};
use crate::memory::{PagePolicy, Pool, PoolOptions, Region, RegionOptions, in_a_child};
use crate::node::meeting::tests::free_port;
use crate::node::pollers::{Pollers, Polling};
use crate::node::{Node, NodeError};
use crate::wire::Incarnation;
use std::sync::atomic::AtomicUsize;

const SOON: Duration = Duration::from_secs(10);
struct Side {
    task: u32,
    losses: Arc<Losses>,
    engine: Arc<Engine<MultiPort, WindowHandler>>,
    peering: FabricPeering,
}

fn members() -> Members {
    Members::new((0..3).map(|task| TaskId::new("w", task).expect("a job name")).collect())
}

/// A life of task 0 or 1 with shared memory alone, for which every loss is fatal.
fn side(task: u32, life: u64) -> Side {
    side_on(task, life, |_| None)
}

/// The same with TCP.
fn side_with_tcp(task: u32, life: u64) -> Side {
    side_on(task, life, |pool| Some(TcpFabric::new(pool, TcpOptions::default()).expect("a fabric")))
}

fn side_on(task: u32, life: u64, tcp: impl Fn(&Pool) -> Option<TcpFabric>) -> Side {
    let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
    let pool =
        Pool::new(Region::create(0, &region).expect("a region"), PoolOptions::default()).expect("a pool");
    let shm = ShmFabric::new(&pool, ShmOptions::default()).expect("a fabric");
    let fabrics = NodeFabrics::of(FabricParts { shm: Some(shm), tcp: tcp(&pool), verbs: None });
    let losses = Arc::new(Losses::new(&members(), true));
    let directory = PeerDirectory::new(members());
    let link =
        LinkSettings { small_tensor_bytes: 64, validate: false, borrow: false, max_ready_bytes: 1 << 20 };
    let settings = RemoteSettings { peer_loss_is_fatal: true, ..RemoteSettings::new(link, 16) };
    let me = TaskId::new("w", task).expect("a job name");
    let reporter = Arc::new(LinkReporter::new(
        (me.clone(), false),
        losses.clone(),
        directory.clone(),
        EventHistory::new(),
    ));
    let handler = || {
        let (me, settings, reporter) = (me.clone(), settings.clone(), reporter.clone());
        WindowHandler::new(me, life, members(), settings, Arc::new(AtomicUsize::new(0)), reporter)
    };
    let pollers =
        Arc::new(Pollers::new(Polling::inline(), fabrics.fabric(), &pool, handler).expect("a poller"));
    let engine = pollers.of(PeerIndex(0)).clone();
    let link = LinkOptions { depth: 16, receives: 0, generation: 0 };
    let peering = FabricPeering::new(fabrics, pollers, me.clone(), directory, "here".into(), link);
    Side { task, losses, engine, peering }
}

fn info(task: u32, life: u64, generation: u64) -> PeerInfo {
    PeerInfo {
        name: TaskId::new("w", task).expect("a name"),
        incarnation: Incarnation::new(life).expect("not 0"),
        host_id: "here".into(),
        generation,
        number: generation,
    }
}

/// Connects both sides; gives the tickets.
fn connect(sides: [&Side; 2], infos: [&PeerInfo; 2]) -> [u64; 2] {
    let first = sides[0].peering.prepare(infos[0], None).expect("endpoints");
    let second = sides[1].peering.prepare(infos[1], Some(&first.offer)).expect("an endpoint");
    let made = [first, second];
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|k: usize| {
            let (endpoint, offer) = (made[k].ticket, &made[1 - k].offer);
            scope.spawn(move || sides[k].peering.connect(infos[k], endpoint, offer, k == 0, SOON))
        });
        threads.into_iter().for_each(|thread| thread.join().expect("no panic").expect("connected"));
    });
    [made[0].ticket, made[1].ticket]
}

impl Side {
    fn status(&self) -> PeerStatus {
        self.status_of(1 - self.task)
    }

    fn status_of(&self, peer: u32) -> PeerStatus {
        for _ in 0..100 {
            self.engine.progress().expect("usable");
        }
        self.losses.status(PeerIndex(peer))
    }

    /// Notes the end of a peer, as if the command about it were still queued.
    fn is_told(&self, info: &PeerInfo, cause: LossCause) {
        self.peering.note_end(info, &cause);
    }

    fn told_ends(&self) -> Vec<(u32, LossCause)> {
        let ends = self.peering.directory.told_ends.lock().expect("no panic").clone();
        ends.into_iter().map(|end| (end.peer.0, end.cause)).collect()
    }

    fn is_up(&self, generation: u64) -> bool {
        matches!(self.status(), PeerStatus::Up(tag) if tag.generation.get() == generation)
    }
}

#[test]
fn late_news_of_an_old_link_or_life_leaves_the_new_one_alone() {
    let (a, b) = (side(0, 10), side(1, 20));
    let old = [info(1, 20, 1), info(0, 10, 1)];
    let tickets = connect([&a, &b], [&old[0], &old[1]]);
    assert!(matches!(a.status(), PeerStatus::Absent), "nobody has said ready yet");
    a.peering.abandon(&old[0], tickets[0]);
    b.peering.abandon(&old[1], tickets[1]);
    assert!(matches!(a.status(), PeerStatus::Absent), "an attempt that is given up is no loss");
    let new = [info(1, 20, 2), info(0, 10, 2)];
    let tickets_2 = connect([&a, &b], [&new[0], &new[1]]);
    a.peering.ready(&new[0], tickets_2[0]);
    b.peering.ready(&new[1], tickets_2[1]);
    assert!(a.is_up(2) && b.is_up(2));
    a.peering.abandon(&old[0], tickets[0]);
    a.peering.lost(&old[0], LossCause::Silent { after: SOON, bound: SOON });
    a.peering.gone(&info(1, 19, 2), LossCause::Died("another life of it".into()));
    a.peering.ready(&old[0], tickets[0]);
    assert!(a.is_up(2) && b.is_up(2), "{:?} {:?}", a.status(), b.status());
    a.peering.lost(&new[0], LossCause::Left(LossCause::STOPPED.into()));
    assert!(matches!(a.status(), PeerStatus::Lost(Some(tag), _) if tag.generation.get() == 2));
}

/// Links `a`, task 0, with lives 20 and 30 of tasks 1 and 2.
fn linked_with_two(a: &Side) -> [(Side, PeerInfo); 2] {
    [(1, 20), (2, 30)].map(|(task, life)| {
        let other = side(task, life);
        let infos = [info(task, life, 1), info(0, 10, 1)];
        let tickets = connect([a, &other], [&infos[0], &infos[1]]);
        a.peering.ready(&infos[0], tickets[0]);
        other.peering.ready(&infos[1], tickets[1]);
        let [theirs, _] = infos;
        (other, theirs)
    })
}

fn lost_cause(status: PeerStatus) -> LossCause {
    match status {
        PeerStatus::Lost(_, Error::PeerLost { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_closed_link_has_the_reason_that_was_told_before_it() {
    let a = side(0, 10);
    let [(one, life), (_two, _)] = linked_with_two(&a);
    a.is_told(&info(1, 19, 1), LossCause::Died("another life of it".into()));
    a.is_told(&life, LossCause::Left(LossCause::STOPPED.into()));
    one.engine.close();
    assert!(lost_cause(a.status()).is_clean());
    assert!(matches!(a.status_of(2), PeerStatus::Up(_)) && a.losses.ended().is_none());
}

#[test]
fn what_was_told_says_more_than_a_close_for_which_the_service_gave_another_reason() {
    let a = side(0, 10);
    let [(one, life), (_two, _)] = linked_with_two(&a);
    a.is_told(&life, LossCause::Left(LossCause::STOPPED.into()));
    one.engine.close();
    a.peering.lost(&life, LossCause::Closed("it has started generation 2".into()));
    assert!(lost_cause(a.status()).is_clean());
}

#[test]
fn a_closed_link_without_a_word_is_a_loss() {
    let a = side(0, 10);
    let [(one, _), (_two, _)] = linked_with_two(&a);
    a.is_told(&info(1, 19, 1), LossCause::Died("another life of it".into()));
    one.engine.close();
    assert!(matches!(lost_cause(a.status()), LossCause::Closed(_)));
}

#[test]
fn of_two_that_are_gone_the_one_of_whom_was_told_first_is_lost_first() {
    for both_closed in [false, true] {
        let a = side(0, 10);
        let [(one, consequence), (two, first)] = linked_with_two(&a);
        a.is_told(&first, LossCause::Died("it was killed".into()));
        a.is_told(&consequence, LossCause::Left("it stopped, as peer w/2 was lost".into()));
        one.engine.close();
        if both_closed {
            two.engine.close();
        }
        assert!(matches!(lost_cause(a.status_of(1)), LossCause::Left(_)));
        assert!(matches!(lost_cause(a.status_of(2)), LossCause::Died(_)));
        // Every loss is fatal.
        let ended = a.losses.ended().expect("the first loss").to_string();
        assert!(ended.contains("w/2") && ended.contains("it was killed"), "{ended}");
        // The commands come late.
        a.peering.lost(&first, LossCause::Died("it was killed".into()));
        a.peering.gone(&consequence, LossCause::Left("another word".into()));
        assert!(matches!(lost_cause(a.status_of(1)), LossCause::Left(words) if words.contains("w/2")));
    }
}

#[test]
fn the_ends_of_linked_and_of_other_lives_are_noted_in_order_and_nothing_else() {
    let a = side(0, 10);
    let [one, two] = [info(1, 20, 1), info(2, 30, 1)];
    let (left, died) = (LossCause::Left("it stopped".into()), LossCause::Died("it was killed".into()));
    a.peering.lost(&one, left.clone());
    a.peering.gone(&two, died.clone());
    assert_eq!(a.told_ends(), [(1, left), (2, died.clone())]);
    a.peering.lost(&two, LossCause::Closed("it has started generation 2".into()));
    a.peering.gone(&one, died.clone());
    assert_eq!(a.told_ends(), [(2, died.clone()), (1, died)]);
}

#[test]
fn the_first_cause_ends_every_call_although_another_poller_has_its_peer() {
    let a = side(0, 10);
    let infos = [info(1, 20, 1), info(0, 10, 1)];
    let one = side(1, 20);
    let tickets = connect([&a, &one], [&infos[0], &infos[1]]);
    a.peering.ready(&infos[0], tickets[0]);
    assert!(a.is_up(1));
    // Never linked here.
    a.is_told(&info(2, 30, 1), LossCause::Died("it was killed".into()));
    a.is_told(&infos[0], LossCause::Left("it stopped, as peer w/2 was lost".into()));
    one.engine.close();
    assert!(matches!(lost_cause(a.status()), LossCause::Left(_)));
    let ended = a.losses.ended().expect("a fatal loss").to_string();
    assert!(ended.contains("w/2") && ended.contains("it was killed"), "{ended}");
}

#[test]
fn a_peer_that_came_back_stays_when_another_closes_its_link() {
    let a = side(0, 10);
    let [(one, _), (two, earlier)] = linked_with_two(&a);
    a.peering.lost(&earlier, LossCause::Silent { after: SOON, bound: SOON });
    assert!(matches!(lost_cause(a.status_of(2)), LossCause::Silent { .. }));
    let infos = [info(2, 30, 2), info(0, 10, 2)];
    let tickets = connect([&a, &two], [&infos[0], &infos[1]]);
    a.peering.ready(&infos[0], tickets[0]);
    assert!(matches!(a.status_of(2), PeerStatus::Up(_)));
    one.engine.close();
    assert!(matches!(lost_cause(a.status()), LossCause::Closed(_)));
    assert!(matches!(a.status_of(2), PeerStatus::Up(_)));
}

/// The offer of a peer with one fabric.
fn offer_of(kind: FabricKind, depth: u32, address: &[u8]) -> Vec<u8> {
    let state = OfferState::Offered { depth, failures: 0, address: address.to_vec() };
    let refusal = FabricRefusal { why: "fabric is set".into(), is_final: true };
    let others = FabricKind::FASTEST_FIRST.into_iter().filter(|other| *other != kind);
    let refused = others.map(|other| FabricOffer::refused(other, refusal.clone()));
    offer::encode(&std::iter::once(FabricOffer { kind, state }).chain(refused).collect::<Vec<_>>())
}

/// The address on shared memory in an offer.
fn shm_address(offer: &[u8]) -> Vec<u8> {
    match &offer::decode(offer).expect("an offer")[0] {
        FabricOffer { kind: FabricKind::Shm, state: OfferState::Offered { address, .. } } => address.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_sides_without_a_common_fabric_hear_why_of_each() {
    let a = side(0, 10);
    let peer = info(1, 20, 1);
    let refused = a
        .peering
        .prepare(&peer, Some(&offer_of(FabricKind::Verbs, 0, b"there")))
        .expect_err("it has shared memory only");
    assert_eq!(refused.code, Code::FailedPrecondition);
    for part in [
        "w/0 (on host here) and w/1 (on host here)",
        "shm: w/1: fabric is set",
        "tcp: w/0: there is none",
        "verbs: w/0: there is none",
    ] {
        assert!(refused.message.contains(part), "{part}: {refused}");
    }
}

#[test]
fn an_offer_that_no_member_makes_is_refused() {
    let (a, b) = (side(0, 10), side(1, 20));
    let peer = info(1, 20, 1);
    let offers = [
        (b"v-and-what-it-says".to_vec(), "no offer of fabrics"),
        (Vec::new(), "no offer of fabrics"),
        (offer::encode(&[]), "no fabric that was chosen"),
        (offer_of(FabricKind::Verbs, 0, b"there"), "a fabric that was not offered"),
        (offer_of(FabricKind::Shm, 32, b"there"), "queue_depth is 16 at w/0 and 32 at w/1"),
    ];
    for (offer, why) in offers {
        let endpoint = a.peering.prepare(&peer, None).expect("endpoints");
        let refused = a.peering.connect(&peer, endpoint.ticket, &offer, true, SOON).expect_err("refused");
        assert_eq!(refused.code, Code::FailedPrecondition, "{refused}");
        assert!(refused.message.contains(why), "{why}: {refused}");
    }
    let peer = info(0, 10, 1);
    let offer = a.peering.prepare(&info(1, 20, 1), None).expect("endpoints").offer;
    let endpoint = b.peering.prepare(&peer, Some(&offer)).expect("an endpoint");
    let other = offer_of(FabricKind::Verbs, 0, b"there");
    let refused = b.peering.connect(&peer, endpoint.ticket, &other, false, SOON).expect_err("refused");
    assert!(refused.message.contains("no fabric that was chosen"), "{refused}");
    let refused = b.peering.prepare(&peer, Some(&offer_of(FabricKind::Shm, 16, b"nowhere")));
    assert!(refused.expect_err("no address").message.contains("shm: w/0: its address of 7 bytes"));
}

#[test]
fn what_no_further_attempt_changes_is_told_apart_from_what_one_may() {
    // Places of an address: a mark, the version, the boot, two namespaces, a folder, and the user.
    let places = [("version", 8), ("another host", 10), ("as user", 58)];
    let (a, b) = (side(0, 10), side(1, 20));
    for (what, place, code) in places
        .map(|(what, place)| (what, place, Code::FailedPrecondition))
        .into_iter()
        .chain([("not one of this fabric", 0, Code::Unavailable)])
    {
        let offer = b.peering.prepare(&info(0, 10, 1), None).expect("an endpoint").offer;
        let mut address = shm_address(&offer);
        address[place] ^= 1;
        let endpoint = a.peering.prepare(&info(1, 20, 1), None).expect("an endpoint");
        let offer = offer_of(FabricKind::Shm, 16, &address);
        let refused = a.peering.connect(&info(1, 20, 1), endpoint.ticket, &offer, true, SOON);
        let refused = refused.expect_err("another one");
        assert!(refused.message.contains(what), "{refused}");
        assert_eq!(refused.code, code, "{refused}");
    }
}

/// The fabric that `b` chooses for a link with `a`, whose shared memory it sees as it is, or as
/// that of another host.
fn chosen([a, b]: [&Side; 2], other_host: bool) -> (FabricKind, String) {
    let mut offers = offer::decode(&a.peering.prepare(&info(1, 20, 1), None).expect("endpoints").offer);
    for offer in offers.iter_mut().flatten() {
        if let (FabricKind::Shm, OfferState::Offered { address, .. }) = (offer.kind, &mut offer.state) {
            // A byte of the host's boot.
            address[10] ^= u8::from(other_host);
        }
    }
    let offers = offer::encode(&offers.expect("an offer"));
    let made = b.peering.prepare(&info(0, 10, 1), Some(&offers)).expect("a common fabric");
    let waiting = b.peering.endpoints().waiting.remove(&made.ticket).expect("the endpoint");
    let transport = waiting.chosen.expect("a choice");
    (transport.kind, transport.why.to_string())
}

fn failed(kind: FabricKind) -> FabricError {
    FabricError::Peer { fabric: kind, why: "it closed the connection".into() }
}

#[test]
fn the_only_fabric_that_two_hosts_share_is_tried_again_however_often_it_failed() {
    let (a, b) = (side_with_tcp(0, 10), side_with_tcp(1, 20));
    for failures in 0..5 {
        for other_host in [true, false] {
            let expected = if other_host { FabricKind::Tcp } else { FabricKind::Shm };
            assert_eq!(chosen([&a, &b], other_host).0, expected, "after {failures} failures");
        }
        a.peering.failures.note(&info(1, 20, 1), FabricKind::Tcp, &failed(FabricKind::Tcp));
        b.peering.failures.note(&info(0, 10, 1), FabricKind::Tcp, &failed(FabricKind::Tcp));
    }
}

#[test]
fn a_fabric_that_fails_twice_comes_after_the_others_until_a_link_is_made_there() {
    let (a, b) = (side_with_tcp(0, 10), side_with_tcp(1, 20));
    // Whichever side has seen the failures.
    for (at, peer, said) in
        [(&b, info(0, 10, 1), "w/1: tried 2 times: "), (&a, info(1, 20, 1), "w/0: tried 2")]
    {
        at.peering.failures.note(&peer, FabricKind::Shm, &failed(FabricKind::Shm));
        assert_eq!(chosen([&a, &b], false).0, FabricKind::Shm, "once is no pattern");
        at.peering.failures.note(&peer, FabricKind::Shm, &failed(FabricKind::Shm));
        let (kind, why) = chosen([&a, &b], false);
        assert_eq!(kind, FabricKind::Tcp, "{why}");
        assert!(why.contains(said), "{why}");
        // When both fail, the one that failed less comes next.
        (0..3).for_each(|_| at.peering.failures.note(&peer, FabricKind::Tcp, &failed(FabricKind::Tcp)));
        assert_eq!(chosen([&a, &b], false).0, FabricKind::Shm);
        at.peering.failures.forget(&peer, FabricKind::Tcp);
        assert_eq!(chosen([&a, &b], false).0, FabricKind::Tcp);
        at.peering.failures.forget(&peer, FabricKind::Shm);
        assert_eq!(chosen([&a, &b], false).0, FabricKind::Shm);
    }
    let infos = [info(1, 20, 2), info(0, 10, 2)];
    b.peering.failures.note(&infos[1], FabricKind::Shm, &failed(FabricKind::Shm));
    connect([&a, &b], [&infos[0], &infos[1]]);
    assert_eq!(b.peering.failures.of(&infos[1], FabricKind::Shm).count, 0, "a link was made");
}

#[test]
fn a_refusal_that_may_pass_names_no_setting() {
    let a = side(0, 10);
    for (is_final, says_so) in [(true, true), (false, false)] {
        let refused = FabricKind::FASTEST_FIRST
            .map(|kind| FabricOffer::refused(kind, FabricRefusal { why: "too few files".into(), is_final }));
        let refused = a.peering.prepare(&info(1, 20, 1), Some(&offer::encode(&refused)));
        let message = refused.expect_err("nothing is offered").message;
        assert_eq!(message.contains("Set fabric to the same value"), says_so, "{message}");
    }
}

#[test]
fn an_attempt_that_fails_is_no_loss_even_where_losses_are_fatal() {
    let (a, b) = (side(0, 10), side(1, 20));
    let peer = info(1, 20, 1);
    let endpoint = a.peering.prepare(&peer, None).expect("endpoints");
    let ours = shm_address(&endpoint.offer);
    let options = LinkOptions { depth: 16, receives: 0, generation: 1 };
    let other = b.peering.fabrics.endpoint(FabricKind::Shm, 0, &options, None).expect("an endpoint");
    let offer = offer_of(FabricKind::Shm, 16, other.address());
    std::thread::scope(|scope| {
        // Connects, and closes the link without a word.
        scope.spawn(|| drop(other.connect(Role::Acceptor, &ours, SOON).expect("connected")));
        let refused = a.peering.connect(&peer, endpoint.ticket, &offer, true, SOON);
        println!("{}", refused.expect_err("nobody is at the other end"));
    });
    assert!(matches!(a.status(), PeerStatus::Absent), "{:?}", a.status());
    let infos = [info(1, 20, 2), info(0, 10, 2)];
    let tickets = connect([&a, &b], [&infos[0], &infos[1]]);
    a.peering.ready(&infos[0], tickets[0]);
    assert!(a.is_up(2));
}

#[test]
fn a_life_that_ends_before_it_is_linked_is_a_loss() {
    let a = side(0, 10);
    a.peering.gone(&info(1, 20, 0), LossCause::Died("nobody listens".into()));
    let PeerStatus::Lost(Some(tag), error) = a.status() else { panic!("{:?}", a.status()) };
    assert_eq!(tag.incarnation.get(), 20);
    assert!(error.to_string().contains("nobody listens"), "{error}");
}

#[test]
fn a_link_that_failed_before_both_were_ready_is_not_used() {
    let (a, b) = (side(0, 10), side(1, 20));
    let infos = [info(1, 20, 1), info(0, 10, 1)];
    let tickets = connect([&a, &b], [&infos[0], &infos[1]]);
    b.peering.abandon(&infos[1], tickets[1]);
    let _ = (b.status(), a.status());
    a.peering.ready(&infos[0], tickets[0]);
    assert!(matches!(a.status(), PeerStatus::Absent), "{:?}", a.status());
}

#[test]
fn a_new_life_that_came_before_the_news_of_the_old_ones_end_makes_that_a_loss() {
    let (a, b) = (side(0, 10), side(1, 20));
    let infos = [info(1, 20, 1), info(0, 10, 1)];
    let tickets = connect([&a, &b], [&infos[0], &infos[1]]);
    a.peering.ready(&infos[0], tickets[0]);
    assert!(a.is_up(1));
    let again = side(1, 21);
    let infos = [info(1, 21, 2), info(0, 10, 2)];
    let tickets = connect([&a, &again], [&infos[0], &infos[1]]);
    let PeerStatus::Lost(Some(tag), error) = a.status() else { panic!("{:?}", a.status()) };
    assert_eq!((tag.incarnation.get(), tag.generation.get()), (20, 1));
    assert!(error.to_string().contains("started again"), "{error}");
    a.peering.ready(&infos[0], tickets[0]);
    assert!(a.is_up(2));
    drop(b);
    assert!(a.is_up(2), "the old life's end comes late");
}

fn cluster_of_two() -> String {
    let ports = [0; 2].map(|_| free_port());
    format!("w=127.0.0.1:{},127.0.0.1:{}", ports[0], ports[1])
}

fn node(task: u32, cluster: &str) -> Node {
    let node = Node::builder().without_environment().member("w", task).set("cluster", cluster);
    let node = node.set("pool_size", "1MiB").set("pool_pages", "plain").set("pool_lock", "no");
    node.set("stop_timeout", "200ms").start().expect("the node starts")
}

#[test]
fn a_forked_child_waits_for_no_lock_of_the_node() {
    let node = node(0, &cluster_of_two());
    let held = (node.directory.transports(), node.failed_join.lock().expect("no panic"));
    let good = in_a_child(|| {
        matches!(&node.peers()[0].state, PeerState::Lost(Error::Forked))
            && matches!(node.join(), Err(NodeError::Forked))
    });
    drop(held);
    assert!(good, "the child failed or hung");
}

#[test]
fn a_link_that_is_cut_between_two_that_live_is_made_again_and_works() {
    let cluster = cluster_of_two();
    let nodes = [0, 1].map(|task| node(task, &cluster));
    let [a, b] = &nodes;
    std::thread::scope(|scope| {
        scope.spawn(|| b.join().expect("joined"));
        a.join().expect("joined");
    });
    for generation in 1..5 {
        let began = Instant::now();
        assert_eq!([a.peers()[0].generation, b.peers()[0].generation], [generation.into(); 2]);
        let step = b.step(generation).expect("new");
        let waits = step.receive(&b.edge_from("w", 0, "never").expect("edge")).begin().expect("begun");
        a.cut(generation);
        let error = waits.wait().map(|_| ()).expect_err("its link is gone");
        let life = a.incarnation();
        // The close of the link, the peer's reason and the next link come in any order.
        assert!(
            matches!(&error, Error::PeerLost { incarnation, cause: LossCause::Closed(_), .. }
                if *incarnation == life),
            "{error}"
        );
        while nodes.iter().any(|node| node.peers()[0].generation.get() == generation || node.join().is_err())
        {
            assert!(began.elapsed() < SOON, "{:?} {:?}", a.peers(), b.peers());
            let _ = (a.progress(), b.progress());
        }
        println!("made again after {:?}", began.elapsed());
        let value = a.tensor(crate::wire::DType::U8, &[100_000]).expect("room").freeze();
        a.step(generation).expect("new").send(&a.edge_to("w", 1, "x").expect("edge"), value).expect("sent");
        std::thread::scope(|scope| {
            let received = scope.spawn(|| step.recv(&b.edge_from("w", 0, "x").expect("edge"), SOON));
            while !received.is_finished() {
                let _ = a.progress();
            }
            received.join().expect("no panic").expect("the new link works");
        });
        nodes.iter().for_each(|node| node.cleanup(generation));
        while !a.pool().is_empty() || !b.pool().is_empty() {
            assert!(began.elapsed() < SOON, "{:?} {:?}", a.pool().stats(), b.pool().stats());
            let _ = (a.progress(), b.progress());
        }
    }
    nodes.iter().for_each(|node| drop(node.stop().expect("stopped")));
}
