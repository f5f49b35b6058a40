//! One poller: its links and the layer above.

use crate::fabric::Port;
use crate::link::{Handler, Links};
use crate::telemetry::{Counter, Counters};
use crate::wire::Time;
use std::sync::Arc;

/// One poller. The thread that holds `&mut` of it moves it on.
pub struct Poller<P: Port, H: Handler<P>> {
    links: Links<P>,
    handler: H,
    /// Whether anything was done since the last [`Poller::take_active`].
    active: bool,
    /// Whether the port is armed and nothing has come since.
    armed: bool,
    /// Results of direct waits until a poll is due.
    results_left: u32,
    /// How often such a poll was due so far, modulo 2^32.
    result_polls: u32,
}

/// Results of direct waits between two polls: other links go on, also if each wait finds its
/// result.
const RESULTS_PER_POLL: u32 = 16;
/// Such polls between two ends of waits whose deadlines have passed.
const POLLS_PER_CLOCK: u32 = 4;

impl<P: Port, H: Handler<P>> Poller<P, H> {
    /// A poller over these links.
    pub fn new(links: Links<P>, handler: H) -> Self {
        Poller {
            links,
            handler,
            active: false,
            armed: false,
            results_left: RESULTS_PER_POLL,
            result_polls: 0,
        }
    }

    /// Runs a command and the events that it causes at once. Returns what [`Handler::command`]
    /// returns.
    pub fn command(&mut self, command: H::Command, now: Time) -> Option<H::Command> {
        self.active = true;
        let returned = self.handler.command(&mut self.links, command, now);
        if !self.links.is_quiet() {
            self.events(now);
        }
        returned
    }

    /// Handles a bounded number of completions, and ends every wait whose deadline has passed at
    /// `now`. Returns the number of completions.
    pub fn step(&mut self, now: Time) -> usize {
        self.before_poll();
        self.links.set_time(now);
        let count = self.links.poll();
        self.links.counters().increment(Counter::Polls);
        if count > 0 {
            (self.active, self.armed) = (true, false);
            self.events(now);
        } else {
            self.links.counters().increment(Counter::IdlePolls);
        }
        if now >= self.handler.next_deadline() {
            self.active = true;
            self.handler.expire(&mut self.links, now);
            self.events(now);
        }
        count
    }

    /// Calls `body` on the handler and its links, and handles the events that it causes at once.
    /// The handler needs no time for them.
    #[inline]
    pub fn direct<R>(&mut self, body: impl FnOnce(&mut H, &mut Links<P>) -> R) -> R {
        self.active = true;
        let result = body(&mut self.handler, &mut self.links);
        if !self.links.is_quiet() {
            self.events(Time::ZERO);
        }
        result
    }

    /// Whether there is another link beside the one that a direct wait looks at.
    pub fn has_several_links(&self) -> bool {
        self.links.has_several()
    }

    /// Counts a result that a direct wait has found. Returns whether a poll is due.
    #[inline]
    pub fn count_result(&mut self) -> bool {
        self.results_left = self.results_left.wrapping_sub(1);
        self.results_left == 0
    }

    /// Counts a poll that was due. Returns whether the end of late waits is due, too.
    pub fn count_result_poll(&mut self) -> bool {
        self.results_left = RESULTS_PER_POLL;
        self.result_polls = self.result_polls.wrapping_add(1);
        self.result_polls.is_multiple_of(POLLS_PER_CLOCK)
    }

    /// Lets the handler send what it has put off.
    #[inline]
    pub fn before_poll(&mut self) {
        self.handler.before_poll(&mut self.links);
    }

    /// As [`Poller::step`], for a handler that needs no time. Neither ends waits nor lets the
    /// handler send what it has put off.
    #[inline]
    pub fn poll_direct(&mut self) -> usize {
        let count = self.links.poll();
        self.links.counters().increment(Counter::Polls);
        if count > 0 {
            (self.active, self.armed) = (true, false);
            self.events(Time::ZERO);
        } else {
            self.links.counters().increment(Counter::IdlePolls);
        }
        count
    }

    /// The counters, for readers.
    pub fn counters(&self) -> Arc<Counters> {
        self.links.counters().counters()
    }

    /// The object that threads sleep on while nothing comes.
    pub fn sleeper(&self) -> P::Sleeper {
        self.links.sleeper()
    }

    /// Arms the port: what comes from now on ends sleeps. `false` if something has come already.
    /// See [`Port::arm`].
    pub fn arm(&mut self) -> bool {
        self.armed = self.links.arm();
        self.armed
    }

    /// Whether the port is armed and nothing has come since.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// The time at which [`Poller::step`] has something to do even if nothing comes.
    pub fn next_deadline(&self) -> Time {
        self.handler.next_deadline()
    }

    /// Whether anything was done since the last call of this method: then a waiter may be done.
    pub fn take_active(&mut self) -> bool {
        std::mem::take(&mut self.active)
    }

    #[inline(never)] // keeps direct calls short
    fn events(&mut self, now: Time) {
        loop {
            if !self.links.has_events() {
                self.handler.after_events(&mut self.links, now);
            }
            let Some(event) = self.links.next_event() else { return };
            self.handler.event(&mut self.links, event, now);
        }
    }
}
