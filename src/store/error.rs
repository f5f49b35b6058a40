//! Errors of stores.

use crate::wire::quote;
use std::path::PathBuf;
use std::time::Duration;

/// Keys that an error names.
const SHOWN_KEYS: usize = 8;

/// Why keys could not be set, read or waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Keys were not set in time.
    #[error("{store}: {} not set within {waited:?}", shown(missing))]
    Timeout {
        /// The store that was asked.
        store: String,
        /// The keys, in the order in which they were asked for.
        missing: Vec<String>,
        /// The time waited.
        waited: Duration,
    },
    /// The key can't be used.
    #[error("the key {key} has {bytes} bytes: it must have 1 to {most}")]
    Key {
        /// The key in quotes, shortened if it is long.
        key: String,
        /// Its length.
        bytes: usize,
        /// The longest key.
        most: usize,
    },
    /// The value is too long.
    #[error("the value for the key {key} has {bytes} bytes: at most {most} are stored")]
    Value {
        /// The key in quotes, shortened if it is long.
        key: String,
        /// The length of the value.
        bytes: usize,
        /// The longest value.
        most: usize,
    },
    /// The store has no room for the value.
    #[error(
        "no room for the key {key}: the store has {keys} keys of at most {most_keys}, and {bytes} bytes \
             of at most {most_bytes}; delete keys that nobody needs"
    )]
    Full {
        /// The key in quotes, shortened if it is long.
        key: String,
        /// The number of keys.
        keys: usize,
        /// Limit of their number.
        most_keys: usize,
        /// Bytes of all keys and values.
        bytes: usize,
        /// Limit of their sum.
        most_bytes: usize,
    },
    /// A number can't be added to the value.
    #[error(
        "{amount} can't be added to {value}, the value of the key {key}: it must be a decimal number, \
             and the sum an i64"
    )]
    NotANumber {
        /// The key in quotes, shortened if it is long.
        key: String,
        /// Its value in quotes, shortened if it is long.
        value: String,
        /// The number to be added.
        amount: i64,
    },
    /// The server of the store gives no answer.
    #[error("{store}: {tried}: {why} (tried for {waited:?})")]
    Unreachable {
        /// The server, with its address.
        store: String,
        /// The call.
        tried: String,
        /// The last error.
        why: String,
        /// The time that the call took.
        waited: Duration,
    },
    /// This process can't call the server of the store.
    #[error("{store} can't be called: {why}")]
    Local {
        /// The server, with its address.
        store: String,
        /// What was tried, why it failed, and what to change.
        why: String,
    },
    /// The server of the store has refused the call.
    #[error("{store}: {tried} was refused: {why}")]
    Refused {
        /// The server, with its address.
        store: String,
        /// The call.
        tried: String,
        /// The server's words.
        why: String,
    },
    /// The file of the store can't be used.
    #[error("the store file {}: {tried}: {why}", path.display())]
    File {
        /// As given to `FileStore::open`.
        path: PathBuf,
        /// The step that failed.
        tried: &'static str,
        /// The system's error, or what is wrong with the file.
        why: String,
    },
}

/// The missing keys in one line.
fn shown(missing: &[String]) -> String {
    let keys = missing.iter().take(SHOWN_KEYS).map(|key| quote(key)).collect::<Vec<_>>().join(", ");
    let verb = if missing.len() == 1 { "was" } else { "were" };
    match missing.len().saturating_sub(SHOWN_KEYS) {
        0 => format!("{keys} {verb}"),
        more => format!("{keys} and {more} more {verb}"),
    }
}
