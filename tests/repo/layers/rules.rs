//! The rules themselves: which module may import which, and what each may hold.

use crate::source::{Token, files, is_generated, tokens};
use std::path::Path;
use std::sync::LazyLock;

/// Lines that a file may have.
pub const MAX_LINES: usize = 600;

/// The page that has the layers.
const PAGE: &str = "docs/design/architecture.md";

/// A module directly under `src/`.
pub struct Layer {
    pub name: String,
    /// The other modules that it may import.
    pub imports: Vec<String>,
}

/// The layers, from the bottom up, as the architecture page has them.
pub static LAYERS: LazyLock<Vec<Layer>> = LazyLock::new(|| {
    let (_, page) = files(&["docs/design"], "md")
        .into_iter()
        .find(|(path, _)| path == Path::new(PAGE))
        .expect("the page is there");
    let rows = page.lines().skip_while(|line| !line.starts_with("| module | may import |")).skip(2);
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    rows.map_while(|row| row.strip_prefix("| ")?.split_once(" |"))
        .map(|(name, imports)| Layer { name: names(name).concat(), imports: names(imports) })
        .collect()
});

/// Mutants. `is_on` is a constant `false` in an ordinary build, so that each module may have
/// some.
pub const MUTANTS: &str = "mutants";

/// Modules that may ask the system for the time. Any other takes the time as an argument.
const OWN_CLOCK: &[&str] = &["bootstrap", "node", "store"];

/// Files of other modules that ask the system for the time all the same, and why.
const CLOCK_EXCEPTIONS: &[(&str, &str)] = &[
    (
        "src/fabric/shm/connect/socket",
        "each read and write of a link's set-up counts against the caller's timeout",
    ),
    ("src/fabric/log_rate_limit", "the log of real time has so many lines in a period"),
    ("src/fabric/tcp/connect/deadline", "making a link counts against the caller's timeout"),
    (
        "src/fabric/tcp/watcher",
        "a thread of its own bounds how long repairs, and the ends of detached links, take",
    ),
    ("src/fabric/verbs/events", "a thread of its own measures how long ports are down and links take to end"),
    ("src/fabric/verbs/endpoint", "the wait for the peer's ping counts against the caller's timeout"),
];

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &[
    "src/memory",
    "src/sync",
    "src/fabric/shm",
    "src/fabric/verbs",
    // One call of the kernel.
    "src/fabric/tcp/unacknowledged",
    "src/engine",
    "cli/src/reference",
];

/// Modules within those that are plain Rust all the same.
const NO_UNSAFE: &[&str] = &["src/fabric/verbs/device"];

/// Names that the crate root exports again.
const CRATE_ROOT: &str = "the crate root";

/// Packages of the RPC stack. They stay inside `bootstrap` and never show in the API.
const RPC: &[&str] = &[
    "tokio",
    "tonic",
    "tonic_prost",
    "prost",
    "hyper",
    "hyper_util",
    "http_body_util",
    "tower",
    "rustls",
    "tokio_rustls",
    "webpki",
    "rustls_graviola",
];

/// Where messages are read and written without RPC.
const MESSAGES: (&str, &str) = ("prost", "src/memory/serialized");

pub fn is_under(path: &Path, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| path.starts_with(prefix) || path == Path::new(&format!("{prefix}.rs")))
}

/// The module that a file belongs to. `None` for `lib.rs` and for the program, which may import
/// all.
fn module_of(path: &Path) -> Option<String> {
    let first = path.strip_prefix("src").ok()?.components().next()?;
    let name = first.as_os_str().to_str()?.trim_end_matches(".rs").to_owned();
    (name != "lib").then_some(name)
}

/// How deep the file's own module is below the crate root: 1 for `src/link/mod.rs`.
fn depth_of(path: &Path) -> usize {
    let parts = path.components().count() - 1;
    match path.file_name().and_then(|name| name.to_str()) {
        Some("mod.rs" | "lib.rs") => parts - 1,
        _ => parts,
    }
}

/// Each rule that the file breaks, one line each, as `path:line: what is wrong`.
pub fn check_file(path: &Path, text: &str, is_test: bool) -> Vec<String> {
    let code = tokens(text);
    let mut broken = Vec::new();
    let mut say = |line: usize, what: String| broken.push(format!("{}:{line}: {what}", path.display()));

    let lines = text.lines().count();
    if lines > MAX_LINES && !is_generated(text) {
        say(lines, format!("{lines} lines: a file has {MAX_LINES} at most; split it by idea"));
    }
    if path.ends_with("mod.rs") && !text.starts_with("//!") {
        say(1, "a module opens with `//!` and what it is for".into());
    }
    if let Some(module) = module_of(path) {
        for (line, import) in imports(&code, depth_of(path)) {
            if import != module && import != MUTANTS && !may_import(&module, &import) {
                say(line, format!("{module} may not import {import}: see the layers in {PAGE}"));
            }
        }
    }
    for (at, token) in code.iter().enumerate() {
        let Some(word) = token.word() else { continue };
        let in_test = is_test || token.in_test;
        let may_be_unsafe = is_under(path, UNSAFE) && !is_under(path, NO_UNSAFE);
        match word {
            "unsafe" if !may_be_unsafe => say(token.line, "unsafe code outside its modules".into()),
            "unsafe_code" if !may_be_unsafe && lint_is_relaxed(&code[..at]) => {
                say(token.line, "unsafe code is allowed outside its modules".into());
            }
            "todo" | "unimplemented" if code.get(at + 1).is_some_and(|next| next.is_mark('!')) => {
                say(token.line, format!("{word}! in finished code"));
            }
            "async" | "await" if !in_test && !is_under(path, &["src/bootstrap"]) => {
                say(token.line, format!("{word} outside bootstrap: the engine is synchronous"));
            }
            _ if RPC.contains(&word) && begins_path(&code, at) && !may_name(path, word) => {
                say(token.line, format!("{word} outside bootstrap"));
            }
            _ if !in_test && asks_the_time(&code, at) && time_is_injected(path) => {
                say(token.line, "asks the system for the time: take `now` as an argument".into());
            }
            _ => {}
        }
    }
    broken
}

/// Whether the file may name this package of the RPC stack.
fn may_name(path: &Path, package: &str) -> bool {
    is_under(path, &["src/bootstrap"]) || (package == MESSAGES.0 && is_under(path, &[MESSAGES.1]))
}

fn may_import(module: &str, import: &str) -> bool {
    LAYERS.iter().any(|layer| layer.name == module && layer.imports.iter().any(|known| known == import))
}

fn time_is_injected(path: &Path) -> bool {
    let excepted: Vec<&str> = CLOCK_EXCEPTIONS.iter().map(|(prefix, _why)| *prefix).collect();
    !is_under(path, &excepted) && module_of(path).is_some_and(|module| !OWN_CLOCK.contains(&&*module))
}

/// Whether the lint named next is inside `allow(`, `expect(` or `warn(`.
pub fn lint_is_relaxed(before: &[Token]) -> bool {
    let open = before.iter().rposition(|token| token.is_mark('('));
    open.and_then(|at| before[..at].last())
        .is_some_and(|token| matches!(token.word(), Some("allow" | "expect" | "warn")))
}

fn asks_the_time(code: &[Token], at: usize) -> bool {
    let mark = |n: usize, mark| code.get(at + n).is_some_and(|token| token.is_mark(mark));
    match code[at].word() {
        Some("Instant" | "SystemTime") => {
            is_path_mark(code, at + 1) && code.get(at + 3).is_some_and(|token| token.is_word("now"))
        }
        Some("clock_gettime" | "_rdtsc" | "__rdtscp") => mark(1, '('),
        Some("elapsed") => at > 0 && code[at - 1].is_mark('.') && mark(1, '(') && mark(2, ')'),
        _ => false,
    }
}

fn is_path_mark(code: &[Token], at: usize) -> bool {
    matches!(code.get(at..), Some([first, second, ..]) if first.is_mark(':') && second.is_mark(':'))
}

/// Whether the word begins a path (`tokio::net`) or is imported (`use tokio;`), and is no field and
/// no method.
fn begins_path(code: &[Token], at: usize) -> bool {
    let after_use = at > 0 && code[at - 1].is_word("use");
    let continues_path = at > 1 && code[at - 1].is_mark(':') && code[at - 2].word().is_some();
    after_use || (!continues_path && is_path_mark(code, at + 1))
}

/// Each mention of a module or of the crate root through `crate`, `$crate`, `tensorwire` or
/// `super`, with its line.
fn imports(code: &[Token], file_depth: usize) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, token) in code.iter().enumerate() {
        match token.word() {
            Some("crate") if !is_visibility(code, at) => names_after(code, at + 1, &mut found),
            Some("tensorwire") if begins_path(code, at) => {
                // The modules in `internals` are those of the crate.
                let inside = is_path_mark(code, at + 1)
                    && code.get(at + 3).is_some_and(|token| token.is_word("internals"));
                names_after(code, at + if inside { 4 } else { 1 }, &mut found);
            }
            Some("super") if !follows_super(code, at) => {
                supers(code, at, file_depth + token.modules, &mut found);
            }
            _ => {}
        }
    }
    found
}

/// `pub(crate)` is no path. (`pub(in crate::link)` has one.)
fn is_visibility(code: &[Token], at: usize) -> bool {
    at >= 2
        && code[at - 1].is_mark('(')
        && code[at - 2].is_word("pub")
        && code.get(at + 1).is_some_and(|token| token.is_mark(')'))
}

fn follows_super(code: &[Token], at: usize) -> bool {
    at >= 3 && is_path_mark(code, at - 2) && code[at - 3].is_word("super")
}

/// Follows `super::super::...` from a module `depth` below the root. At the root a module's name
/// follows.
fn supers(code: &[Token], mut at: usize, mut depth: usize, found: &mut Vec<(usize, String)>) {
    while code.get(at).is_some_and(|token| token.is_word("super")) {
        depth = depth.saturating_sub(1);
        if depth == 0 {
            return names_after(code, at + 1, found);
        }
        if !is_path_mark(code, at + 1) {
            return;
        }
        at += 3;
    }
    if code.get(at).is_some_and(|token| token.is_mark('{')) {
        group_parts(code, at).into_iter().for_each(|part| supers(code, part, depth, found));
    }
}

/// The names after the root's: one, or each of a `{...}` group.
fn names_after(code: &[Token], at: usize, found: &mut Vec<(usize, String)>) {
    let root = |name: &str| format!("{CRATE_ROOT}{name}: name the module");
    if !is_path_mark(code, at) {
        return found.push((code[at - 1].line, root("")));
    }
    let first = at + 2;
    let parts = match code.get(first) {
        Some(token) if token.is_mark('{') => group_parts(code, first),
        Some(_) => vec![first],
        None => return,
    };
    for part in parts {
        let name = match code[part].word() {
            Some(name) if name == MUTANTS || LAYERS.iter().any(|layer| layer.name == name) => name.to_owned(),
            Some(name) => root(&format!(" (`{name}`)")),
            None => root(""),
        };
        found.push((code[part].line, name));
    }
}

/// Where each part of the group that opens at `open` begins, nested groups left alone.
fn group_parts(code: &[Token], open: usize) -> Vec<usize> {
    let mut parts = Vec::new();
    let mut depth = 0;
    for (at, token) in code.iter().enumerate().skip(open) {
        depth += i32::from(token.is_mark('{')) - i32::from(token.is_mark('}'));
        if depth == 0 {
            break;
        }
        let begins = depth == 1 && (at == open || token.is_mark(','));
        if begins && code.get(at + 1).is_some_and(|next| !next.is_mark('}')) {
            parts.push(at + 1);
        }
    }
    parts
}
