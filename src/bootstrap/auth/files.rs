//! Files with secrets: only their owner may read them, and their content never shows.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
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

/// Reads a file of at most `max` bytes that belongs to this user or to root, and that no other user
/// may read or write. The checks are of the opened file, so nobody replaces it in between.
pub(super) fn read_private(path: &Path, max: usize) -> Result<Private, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let facts = file.metadata().map_err(|error| error.to_string())?;
    let (mode, owner, me) = (facts.mode() & 0o7777, facts.uid(), rustix::process::geteuid().as_raw());
    if !facts.is_file() {
        return Err("it is no regular file".into());
    }
    if mode & 0o077 != 0 {
        return Err(format!("others may read or write it (mode {mode:04o}): chmod 600 {}", path.display()));
    }
    if owner != me && owner != 0 {
        return Err(format!("it belongs to user {owner}, and this process runs as user {me}"));
    }
    read(file, max).map(Private)
}

/// Reads a file of at most `max` bytes.
pub(super) fn read(file: File, max: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() > max {
        return Err(format!("it has more than {max} bytes"));
    }
    Ok(bytes)
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
}
