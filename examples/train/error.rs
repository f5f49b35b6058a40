//! Errors of this program: messages for a person.

/// Any error.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// A result with any error.
pub type Result<T> = std::result::Result<T, Error>;

/// The messages of an error and of its causes, on one line.
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // Many errors repeat their cause in their own message.
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer\nline")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_are_added_to_the_message() {
        let error = Outer(std::io::Error::other("inner"));
        assert_eq!(one_line(&error), "outer line: inner");
    }
}
