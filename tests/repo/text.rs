//! The lines and paragraphs of sources, scripts and pages, and the width of their lines.

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

/// The pages of the book and the `README.md` files.
pub fn pages() -> Vec<(PathBuf, String)> {
    let read = |page: &str| {
        (PathBuf::from(page), std::fs::read_to_string(root().join(page)).expect("the page can be read"))
    };
    files(&["docs", "examples"], "md").into_iter().chain([read("README.md"), read("CHANGELOG.md")]).collect()
}

/// A paragraph, a list item or a heading.
pub struct Block {
    /// Where it begins, counted from 1.
    pub line: usize,
    pub text: String,
}

impl Block {
    /// The blocks of the comments that have lines of their own.
    pub fn of_comments(text: &str) -> Vec<Block> {
        let mut found = Vec::new();
        let mut lines = text.lines().map(str::trim_start).enumerate().peekable();
        while let Some((at, line)) = lines.next() {
            let Some((mark, first)) = comment(line) else { continue };
            let mut own = vec![(at, first)];
            while let Some((_, rest)) =
                lines.peek().and_then(|&(_, next)| comment(next)).filter(|next| next.0 == mark)
            {
                own.push((at + own.len(), rest));
                lines.next();
            }
            found.extend(blocks(own));
        }
        found
    }
}

/// The mark of a comment line, and its text.
fn comment(line: &str) -> Option<(&str, &str)> {
    let mark = ["//!", "///", "//"].into_iter().find(|mark| line.starts_with(mark))?;
    let text = &line[mark.len()..];
    Some((mark, text.strip_prefix(' ').unwrap_or(text)))
}

/// A line without the mark of a list item or a heading.
fn without_mark(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = || number.strip_prefix(". ").filter(|_| number.len() < line.len());
    let heading = || line.starts_with('#').then(|| line.trim_start_matches('#'));
    line.strip_prefix("* ").or_else(|| line.strip_prefix("- ")).or_else(numbered).or_else(heading)
}

/// Cuts Markdown into blocks. Tables, code and the addresses of links are no text.
pub fn blocks<'a>(lines: impl IntoIterator<Item = (usize, &'a str)>) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let (mut in_code, mut is_new, mut in_list) = (false, true, false);
    for (at, line) in lines {
        let text = line.trim();
        let fence = text.starts_with("```");
        in_code ^= fence;
        let mark = without_mark(line);
        let indented = line.starts_with("    ") && is_new && mark.is_none() && !in_list;
        let is_address = line.starts_with('[') && line.contains("]: ");
        if in_code || fence || indented || is_address || text.is_empty() || text.starts_with('|') {
            is_new = true;
            continue;
        }
        if is_new || mark.is_some() {
            in_list = mark.is_some() && !line.starts_with('#') || in_list && line.starts_with(' ');
            found.push(Block { line: at + 1, text: String::new() });
        }
        is_new = line.starts_with('#');
        if let Some(block) = found.last_mut() {
            block.text.extend([mark.unwrap_or(text), " "]);
        }
    }
    found
}

/// A paragraph without the addresses of its links.
pub fn without_addresses(text: &str) -> String {
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, rest| format!("{text}]{}", rest.split_once(')').map_or("", |(_, rest)| rest)))
}

/// The lines of a page that are too wide. Code and tables may be.
fn too_wide_in_page(path: &Path, text: &str) -> Vec<String> {
    let mut in_code = false;
    let check = |(at, line): (usize, &str)| {
        in_code ^= line.trim_start().starts_with("```");
        let exempt = in_code || line.starts_with("    ") || line.starts_with('|');
        let columns = without_addresses(line).chars().count();
        (columns > CODE && !exempt)
            .then(|| format!("{}:{}: {columns} columns, not {CODE}", path.display(), at + 1))
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
    let of_pages = pages().into_iter().flat_map(|(path, text)| too_wide_in_page(&path, &text));
    let wide: Vec<String> = files.flat_map(|(path, text)| too_wide(&path, &text)).chain(of_pages).collect();
    assert!(wide.is_empty(), "{} lines are too wide:\n{}", wide.len(), wide.join("\n"));
}

#[test]
fn a_line_that_is_too_wide_is_found() {
    let said = |text: &str| too_wide(Path::new("x.rs"), text).join("\n");
    assert!(said(&"x".repeat(CODE)).is_empty() && said(&format!("// {}", "x".repeat(97))).is_empty());
    assert_eq!(said(&format!("\n{}", "ä".repeat(111))), "x.rs:2: 111 columns, not 110");
    assert_eq!(said(&format!("    /// {}", "x".repeat(93))), "x.rs:1: 101 columns, not 100");
    let said = |text: &str| too_wide_in_page(Path::new("x.md"), text).join("\n");
    let wide = "ä".repeat(111);
    assert_eq!(said(&wide), "x.md:1: 111 columns, not 110");
    assert!(said(&format!("{}\n```\n{wide}\n```\n| {wide} |\n[x]({wide})", "ä".repeat(110))).is_empty());
}
