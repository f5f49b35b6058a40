//! Reads a TOML file: keys, and for each the text and line of its value.

use super::builder::{unknown, wrong};
use super::error::{ConfigError, Origin};
use super::table::Key;
use std::path::Path;
use toml::de::DeTable;

/// The settings of the file at `path`.
pub(super) fn read(path: &Path) -> Result<Vec<(&'static Key, String, Origin)>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
    let origin = |at: usize| Origin::File { path: path.to_path_buf(), line: line_of(&text, at) };
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        origin: origin(error.span().map_or(0, |span| span.start)),
        message: error.message().replace('\n', " "),
    })?;
    let mut settings = Vec::new();
    for (name, value) in table.get_ref() {
        let origin = origin(name.span().start);
        let key = Key::named(name.get_ref()).ok_or_else(|| unknown(name.get_ref(), origin.clone()))?;
        match (key.from_toml)(value.get_ref()) {
            Some(value) => settings.push((key, value, origin)),
            None => return Err(wrong(key, text.get(value.span()).unwrap_or_default(), origin, None)),
        }
    }
    Ok(settings)
}

/// The line of the byte at `at`, counted from 1.
fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}
