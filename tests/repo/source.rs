//! The files of the repository, and Rust source cut into tokens.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below these folders with this extension, relative to the root, with their texts. The
/// extension `""` selects files without one.
pub fn files(folders: &[&str], extension: &str) -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    folders.iter().for_each(|folder| walk(Path::new(folder), extension, &mut paths));
    paths.sort();
    let with_text = |path: PathBuf| {
        let text = std::fs::read_to_string(root().join(&path)).expect("sources are UTF-8");
        (path, text)
    };
    paths.into_iter().map(with_text).collect()
}

fn walk(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(root().join(folder)).expect("the folder can be read") {
        let entry = entry.expect("the folder can be read");
        let path = folder.join(entry.file_name());
        if entry.file_type().expect("the folder can be read").is_dir() {
            walk(&path, extension, found);
        } else if path.extension().unwrap_or_default() == extension {
            found.push(path);
        }
    }
}

/// Whether a program wrote it, which its first line says.
pub fn is_generated(text: &str) -> bool {
    text.lines().next().is_some_and(|line| line.starts_with("//") && line.contains("@generated"))
}

pub struct Token {
    /// Counted from 1.
    pub line: usize,
    pub kind: Kind,
    /// Whether it belongs to an item that only tests have.
    pub in_test: bool,
    /// The inline modules around it.
    pub modules: usize,
}

#[derive(PartialEq, Eq)]
pub enum Kind {
    /// A name or keyword; a raw name (`r#node`) without its mark.
    Word(String),
    /// A literal, as written.
    Text(String),
    /// Punctuation or a bracket.
    Mark(char),
}

impl Token {
    pub fn word(&self) -> Option<&str> {
        match &self.kind {
            Kind::Word(word) => Some(word),
            _ => None,
        }
    }

    pub fn is_word(&self, word: &str) -> bool {
        self.word() == Some(word)
    }

    pub fn is_mark(&self, mark: char) -> bool {
        self.kind == Kind::Mark(mark)
    }
}

/// The tokens of Rust source. Comments are no tokens; a doc comment is the attribute that the
/// compiler makes of it.
pub fn tokens(text: &str) -> Vec<Token> {
    let stream = text.parse().unwrap_or_else(|error| panic!("not Rust: {error}: {text}"));
    let mut found = Vec::new();
    flatten(stream, false, 0, &mut found);
    found
}

fn flatten(stream: TokenStream, in_test: bool, modules: usize, found: &mut Vec<Token>) {
    // Whether the item that has begun is for tests only.
    let mut item_is_test = false;
    for tree in stream {
        let line = tree.span().start().line;
        let token = |line, kind| Token { line, kind, in_test: in_test || item_is_test, modules };
        let group = match tree {
            TokenTree::Ident(word) => {
                found.push(token(line, Kind::Word(word.to_string().trim_start_matches("r#").to_owned())));
                continue;
            }
            TokenTree::Literal(literal) => {
                found.push(token(line, Kind::Text(literal.to_string())));
                continue;
            }
            TokenTree::Punct(mark) => {
                found.push(token(line, Kind::Mark(mark.as_char())));
                item_is_test &= mark.as_char() != ';';
                continue;
            }
            TokenTree::Group(group) => group,
        };
        let (open, close) = match group.delimiter() {
            Delimiter::Brace => ('{', '}'),
            Delimiter::Bracket => ('[', ']'),
            Delimiter::Parenthesis => ('(', ')'),
            Delimiter::None => (' ', ' '),
        };
        let is_attribute = open == '[' && found.last().is_some_and(|before| before.is_mark('#'));
        let is_module = open == '{'
            && matches!(found.as_slice(), [.., word, name] if word.is_word("mod") && name.word().is_some());
        found.push(token(line, Kind::Mark(open)));
        let last = token(group.span_close().start().line, Kind::Mark(close));
        flatten(group.stream(), in_test || item_is_test, modules + usize::from(is_module), found);
        found.push(last);
        item_is_test |= is_attribute && is_for_tests(&group.stream().to_string());
        item_is_test &= open != '{';
    }
}

/// Whether an attribute is `test`, or a `cfg` that needs `test`.
fn is_for_tests(attribute: &str) -> bool {
    let mut words =
        attribute.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    match words.next() {
        Some("test") => true,
        Some("cfg") => {
            let words: Vec<&str> = words.collect();
            words.contains(&"test") && !words.contains(&"not") && !words.contains(&"any")
        }
        _ => false,
    }
}

/// The files that `#[cfg(test)] mod name;` lines of this file bring in, and all files below those.
pub fn test_files(path: &Path, text: &str) -> Vec<PathBuf> {
    let code = tokens(text);
    let mut files = Vec::new();
    let mut named: Option<&str> = None;
    for at in 0..code.len() {
        match &code[at..] {
            [path, equals, file, ..] if path.is_word("path") && equals.is_mark('=') => {
                if let Kind::Text(file) = &file.kind {
                    named = Some(file.trim_matches('"'));
                }
            }
            [word, name, end, ..] if word.is_word("mod") && name.word().is_some() => {
                let file = named.take().map_or_else(|| module_file(path, name), |named| sibling(path, named));
                files.extend((end.is_mark(';') && word.in_test).then_some(file));
            }
            _ => {}
        }
    }
    files
}

fn sibling(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

/// Where the compiler looks for `mod name;` of the file `path`.
fn module_file(path: &Path, name: &Token) -> PathBuf {
    let file = format!("{}.rs", name.word().unwrap_or_default());
    match path.file_stem().and_then(|stem| stem.to_str()) {
        Some("mod" | "lib" | "main") | None => sibling(path, &file),
        Some(stem) => sibling(path, stem).join(file),
    }
}

/// A Rust file of the library or the program.
pub struct Source {
    pub path: PathBuf,
    pub text: String,
    /// Whether only tests have it.
    pub is_test: bool,
}

/// The sources of the library and the program, which are read once.
pub fn sources() -> &'static [Source] {
    static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(read_sources);
    &SOURCES
}

fn read_sources() -> Vec<Source> {
    let files = files(&["src", "cli/src"], "rs");
    assert!(files.len() > 10, "only {} files found under src: the walk is broken", files.len());
    let tests: Vec<PathBuf> = files.iter().flat_map(|(path, text)| test_files(path, text)).collect();
    let is_test =
        |path: &Path| tests.iter().any(|test| path == test || path.starts_with(test.with_extension("")));
    let source = |(path, text): (PathBuf, String)| Source { is_test: is_test(&path), path, text };
    files.into_iter().map(source).collect()
}

#[test]
fn a_file_is_a_test_file_when_its_parent_says_so() {
    let named = |path, text| test_files(Path::new(path), text);
    assert_eq!(named("src/link/mod.rs", "#[cfg(test)] mod tests;"), [Path::new("src/link/tests.rs")]);
    assert_eq!(
        named("src/wire/key.rs", "#[cfg(test)]\n#[path = \"key_tests.rs\"]\nmod tests;"),
        [Path::new("src/wire/key_tests.rs")]
    );
    assert_eq!(named("src/wire/key.rs", "#[cfg(test)] mod tests;"), [Path::new("src/wire/key/tests.rs")]);
    assert!(named("src/wire/mod.rs", "mod key; #[cfg(test)] mod tests {} mod other;").is_empty());
}
