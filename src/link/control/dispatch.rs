//! Reassembles and decodes the messages of a peer, and dispatches them.

use crate::fabric::{Event, LinkFailure, Port};
use crate::link::LinkEvent;
use crate::link::links::{Link, LinkContext, LinkIdentity, Links};
use crate::link::windows::PolledPlace;
use crate::telemetry::{Counter, FlightEvent};
use crate::wire::message::fragment::is_fragment;
use crate::wire::{EdgeName, Status};

impl<P: Port> Links<P> {
    /// Handles the completions from [`PolledPlace`] on.
    pub(in crate::link) fn handle_completions(&mut self) {
        let PolledPlace { completions: mut taken, mut bytes } = std::mem::take(&mut self.polled);
        let (links, completions, mut cx) = self.split();
        for (completion, message) in completions.drain() {
            if taken > 0 {
                taken -= 1;
                continue;
            }
            let (id, begun) = (completion.link, std::mem::take(&mut bytes));
            if let Event::Done | Event::Failed = completion.event {
                // The port has released the source; a failure is followed by the link's end.
                if let Some(link) = links.get_mut(id) {
                    link.finished(&mut cx);
                }
                continue;
            }
            if let Event::Down(failure) = completion.event {
                if let Some(link) = links.remove(id) {
                    link.down(&mut cx, failure);
                }
                continue;
            }
            let Some(link) = links.get_mut(id) else { continue };
            let handled = match begun {
                0 => link.completed(&mut cx, completion.event, message),
                _ => link.on_rest_of_pack(&mut cx, &message[begun..]),
            };
            if let Err(why) = handled {
                link.is_ended = true;
                cx.port.fail(id, LinkFailure::Protocol(why));
            }
            if link.windows.returns_eager() {
                link.return_eager(&mut cx);
            }
            links.note_use(id);
            links.note_backlog(id);
        }
        completions.clear();
        self.links.for_each_used(|link| {
            if link.receive_credits.replenish(&mut self.port, link.id) {
                self.counters.increment(Counter::CreditsPublished);
            }
        });
    }
}

impl Link {
    /// Handles the contents of a control slot.
    pub(in crate::link) fn on_slot<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        bytes: &[u8],
    ) -> Result<(), String> {
        if !is_fragment(bytes) {
            if !self.assembler.is_idle() {
                return Err("a message came between the fragments of another".into());
            }
            return self.on_packed(cx, bytes);
        }
        let mut assembler = std::mem::take(&mut self.assembler);
        let handled = match assembler.push(bytes) {
            Ok(Some(whole)) => self.on_message(cx, whole),
            Ok(None) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        assembler.release();
        self.assembler = assembler;
        handled
    }

    pub(in crate::link) fn on_pong<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P>,
        nonce: u64,
    ) -> Result<(), String> {
        if nonce != self.identity.nonce() {
            return Err("it answered a ping that was not sent".into());
        }
        if !self.up {
            self.up = true;
            self.recorder.record(FlightEvent::Up);
            cx.events.push_back(LinkEvent::Up { link: self.id });
        }
        Ok(())
    }

    /// The reason why this task does not serve an edge of this incarnation.
    pub(in crate::link) fn refusal(&self, incarnation: u64, edge: &EdgeName) -> Option<Status> {
        use crate::wire::Code::{FailedPrecondition, InvalidArgument, PermissionDenied};
        let LinkIdentity { local, local_incarnation, peer, .. } = &self.identity;
        if edge.source_task() != local {
            let message = format!("{edge} does not start at {local}, which {peer} asked for it");
            return Some(Status::new(InvalidArgument, message));
        }
        if edge.destination_task() != peer {
            let message = format!("{edge} does not end at {peer}, which asked for it");
            return Some(Status::new(PermissionDenied, message));
        }
        if incarnation != *local_incarnation {
            let message = format!(
                "{edge} was asked of incarnation {incarnation:016x} of {local}, which is gone: \
                 it is {local_incarnation:016x} now"
            );
            return Some(Status::new(FailedPrecondition, message));
        }
        None
    }
}
