//! Where the tensor of a request goes: what is granted or kept for it before it comes, and what is made of a response.

use crate::fabric::{LinkId, Port};
use crate::link::links::{Context, Link, RequestRefused};
use crate::link::receiving::slots::Request;
use crate::link::receiving::stash::Unfit;
use crate::link::{HeldValue, Received, RequestError, Want};
use crate::memory::TensorMut;
use crate::telemetry::{Counter, CountersWriter, Gauge};
use crate::wire::Grant;
use crate::wire::message::{Side, VersionedMeta};

impl<C> Link<C> {
    /// Makes the destination of a request, as far as it can be known before the answer.
    pub(in crate::link) fn destination<P: Port>(
        &self,
        cx: &mut Context<'_, P, C>,
        want: Want,
        cached: Option<&VersionedMeta>,
    ) -> Result<Destination, RequestRefused> {
        let (want, copy_to) = match want {
            // It lands in the pool first.
            Want::Into(given) if !cx.port.reaches(&given) => (Want::Fresh, Some(given)),
            want => (want, None),
        };
        let destination = self.reachable(cx, want, cached)?;
        Ok(Destination { copy_to, ..destination })
    }

    /// As [`Link::destination`], of a tensor that the port reaches, if it is one.
    fn reachable<P: Port>(
        &self,
        cx: &mut Context<'_, P, C>,
        want: Want,
        cached: Option<&VersionedMeta>,
    ) -> Result<Destination, RequestRefused> {
        let in_response =
            |meta: &VersionedMeta| meta.meta.bytes() <= u64::from(self.settings.small_tensor_bytes);
        let lends = cx.port.limits(self.id).lends;
        match (want, cached) {
            (Want::Borrow, _) if lends => {
                Ok(Destination { borrow: true, use_cached: true, ..Destination::NONE })
            }
            (Want::Fresh | Want::Borrow, Some(meta)) if !in_response(meta) => {
                let target = cx.pool.tensor(meta.meta.clone()).map_err(RequestRefused::NoRoom)?;
                // A link with no room for a grant asks without one: slower, and right.
                let grant = self.grant(cx, target).ok();
                Ok(Destination { grant, use_cached: true, ..Destination::NONE })
            }
            (Want::Fresh | Want::Borrow, _) => Ok(Destination { use_cached: true, ..Destination::NONE }),
            (Want::Into(given), Some(meta)) if meta.meta == *given.meta() => {
                let into = Destination { into: true, use_cached: true, ..Destination::NONE };
                if in_response(meta) {
                    return Ok(Destination { given: Some(given), ..into });
                }
                Ok(match self.grant(cx, given) {
                    Ok(grant) => Destination { grant: Some(grant), ..into },
                    Err(given) => Destination { given: Some(given), ..into },
                })
            }
            // What is cached is not what was given: only the sender knows which is right now.
            (Want::Into(given), _) => Ok(Destination { given: Some(given), into: true, ..Destination::NONE }),
        }
    }

    pub(in crate::link) fn grant<P: Port>(
        &self,
        cx: &mut Context<'_, P, C>,
        target: TensorMut,
    ) -> Result<Grant, TensorMut> {
        cx.port.grant(self.id, target).map_err(|(_, target)| target)
    }
}

/// Takes back what a request has given to the peer, or was given by its waiter.
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

/// Copies the bytes of a response to where they belong.
pub(in crate::link) fn place_response<P: Port, C>(
    cx: &Context<'_, P, C>,
    meta: VersionedMeta,
    data: &[u8],
    given: Option<TensorMut>,
) -> Result<(Received, Side), Box<Unfit>> {
    let VersionedMeta { side: sender, meta, .. } = meta;
    let bytes = |meta| HeldValue::Bytes { meta, bytes: data.into(), sender };
    if let Some(mut given) = given {
        if *given.meta() == meta {
            given.bytes_mut().copy_from_slice(data);
            return Ok((Received::Into(given), sender));
        }
        return Err(Box::new(bytes(meta).unfit_for(given.meta())));
    }
    match cx.pool.tensor(meta.clone()) {
        Ok(mut target) => {
            target.bytes_mut().copy_from_slice(data);
            Ok((Received::Tensor(target.freeze()), sender))
        }
        Err(error) => Err(Box::new(Unfit { value: bytes(meta), error: RequestError::NoRoom(error) })),
    }
}

/// Gives a value to a receiver, as [`HeldValue::place`], and counts what is copied to memory outside the pool.
pub(in crate::link) fn place_value<P: Port, C>(
    cx: &Context<'_, P, C>,
    value: HeldValue,
    given: Option<TensorMut>,
    into: bool,
) -> Result<(Received, Side), Box<Unfit>> {
    let placed = value.place(cx.pool, given, into)?;
    if let (Received::Into(given), _) = &placed
        && given.is_foreign()
    {
        cx.counters.increment(Counter::TensorsStaged);
        cx.counters.add(Counter::BytesStaged, given.meta().bytes());
    }
    Ok(placed)
}

/// Where a request's tensor will go, as far as that is known before the answer.
pub(in crate::link) struct Destination {
    grant: Option<Grant>,
    given: Option<TensorMut>,
    into: bool,
    borrow: bool,
    /// What was given, if the tensor lands elsewhere and is copied there.
    copy_to: Option<TensorMut>,
    /// Whether the answer may refer to the cached meta-data.
    use_cached: bool,
}

impl Destination {
    const NONE: Destination = Destination {
        grant: None,
        given: None,
        into: false,
        borrow: false,
        copy_to: None,
        use_cached: false,
    };
}

impl<C> Request<C> {
    /// Says where its tensor will go: it is sent now.
    pub(in crate::link) fn ask(&mut self, destination: Destination, cached: Option<VersionedMeta>) {
        let Destination { grant, given, into, borrow, copy_to, use_cached } = destination;
        self.machine.asked(grant.map(|grant| grant.len));
        (self.grant, self.given, self.into, self.borrow) = (grant, given, into, borrow);
        self.copy_to = copy_to;
        self.meta = cached.filter(|_| use_cached);
    }
}
