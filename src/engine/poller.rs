//! One poller: its links and the layer above, moved on step by step.

use crate::fabric::Port;
use crate::link::{LinkEvent, Links};
use crate::telemetry::Counter;
use crate::wire::Time;

/// The layer above: told what happens on the links, and what its users want.
///
/// Nothing here may block.
pub trait Handler<P: Port>: Send + 'static {
    /// Its name for whoever waits for a request.
    type Waiter: Send + 'static;
    /// What its users hand over to it.
    type Command: Send + 'static;

    /// A user's command. One about something that another thread has handed over, and that is not there yet, comes back: it
    /// is done once more when everything that was handed over before it has been.
    fn command(
        &mut self,
        links: &mut Links<P, Self::Waiter>,
        op: Self::Command,
        now: Time,
    ) -> Option<Self::Command>;

    /// Something happened on a link.
    fn event(&mut self, links: &mut Links<P, Self::Waiter>, event: LinkEvent<Self::Waiter>, now: Time);

    /// Everything that has happened was told. What waited for it can go on.
    fn after_events(&mut self, links: &mut Links<P, Self::Waiter>, now: Time) {
        let _ = (links, now);
    }

    /// The earliest time at which [`Handler::expire`] has something to do; [`Time::NEVER`] if there is none.
    fn next_deadline(&self) -> Time;

    /// Ends what has waited until now.
    fn expire(&mut self, links: &mut Links<P, Self::Waiter>, now: Time);
}

/// One poller. Whoever has `&mut` of it is its owner.
pub struct Poller<P: Port, H: Handler<P>> {
    links: Links<P, H::Waiter>,
    handler: H,
    /// Whether anything was done since [`Poller::take_active`] was asked.
    active: bool,
    /// Whether the port was armed and nothing came since.
    armed: bool,
}

impl<P: Port, H: Handler<P>> Poller<P, H> {
    /// A poller over these links.
    pub fn new(links: Links<P, H::Waiter>, handler: H) -> Self {
        Poller { links, handler, active: false, armed: false }
    }

    /// Does what a user wants, and what follows from it at once. What comes back is [`Handler::command`]'s.
    pub fn command(&mut self, op: H::Command, now: Time) -> Option<H::Command> {
        self.active = true;
        let back = self.handler.command(&mut self.links, op, now);
        self.events(now);
        back
    }

    /// Moves everything that has come, a bounded amount, and ends what has waited too long at `now`. Returns
    /// how many completions there were.
    pub fn step(&mut self, now: Time) -> usize {
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

    /// What threads sleep on while nothing comes.
    pub fn sleeper(&self) -> P::Sleeper {
        self.links.sleeper()
    }

    /// Arranges that what comes from now on ends sleeps; `false` if something is there already. See [`Port::arm`].
    pub fn arm(&mut self) -> bool {
        self.armed = self.links.arm();
        self.armed
    }

    /// Whether the port was armed and nothing came since.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// When [`Poller::step`] has something to do even if nothing comes.
    pub fn next_deadline(&self) -> Time {
        self.handler.next_deadline()
    }

    /// Whether anything was done since this was last asked: then somebody who waits may be done.
    pub fn take_active(&mut self) -> bool {
        std::mem::take(&mut self.active)
    }

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
