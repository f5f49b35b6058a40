//! The identity of this host for shared memory.

use super::error::NodeError;
use std::fs;

/// The boot id of the kernel and the network namespace. Two processes with the same identity reach
/// each other over loopback, and by abstract sockets.
///
/// # Errors
/// If `/proc` can't be read. All hosts without an identity would look like one host.
pub(super) fn identity() -> Result<String, NodeError> {
    identity_from("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")
}

fn identity_from(boot: &'static str, network: &'static str) -> Result<String, NodeError> {
    let failed = |path| move |source| NodeError::Host { path, source };
    let boot_id = fs::read_to_string(boot).map_err(failed(boot))?;
    if boot_id.trim().is_empty() {
        return Err(failed(boot)(std::io::ErrorKind::UnexpectedEof.into()));
    }
    let namespace = fs::read_link(network).map_err(failed(network))?;
    Ok(format!("{} {}", boot_id.trim(), namespace.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_can_not_be_told_from_others_is_an_error_that_names_what_was_read() {
        let good = identity().expect("/proc is mounted");
        assert_eq!(good, identity().expect("/proc is mounted"));
        for (boot, network) in [("/nowhere/boot", "/proc/self/ns/net"), ("/proc/version", "/nowhere/net")] {
            let error = identity_from(boot, network).expect_err("not there").to_string();
            assert!(error.contains("/nowhere/") && error.contains("mount /proc"), "{error}");
        }
        let error = identity_from("/dev/null", "/proc/self/ns/net").expect_err("empty").to_string();
        assert!(error.contains("/dev/null"), "{error}");
    }
}
