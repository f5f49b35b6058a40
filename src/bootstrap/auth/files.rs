//! Files that proofs depend on. Nobody but their owner and root may write them. Only their owner
//! may read those with secrets, whose content never shows.

use crate::wire::own_user;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Bytes that no log, error or `Debug` shows.
pub(super) struct Private(Vec<u8>);

impl Private {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Without blanks and newlines at its ends.
    pub(super) fn trimmed(self) -> Self {
        Private(self.0.trim_ascii().to_vec())
    }
}

impl fmt::Debug for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<private>")
    }
}

/// Reads a file of at most `max` bytes that no other user may read.
pub(super) fn read_private(path: &Path, max: usize) -> Result<Private, String> {
    read(path, max, 0o077).map(Private)
}

/// Reads a file of at most `max` bytes that other users may read, but not write.
pub(super) fn read_public(path: &Path, max: usize) -> Result<Vec<u8>, String> {
    read(path, max, 0o022)
}

/// Reads a file that belongs to this user or to root, and of whose mode no bit is in `forbidden`.
/// The checks are of the opened file, so nobody replaces it in between.
fn read(path: &Path, max: usize, forbidden: u32) -> Result<Vec<u8>, String> {
    // Without O_NONBLOCK the open of a FIFO waits for a writer.
    let mut how = OpenOptions::new();
    let file = how.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = file.map_err(|error| error.to_string())?;
    let facts = file.metadata().map_err(|error| error.to_string())?;
    if !facts.is_file() {
        return Err("it is no regular file".into());
    }
    check(path, facts.mode() & 0o7777, facts.uid(), forbidden)?;
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() > max {
        return Err(format!("it has more than {max} bytes"));
    }
    Ok(bytes)
}

fn check(path: &Path, mode: u32, owner: u32, forbidden: u32) -> Result<(), String> {
    if mode & forbidden != 0 {
        let (what, remedy) =
            if forbidden & 0o044 == 0 { ("write", "go-w") } else { ("read or write", "600") };
        return Err(format!("others may {what} it (mode {mode:04o}): chmod {remedy} {}", path.display()));
    }
    if owner == 0 {
        return Ok(());
    }
    match own_user().map_err(|shared| shared.to_string())? {
        me if owner == me => Ok(()),
        me => Err(format!("it belongs to user {owner}, and this process runs as user {me}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, " hush \n").unwrap();
        for mode in [0o644, 0o640, 0o604, 0o602, 0o610] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read_private(&path, 100).unwrap_err();
            assert!(error.contains("others may read or write it") && error.contains("chmod 600"), "{error}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
        let private = read_private(&path, 100).unwrap().trimmed();
        assert_eq!(private.bytes(), b"hush");
        assert_eq!(format!("{private:?}"), "<private>");
        assert!(read_private(&path, 3).unwrap_err().contains("more than 3 bytes"));
        assert!(read_private(folder.path(), 3).is_err());
        assert!(read_private(&folder.path().join("none"), 3).unwrap_err().contains("No such file"));
    }

    #[test]
    fn a_file_that_others_may_write_is_refused_although_they_may_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        fs::write(&path, "open").unwrap();
        for mode in [0o664, 0o646, 0o622, 0o666] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read_public(&path, 100).unwrap_err();
            assert!(error.contains("others may write it") && error.contains("chmod go-w"), "{error}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read_public(&path, 100).unwrap(), b"open");
    }

    #[test]
    fn a_file_of_another_user_is_refused_and_one_of_root_is_not() {
        let path = Path::new("ca.pem");
        let me = rustix::process::geteuid().as_raw();
        for (forbidden, owner) in [(0o022, me + 1), (0o077, me + 1)] {
            let error = check(path, 0o600, owner, forbidden).unwrap_err();
            assert_eq!(error, format!("it belongs to user {owner}, and this process runs as user {me}"));
        }
        assert_eq!((check(path, 0o600, me, 0o077), check(path, 0o600, 0, 0o077)), (Ok(()), Ok(())));
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can give a file to another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        fs::write(&path, "open").unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(read_public(&path, 100).unwrap_err().contains("it belongs to user 65534"));
        assert!(read_private(&path, 100).is_err());
    }

    #[test]
    fn a_fifo_and_a_device_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let (sender, outcomes) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for path in [path.as_path(), Path::new("/dev/null")] {
                sender.send((read_private(path, 100).map(|_| ()), read_public(path, 100))).unwrap();
            }
        });
        for _ in 0..2 {
            let (private, public) = outcomes.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
            assert_eq!(private.unwrap_err(), "it is no regular file");
            assert_eq!(public.unwrap_err(), "it is no regular file");
        }
        drop(folder);
    }
}
