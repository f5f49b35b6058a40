//! The size of a file in memory.

use crate::memory::byte_count::ByteCount;
use rustix::fd::AsFd;
use rustix::fs::ftruncate;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Gives a new memfd its size.
///
/// # Errors
/// If there is no memory for it, or the size is above the limit of file size, which counts for
/// files in memory too. The kernel would end this process by SIGXFSZ then.
pub fn grow_memfd(file: impl AsFd, bytes: u64) -> io::Result<()> {
    if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < bytes) {
        let why = format!(
            "{} are needed, and the limit of file size is {}: raise `ulimit -f` (LimitFSIZE of a service)",
            ByteCount(bytes),
            ByteCount(limit)
        );
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(ftruncate(file, bytes)?)
}
