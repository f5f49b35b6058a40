//! How wide source text is.

use crate::source::{files, is_generated};
use std::path::Path;

const CODE: usize = 110;
const COMMENT: usize = 100;

/// Folders with Rust source.
pub const RUST: &[&str] = &["src", "cli", "tests", "examples", "benches", "fuzz/fuzz_targets"];

/// Rows of a table in documentation cannot be wrapped.
fn is_table_row(line: &str) -> bool {
    ["/// |", "//! |"].iter().any(|row| line.starts_with(row))
}

fn too_wide(path: &Path, text: &str) -> Vec<String> {
    let width = |line: &str| match line.trim_start() {
        line if is_table_row(line) => usize::MAX,
        line if line.starts_with("//") => COMMENT,
        _ => CODE,
    };
    let check = |(at, line): (usize, &str)| {
        let (columns, width) = (line.chars().count(), width(line));
        (columns > width).then(|| format!("{}:{}: {columns} columns, not {width}", path.display(), at + 1))
    };
    text.lines().enumerate().filter_map(check).collect()
}

#[test]
fn no_line_is_wider_than_the_project_s_width() {
    let files = files(RUST, "rs").into_iter().filter(|(_, text)| !is_generated(text));
    let wide: Vec<String> = files.flat_map(|(path, text)| too_wide(&path, &text)).collect();
    assert!(wide.is_empty(), "{} lines are too wide:\n{}", wide.len(), wide.join("\n"));
}

#[test]
fn a_line_that_is_too_wide_is_found() {
    let said = |text: &str| too_wide(Path::new("x.rs"), text).join("\n");
    assert!(said(&"x".repeat(CODE)).is_empty() && said(&format!("// {}", "x".repeat(97))).is_empty());
    assert_eq!(said(&format!("\n{}", "ä".repeat(111))), "x.rs:2: 111 columns, not 110");
    assert_eq!(said(&format!("    /// {}", "x".repeat(93))), "x.rs:1: 101 columns, not 100");
}
