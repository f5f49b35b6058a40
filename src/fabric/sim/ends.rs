//! How links and processes end.

use super::SimProcess;
use super::network::{SimEvent, SimState};
use super::side::{HeldMemory, LinkSide, SimArrival};
use crate::fabric::LinkFailure;

impl SimState {
    pub fn is_dead(&self, side: usize) -> bool {
        self.processes[self.sides[side].process.0 as usize].is_dead
    }

    /// The side closes the link.
    pub fn fail(&mut self, side: usize, why: LinkFailure) {
        if self.sides[side].is_up {
            self.go_down(side, why);
            self.tell_peer(side);
        }
    }

    /// The peer is told of the end behind everything that was sent before.
    fn tell_peer(&mut self, side: usize) {
        let Some(peer) = self.sides[side].peer() else { return };
        if self.is_dead(side) || self.sides[side].is_cut {
            return; // the peer is told of the death instead
        }
        let sent = self.sides[side].last_arrival;
        let news = self.after_a_delay().max(sent);
        self.schedule(news, SimEvent::News { side: peer, failure: LinkFailure::Closed });
    }

    pub(super) fn go_down(&mut self, side: usize, failure: LinkFailure) {
        if !std::mem::replace(&mut self.sides[side].is_up, false) {
            return;
        }
        self.note("down", side, 0);
        for held in self.release_all(side) {
            if !matches!(held, HeldMemory::Nothing) {
                self.sides[side].bring(SimArrival::Failed);
            }
        }
        self.sides[side].bring(SimArrival::Down(failure));
    }

    /// Ends all operations of a side and releases their memory, apart from loans that are out.
    fn release_all(&mut self, side: usize) -> Vec<HeldMemory> {
        self.sides[side].batched.clear();
        for event in self.events.values_mut() {
            if let SimEvent::Packet { from, load, .. } = event
                && *from == side
            {
                load.leave_memory();
            }
        }
        let operations: Vec<_> = std::mem::take(&mut self.sides[side].operations).into_values().collect();
        for operation in &operations {
            if let HeldMemory::Loan(loan) = operation {
                self.release_loan(*loan);
            }
        }
        operations
    }

    /// The owner has dropped the side. Returns the held memory, to be dropped outside the network's
    /// lock.
    pub fn close(&mut self, side: usize) -> (LinkSide, Vec<HeldMemory>) {
        let was_up = std::mem::replace(&mut self.sides[side].is_up, false);
        self.note("close", side, 0);
        let operations = self.release_all(side);
        self.forget_early(side);
        if was_up {
            self.tell_peer(side);
        }
        let empty = self.sides[side].closed();
        // Its number is not used again, so that late packets find no side.
        (std::mem::replace(&mut self.sides[side], empty), operations)
    }

    pub fn kill(&mut self, process: SimProcess) {
        self.note("kill", process.0 as usize, 0);
        self.processes[process.0 as usize].is_dead = true;
        for side in 0..self.sides.len() {
            let this = &self.sides[side];
            let (Some(peer), true) = (this.peer(), this.process == process && this.is_up) else { continue };
            self.forget_early(side);
            // Not behind packets in flight: the seed decides how many of these still arrive.
            let news = self.after_a_delay();
            let failure = LinkFailure::PeerDied { pid: process.0 };
            self.schedule(news, SimEvent::News { side: peer, failure });
        }
    }

    pub fn cut(&mut self, a: SimProcess, b: SimProcess) {
        self.note("cut", a.0 as usize, b.0.into());
        for side in 0..self.sides.len() {
            let Some(peer) = self.sides[side].peer() else { continue };
            let ends = (self.sides[side].process, self.sides[peer].process);
            if ends == (a, b) || ends == (b, a) {
                self.sides[side].is_cut = true;
                let news = self.after_a_delay();
                let failure = LinkFailure::Local("the link was cut".into());
                self.schedule(news, SimEvent::News { side, failure });
            }
        }
    }
}
