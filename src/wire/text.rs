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

/// Text from a peer, for an error message: at most `max` bytes, control characters escaped.
pub fn shorten(text: &str, max: usize) -> String {
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
    fn text_from_outside_is_cut_and_escaped() {
        assert_eq!(shorten("a\nb", 10), "a\\nb");
        assert_eq!(shorten("äääää", 5), "ää...");
        assert_eq!(shorten("abc", 3), "abc");
    }
}
