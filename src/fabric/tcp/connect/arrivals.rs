//! The connections that have come to an endpoint, until each has said its hello.
//!
//! Anybody can connect. So all that wait in the kernel are taken at once, and silent ones make way
//! for newer ones: nobody waits behind strangers. The peer says each hello as soon as its
//! connection is open, so that it is read before the connection could make way.

use super::deadline::ConnectDeadline;
use super::hello::{BYTES, Hello};
use crate::fabric::log_rate_limit::{LOG_PERIOD, LogRateLimit};
use crate::wire::{LACKS, source_of};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Connections that have not said their hello yet, of all endpoints of a fabric.
pub(in super::super) const HALF_OPEN: usize = 128;
/// Those that an endpoint may have in any case at least: see [`own_places`].
const OWN_PLACES: usize = 8;
/// Connections that may wait in the kernel.
pub(in super::super) const BACKLOG: i32 = 1024;
/// How long a connection may take to say its hello.
pub(super) const HELLO_TIME: Duration = Duration::from_secs(1);
/// Connections that one look takes. More are left to the next look.
const TAKEN: usize = 256;
/// An endpoint logs strangers, and repairs, once in this time.
pub(super) const QUIET: Duration = LOG_PERIOD;

/// Connections that an endpoint may have in any case: two for each connection of its link, of which
/// `streams` are for bulk. So a flood of other endpoints leaves it some.
const fn own_places(streams: u8) -> usize {
    let of_link = 1 + streams as usize;
    if 2 * of_link > OWN_PLACES { 2 * of_link } else { OWN_PLACES }
}

/// The most connections that have not said their hello yet, of a fabric with so many endpoints.
pub(crate) const fn most_arriving(streams: u8, endpoints: u64) -> u64 {
    HALF_OPEN as u64 + endpoints * own_places(streams) as u64
}

/// What the endpoints of a fabric count together.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct SharedArrivals {
    /// Connections that have not said their hello yet.
    waiting: Arc<AtomicUsize>,
    /// Lines in the log.
    strangers: Arc<LogRateLimit>,
    repairs: Arc<LogRateLimit>,
}

impl SharedArrivals {
    fn add(&self) -> CountedArrival {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        CountedArrival(Arc::clone(&self.waiting))
    }

    /// Connections that wait.
    pub(in super::super) fn get(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the log gets a further line on strangers.
    fn may_log_stranger(&self) -> bool {
        self.strangers.line().is_some()
    }

    /// Whether the log gets a further line on repairs.
    pub(super) fn may_log_repair(&self) -> bool {
        self.repairs.line().is_some()
    }
}

/// One connection's part of the count. The drop ends it.
struct CountedArrival(Arc<AtomicUsize>);

impl Drop for CountedArrival {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The connections of one endpoint that have not said their hello yet, the oldest first.
pub(super) struct ArrivingConnections {
    shared: SharedArrivals,
    /// Connections of the link for bulk.
    streams: u8,
    waiting: Vec<ArrivingConnection>,
    /// Connections that were closed, as they were not the peer's.
    strangers: u64,
    /// When strangers are logged again, and how many the log had last.
    quiet: Option<ConnectDeadline>,
    /// What lacked for a connection at last, if anything ever did.
    lack: Option<Errno>,
}

/// What a look at an endpoint has left.
pub(super) enum LeftWaiting {
    Nothing,
    /// More connections may wait in the kernel.
    More,
    /// This process or host lacks descriptors or memory for more of them.
    Lack(Errno),
}

impl ArrivingConnections {
    /// None yet. They count among all of the fabric. The link has so many connections for bulk.
    pub(super) fn new(shared: SharedArrivals, streams: u8) -> Self {
        ArrivingConnections { shared, streams, waiting: Vec::new(), strangers: 0, quiet: None, lack: None }
    }

    /// Whether one of them has to make way.
    fn has_too_many(&self) -> bool {
        self.waiting.len() > own_places(self.streams) && self.shared.get() > HALF_OPEN
    }

    /// Takes the connections that wait in the kernel, by `accept`, and tells `watch` of each. Tells
    /// `admit` of those with a whole hello, which says whether it was the peer's. Closes those that
    /// are too late.
    pub(super) fn take(
        &mut self,
        accept: impl FnMut() -> io::Result<(TcpStream, SocketAddr)>,
        watch: impl Fn(&TcpStream),
        mut admit: impl FnMut(Hello, TcpStream) -> bool,
    ) -> LeftWaiting {
        let left = self.accept(accept, watch, &mut admit);
        for arrived in std::mem::take(&mut self.waiting) {
            self.read(arrived, &mut admit);
        }
        left
    }

    fn accept(
        &mut self,
        mut accept: impl FnMut() -> io::Result<(TcpStream, SocketAddr)>,
        watch: impl Fn(&TcpStream),
        admit: &mut impl FnMut(Hello, TcpStream) -> bool,
    ) -> LeftWaiting {
        for _ in 0..TAKEN {
            match accept() {
                Ok((socket, from)) => {
                    watch(&socket);
                    let counted = self.shared.add();
                    let arrived = ArrivingConnection::new(socket, from.ip(), counted);
                    let Some(arrived) = arrived else { continue };
                    self.read(arrived, admit);
                    if self.has_too_many() {
                        self.make_way(admit);
                    }
                }
                // The place of a stranger is better used by whoever comes.
                Err(error) => match own_limit(&error) {
                    Some(lack) => {
                        self.lack = Some(lack);
                        if self.waiting.is_empty() {
                            return LeftWaiting::Lack(lack);
                        }
                        self.make_way(admit);
                    }
                    None if error.kind() == io::ErrorKind::WouldBlock => return LeftWaiting::Nothing,
                    // Somebody has left again.
                    None => {}
                },
            }
        }
        LeftWaiting::More
    }

    /// Reads what has come of a hello. The connection waits on for the rest.
    fn read(&mut self, mut arrived: ArrivingConnection, admit: &mut impl FnMut(Hello, TcpStream) -> bool) {
        match arrived.hello.read(&arrived.socket) {
            Ok(None) if !arrived.until.is_over() => self.waiting.push(arrived),
            Ok(None) => self.close(arrived.source, "it said no hello in time"),
            Ok(Some(hello)) => {
                if !admit(hello, arrived.socket) {
                    self.close(arrived.source, "its hello is not the peer's");
                }
            }
            Err(_) => self.close(arrived.source, "it said no hello, or has ended"),
        }
    }

    /// Closes a connection: the oldest one of the address with the most of them, if those are more
    /// than the link has. So those of other addresses stay. Otherwise the oldest one of all: the
    /// peer itself may be the address with the most.
    fn make_way(&mut self, admit: &mut impl FnMut(Hello, TcpStream) -> bool) {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for arrived in &self.waiting {
            *counts.entry(arrived.source).or_default() += 1;
        }
        let most = counts.values().max().copied().unwrap_or_default();
        let is_peers = most <= 1 + usize::from(self.streams);
        let gives_way = |arrived: &ArrivingConnection| is_peers || counts.get(&arrived.source) == Some(&most);
        let Some(at) = self.waiting.iter().position(gives_way) else { return };
        let mut arrived = self.waiting.remove(at);
        // Its hello may have come meanwhile.
        match arrived.hello.read(&arrived.socket) {
            Ok(Some(hello)) if admit(hello, arrived.socket) => {}
            _ => self.close(arrived.source, "it was silent, and newer ones took its place"),
        }
    }

    fn close(&mut self, from: IpAddr, why: &str) {
        self.strangers += 1;
        if self.quiet.is_none_or(ConnectDeadline::is_over) && self.shared.may_log_stranger() {
            self.quiet = Some(ConnectDeadline::after(QUIET));
            tracing::warn!(
                "a connection from {from} to the port of a link was closed: {why}. It is not the peer's; {} \
                 were closed there so far. Which process calls the ports of this one?",
                self.strangers
            );
        }
    }

    /// The connections that were closed, as they were not the peer's.
    pub(super) fn strangers(&self) -> u64 {
        self.strangers
    }

    /// What this process or host lacked for a connection. One that was the peer's, and had not said
    /// its hello, may have made way for it.
    pub(super) fn lack(&self) -> Option<Errno> {
        self.lack
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = &TcpStream> {
        self.waiting.iter().map(|arrived| &arrived.socket)
    }

    /// The earlier of `deadline` and the end of the first connection that waits.
    pub(super) fn until(&self, deadline: ConnectDeadline) -> ConnectDeadline {
        self.waiting.iter().fold(deadline, |until, arrived| until.or_earlier(arrived.until))
    }
}

/// What this process or host lacks, if that is the error.
pub(super) fn own_limit(error: &io::Error) -> Option<Errno> {
    Errno::from_io_error(error).filter(|error| LACKS.contains(error))
}

/// A connection that has not said its hello yet.
struct ArrivingConnection {
    socket: TcpStream,
    source: IpAddr,
    hello: PartialHello,
    until: ConnectDeadline,
    _counted: CountedArrival,
}

impl ArrivingConnection {
    fn new(socket: TcpStream, from: IpAddr, counted: CountedArrival) -> Option<Self> {
        socket.set_nonblocking(true).ok()?;
        let (source, hello) = (source_of(from), PartialHello::default());
        let until = ConnectDeadline::after(HELLO_TIME);
        Some(ArrivingConnection { socket, source, hello, until, _counted: counted })
    }
}

/// The part of a hello that has come.
pub(super) struct PartialHello {
    bytes: [u8; BYTES],
    len: usize,
}

impl Default for PartialHello {
    fn default() -> Self {
        PartialHello { bytes: [0; BYTES], len: 0 }
    }
}

impl PartialHello {
    /// Reads what has come, and nothing behind the hello. `Ok(None)`: there is more to come.
    ///
    /// # Errors
    /// The connection's, or none if what came is no hello.
    pub(super) fn read(&mut self, mut socket: &TcpStream) -> Result<Option<Hello>, Option<io::Error>> {
        while self.len < BYTES {
            match socket.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Err(Some(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(Some(error)),
            }
        }
        Hello::from_bytes(&self.bytes).map(Some).ok_or(None)
    }
}

#[cfg(test)]
mod tests {
    use super::super::address::Token;
    use super::super::hello::Speaker;
    use super::*;
    use std::collections::VecDeque;
    use std::io::Write;
    use std::net::TcpListener;

    /// Connections that come from addresses of a test's choice, and their other ends.
    struct Coming {
        listener: TcpListener,
        next: VecDeque<io::Result<(TcpStream, SocketAddr)>>,
    }

    impl Coming {
        fn new() -> Self {
            Coming { listener: TcpListener::bind("127.0.0.1:0").expect("a port"), next: VecDeque::new() }
        }

        /// One more, which has said these bytes.
        fn from(&mut self, ip: [u8; 4], says: &[u8]) -> TcpStream {
            let mut other =
                TcpStream::connect(self.listener.local_addr().expect("bound")).expect("it listens");
            other.write_all(says).expect("sent");
            let (socket, _) = self.listener.accept().expect("a connection");
            self.next.push_back(Ok((socket, (ip, 1).into())));
            other
        }

        fn fails(&mut self, errno: Errno) {
            self.next.push_back(Err(errno.into()));
        }

        /// What a look takes: the numbers of the connections that said a hello.
        fn taken(&mut self, arriving: &mut ArrivingConnections) -> (LeftWaiting, Vec<u8>) {
            let mut said = Vec::new();
            let none = || Err(io::ErrorKind::WouldBlock.into());
            let accept = || self.next.pop_front().unwrap_or_else(none);
            let left = arriving.take(
                accept,
                |_| {},
                |hello, _| {
                    said.push(hello.stream);
                    true
                },
            );
            (left, said)
        }
    }

    /// Of a link with two connections.
    fn none_yet() -> ArrivingConnections {
        ArrivingConnections::new(SharedArrivals::default(), 1)
    }

    fn is_open(mut other: &TcpStream) -> bool {
        other.set_nonblocking(true).expect("set");
        other.read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    fn hello(stream: u8) -> [u8; BYTES] {
        Hello { speaker: Speaker::Initiator, stream, number: 0, token: Token([7; 16]) }.to_bytes()
    }

    #[test]
    fn the_oldest_of_the_busiest_address_makes_way_unless_its_hello_has_come() {
        let (mut coming, mut arriving) = (Coming::new(), none_yet());
        let far = coming.from([10, 0, 0, 2], &[]);
        let mut near: Vec<TcpStream> = (1..HALF_OPEN).map(|_| coming.from([10, 0, 0, 1], &[])).collect();
        let (left, said) = coming.taken(&mut arriving);
        assert!(matches!(left, LeftWaiting::Nothing) && said.is_empty());
        assert_eq!((arriving.sockets().count(), arriving.strangers()), (HALF_OPEN, 0));
        near[1].write_all(&hello(3)).expect("sent");
        near.extend((0..3).map(|_| coming.from([10, 0, 0, 1], &[])));
        assert_eq!(coming.taken(&mut arriving).1, [3]);
        let open: Vec<bool> = near.iter().map(is_open).collect();
        assert!(!open[0] && !open[2] && open[3..].iter().all(|it| *it), "{open:?}");
        assert!(is_open(&far), "another address");
        assert_eq!((arriving.sockets().count(), arriving.strangers()), (HALF_OPEN, 2));
    }

    #[test]
    fn a_flood_of_several_endpoints_takes_the_places_of_one() {
        let count = SharedArrivals::default();
        let mut endpoints: Vec<ArrivingConnections> =
            (0..8).map(|_| ArrivingConnections::new(count.clone(), 1)).collect();
        let mut others = Vec::new();
        for arriving in &mut endpoints {
            let mut coming = Coming::new();
            others.extend((0..HALF_OPEN + 2).map(|_| coming.from([10, 0, 0, 1], &[])));
            coming.taken(arriving);
        }
        let waiting: Vec<usize> = endpoints.iter().map(|it| it.sockets().count()).collect();
        assert_eq!(waiting, [HALF_OPEN, 8, 8, 8, 8, 8, 8, 8]);
        assert_eq!(count.get() as u64, most_arriving(1, 7));
        // A flooded endpoint still takes its peer.
        let mut coming = Coming::new();
        let _peer = coming.from([10, 0, 0, 1], &hello(1));
        assert_eq!(coming.taken(&mut endpoints[7]).1, [1]);
        drop(endpoints);
        assert_eq!(count.get(), 0);
    }

    #[test]
    fn a_peer_with_the_most_connections_keeps_them_while_strangers_come_from_many_addresses() {
        const STREAMS: u8 = 15;
        let flood = |from: u8| (0..HALF_OPEN as u8).map(move |at| [10, 1, from, at]);
        let (shared, mut others) = (SharedArrivals::default(), Coming::new());
        let mut elsewhere = ArrivingConnections::new(shared.clone(), STREAMS);
        let _silent: Vec<TcpStream> = flood(0).map(|from| others.from(from, &[])).collect();
        others.taken(&mut elsewhere);
        assert_eq!(shared.get(), HALF_OPEN);
        // The hellos of the peer come after all its connections.
        let (mut coming, mut arriving) = (Coming::new(), ArrivingConnections::new(shared, STREAMS));
        let _before: Vec<TcpStream> = flood(1).map(|from| coming.from(from, &[])).collect();
        coming.taken(&mut arriving);
        let mut peer: Vec<TcpStream> = (0..=STREAMS).map(|_| coming.from([10, 0, 0, 1], &[])).collect();
        let _between: Vec<TcpStream> =
            flood(2).take(usize::from(STREAMS) + 1).map(|from| coming.from(from, &[])).collect();
        assert!(coming.taken(&mut arriving).1.is_empty());
        for (stream, socket) in (0..).zip(&mut peer) {
            socket.write_all(&hello(stream)).expect("sent");
        }
        assert_eq!(coming.taken(&mut arriving).1, (0..=STREAMS).collect::<Vec<u8>>());
    }

    #[test]
    fn a_peer_makes_no_way_for_a_stranger_with_more_connections_while_descriptors_lack() {
        let (mut coming, mut arriving) = (Coming::new(), none_yet());
        let peer = [0, 1].map(|_| coming.from([10, 0, 0, 1], &[]));
        let strangers = [0, 1, 2].map(|_| coming.from([10, 0, 0, 2], &[]));
        coming.taken(&mut arriving);
        coming.fails(Errno::MFILE);
        coming.taken(&mut arriving);
        assert!(peer.iter().all(is_open));
        assert_eq!(strangers.each_ref().map(is_open), [false, true, true]);
    }

    #[test]
    fn a_stranger_makes_way_while_descriptors_lack() {
        let (mut coming, mut arriving) = (Coming::new(), none_yet());
        let silent = coming.from([10, 0, 0, 1], &[]);
        coming.taken(&mut arriving);
        coming.fails(Errno::MFILE);
        coming.fails(Errno::CONNABORTED);
        let _peer = coming.from([10, 0, 0, 1], &hello(0));
        assert_eq!(coming.taken(&mut arriving).1, [0]);
        assert!(!is_open(&silent));
        // Nobody makes way any more.
        coming.fails(Errno::NFILE);
        let (left, _) = coming.taken(&mut arriving);
        assert!(matches!(left, LeftWaiting::Lack(Errno::NFILE)));
    }

    #[test]
    fn a_look_leaves_connections_to_the_next_one() {
        let (mut coming, mut arriving) = (Coming::new(), none_yet());
        (0..=TAKEN).for_each(|_| coming.fails(Errno::CONNABORTED));
        assert!(matches!(coming.taken(&mut arriving).0, LeftWaiting::More));
        assert!(matches!(coming.taken(&mut arriving).0, LeftWaiting::Nothing));
    }
}
