//! The width of Rust sources, shell scripts and TOML files.

use crate::source::{files, is_generated, root};
use std::path::{Path, PathBuf};

const CODE: usize = 110;
const COMMENT: usize = 100;

/// Folders with Rust source.
pub const RUST: &[&str] = &["src", "cli", "tests", "examples", "benches", "fuzz/fuzz_targets"];

/// Folders with shell scripts. A script has the extension `sh` or none.
const SHELL: &[&str] = &["tests", "tuning"];

/// Folders with TOML files, besides the root.
const TOML: &[&str] = &["cli", "fuzz", "tuning"];

fn top_level_toml() -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(root()).expect("the root can be read");
    let names = entries.map(|entry| PathBuf::from(entry.expect("the root can be read").file_name()));
    let tomls = names.filter(|name| name.extension().is_some_and(|own| own == "toml"));
    let with_text = |name: PathBuf| {
        let text = std::fs::read_to_string(root().join(&name)).expect("TOML is UTF-8");
        (name, text)
    };
    tomls.map(with_text).collect()
}

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
    let scripts = [files(SHELL, ""), files(SHELL, "sh")].concat();
    let tomls = [files(TOML, "toml"), top_level_toml()].concat();
    assert!(scripts.len() > 5 && tomls.len() > 3, "{} scripts, {} TOML files", scripts.len(), tomls.len());
    let rust = files(RUST, "rs").into_iter().filter(|(_, text)| !is_generated(text));
    let files = rust.chain(scripts).chain(tomls);
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
