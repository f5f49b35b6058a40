//! Reads TOML, of a file or a profile: for each key the text and line of its value.

use super::builder::{unknown, wrong};
use super::error::{ConfigError, Origin};
use super::format::InvalidToml;
use super::profile::Profile;
use super::table::Key;
use crate::wire::quote;
use std::fs::FileType;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// The settings of the file at `path`.
pub(super) fn read(path: &Path) -> Result<Vec<(&'static Key, String, Origin)>, ConfigError> {
    let text = read_regular(path)?;
    parse(&text, |line| Origin::File { path: path.to_path_buf(), line })
}

/// The settings of a profile.
pub(super) fn of_profile(profile: Profile) -> Result<Vec<(&'static Key, String, Origin)>, ConfigError> {
    parse(profile.text(), |line| Origin::Profile { profile, line })
}

fn parse(
    text: &str,
    origin_of_line: impl Fn(usize) -> Origin,
) -> Result<Vec<(&'static Key, String, Origin)>, ConfigError> {
    let origin = |at: usize| origin_of_line(line_of(text, at));
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let entry = text.lines().nth(line_of(text, at) - 1).unwrap_or_default().trim();
        let message = error.message().replace('\n', " ");
        ConfigError::Syntax { origin: origin(at), entry: quote(entry), message }
    })?;
    let mut settings = Vec::new();
    for (name, value) in table.get_ref() {
        let origin_of = |span: Range<usize>| origin(span.start);
        let Some(key) = Key::named(name.get_ref()) else {
            return Err(unknown(&full_name(name.get_ref(), value.get_ref()), origin_of(name.span())));
        };
        match (key.from_toml)(value.get_ref()) {
            Ok(text) => settings.push((key, text, origin_of(name.span()))),
            Err(InvalidToml::Value) => {
                let value = text.get(value.span()).unwrap_or_default();
                return Err(wrong(key, value, origin_of(name.span()), None));
            }
            Err(InvalidToml::Entry { span, why }) => {
                let value = text.get(span.clone()).unwrap_or_default();
                return Err(wrong(key, value, origin_of(span), Some(why)));
            }
        }
    }
    Ok(settings)
}

/// The text of a regular file. Any other kind is refused before it is opened: a pipe may block, and
/// a device may have no end.
fn read_regular(path: &Path) -> Result<String, ConfigError> {
    let failed = |cause| ConfigError::Read { path: path.to_path_buf(), cause };
    let kind = std::fs::metadata(path).map_err(failed)?.file_type();
    if !kind.is_file() {
        let why = format!("it is {}, and must be a regular file", named(kind));
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn named(kind: FileType) -> &'static str {
    match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

/// The full name of an unknown entry: for a table with the name of its first entry.
fn full_name(name: &str, value: &DeValue<'_>) -> String {
    match value.as_table().and_then(|table| table.keys().next()) {
        Some(entry) => format!("{name}.{}", entry.get_ref()),
        None => name.to_string(),
    }
}

/// The line of the byte at `at`, counted from 1.
fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}
