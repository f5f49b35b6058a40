//! The rules themselves: which room may know which, and what each may hold.

use super::lexer::{Kind, Token, tokens};
use std::path::{Path, PathBuf};

/// Lines that a file may have.
pub const MAX_LINES: usize = 600;

/// A folder (or file) directly under `src/`.
pub struct Room {
    pub name: &'static str,
    /// The other rooms that it may name.
    pub knows: &'static [&'static str],
    /// It takes the time as an argument and never asks for it.
    pub time_is_injected: bool,
}

const fn engine_room(name: &'static str, knows: &'static [&'static str]) -> Room {
    Room { name, knows, time_is_injected: true }
}

const fn own_clock(name: &'static str, knows: &'static [&'static str]) -> Room {
    Room { name, knows, time_is_injected: false }
}

/// The layers, from the bottom up. A room knows only rooms listed before it.
///
/// `bootstrap` and `telemetry` are leaves that `node` wires in; `config` has the enums of the rooms that it sets; the counters of `telemetry` are
/// plain data that every room from `link` upward counts into.
pub const ROOMS: &[Room] = &[
    // Switchable bugs: a constant `false` in every ordinary build, so that every room may have some.
    own_clock(MUTANTS, &[]),
    engine_room("wire", &[]),
    engine_room("memory", &["wire"]),
    engine_room("fabric", &["memory", "wire"]),
    engine_room("protocol", &["memory", "wire"]),
    own_clock("bootstrap", &["wire"]),
    own_clock("telemetry", &["wire"]),
    engine_room("link", &["protocol", "fabric", "memory", "wire", "telemetry"]),
    engine_room("engine", &["link", "protocol", "fabric", "memory", "wire", "telemetry"]),
    engine_room("rendezvous", &["engine", "link", "protocol", "fabric", "memory", "wire", "telemetry"]),
    engine_room("collective", &["engine", "link", "protocol", "fabric", "memory", "wire", "telemetry"]),
    own_clock("config", &["engine", "fabric", "memory", "wire"]),
    own_clock(
        "node",
        &[
            "rendezvous",
            "collective",
            "engine",
            "link",
            "protocol",
            "fabric",
            "memory",
            "wire",
            "bootstrap",
            "config",
            "telemetry",
        ],
    ),
];

const MUTANTS: &str = "mutants";

/// Where `unsafe` may stand.
const UNSAFE: &[&str] =
    &["src/memory", "src/fabric/shm", "src/fabric/verbs", "src/engine", "cli/src/reference"];

/// Rooms within those that are plain Rust all the same.
const NO_UNSAFE: &[&str] = &["src/fabric/verbs/device"];

/// Files with injected time that ask the system for it all the same, and why.
const CLOCK_EXCEPTIONS: &[(&str, &str)] = &[
    (
        "src/fabric/shm/connect/socket",
        "each read and write of a link's set-up counts against the caller's timeout",
    ),
    ("src/fabric/verbs/events", "a thread of its own measures how long ports are down and links take to end"),
    ("src/fabric/verbs/endpoint", "the wait for the peer's ping counts against the caller's timeout"),
];

/// What is re-exported at the crate's root.
const FACE: &str = "the crate's face";

/// Packages of the RPC stack; they stay behind the bootstrap and never show in the API.
const RPC: &[&str] = &["tokio", "tonic", "tonic_prost", "prost", "hyper", "tower"];

/// Where messages are read and written without RPC.
const MESSAGES: (&str, &str) = ("prost", "src/memory/serialized");

pub fn is_under(path: &Path, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|p| path.starts_with(p) || path == Path::new(&format!("{p}.rs")))
}

/// The room that a file belongs to; `None` for the crate's face (`lib.rs`) and for
/// the program (`cli/`), which may know all.
fn room_of(path: &Path) -> Option<String> {
    let first = path.strip_prefix("src").ok()?.components().next()?;
    let name = first.as_os_str().to_str()?.trim_end_matches(".rs").to_owned();
    (name != "lib").then_some(name)
}

/// How many modules deep below the crate's root the file's own module is: 1 for `src/link/mod.rs`.
fn depth_of(path: &Path) -> usize {
    let parts = path.components().count() - 1;
    match path.file_name().and_then(|n| n.to_str()) {
        Some("mod.rs" | "lib.rs") => parts - 1,
        _ => parts,
    }
}

/// Every rule that the file breaks, one line each, as `path:line: what is wrong`.
pub fn check_file(path: &Path, text: &str, whole_file_is_test: bool) -> Vec<String> {
    let code = tokens(text);
    let mut broken = Vec::new();
    let mut say = |line: usize, what: String| broken.push(format!("{}:{line}: {what}", path.display()));

    let lines = text.lines().count();
    if lines > MAX_LINES && !is_generated(text) {
        say(lines, format!("{lines} lines: a file has {MAX_LINES} at most; split it by idea"));
    }
    if path.ends_with("mod.rs") && !text.starts_with("//!") {
        say(1, "a room opens with `//!` and what it is for".into());
    }
    let scope = Scope::of(&code);
    if let Some(room) = room_of(path) {
        for (line, known) in edges(&code, &scope, depth_of(path)) {
            if known == room || known == MUTANTS || may_know(&room, &known) {
                continue;
            }
            say(line, format!("{room} may not know {known}: see the layers in tests/repo/layers/rules.rs"));
        }
    }
    for (at, token) in code.iter().enumerate() {
        let Some(word) = token.word() else { continue };
        let next = |n: usize| code.get(at + n);
        let in_test = whole_file_is_test || scope.in_test[at];
        let may_be_unsafe = is_under(path, UNSAFE) && !is_under(path, NO_UNSAFE);
        match word {
            "unsafe" if !may_be_unsafe => say(token.line, "unsafe code outside its rooms".into()),
            "unsafe_code" if !may_be_unsafe && lint_is_relaxed(&code[..at]) => {
                say(token.line, "unsafe code is allowed outside its rooms".into());
            }
            "todo" | "unimplemented" if next(1).is_some_and(|t| t.is_mark('!')) => {
                say(token.line, format!("{word}! in finished code"));
            }
            "async" | "await" if !in_test && !is_under(path, &["src/bootstrap"]) => {
                say(token.line, format!("{word} outside bootstrap: the engine is synchronous"));
            }
            _ if RPC.contains(&word) && is_crate_path(&code, at) && !may_name(path, word) => {
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

/// Written by a program (which says so in the first line), so nobody has to read it.
fn is_generated(text: &str) -> bool {
    text.lines().next().is_some_and(|line| line.starts_with("//") && line.contains("@generated"))
}

fn may_know(room: &str, known: &str) -> bool {
    ROOMS.iter().any(|r| r.name == room && r.knows.contains(&known))
}

fn time_is_injected(path: &Path) -> bool {
    let excepted: Vec<&str> = CLOCK_EXCEPTIONS.iter().map(|(prefix, _why)| *prefix).collect();
    !is_under(path, &excepted)
        && room_of(path).is_some_and(|room| ROOMS.iter().any(|r| r.name == room && r.time_is_injected))
}

/// The lint named next is inside `allow(`, `expect(` or `warn(`.
pub fn lint_is_relaxed(before: &[Token]) -> bool {
    let open = before.iter().rposition(|t| t.is_mark('('));
    open.and_then(|at| before[..at].last())
        .is_some_and(|t| matches!(t.word(), Some("allow" | "expect" | "warn")))
}

fn asks_the_time(code: &[Token], at: usize) -> bool {
    let next = |n: usize| code.get(at + n);
    let path_to = |name: &str| {
        next(1).is_some_and(|t| t.is_mark(':'))
            && next(2).is_some_and(|t| t.is_mark(':'))
            && next(3).is_some_and(|t| t.is_word(name))
    };
    match code[at].word() {
        Some("Instant" | "SystemTime") => path_to("now"),
        Some("clock_gettime" | "_rdtsc" | "__rdtscp") => next(1).is_some_and(|t| t.is_mark('(')),
        Some("elapsed") => {
            at > 0
                && code[at - 1].is_mark('.')
                && next(1).is_some_and(|t| t.is_mark('('))
                && next(2).is_some_and(|t| t.is_mark(')'))
        }
        _ => false,
    }
}

/// The word at `at` begins a path (`tokio::net`) or is imported (`use tokio;`), not a field or a method.
fn is_crate_path(code: &[Token], at: usize) -> bool {
    let after_use = at > 0 && code[at - 1].is_word("use");
    let begins = !(at > 1 && code[at - 1].is_mark(':') && code[at - 2].word().is_some());
    let continues =
        code.get(at + 1).is_some_and(|t| t.is_mark(':')) && code.get(at + 2).is_some_and(|t| t.is_mark(':'));
    after_use || (begins && continues)
}

/// What surrounds each token: inline modules opened so far, and whether one of them is for tests only.
pub struct Scope {
    modules: Vec<usize>,
    pub in_test: Vec<bool>,
}

impl Scope {
    pub fn of(code: &[Token]) -> Scope {
        let mut scope = Scope { modules: Vec::new(), in_test: Vec::new() };
        // One entry for each open brace: (it opened a module, what it holds is for tests).
        let mut open: Vec<(bool, bool)> = Vec::new();
        let mut item_is_test = false;
        for (at, token) in code.iter().enumerate() {
            scope.modules.push(open.iter().filter(|b| b.0).count());
            scope.in_test.push(item_is_test || open.last().is_some_and(|b| b.1));
            if token.is_mark('#') {
                item_is_test |= is_test_attribute(&code[at..]);
            } else if token.is_mark('{') {
                let module = at >= 2 && code[at - 1].word().is_some() && code[at - 2].is_word("mod");
                open.push((module, item_is_test || open.last().is_some_and(|b| b.1)));
                item_is_test = false;
            } else if token.is_mark('}') {
                open.pop();
                item_is_test = false;
            } else if token.is_mark(';') {
                item_is_test = false;
            }
        }
        scope
    }
}

/// `#[test]` or a `#[cfg(...)]` that needs `test` (and does not deny it).
fn is_test_attribute(code: &[Token]) -> bool {
    if !code.get(1).is_some_and(|t| t.is_mark('[')) {
        return false;
    }
    let words: Vec<&str> =
        code.iter().skip(2).take_while(|t| !t.is_mark(']')).filter_map(Token::word).collect();
    match words.first() {
        Some(&"test") => true,
        Some(&"cfg") => words.contains(&"test") && !words.contains(&"not") && !words.contains(&"any"),
        _ => false,
    }
}

/// Each mention of a room (or of the crate's face) through `crate`, `$crate`, `tensorwire` or `super`.
fn edges(code: &[Token], scope: &Scope, file_depth: usize) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, token) in code.iter().enumerate() {
        match token.word() {
            Some("crate") if !opens_visibility(code, at) => names_after(code, at + 1, &mut found),
            Some("tensorwire") if is_crate_path(code, at) => {
                names_after(code, at + 1 + inside_internals(code, at + 1), &mut found);
            }
            Some("super") if !is_after_super(code, at) => {
                let depth = file_depth + scope.modules[at];
                supers(code, at, depth, &mut found);
            }
            _ => {}
        }
    }
    found
}

/// How many tokens to pass over if `::internals` follows: its modules are the crate's.
fn inside_internals(code: &[Token], at: usize) -> usize {
    let follows = is_path_mark(code, at) && code.get(at + 2).is_some_and(|t| t.is_word("internals"));
    if follows { 3 } else { 0 }
}

/// `pub(crate)`: not a path. (`pub(in crate::link)` is one.)
fn opens_visibility(code: &[Token], at: usize) -> bool {
    at >= 2
        && code[at - 1].is_mark('(')
        && code[at - 2].is_word("pub")
        && code.get(at + 1).is_some_and(|t| t.is_mark(')'))
}

fn is_after_super(code: &[Token], at: usize) -> bool {
    at >= 3 && code[at - 1].is_mark(':') && code[at - 2].is_mark(':') && code[at - 3].is_word("super")
}

/// Follows `super::super::...` from a module `depth` below the root; at the root, what follows is a room.
fn supers(code: &[Token], mut at: usize, mut depth: usize, found: &mut Vec<(usize, String)>) {
    while code.get(at).is_some_and(|t| t.is_word("super")) {
        depth = depth.saturating_sub(1);
        if depth == 0 {
            return names_after(code, at + 1, found);
        }
        if !is_path_mark(code, at + 1) {
            return;
        }
        at += 3;
    }
    if !code.get(at).is_some_and(|t| t.is_mark('{')) {
        return;
    }
    for part in group_parts(code, at) {
        supers(code, part, depth, found);
    }
}

fn is_path_mark(code: &[Token], at: usize) -> bool {
    code.get(at).is_some_and(|t| t.is_mark(':')) && code.get(at + 1).is_some_and(|t| t.is_mark(':'))
}

/// The names right after the root's name: one, or each of a `{...}` group.
fn names_after(code: &[Token], at: usize, found: &mut Vec<(usize, String)>) {
    if !is_path_mark(code, at) {
        let line = code[at - 1].line;
        return found.push((line, format!("{FACE} (name the room)")));
    }
    let first = at + 2;
    let parts = match code.get(first) {
        Some(t) if t.is_mark('{') => group_parts(code, first),
        Some(_) => vec![first],
        None => return,
    };
    for part in parts {
        let token = &code[part];
        let name = match token.word() {
            Some(name) if ROOMS.iter().any(|r| r.name == name) => name.to_owned(),
            Some(name) => format!("{FACE} (`{name}`: name the room)"),
            None => format!("{FACE} (name the room)"),
        };
        found.push((token.line, name));
    }
}

/// Where each part of the group that opens at `open` begins, nested groups left alone.
fn group_parts(code: &[Token], open: usize) -> Vec<usize> {
    let mut parts = Vec::new();
    let mut depth = 0;
    for at in open..code.len() {
        match code[at].kind {
            Kind::Mark('{') => depth += 1,
            Kind::Mark('}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        let begins = depth == 1 && (at == open || code[at].is_mark(','));
        if begins && code.get(at + 1).is_some_and(|t| !t.is_mark('}')) {
            parts.push(at + 1);
        }
    }
    parts
}

/// The files that `#[cfg(test)] mod name;` lines of this file bring in.
pub fn test_files_named_in(path: &Path, text: &str) -> Vec<PathBuf> {
    let code = tokens(text);
    let scope = Scope::of(&code);
    let mut files = Vec::new();
    let mut named: Option<String> = None;
    for (at, token) in code.iter().enumerate() {
        let is_path = token.is_word("path") && code.get(at + 1).is_some_and(|t| t.is_mark('='));
        if is_path && let Some(Kind::Text(file)) = code.get(at + 2).map(|t| &t.kind) {
            named = Some(file.clone());
        }
        if token.is_word("mod") {
            let own = named.take();
            let (Some(name), Some(end)) = (code.get(at + 1).and_then(Token::word), code.get(at + 2)) else {
                continue;
            };
            if end.is_mark(';') && scope.in_test[at] {
                files.push(file_of_module(path, name, own));
            }
        }
    }
    files
}

/// Where the compiler looks for `mod name;` of the file `path`.
fn file_of_module(path: &Path, name: &str, own: Option<String>) -> PathBuf {
    let folder = path.parent().unwrap_or(Path::new(""));
    if let Some(own) = own {
        return folder.join(own);
    }
    match path.file_stem().and_then(|s| s.to_str()) {
        Some("mod" | "lib" | "main") | None => folder.join(format!("{name}.rs")),
        Some(stem) => folder.join(stem).join(format!("{name}.rs")),
    }
}
