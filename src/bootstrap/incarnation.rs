//! The draw of an incarnation.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnations_are_not_the_same() {
        assert_ne!(Incarnation::random().unwrap(), Incarnation::random().unwrap());
    }
}
