//! The destination of a request's tensor: what is granted or kept before the answer, and where a
//! response is copied.

use crate::fabric::{LinkId, Port};
use crate::link::links::{Link, LinkContext, RequestRefused};
use crate::link::receiving::slots::Request;
use crate::link::receiving::stash::RejectedValue;
use crate::link::{Destination, Received, RequestError, StashedValue};
use crate::memory::TensorMut;
use crate::telemetry::{Counter, CountersWriter, Gauge};
use crate::wire::Grant;
use crate::wire::message::{Placement, VersionedMeta};

impl<C> Link<C> {
    /// Prepares the destination of a request, as far as it can be known before the answer.
    pub(in crate::link) fn prepare_destination<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
        destination: Destination,
        cached: Option<&VersionedMeta>,
    ) -> Result<PreparedDestination, RequestRefused> {
        let (destination, copy_to) = match destination {
            // The tensor lands in the pool first.
            Destination::Into(given) if !cx.port.reaches(&given) => (Destination::Alloc, Some(given)),
            destination => (destination, None),
        };
        let destination = self.reachable(cx, destination, cached)?;
        Ok(PreparedDestination { copy_to, ..destination })
    }

    /// As [`Link::prepare_destination`], where a given tensor is reachable by the port.
    fn reachable<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
        destination: Destination,
        cached: Option<&VersionedMeta>,
    ) -> Result<PreparedDestination, RequestRefused> {
        let in_response =
            |meta: &VersionedMeta| meta.meta.bytes() <= u64::from(self.settings.small_tensor_bytes);
        let lends = cx.port.limits(self.id).lends;
        match (destination, cached) {
            (Destination::Borrow, _) if lends => {
                Ok(PreparedDestination { borrow: true, use_cached: true, ..PreparedDestination::NONE })
            }
            (Destination::Alloc | Destination::Borrow, Some(meta)) if !in_response(meta) => {
                let target = cx.pool.landing(&meta.meta).map_err(RequestRefused::NoRoom)?;
                // Without a grant the exchange takes longer and is still correct.
                let grant = self.grant(cx, target).ok();
                Ok(PreparedDestination { grant, use_cached: true, ..PreparedDestination::NONE })
            }
            (Destination::Alloc | Destination::Borrow, _) => {
                Ok(PreparedDestination { use_cached: true, ..PreparedDestination::NONE })
            }
            (Destination::Into(given), Some(meta)) if meta.meta == *given.meta() => {
                let into = PreparedDestination { into: true, use_cached: true, ..PreparedDestination::NONE };
                if in_response(meta) {
                    return Ok(PreparedDestination { given: Some(given), ..into });
                }
                Ok(match self.grant(cx, given) {
                    Ok(grant) => PreparedDestination { grant: Some(grant), ..into },
                    Err(given) => PreparedDestination { given: Some(given), ..into },
                })
            }
            // The cached meta-data differs from that of the given tensor. Only the sender knows
            // which is right.
            (Destination::Into(given), _) => {
                Ok(PreparedDestination { given: Some(given), into: true, ..PreparedDestination::NONE })
            }
        }
    }

    pub(in crate::link) fn grant<P: Port>(
        &self,
        cx: &mut LinkContext<'_, P, C>,
        target: TensorMut,
    ) -> Result<Grant, TensorMut> {
        cx.port.grant(self.id, target).map_err(|(_, target)| target)
    }
}

/// Takes back the tensor that a request has granted to the peer or got from its waiter.
pub(in crate::link) fn take_back<P: Port, C>(
    request: &mut Request<C>,
    port: &mut P,
    counters: &CountersWriter,
    link: LinkId,
) -> Option<TensorMut> {
    let Some(grant) = request.grant.take() else { return request.given.take() };
    if request.quarantined > 0 {
        counters.lower(Gauge::QuarantinedBytes, std::mem::take(&mut request.quarantined));
    }
    port.revoke(link, &grant)
}

/// Copies the bytes of a response to their destination.
pub(in crate::link) fn place_response<P: Port, C>(
    cx: &LinkContext<'_, P, C>,
    meta: VersionedMeta,
    data: &[u8],
    given: Option<TensorMut>,
) -> Result<(Received, Placement), Box<RejectedValue>> {
    let VersionedMeta { placement: sender, meta, .. } = meta;
    let bytes = |meta| StashedValue::Bytes { meta, bytes: data.into(), sender };
    if let Some(mut given) = given {
        if *given.meta() == meta {
            given.bytes_mut().copy_from_slice(data);
            return Ok((Received::Into(given), sender));
        }
        return Err(Box::new(bytes(meta).rejected_for(given.meta())));
    }
    match cx.pool.landing(&meta) {
        Ok(mut target) => {
            target.bytes_mut().copy_from_slice(data);
            Ok((Received::Tensor(target.freeze()), sender))
        }
        Err(error) => Err(Box::new(RejectedValue { value: bytes(meta), error: RequestError::NoRoom(error) })),
    }
}

/// Gives a value to a receiver, as [`StashedValue::place`], and counts copies to memory outside the
/// pool.
pub(in crate::link) fn place_value<P: Port, C>(
    cx: &LinkContext<'_, P, C>,
    value: StashedValue,
    given: Option<TensorMut>,
    into: bool,
) -> Result<(Received, Placement), Box<RejectedValue>> {
    let placed = value.place(cx.pool, given, into)?;
    if let (Received::Into(given), _) = &placed
        && given.is_foreign()
    {
        cx.counters.increment(Counter::TensorsStaged);
        cx.counters.add(Counter::BytesStaged, given.meta().bytes());
    }
    Ok(placed)
}

/// The destination of a request, as far as it is known before the answer.
pub(in crate::link) struct PreparedDestination {
    grant: Option<Grant>,
    given: Option<TensorMut>,
    into: bool,
    borrow: bool,
    /// The given tensor, if the value lands elsewhere and is copied to it.
    copy_to: Option<TensorMut>,
    /// Whether the answer may refer to the cached meta-data.
    use_cached: bool,
}

impl PreparedDestination {
    const NONE: PreparedDestination = PreparedDestination {
        grant: None,
        given: None,
        into: false,
        borrow: false,
        copy_to: None,
        use_cached: false,
    };
}

impl<C> Request<C> {
    /// Sets the destination of a request that is sent now.
    pub(in crate::link) fn ask(&mut self, destination: PreparedDestination, cached: Option<VersionedMeta>) {
        let PreparedDestination { grant, given, into, borrow, copy_to, use_cached } = destination;
        self.machine.asked(grant.map(|grant| grant.len));
        (self.grant, self.given, self.into, self.borrow) = (grant, given, into, borrow);
        self.copy_to = copy_to;
        self.meta = cached.filter(|_| use_cached);
    }
}
