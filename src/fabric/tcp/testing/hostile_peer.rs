//! A link whose peer is made by hand: it has the sockets, and writes what it likes.

use crate::fabric::tcp::connect::address::TcpAddress;
use crate::fabric::tcp::connect::hello::{BYTES, Hello, Speaker};
use crate::fabric::tcp::frame::Frame;
use crate::fabric::tcp::{TcpFabric, TcpOptions, TcpPort};
use crate::fabric::{Completions, Endpoint, Event, Fabric, LinkId, LinkOptions, Port, Role};
use crate::memory::Pool;
use crate::wire::Immediate;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The longest wait of a test.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Polls within which something must come: some seconds.
pub(super) const POLLS: u32 = 3_000_000;

/// Operations that the victim's link can have outstanding.
pub(crate) const DEPTH: u32 = 16;

/// What the victim has got.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Got {
    Done,
    Read(Vec<u8>),
    Failed,
    Message(Vec<u8>),
    Immediate(Immediate, u64),
    Repaired,
    Down(crate::fabric::LinkFailure),
}

/// The honest side.
pub(crate) struct Victim {
    #[cfg_attr(not(test), allow(dead_code, reason = "tests make more links of it"))]
    pub fabric: TcpFabric,
    pub port: TcpPort,
    pub link: LinkId,
}

/// The other side: raw connections.
pub(crate) struct TcpHostilePeer {
    pub main: TcpStream,
    pub bulk: Vec<TcpStream>,
    /// Where the victim listens.
    to: TcpAddress,
}

pub(crate) fn link_options() -> LinkOptions {
    LinkOptions { depth: DEPTH, receives: 0, generation: 0 }
}

/// Opens a connection to an endpoint and says a hello with this token.
#[cfg(test)]
pub(crate) fn say_hello(to: &TcpAddress, stream: u8, token: [u8; 16]) -> TcpStream {
    say_numbered_hello(to, stream, 0, token).expect("it listens")
}

/// The same, with the number of the connections that it is one of. `None` if nobody listens.
fn say_numbered_hello(to: &TcpAddress, stream: u8, number: u32, token: [u8; 16]) -> Option<TcpStream> {
    let mut socket = TcpStream::connect((to.hosts[0], to.port)).ok()?;
    let token = crate::fabric::tcp::connect::address::Token(token);
    // A victim that has closed it already does not mind.
    let _ = socket.write_all(&Hello { speaker: Speaker::Initiator, stream, number, token }.to_bytes());
    Some(socket)
}

/// Links a victim with a hostile peer. Nobody listens at the peer's address.
pub(crate) fn meet(pool: &Pool, options: TcpOptions) -> (Victim, TcpHostilePeer) {
    meet_at(pool, options, 1)
}

/// Links a victim with a hostile peer, who says that it listens at this port.
pub(crate) fn meet_at(pool: &Pool, options: TcpOptions, listens: u16) -> (Victim, TcpHostilePeer) {
    let fabric = TcpFabric::new(pool, options).expect("a fabric");
    let mut port = fabric.port().expect("a port");
    let (link, peer) = another_at(&fabric, &mut port, listens);
    (Victim { fabric, port, link }, peer)
}

/// Another link of a victim's port.
#[cfg_attr(not(test), allow(dead_code, reason = "tests make more links"))]
pub(crate) fn another(fabric: &TcpFabric, port: &mut TcpPort) -> (LinkId, TcpHostilePeer) {
    another_at(fabric, port, 1)
}

fn another_at(fabric: &TcpFabric, port: &mut TcpPort, listens: u16) -> (LinkId, TcpHostilePeer) {
    let victim = fabric.endpoint(0, &link_options()).expect("an endpoint");
    let to = TcpAddress::from_bytes(victim.address()).expect("an address");
    let own = TcpAddress { port: listens, ..to.clone() };
    let (link, sockets) = std::thread::scope(|scope| {
        let sockets = scope.spawn(|| {
            let sockets = connections(&to, 0).expect("it listens");
            sockets.iter().for_each(read_answer);
            sockets
        });
        let link = victim.connect(Role::Acceptor, &own.to_bytes(), TIMEOUT).expect("accepted");
        (link, sockets.join().expect("no panic"))
    });
    let mut sockets = sockets.into_iter();
    let peer = TcpHostilePeer { main: sockets.next().expect("the main one"), bulk: sockets.collect(), to };
    (port.attach(link).expect("room"), peer)
}

/// Opens all connections of a link, with this number. `None` if nobody listens.
fn connections(to: &TcpAddress, number: u32) -> Option<Vec<TcpStream>> {
    (0..=to.streams).map(|stream| say_numbered_hello(to, stream, number, to.token.0)).collect()
}

fn read_answer(mut socket: &TcpStream) {
    socket.set_read_timeout(Some(TIMEOUT)).expect("set");
    socket.read_exact(&mut [0; BYTES]).expect("an answer");
    socket.set_read_timeout(None).expect("set");
}

impl TcpHostilePeer {
    /// Sends a header and bytes behind it.
    pub(crate) fn send(&mut self, frame: Frame, payload: &[u8]) {
        self.send_raw(&[&frame.header(0), payload].concat());
    }

    /// Replaces its connections by others with this number, whose hellos may get no answer. Returns
    /// the old ones; `None` if nobody listens, as the victim's link is down.
    pub(crate) fn dial(&mut self, number: u32) -> Option<Vec<TcpStream>> {
        let mut sockets = connections(&self.to, number)?.into_iter();
        let main = std::mem::replace(&mut self.main, sockets.next()?);
        Some(std::iter::once(main).chain(std::mem::replace(&mut self.bulk, sockets.collect())).collect())
    }

    /// As [`TcpHostilePeer::dial`], and waits for the answers.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests wait"))]
    pub(crate) fn dial_again(&mut self, number: u32) -> Vec<TcpStream> {
        let old = self.dial(number).expect("it listens");
        std::iter::once(&self.main).chain(&self.bulk).for_each(read_answer);
        old
    }

    /// Sends bytes on the main connection. A victim that has closed it does not mind.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        let _ = self.main.write_all(bytes);
    }
}

impl Victim {
    /// All events of some polls.
    pub(crate) fn poll(&mut self) -> Vec<Got> {
        let mut completions = Completions::default();
        self.port.poll(&mut completions);
        let got = completions.drain().map(|(completion, message)| match completion.event {
            Event::Done => Got::Done,
            Event::ReadDone { target } => Got::Read(target.bytes().to_vec()),
            Event::Failed => Got::Failed,
            Event::Message(_) => Got::Message(message.to_vec()),
            Event::Immediate { immediate, bytes } => Got::Immediate(immediate, bytes),
            Event::Repaired => Got::Repaired,
            Event::Down(why) => Got::Down(why),
            Event::Lent { .. } => panic!("it does not lend"),
        });
        got.collect()
    }

    /// All events until the link is down, that included.
    pub(crate) fn until_down(&mut self) -> Vec<Got> {
        let mut all = Vec::new();
        for _ in 0..POLLS {
            all.extend(self.poll());
            if matches!(all.last(), Some(Got::Down(_))) {
                return all;
            }
            std::thread::yield_now();
        }
        panic!("still up: {all:?}");
    }
}
