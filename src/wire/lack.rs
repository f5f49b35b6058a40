//! Errors of the system that say what this process or its host lacks.

use rustix::io::Errno;
use std::io;

/// What to change if descriptors or memory lack.
pub(crate) const LACK_REMEDY: &str =
    "raise the limit of open files of this process (ulimit -n), or free memory";

/// The errors of a process or host that lacks descriptors or memory, whatever its peers do.
pub(crate) const LACKS: [Errno; 4] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];

/// Whether an error says that this process or its host lacks descriptors or memory.
pub fn is_lack(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|error| LACKS.contains(&error))
}
