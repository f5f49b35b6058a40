//! Files that only their owner can read, from their first byte on.

use std::fs::{DirBuilder, Metadata, OpenOptions, rename};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Makes a new file. One that exists is left alone.
pub fn create(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(path, bytes).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            io::Error::new(error.kind(), "it exists already, and other members may use it: remove it first")
        }
        _ => error,
    })
}

/// Makes a file, or replaces it as a whole: no reader finds a part of it.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Path::new(&fresh);
    // Of an earlier run that was stopped half way.
    if let Err(error) = std::fs::remove_file(fresh)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error);
    }
    write(fresh, bytes)?;
    rename(fresh, path)
}

/// Fails if others may read or write the file, or if it is another user's.
pub fn check(path: &Path) -> Result<(), String> {
    let facts = std::fs::metadata(path).map_err(|error| error.to_string())?;
    let mode = facts.mode() & 0o7777;
    if !facts.is_file() || mode & 0o077 != 0 {
        return Err(format!("others may read or write it (mode {mode:04o}): chmod 600 {}", path.display()));
    }
    check_owner(&facts)
}

/// Fails if others may write the file, or if it is another user's.
pub fn check_public(path: &Path) -> Result<(), String> {
    let facts = std::fs::metadata(path).map_err(|error| error.to_string())?;
    let mode = facts.mode() & 0o7777;
    if mode & 0o022 != 0 {
        return Err(format!("others may write it (mode {mode:04o}): chmod go-w {}", path.display()));
    }
    check_owner(&facts)
}

/// Another user could replace what is in its file or folder.
fn check_owner(facts: &Metadata) -> Result<(), String> {
    let (owner, me) = (facts.uid(), rustix::process::geteuid().as_raw());
    match owner == me || owner == 0 {
        true => Ok(()),
        false => Err(format!("it belongs to user {owner}, and this process runs as user {me}: take another")),
    }
}

/// Makes a folder, unless it exists, into which others can't put files of their own. Fails if they
/// can.
pub fn make_folder(path: &Path) -> Result<(), String> {
    // Where the umask lets the group write, too.
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(|error| error.to_string())?;
    check_public(path)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
