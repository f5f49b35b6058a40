//! Text from outside in error messages.

/// A longer text is shortened when an error quotes it.
const QUOTED: usize = 160;

/// The text in quotes, escaped, so that it stays on one line. Of a long text both ends and the
/// length.
pub(crate) fn quote(text: &str) -> String {
    if text.len() <= QUOTED {
        return format!("{text:?}");
    }
    let head = &text[..text.floor_char_boundary(QUOTED / 2)];
    let tail = &text[text.ceil_char_boundary(text.len() - QUOTED / 4)..];
    format!("{head:?}...{tail:?} ({} bytes)", text.len())
}
