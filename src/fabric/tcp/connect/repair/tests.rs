//! A session whose peer is made by hand, by a clock of the test's own.

use super::*;
use crate::fabric::tcp::connect::arrivals::PartialHello;
use std::net::Ipv4Addr;

/// Time that a look takes.
const LOOK: Duration = Duration::from_millis(1);

/// The watcher's part of an initiator's session, and its acceptor.
struct Meeting {
    watch: SessionWatch,
    epoll: OwnedFd,
    /// `None`: the acceptor's host refuses connections.
    acceptor: Option<TcpListener>,
    /// The connections of the acceptor whose hello has not come yet, and those that it answered.
    arrived: Vec<(TcpStream, PartialHello)>,
    answered: Vec<TcpStream>,
    now: Instant,
}

fn listener() -> TcpListener {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.set_nonblocking(true).expect("set");
    listener
}

impl Meeting {
    fn new(user_timeout: Duration) -> Self {
        Self::of(Role::Initiator, user_timeout)
    }

    /// The watcher's side has this role.
    fn of(role: Role, user_timeout: Duration) -> Self {
        let (own, acceptor) = (listener(), listener());
        let seen = acceptor.local_addr().expect("bound");
        let (token, hosts) = (Token([2; 16]), vec![seen.ip()]);
        let peer =
            TcpAddress { token, pid: 1, depth: 1, generation: 0, streams: 1, port: seen.port(), hosts };
        let options = TcpOptions { user_timeout, ..TcpOptions::default() };
        let plan = SessionPlan { role, options, own: Token([1; 16]), peer, seen, streams: 1 };
        Meeting {
            watch: SessionWatch::new(plan, own, &SharedArrivals::default()),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll"),
            acceptor: Some(acceptor),
            arrived: Vec::new(),
            answered: Vec::new(),
            now: Instant::now(),
        }
    }

    fn time_to_repair(&self) -> Duration {
        self.watch.plan.options.time_to_repair()
    }

    /// The acceptor asks for other connections than the present ones.
    fn ask(&self) -> TcpStream {
        self.come(Speaker::Acceptor, 0, self.watch.number)
    }

    /// A connection of the peer.
    fn come(&self, speaker: Speaker, stream: u8, number: u32) -> TcpStream {
        let to = self.watch.listener.local_addr().expect("bound");
        let mut socket = TcpStream::connect(to).expect("it listens");
        let hello = Hello { speaker, stream, number, token: self.watch.plan.own };
        socket.write_all(&hello.to_bytes()).expect("sent");
        socket
    }

    /// The watcher looks once, and the acceptor answers all hellos that have come.
    /// Returns whether the watcher is to look again.
    fn look(&mut self) -> bool {
        self.now += LOOK;
        let data = epoll::EventData::new_u64(0);
        let again = self.watch.step(SessionEvents { epoll: &self.epoll, data }, self.now);
        while let Some(Ok((socket, _))) = self.acceptor.as_ref().map(TcpListener::accept) {
            socket.set_nonblocking(true).expect("set");
            self.arrived.push((socket, PartialHello::default()));
        }
        for (mut socket, mut hello) in std::mem::take(&mut self.arrived) {
            match hello.read(&socket) {
                Ok(Some(hello)) => {
                    let hello = Hello { speaker: Speaker::Acceptor, token: self.watch.plan.own, ..hello };
                    socket.write_all(&hello.to_bytes()).expect("sent");
                    self.answered.push(socket);
                }
                Ok(None) => self.arrived.push((socket, hello)),
                // The watcher has given it up.
                Err(_) => {}
            }
        }
        std::thread::yield_now();
        again
    }

    /// Looks until there is an outcome.
    fn outcome(&mut self) -> RepairOutcome {
        let end = self.now + 2 * self.watch.plan.options.user_timeout;
        while self.now < end {
            self.look();
            if let Some(outcome) = self.watch.mailbox.take() {
                return outcome;
            }
        }
        panic!("no outcome")
    }
}

#[test]
fn an_acceptor_that_asks_again_and_again_and_does_not_resume_gets_no_more_time() {
    let mut meeting = Meeting::new(Duration::from_secs(1));
    let (start, time) = (meeting.now, meeting.time_to_repair());
    let mut rounds = 0;
    for _ in 0..2 {
        let (start, mut last) = (meeting.now, meeting.now);
        let outcome = loop {
            let _asks = meeting.ask();
            match meeting.outcome() {
                RepairOutcome::Connected(..) => (rounds, last) = (rounds + 1, meeting.now),
                outcome => break outcome,
            }
            assert!(meeting.now < start + 2 * time, "{rounds} rounds, and no end");
        };
        assert!(matches!(outcome, RepairOutcome::GivenUp(None)));
        assert!(last > start && last <= start + time + LOOK, "{:?}", last - start);
        // It has the whole time again once it has gone on with the connections.
        meeting.watch.mailbox.has_resumed.store(true, Ordering::Relaxed);
    }
    println!("{rounds} rounds in {:?}", meeting.now - start);
    assert!(rounds > 4, "{rounds} rounds");
}

#[test]
fn connections_that_were_silent_to_their_end_have_not_lived() {
    for user_timeout in [1, 2, 4, 10, 3600].map(Duration::from_secs) {
        let mut meeting = Meeting::new(user_timeout);
        let start = meeting.now;
        let mut breaks = 0;
        // A network that lets hellos through, and nothing larger.
        let outcome = loop {
            meeting.watch.broken(meeting.watch.number, false, true, meeting.now);
            breaks += 1;
            match meeting.outcome() {
                // As long as the kernel may take to notice: see `set_up`.
                RepairOutcome::Connected(..) => {
                    let options = &meeting.watch.plan.options;
                    meeting.now += options.time_to_notice() + options.keep_alive() * 3 / 2;
                }
                outcome => break outcome,
            }
            assert!(meeting.now < start + 10 * user_timeout, "{user_timeout:?}: {breaks} breaks, and no end");
        };
        assert!(matches!(outcome, RepairOutcome::GivenUp(None)) && breaks > 1, "{breaks} breaks");
        // An idle link that the network broke much later has the whole time.
        meeting.now += meeting.watch.plan.options.longest_silence() + meeting.time_to_repair();
        meeting.watch.broken(meeting.watch.number, false, true, meeting.now);
        assert!(matches!(meeting.outcome(), RepairOutcome::Connected(..)));
    }
}

#[test]
fn the_end_of_a_cut_is_told_until_the_owner_acts_whatever_the_peer_asks_for() {
    let mut meeting = Meeting::new(Duration::from_secs(1));
    meeting.watch.cut(0, meeting.now);
    meeting.now += meeting.time_to_repair();
    meeting.look();
    // The owner has not looked yet. The acceptor asks, and its host refuses what it asked for.
    meeting.acceptor = None;
    let _asks = meeting.ask();
    while meeting.watch.last_until.is_none() || meeting.watch.repair.is_some() {
        meeting.look();
    }
    assert!(matches!(meeting.outcome(), RepairOutcome::Overdue));
    // The owner acts.
    meeting.watch.broken(0, false, true, meeting.now);
    assert!(matches!(meeting.outcome(), RepairOutcome::Gone));
    assert!(!meeting.look() && meeting.watch.mailbox.take().is_none());
}

/// Longer than the shortest time of an attempt, and less than an eighth of this timeout.
const SLOW: Duration = Duration::from_secs(3);
const USER_TIMEOUT: Duration = Duration::from_secs(40);

#[test]
fn an_attempt_waits_for_a_slow_network_and_not_for_the_whole_repair() {
    for (delay, attempts) in [(SLOW, 1), (USER_TIMEOUT / 8 + LOOK, 2)] {
        let mut meeting = Meeting::new(USER_TIMEOUT);
        let acceptor = meeting.acceptor.take();
        meeting.watch.broken(0, true, false, meeting.now);
        while meeting.watch.attempts == 0 {
            meeting.look();
        }
        meeting.now += delay;
        meeting.look();
        meeting.acceptor = acceptor;
        let RepairOutcome::Connected(_, number) = meeting.outcome() else { panic!("not connected") };
        assert_eq!(number, attempts, "after {delay:?}");
    }
}

#[test]
fn an_acceptor_waits_for_the_connections_of_a_slow_network_too() {
    let mut meeting = Meeting::of(Role::Acceptor, USER_TIMEOUT);
    let _main = meeting.come(Speaker::Initiator, 0, 1);
    while meeting.watch.set.is_none() {
        meeting.look();
    }
    meeting.now += SLOW;
    meeting.look();
    let _bulk = meeting.come(Speaker::Initiator, 1, 1);
    assert!(matches!(meeting.outcome(), RepairOutcome::Connected(_, 1)));
    // Those that do not come at all are not waited for.
    let _main = meeting.come(Speaker::Initiator, 0, 2);
    while meeting.watch.set.is_none() {
        meeting.look();
    }
    meeting.now += USER_TIMEOUT / 8;
    assert!(!meeting.look() && meeting.watch.set.is_none());
}
