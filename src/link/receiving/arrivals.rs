//! Arrivals without a message: writes, loans and dead values.

use crate::fabric::Port;
use crate::link::Received;
use crate::link::links::{Link, LinkContext};
use crate::link::receiving::destination::take_back;
use crate::memory::{LentBytes, Tensor};
use crate::mutants::{Mutant, is_on};
use crate::protocol::Arrival;
use crate::wire::message::{Placement, RequestId};
use crate::wire::{Immediate, ImmediateKind, MetaSlot};

impl<C> Link<C> {
    /// Handles a write with immediate, or an immediate alone.
    pub(in crate::link) fn on_immediate<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        immediate: Immediate,
        bytes: u64,
    ) -> Result<(), String> {
        let id = RequestId { slot: immediate.slot, generation: immediate.generation };
        let link = self.id;
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        match immediate.kind {
            ImmediateKind::Plain => self.on_landed(cx, id, bytes),
            ImmediateKind::PlainAs(place) => {
                self.named(id, place, |bytes| Arrival::MetaBeforeWrite { bytes })?;
                self.on_landed(cx, id, bytes)
            }
            ImmediateKind::Dead => {
                let action = request.machine.arrive(Arrival::Dead).map_err(|v| v.to_string())?;
                let given = take_back(request, cx.port, cx.counters, link);
                let given = if request.into { given } else { None };
                self.deliver(cx, id, action, Received::Dead(given), Placement::HEAP);
                Ok(())
            }
            ImmediateKind::Lend | ImmediateKind::LendAs(_) => {
                Err("a loan's immediate came without a loan".into())
            }
            ImmediateKind::Stripe => Err("a stripe came for a request that was not striped".into()),
        }
    }

    /// The arrival has meta-data that the sender has told before, in this meta-data slot.
    fn named(
        &mut self,
        id: RequestId,
        place: MetaSlot,
        arrival: impl FnOnce(u64) -> Arrival,
    ) -> Result<(), String> {
        let Some(request) = self.requests.get(id) else { return Ok(()) };
        let Some(meta) = self.routes_out.known(&request.key.edge, place) else {
            return Err(format!("a tensor came whose meta-data, at place {}, was never told", place.index()));
        };
        request.machine.arrive(arrival(meta.meta.bytes())).map_err(|v| v.to_string())?;
        request.meta = Some(meta);
        Ok(())
    }

    /// Handles a tensor that has landed whole in its destination.
    fn on_landed<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        id: RequestId,
        bytes: u64,
    ) -> Result<(), String> {
        let link = self.id;
        let Some(request) = self.requests.get(id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Landed { bytes }).map_err(|v| v.to_string())?;
        let Some(mut target) = take_back(request, cx.port, cx.counters, link) else {
            return Err(format!("a write landed for slot {}, which granted nothing", id.slot.index()));
        };
        let mut placement = Placement::POOL;
        if let Some(meta) = &request.meta {
            placement = meta.placement;
            if meta.meta.bytes() != bytes {
                return Err(format!("a write of {bytes} bytes landed for a tensor of {}", meta.meta.bytes()));
            }
            // The destination of a standing request was allocated before its tensor was known.
            if *target.meta() != meta.meta && !is_on(Mutant::NotRetyped) {
                target.set_meta(meta.meta.clone()).map_err(|error| error.to_string())?;
            }
            self.routes_out.note_arrival(&request.key.edge, meta.version);
        }
        if request.borrow {
            self.routes_out.note_unlent(&request.key.edge);
        }
        let received = if request.into { Received::Into(target) } else { Received::Tensor(target.freeze()) };
        self.deliver(cx, id, action, received, placement);
        Ok(())
    }

    /// Handles a loan. Its message is the immediate of its request.
    pub(in crate::link) fn on_loan<P: Port>(
        &mut self,
        cx: &mut LinkContext<'_, P, C>,
        message: &[u8],
        bytes: LentBytes,
    ) -> Result<(), String> {
        let bits = message.try_into().map_err(|_| "a loan came without an immediate")?;
        let immediate = Immediate::from_bits(u32::from_le_bytes(bits)).map_err(|error| error.to_string())?;
        let id = RequestId { slot: immediate.slot, generation: immediate.generation };
        let Some(request) = self.current(cx, id) else { return Ok(()) };
        if !request.may_borrow() {
            return Err("a loan came for a request that did not ask to borrow".into());
        }
        if let ImmediateKind::LendAs(place) = immediate.kind {
            self.named(id, place, |_| Arrival::MetaBeforeLoan)?;
        }
        let Some(request) = self.requests.get(id) else { return Ok(()) };
        let action = request.machine.arrive(Arrival::Loan).map_err(|v| v.to_string())?;
        let Some(meta) = request.meta.clone() else {
            return Err(format!("a loan came for slot {}, whose meta-data is not known", id.slot.index()));
        };
        self.routes_out.note_arrival(&request.key.edge, meta.version);
        let tensor = Tensor::from_lent(cx.pool, &meta.meta, bytes).map_err(|(error, _)| error.to_string())?;
        self.deliver(cx, id, action, Received::Tensor(tensor), meta.placement);
        Ok(())
    }
}
