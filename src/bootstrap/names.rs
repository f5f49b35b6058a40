//! Names and lives of the cluster's members.

use super::BootstrapError;
use std::fmt;
use std::num::NonZeroU64;

/// Bytes of the longest job name.
pub const MAX_JOB: usize = 64;

/// A member of the cluster: a job and the number of the task in it. Sorts by job, then by number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskName {
    job: String,
    task: u32,
}

impl TaskName {
    /// The task `task` of `job`.
    ///
    /// # Errors
    /// [`BootstrapError::Job`] unless the job is an ASCII letter followed by letters, digits, underscores
    /// and dashes, [`MAX_JOB`] bytes in all.
    pub fn new(job: impl Into<String>, task: u32) -> Result<Self, BootstrapError> {
        let job = job.into();
        check_job(&job)?;
        Ok(TaskName { job, task })
    }

    /// The job, for example `worker`.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The number of the task in its job, from 0 on.
    pub fn task(&self) -> u32 {
        self.task
    }
}

impl fmt::Display for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.task)
    }
}

/// Refuses what is not a job name.
pub(super) fn check_job(job: &str) -> Result<(), BootstrapError> {
    let why = match job.as_bytes() {
        [] => "it is empty",
        bytes if bytes.len() > MAX_JOB => "it is longer than 64 bytes",
        [first, ..] if !first.is_ascii_alphabetic() => "it does not start with a letter",
        bytes if !bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(byte)) => {
            "only letters, digits, underscores and dashes are allowed"
        }
        _ => return Ok(()),
    };
    Err(BootstrapError::Job { job: shorten(job, MAX_JOB), why })
}

/// The number of one life of a process, drawn at random when it starts, so that what was meant for a process
/// that died and came back is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation(NonZeroU64);

impl Incarnation {
    /// The life with this number; `None` for 0, which is nobody's.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Incarnation)
    }

    /// A new life.
    ///
    /// # Errors
    /// [`BootstrapError::Random`] if the system gives no random numbers.
    pub fn random() -> Result<Self, BootstrapError> {
        loop {
            let number =
                getrandom::u64().map_err(|error| BootstrapError::Random { why: error.to_string() })?;
            if let Some(incarnation) = Self::new(number) {
                return Ok(incarnation);
            }
        }
    }

    /// The number; never 0.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Text from outside, made fit for an error message: at most `max` bytes, control characters escaped.
pub(super) fn shorten(text: &str, max: usize) -> String {
    let mut short = String::new();
    for character in text.chars() {
        let start = short.len();
        if character.is_control() {
            short.extend(character.escape_default());
        } else {
            short.push(character);
        }
        if short.len() > max {
            short.truncate(start);
            short.push_str("...");
            break;
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_job_and_then_by_number() {
        let name = |job, task| TaskName::new(job, task).unwrap();
        assert!(name("ps", 10) < name("worker", 0));
        assert!(name("worker", 2) < name("worker", 10));
        assert_eq!(name("worker", 10).to_string(), "worker/10");
    }

    #[test]
    fn a_job_that_is_not_a_name_is_refused_with_the_reason() {
        for (job, why) in [
            ("", "empty"),
            ("7up", "start with a letter"),
            ("a/b", "only letters"),
            ("wörker", "only letters"),
            ("w;x", "only letters"),
        ] {
            let error = TaskName::new(job, 0).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(TaskName::new("x".repeat(65), 0).unwrap_err().to_string().contains("64 bytes"));
        assert!(TaskName::new("parameter-server_2", 0).is_ok());
    }

    #[test]
    fn incarnations_are_not_zero_and_not_the_same() {
        assert_eq!(Incarnation::new(0), None);
        assert_ne!(Incarnation::random().unwrap(), Incarnation::random().unwrap());
        assert_eq!(Incarnation::new(0xb5c).unwrap().to_string(), "0000000000000b5c");
    }

    #[test]
    fn text_from_outside_is_cut_and_escaped() {
        assert_eq!(shorten("a\nb", 10), "a\\nb");
        assert_eq!(shorten("äääää", 5), "ää...");
        assert_eq!(shorten("abc", 3), "abc");
    }
}
