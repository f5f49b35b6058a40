//! Both machines, with an in-order channel in each direction, in every interleaving of their steps.
//! The receiver cancels at every point.

mod random;

use super::*;
use std::collections::{HashSet, VecDeque};

/// One explored case: a value and a request for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Case {
    value: Kind,
    asked: Ask,
    /// Whether the receiver can allocate a destination.
    room: bool,
    /// Whether the receiver validates.
    validates: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Dead,
    Small,
    Empty,
    Large,
    Lendable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ask {
    /// Nothing is known about the value.
    First,
    /// Its meta-data is cached and its destination granted.
    Granted,
    /// Other meta-data is cached, and a destination for it is granted.
    GrantedOther,
    /// The receiver accepts a loan.
    Borrow,
    /// A standing request with the right meta-data and a destination for it.
    Standing,
    /// A standing request with other meta-data and a destination that is larger than the value.
    StandingRoomy,
    /// A standing request with the right meta-data and a larger destination.
    StandingSpacious,
    /// A standing request with a destination that is too small for large values.
    StandingTight,
    /// A standing request without a destination.
    StandingBare,
    /// A standing request that accepts a loan.
    StandingBorrow,
}

impl Ask {
    const ALL: [Ask; 10] = [
        Ask::First,
        Ask::Granted,
        Ask::GrantedOther,
        Ask::Borrow,
        Ask::Standing,
        Ask::StandingRoomy,
        Ask::StandingSpacious,
        Ask::StandingTight,
        Ask::StandingBare,
        Ask::StandingBorrow,
    ];

    fn is_standing(self) -> bool {
        use Ask::{Standing, StandingBare, StandingBorrow, StandingRoomy, StandingSpacious, StandingTight};
        matches!(
            self,
            Standing | StandingRoomy | StandingSpacious | StandingTight | StandingBare | StandingBorrow
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ToSender {
    Request,
    ReRequest,
    Cancel,
    Return,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ToReceiver {
    Write,
    Dead,
    Response,
    Loan,
    Meta { loan_follows: bool },
    MetaBeforeWrite,
    Stashed,
    Checksum,
    CancelAck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Line {
    Empty,
    Value,
    StashedByReceiver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Waiter {
    /// No receive has claimed the standing request.
    NotYet,
    Waits,
    Got,
    ToldCancelled,
    ToldNoRoom,
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Send,
    Sender,
    Receiver,
    Cancel,
    Drop,
    Claim,
    WithdrawStanding,
}

#[derive(Clone, Debug)]
struct World {
    case: Case,
    receiver: Receiver,
    waiter: Waiter,
    in_use: bool,
    granted: Option<u64>,
    no_room: bool,
    stashed: bool,
    early: bool,
    unverified: bool,
    sender: Option<Sender>,
    kept: bool,
    sent: bool,
    line: Line,
    to_sender: VecDeque<ToSender>,
    to_receiver: VecDeque<ToReceiver>,
    may_cancel: bool,
}

const OTHER: u64 = 77;
const ROOMY: u64 = 2000;

impl Kind {
    fn bytes(self) -> u64 {
        match self {
            Kind::Dead | Kind::Empty => 0,
            Kind::Small => 8,
            Kind::Large | Kind::Lendable => 1000,
        }
    }
}

impl World {
    fn new(case: Case) -> Self {
        let granted = Self::grant_of(case);
        let standing = case.asked.is_standing();
        let receiver = match case.asked {
            Ask::StandingSpacious => Receiver::standing(granted).expecting(case.value.bytes()),
            Ask::StandingRoomy => Receiver::standing(granted).expecting(OTHER),
            _ if standing => Receiver::standing(granted),
            _ => Receiver::new(granted),
        };
        World {
            case,
            receiver: receiver.validated(case.validates),
            waiter: if standing { Waiter::NotYet } else { Waiter::Waits },
            in_use: true,
            granted,
            no_room: false,
            stashed: false,
            early: false,
            unverified: false,
            sender: None,
            kept: false,
            sent: false,
            line: Line::Empty,
            to_sender: [ToSender::Request].into(),
            to_receiver: VecDeque::new(),
            may_cancel: true,
        }
    }

    fn grant_of(case: Case) -> Option<u64> {
        match case.asked {
            Ask::Granted | Ask::Standing => Some(case.value.bytes()),
            Ask::GrantedOther | Ask::StandingTight => Some(OTHER),
            Ask::StandingRoomy | Ask::StandingSpacious => Some(ROOMY),
            Ask::First | Ask::Borrow | Ask::StandingBare | Ask::StandingBorrow => None,
        }
    }

    /// The state after everything has ended, with the next receive, which does not cancel.
    fn next_receive(&self) -> World {
        let (sent, line, stashed) = (self.sent, self.line, self.stashed);
        World { sent, line, stashed, may_cancel: false, ..World::new(Case { room: true, ..self.case }) }
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut add = |step, can: bool| {
            if can {
                steps.push(step);
            }
        };
        add(Step::Send, !self.sent);
        add(Step::Sender, !self.to_sender.is_empty());
        add(Step::Receiver, !self.to_receiver.is_empty());
        let waits = self.waiter == Waiter::Waits;
        add(Step::Cancel, self.may_cancel && waits && self.receiver.clone().cancel() != ReceiverAction::None);
        add(Step::Drop, self.may_cancel && waits);
        let unclaimed = self.waiter == Waiter::NotYet;
        add(Step::Claim, unclaimed);
        add(Step::WithdrawStanding, self.may_cancel && unclaimed);
        steps
    }

    fn take(&mut self, step: Step) -> Result<(), Violation> {
        match step {
            Step::Send => {
                (self.sent, self.line) = (true, Line::Value);
                self.serve();
            }
            Step::Sender => self.sender_step()?,
            Step::Receiver => self.receiver_step()?,
            Step::Cancel => self.cancel(),
            Step::Drop => {
                self.waiter = Waiter::Dropped;
                self.cancel();
            }
            Step::Claim => {
                self.waiter = Waiter::Waits;
                if !self.in_use {
                    // The standing request was cancelled first: the receive sends a plain request
                    // and gets the same end.
                    self.waiter = Waiter::ToldNoRoom;
                } else if self.receiver.claim() == ReceiverAction::Deliver {
                    assert!(std::mem::take(&mut self.early), "it is here");
                    (self.waiter, self.in_use) = (Waiter::Got, false);
                }
            }
            Step::WithdrawStanding => {
                self.waiter = Waiter::Dropped;
                if std::mem::take(&mut self.early) {
                    self.stashed = true;
                    self.to_sender.push_back(ToSender::Return);
                }
                self.cancel();
            }
        }
        Ok(())
    }

    fn cancel(&mut self) {
        match self.receiver.cancel() {
            ReceiverAction::SendCancel => self.to_sender.push_back(ToSender::Cancel),
            ReceiverAction::Free => self.in_use = false,
            _ => {}
        }
    }

    fn sender_value(&self) -> SenderValue {
        let kind = self.case.value;
        SenderValue {
            dead: kind == Kind::Dead,
            bytes: kind.bytes(),
            meta_version: 5,
            fits_response: kind == Kind::Small,
            lendable: kind == Kind::Lendable,
        }
    }

    /// Matches the line with the waiting request.
    fn serve(&mut self) {
        let value = self.sender_value();
        let Some(sender) = self.sender.as_mut().filter(|_| !self.kept) else { return };
        match self.line {
            Line::Empty => return,
            Line::StashedByReceiver => {
                self.sender = None;
                self.to_receiver.push_back(ToReceiver::Stashed);
            }
            Line::Value => match sender.matched(value) {
                SenderAnswer::Meta => {
                    self.kept = true;
                    self.to_receiver.push_back(ToReceiver::Meta { loan_follows: false });
                }
                answer => {
                    self.sender = None;
                    if answer == (SenderAnswer::Lend { meta_first: true }) {
                        self.to_receiver.push_back(ToReceiver::Meta { loan_follows: true });
                    }
                    if answer == SenderAnswer::MetaThenWrite {
                        self.to_receiver.push_back(ToReceiver::MetaBeforeWrite);
                    }
                    self.answer(match answer {
                        SenderAnswer::Dead => ToReceiver::Dead,
                        SenderAnswer::Response => ToReceiver::Response,
                        SenderAnswer::Write | SenderAnswer::MetaThenWrite => ToReceiver::Write,
                        SenderAnswer::Lend { .. } | SenderAnswer::Meta => ToReceiver::Loan,
                    });
                }
            },
        }
        self.line = Line::Empty;
    }

    /// Sends the value, and its checksum behind it if the receiver asked for one and the value has
    /// bytes.
    fn answer(&mut self, answer: ToReceiver) {
        self.to_receiver.push_back(answer);
        if self.case.validates && answer != ToReceiver::Dead {
            self.to_receiver.push_back(ToReceiver::Checksum);
        }
    }

    fn sender_step(&mut self) -> Result<(), Violation> {
        match self.to_sender.pop_front().expect("a step that is there") {
            ToSender::Request => {
                let granted = Self::grant_of(self.case);
                let meta_version = match self.case.asked {
                    Ask::First | Ask::Borrow | Ask::StandingBare | Ask::StandingBorrow => 0,
                    Ask::Granted | Ask::Standing | Ask::StandingSpacious => 5,
                    Ask::GrantedOther | Ask::StandingRoomy | Ask::StandingTight => 4,
                };
                let borrow = matches!(self.case.asked, Ask::Borrow | Ask::StandingBorrow);
                let standing = self.case.asked.is_standing();
                self.sender = Some(Sender::new(SenderRequest { granted, meta_version, borrow, standing }));
                self.serve();
            }
            ToSender::ReRequest => {
                let bytes = self.case.value.bytes();
                self.sender.as_mut().expect("it keeps a value").re_requested(bytes)?;
                (self.sender, self.kept) = (None, false);
                self.answer(ToReceiver::Write);
            }
            ToSender::Cancel => {
                if let Some(sender) = self.sender.take() {
                    assert_eq!(sender.cancelled() == CancelAction::PutBack, self.kept);
                    if std::mem::take(&mut self.kept) {
                        assert_eq!(self.line, Line::Empty, "there is one value");
                        self.line = Line::Value;
                    }
                }
                self.to_receiver.push_back(ToReceiver::CancelAck);
            }
            ToSender::Return => {
                assert_eq!(self.line, Line::Empty, "there is one value");
                self.line = Line::StashedByReceiver;
                self.serve();
            }
        }
        Ok(())
    }

    fn receiver_step(&mut self) -> Result<(), Violation> {
        let arrived = self.to_receiver.pop_front().expect("a step that is there");
        let arrival = match arrived {
            ToReceiver::Write => {
                let (granted, bytes) = (self.granted.take(), self.case.value.bytes());
                assert!(granted.expect("a write lands where it was granted") >= bytes);
                Arrival::Landed { bytes }
            }
            ToReceiver::Dead => Arrival::Dead,
            ToReceiver::Response => Arrival::Response,
            ToReceiver::Loan => Arrival::Loan,
            ToReceiver::MetaBeforeWrite => {
                assert!(self.granted.is_some_and(|granted| granted >= self.case.value.bytes()));
                Arrival::MetaBeforeWrite { bytes: self.case.value.bytes() }
            }
            ToReceiver::Meta { loan_follows: true } => Arrival::MetaBeforeLoan,
            ToReceiver::Meta { loan_follows: false } => Arrival::Meta,
            ToReceiver::Stashed => {
                assert!(std::mem::take(&mut self.stashed), "it is stashed here");
                Arrival::Stashed
            }
            ToReceiver::Checksum => {
                assert!(std::mem::take(&mut self.unverified), "a checksum is right behind its value");
                Arrival::Checksum
            }
            ToReceiver::CancelAck => Arrival::CancelAck,
        };
        let action = self.receiver.arrive(arrival)?;
        match action {
            ReceiverAction::None => {}
            ReceiverAction::AwaitChecksum => (self.unverified, self.granted) = (true, None),
            ReceiverAction::Allocate if self.case.room => {
                self.granted = Some(self.case.value.bytes());
                self.receiver.allocated(self.case.value.bytes());
                self.to_sender.push_back(ToSender::ReRequest);
            }
            ReceiverAction::Allocate => {
                (self.granted, self.no_room) = (None, true);
                assert_eq!(self.receiver.no_room(), ReceiverAction::SendCancel);
                self.to_sender.push_back(ToSender::Cancel);
            }
            ReceiverAction::Deliver | ReceiverAction::DeliverAndKeep => {
                self.in_use = action == ReceiverAction::DeliverAndKeep;
                if self.waiter == Waiter::Waits {
                    self.waiter = Waiter::Got;
                } else {
                    self.stashed = true;
                    self.to_sender.push_back(ToSender::Return);
                }
            }
            ReceiverAction::FinishCancelled => {
                (self.in_use, self.granted) = (false, None);
                if self.waiter == Waiter::Waits {
                    self.waiter = if self.no_room { Waiter::ToldNoRoom } else { Waiter::ToldCancelled };
                }
            }
            ReceiverAction::Free => self.in_use = false,
            ReceiverAction::StoreEarly => (self.early, self.granted) = (true, None),
            ReceiverAction::SendCancel | ReceiverAction::AskOnceMore => panic!("{action:?} for {arrival:?}"),
        }
        if !self.in_use {
            self.granted = None;
        }
        Ok(())
    }

    /// The place of the value: there is exactly one.
    fn check(&self) {
        let on_its_way = |message: &ToReceiver| {
            matches!(
                message,
                ToReceiver::Write
                    | ToReceiver::Dead
                    | ToReceiver::Response
                    | ToReceiver::Loan
                    | ToReceiver::Stashed
            )
        };
        let on_its_way = self.to_receiver.iter().filter(|message| on_its_way(message)).count();
        // A stashed value has a place in line, or the message that gives it one is under way.
        let returning = self.to_sender.contains(&ToSender::Return);
        let stashed_in_line = self.line == Line::StashedByReceiver || returning;
        let stashed_on_its_way = self.to_receiver.contains(&ToReceiver::Stashed);
        assert_eq!(self.stashed, stashed_in_line || stashed_on_its_way, "{self:?}");
        let places = on_its_way
            + usize::from(self.waiter == Waiter::Got)
            + usize::from(self.line == Line::Value)
            + usize::from(self.kept)
            + usize::from(self.early)
            + usize::from(self.unverified)
            + usize::from(stashed_in_line);
        assert_eq!(places, usize::from(self.sent), "never neither, never both: {self:?}");
        let checksums = self.to_receiver.iter().filter(|message| **message == ToReceiver::Checksum).count();
        let bytes = |message: &&ToReceiver| {
            matches!(message, ToReceiver::Write | ToReceiver::Response | ToReceiver::Loan)
        };
        let with_bytes = self.to_receiver.iter().filter(bytes).count() + usize::from(self.unverified);
        assert_eq!(checksums, if self.case.validates { with_bytes } else { 0 }, "{self:?}");
        // The grant exists as long as a write is under way or may still be posted.
        if self.to_receiver.contains(&ToReceiver::Write) || self.to_sender.contains(&ToSender::ReRequest) {
            assert!(self.granted.is_some(), "granted memory was freed too early: {self:?}");
        }
        if let Some(sender) = &self.sender
            && !self.kept
            && Self::grant_of(self.case).is_some()
            && !matches!(self.line, Line::Value | Line::StashedByReceiver)
        {
            assert!(self.granted.is_some(), "{sender:?} may write to freed memory: {self:?}");
        }
    }

    /// No step is possible any more.
    fn check_end(&self) {
        assert!(self.sender.is_none() && !self.kept, "a request is left at the sender: {self:?}");
        assert!(!self.in_use && self.granted.is_none(), "a slot is left at the receiver: {self:?}");
        assert!(!matches!(self.waiter, Waiter::Waits | Waiter::NotYet), "a waiter hangs: {self:?}");
    }
}

/// Explores everything from here. Returns the number of interleavings.
fn explore(world: &World, seen_ends: &mut HashSet<(Waiter, Line)>) -> u64 {
    world.check();
    let steps = world.steps();
    if steps.is_empty() {
        world.check_end();
        seen_ends.insert((world.waiter, world.line));
        return 1;
    }
    let mut count = 0;
    for step in steps {
        let mut next = world.clone();
        next.take(step).unwrap_or_else(|violation| panic!("{violation} after {step:?} in {world:?}"));
        count += explore(&next, seen_ends);
    }
    count
}

fn cases() -> impl Iterator<Item = Case> {
    let values = [Kind::Dead, Kind::Small, Kind::Empty, Kind::Large, Kind::Lendable];
    let all = values.into_iter().flat_map(move |value| Ask::ALL.map(move |asked| (value, asked)));
    let all = all.flat_map(|(value, asked)| [true, false].map(|room| (value, asked, room)));
    all.flat_map(|(value, asked, room)| [false, true].map(|validates| Case { value, asked, room, validates }))
}

/// Follows one path to its end. Returns how it ends.
fn follow(mut world: World, mut choose: impl FnMut(usize) -> usize) -> World {
    loop {
        world.check();
        let steps = world.steps();
        if steps.is_empty() {
            world.check_end();
            return world;
        }
        let step = steps[choose(steps.len()) % steps.len()];
        world.take(step).unwrap_or_else(|violation| panic!("{violation} after {step:?} in {world:?}"));
    }
}

#[test]
fn in_every_interleaving_the_value_is_in_one_place_and_nothing_is_left() {
    let (mut count, mut ends) = (0, HashSet::new());
    for case in cases() {
        count += explore(&World::new(case), &mut ends);
    }
    println!("{count} interleavings of {} exchanges", cases().count());
    // Every possible end was seen; otherwise this test would prove less than its name says.
    for end in [
        (Waiter::Got, Line::Empty),
        (Waiter::ToldCancelled, Line::Value),
        (Waiter::ToldNoRoom, Line::Value),
        (Waiter::Dropped, Line::Value),
        (Waiter::Dropped, Line::StashedByReceiver),
    ] {
        assert!(ends.contains(&end), "{end:?} never came: {ends:?}");
    }
}

#[test]
fn after_any_end_of_a_receive_the_next_one_gets_the_value() {
    fn ends(world: &World, each: &mut impl FnMut(&World)) {
        let steps = world.steps();
        if steps.is_empty() {
            return each(world);
        }
        for step in steps {
            let mut next = world.clone();
            next.take(step).expect("no violation");
            ends(&next, each);
        }
    }
    let mut count = 0_u64;
    for case in cases() {
        ends(&World::new(case), &mut |end| {
            if end.waiter != Waiter::Got {
                count += 1;
                let next = follow(end.next_receive(), |_| 0);
                assert_eq!((next.waiter, next.line), (Waiter::Got, Line::Empty), "after {end:?}");
            }
        });
    }
    println!("{count} second receives");
    assert!(count > 1000);
}
