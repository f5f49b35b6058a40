//! Errors of a configuration.

use super::profile::Profile;
use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
///
/// ```
/// use tensorwire::{Config, Origin};
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let config = settings.set("cluster", "worker=127.0.0.1:7000").build()?;
/// assert_eq!(config.origin("cluster"), Origin::Builder);
/// assert_eq!(config.origin("pool_size"), Origin::Default);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// No source set it.
    Default,
    /// A line of a profile.
    Profile {
        /// The profile that another source chose.
        profile: Profile,
        /// The line, counted from 1.
        line: usize,
    },
    /// A line of a file.
    File {
        /// As given to the builder.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// An environment variable.
    Variable {
        /// As in the environment, such as `TENSORWIRE_POOL_SIZE`.
        name: String,
    },
    /// The program, through [`Builder`](super::Builder).
    Builder,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("the default"),
            Origin::Profile { profile, line } => write!(f, "profile {profile} line {line}"),
            Origin::File { path, line } => write!(f, "file {} line {line}", path.display()),
            Origin::Variable { name } => write!(f, "environment variable {name}"),
            Origin::Builder => f.write_str("the builder"),
        }
    }
}

/// Errors of a configuration. Each message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    #[error("configuration file {} can't be read: {cause}", path.display())]
    Read {
        /// As given to the builder.
        path: PathBuf,
        /// The system's error. It is in the message, so it is no `source` of this error.
        cause: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{origin}, {entry}: not valid TOML: {message}")]
    Syntax {
        /// File and line.
        origin: Origin,
        /// The text of that line, in quotes.
        entry: String,
        /// The parser's message.
        message: String,
    },
    /// A key that does not exist.
    #[error("unknown key {key:?} ({origin}): {hint}")]
    UnknownKey {
        /// Where it was set.
        origin: Origin,
        /// The key as it was spelled.
        key: String,
        /// The nearest key that exists, or all of them.
        hint: String,
    },
    /// A value that is not allowed.
    #[error("{key} is {value} ({origin}): {why}")]
    Value {
        /// Where it was set.
        origin: Origin,
        /// As in the file, such as `pool_size`.
        key: &'static str,
        /// The value in quotes, shortened if it is long.
        value: String,
        /// What is allowed.
        why: String,
    },
    /// A required key that is not set.
    #[error("{key} is not set: {remedy}")]
    Missing {
        /// As in the file, such as `pool_size`.
        key: &'static str,
        /// The ways to set it: builder call, variable, file.
        remedy: String,
    },
}
