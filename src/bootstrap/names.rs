//! The draw of an incarnation, and text from peers.

use super::BootstrapError;
use crate::wire::Incarnation;

impl Incarnation {
    /// Draws the number of a new life.
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
}

/// Text from a peer, for an error message: at most `max` bytes, control characters escaped.
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
    fn incarnations_are_not_the_same() {
        assert_ne!(Incarnation::random().unwrap(), Incarnation::random().unwrap());
    }

    #[test]
    fn text_from_outside_is_cut_and_escaped() {
        assert_eq!(shorten("a\nb", 10), "a\\nb");
        assert_eq!(shorten("äääää", 5), "ää...");
        assert_eq!(shorten("abc", 3), "abc");
    }
}
