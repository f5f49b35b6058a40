//! The user of this process, whom the kernel names by a number.

use std::fs;

/// The number of this process's user stands for others, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "user {0} of this user namespace stands for all users outside of it: map a user of its own, as \
     `unshare --map-current-user` does, or run outside of the namespace"
)]
pub(crate) struct SharedUser(u32);

/// The effective user of this process.
///
/// # Errors
/// If the number is also that of every user whom this user namespace does not know. It then proves
/// nothing about sockets and files.
pub(crate) fn own_user() -> Result<u32, SharedUser> {
    let me = rustix::process::geteuid().as_raw();
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    match is_shared(me, &read("/proc/sys/kernel/overflowuid"), &read("/proc/self/uid_map")) {
        false => Ok(me),
        true => Err(SharedUser(me)),
    }
}

/// Whether `uid` is what the kernel shows for users outside of the namespace. A map of all numbers
/// has none.
fn is_shared(uid: u32, overflow: &str, map: &str) -> bool {
    let count = map.split_whitespace().nth(2).and_then(|count| count.parse().ok());
    overflow.trim().parse().unwrap_or(65534) == uid && count != Some(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overflow_user_is_shared_unless_all_users_are_mapped() {
        let all = "         0          0 4294967295\n";
        assert!(!is_shared(65534, "65534\n", all) && !is_shared(0, "65534\n", all));
        for map in ["", "         0       1000          1\n"] {
            assert!(is_shared(65534, "65534\n", map) && is_shared(65534, "", map));
            assert!(!is_shared(0, "65534\n", map) && is_shared(9, "9\n", map));
        }
        assert!(SharedUser(65534).to_string().contains("user 65534 of this user namespace"));
    }
}
