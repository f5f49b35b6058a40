//! The processes of the members' groups, which can outlive the members.

use std::collections::HashSet;
use std::path::Path;

/// The processes of these groups that run. None if the system has no `/proc`: then nobody is asked
/// to end, and the kill at the end of the launch ends them.
///
/// A system call would tell whether a group is empty only after its first process was waited for.
/// From then on another program can have its number.
pub fn living(groups: &HashSet<i32>) -> Vec<u32> {
    let Ok(entries) = Path::new("/proc").read_dir() else { return Vec::new() };
    let processes = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let runs_in_one = |process: &u32| {
        // It may have ended meanwhile.
        let stat = std::fs::read(format!("/proc/{process}/stat")).unwrap_or_default();
        running_group(&stat).is_some_and(|group| groups.contains(&group))
    };
    processes.filter(runs_in_one).collect()
}

/// The group in a `/proc/PID/stat`; `None` if the process has ended.
fn running_group(stat: &[u8]) -> Option<i32> {
    // The name of the program can be anything, in any encoding, with parentheses.
    let behind = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&stat[behind..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let group = fields.nth(1)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_read_whatever_the_name_of_the_program_is() {
        assert_eq!(running_group(b"12 (a) Z 1 (b\xff) S 1 77 77 0 -1"), Some(77));
        assert_eq!(running_group(b"12 (sh) Z 1 77 77 0 -1"), None);
        assert_eq!([&b""[..], b"12 (sh", b"12 (sh) S 1"].map(running_group), [None; 3]);
    }

    #[test]
    fn a_process_of_a_group_is_found_until_it_has_ended() {
        use std::os::unix::process::CommandExt;
        let mut child = std::process::Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
        let groups = HashSet::from([child.id().cast_signed()]);
        assert_eq!(living(&groups), [child.id()]);
        child.kill().unwrap();
        // It has not been waited for.
        while !living(&groups).is_empty() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
