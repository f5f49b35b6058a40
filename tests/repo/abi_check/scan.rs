//! What `src/fabric/verbs/sys` declares, read from its text: so nothing can be added there and not
//! be compared.

use std::collections::BTreeSet;
use std::path::Path;

/// Beginnings of lines outside of every item that declare nothing to compare.
const OTHER: &[&str] = &[
    "//",
    "#",
    "}",
    ")",
    "use ",
    "mod ",
    "impl ",
    "type ",
    "pub use ",
    "pub fn ",
    "pub unsafe fn ",
    "unsafe fn ",
    "/*",
];

/// Names as the tables have them: `ibv_qp`, `ibv_qp.state`, `IBV_QPS_RTS`.
///
/// A field that isn't `pub` holds the place of some that we don't use; size and neighbours give it
/// away.
pub fn declared(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut owner = None;
    for line in text.lines() {
        if line.starts_with('}') {
            owner = None;
        }
        let public = line.strip_prefix("pub ").and_then(|rest| rest.split_once(' '));
        if let Some(("struct" | "union", name)) = public {
            let name =
                name.strip_suffix(" {").unwrap_or_else(|| panic!("a struct of a form not known: {line}"));
            owner = Some(name);
            names.insert(name.to_owned());
        } else if let Some(("const", rest)) = public {
            names.insert(until_colon(rest).to_owned());
        } else if let Some((owner, field)) = owner.zip(line.strip_prefix("    pub ")) {
            names.insert(format!("{owner}.{}", until_colon(field)));
        } else if !line.is_empty() && !line.starts_with(' ') {
            assert!(OTHER.iter().any(|o| line.starts_with(o)), "a declaration of a form not known: {line}");
        }
    }
    names
}

fn until_colon(text: &str) -> &str {
    text.split_once(':').unwrap_or_else(|| panic!("no type: {text}")).0
}

/// All of [`declared`] in a folder.
pub fn declared_in(folder: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(folder).expect("the declarations can be read");
    files
        .flat_map(|file| {
            let path = file.expect("the declarations can be read").path();
            assert!(path.extension().is_some_and(|e| e == "rs"), "{} is no file of Rust", path.display());
            declared(&std::fs::read_to_string(path).expect("sources are UTF-8"))
        })
        .collect()
}

/// A function of the library: its symbol, what it takes, what it returns.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    pub symbol: String,
    pub takes: Vec<String>,
    pub returns: Option<String>,
}

/// The functions that the invocation `library! { .. }` in the text lists.
pub fn functions(text: &str) -> Vec<Function> {
    let (_, list) = text.split_once("\nlibrary! {").expect("the list of functions");
    let (list, _) = list.split_once("\n}").expect("the end of the list");
    list.lines().filter_map(|line| function(line.trim())).collect()
}

fn function(line: &str) -> Option<Function> {
    let (name, rest) = line.split_once(": fn(").filter(|_| !line.starts_with("//"))?;
    let symbol = match name.split_once(" = ") {
        Some((_, symbol)) => symbol.trim_matches('"').to_owned(),
        None => format!("ibv_{name}"),
    };
    let (takes, returns) = rest.strip_suffix(';')?.split_once(')')?;
    Some(Function {
        symbol,
        takes: takes.split(", ").filter(|of| !of.is_empty()).map(str::to_owned).collect(),
        returns: returns.strip_prefix(" -> ").map(str::to_owned),
    })
}
