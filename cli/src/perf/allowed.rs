//! Which options go with which test and fabric: what means nothing is refused, not ignored.

use super::options::{FabricName, Notify, PerfArgs, Test};
use crate::CliError;

/// What `small_tensor_bytes` may be at most.
const MAX_SMALL: u32 = 160;

/// Refuses an option that means nothing to the test, rather than ignoring it.
pub fn check_settings(args: &PerfArgs) -> Result<(), CliError> {
    let test = args.test;
    let usage = |why: String| Err(CliError::Usage(why));
    if args.depth.is_some() && test.default_depth().is_none() {
        return usage(format!("--depth: {} has no queue; leave it out", test.name()));
    }
    if args.depth.is_some_and(|depth| depth > test.max_depth()) {
        return usage(format!("--depth: {} takes {} at most", test.name(), test.max_depth()));
    }
    for (option, given) in [("--links", args.links.is_some()), ("--notify", args.notify.is_some())] {
        if given && test != Test::WriteLat {
            return usage(format!("{option}: only write_lat takes it, not {}; leave it out", test.name()));
        }
    }
    if args.borrow && (test != Test::RendezvousLat || args.fabric == Some(FabricName::Verbs)) {
        return usage("--borrow: only rendezvous_lat on shm borrows; leave it out".into());
    }
    if args.borrow && args.inline.is_some_and(|inline| inline > 0) {
        return usage("--inline: what travels inside a slot is not borrowed; leave it out".into());
    }
    for (option, given) in [("--batch", args.batch.is_some()), ("--standing", args.standing.is_some())] {
        if given && test != Test::RendezvousLat {
            return usage(format!(
                "{option}: only rendezvous_lat takes it, not {}; leave it out",
                test.name()
            ));
        }
        if given && args.borrow {
            return usage(format!("{option}: not with --borrow; leave one of them out"));
        }
    }
    if args.standing.is_some() && args.batch.is_some() {
        return usage("--standing: not with --batch; leave one of them out".into());
    }
    if args.inline.is_some() && test == Test::ReadLat {
        return usage("--inline: what is read can't travel in the request; leave it out".into());
    }
    let given = [
        ("--pool", args.pool.is_some()),
        ("--inline", args.inline.is_some()),
        ("--fabric", args.fabric.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given && !test.is_ours()) {
        Some((option, _)) => usage(format!("{option}: {} runs on no fabric; leave it out", test.name())),
        None if test == Test::RendezvousLat && args.inline.is_some_and(|inline| inline > MAX_SMALL) => {
            usage(format!("--inline: rendezvous_lat takes {MAX_SMALL} at most"))
        }
        None => Ok(()),
    }
}

/// Refuses an option that the fabric can't do.
pub fn check_fabric(args: &PerfArgs) -> Result<(), CliError> {
    let usage = |why: String| Err(CliError::Usage(why));
    let rendezvous = args.test == Test::RendezvousLat;
    if args.fabric == Some(FabricName::Verbs) {
        return match args.cq_mod {
            Some(_) if rendezvous => {
                usage("--cq-mod: rendezvous_lat leaves that to the engine; leave it out".into())
            }
            _ => Ok(()),
        };
    }
    if args.notify == Some(Notify::Memory) {
        return usage(
            "--notify memory: on shm a write lands when its receiver polls, so nobody could see it by looking at \
             memory; it is for --fabric verbs"
                .into(),
        );
    }
    let given = [
        ("--ib-dev", args.ib_dev.is_some(), "shm has no device"),
        ("--ib-port", args.ib_port.is_some(), "shm has no device"),
        ("--gid-index", args.gid_index.is_some(), "shm has no GIDs"),
        ("--mtu", args.mtu.is_some(), "shm has no packets"),
        ("--cq-mod", args.cq_mod.is_some(), "shm has no completion queue"),
    ];
    match given.into_iter().find(|(_, given, _)| *given) {
        Some((option, _, why)) => usage(format!("{option}: {why}; it is for --fabric verbs")),
        None => Ok(()),
    }
}
