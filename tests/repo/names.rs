//! A name has one meaning: no two types share a name, and no replaced name is used.

use crate::source::{files, is_generated, root, sources};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use syn::visit::Visit;
use syn::{Attribute, Ident, ItemMod};

/// Names that several types have, and why.
const SHARED: &[(&str, &str)] = &[];

/// The types that a file declares outside its tests. Associated types are no types of their own.
#[derive(Default)]
struct Declared(Vec<String>);

impl Declared {
    fn add(&mut self, name: &Ident) {
        self.0.push(name.to_string());
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    let needs_test = |attribute: &Attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let condition = list.tokens.to_string();
                condition.contains("test") && !condition.contains("not")
            })
    };
    attributes.iter().any(needs_test)
}

impl<'ast> Visit<'ast> for Declared {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_for_tests(&module.attrs) {
            syn::visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add(&item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.ident);
    }
}

fn declared(text: &str) -> Vec<String> {
    let mut declared = Declared::default();
    declared.visit_file(&syn::parse_file(text).expect("Rust"));
    declared.0
}

#[test]
fn no_two_types_of_the_library_and_the_program_share_a_name() {
    let mut places: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for source in sources() {
        if source.is_test || is_generated(&source.text) {
            continue;
        }
        for name in declared(&source.text) {
            places.entry(name).or_default().push(source.path.clone());
        }
    }
    assert!(places.contains_key("Node") && places.contains_key("Step"), "the walk is broken");
    let shared = |name: &str| SHARED.iter().any(|(shared, _why)| *shared == name);
    let twice = |(name, places): (&String, &Vec<PathBuf>)| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        (places.len() > 1 && !shared(name)).then(|| format!("{name}: {}", places.join(", ")))
    };
    let broken: Vec<String> = places.iter().filter_map(twice).collect();
    assert!(broken.is_empty(), "{} names have several types:\n{}", broken.len(), broken.join("\n"));
    for (name, _why) in SHARED {
        assert!(places.get(*name).is_some_and(|places| places.len() > 1), "{name} has one type: strike it");
    }
}

#[test]
fn declarations_are_found_and_those_of_tests_are_not() {
    let text = "struct A; pub enum B {} trait C { type D; } mod m { union E { x: u8 } type F = A; }
        impl C for A { type D = B; } #[cfg(test)] mod tests { struct G; } #[cfg(not(test))] mod real { \
        struct H; }";
    assert_eq!(declared(text), ["A", "B", "C", "E", "F", "H"]);
    assert_eq!(declared("fn f() { struct Inner; }"), ["Inner"]);
}

fn items(path: &str) -> Vec<syn::Item> {
    let text = std::fs::read_to_string(root().join(path)).expect("text");
    syn::parse_file(&text).expect("Rust").items
}

/// The arguments of the attributes, such as the condition of a `cfg`.
fn arguments(attributes: &[Attribute]) -> Vec<String> {
    let lists = attributes.iter().filter_map(|attribute| attribute.meta.require_list().ok());
    lists.map(|list| list.tokens.to_string()).collect()
}

#[test]
fn the_library_exports_no_module_but_internals() {
    for item in items("src/lib.rs") {
        let syn::Item::Mod(module) = item else { continue };
        if matches!(module.vis, syn::Visibility::Public(_)) {
            assert_eq!(module.ident, "internals");
            let feature = arguments(&module.attrs);
            assert!(feature.contains(&"feature = \"internals\"".to_owned()), "{feature:?}");
        }
    }
}

#[test]
fn no_build_of_a_user_names_the_fabric_of_the_tests() {
    let kinds = items("src/fabric/mod.rs").into_iter().find_map(|item| match item {
        syn::Item::Enum(item) if item.ident == "FabricKind" => Some(item.variants),
        _ => None,
    });
    let sim = kinds.expect("the kinds").into_iter().find(|kind| kind.ident == "Sim").expect("the kind");
    assert!(arguments(&sim.attrs).iter().any(|condition| condition.contains("feature = \"sim\"")));
}

const GLOSSARY: &str = "docs/glossary.md";

/// Older names that are words of other concepts too, and why they may stand in text.
const AMBIGUOUS: &[(&[&str], &str)] = &[
    (
        &[
            "address",
            "asked",
            "cold",
            "floor",
            "give",
            "give-up",
            "grace",
            "half",
            "home",
            "hot",
            "kept",
            "look",
            "mark",
            "members",
            "mode",
            "names",
            "next",
            "opened",
            "part",
            "ranges",
            "reach",
            "room",
            "run",
            "succeeded",
            "sum",
            "told",
            "tried",
            "turn",
            "verdict",
            "waiting",
            "way",
            "who",
            "word",
        ],
        "a word of everyday English",
    ),
    (&["call", "chain", "class", "fence", "Side"], "a word of Rust, of its library or of every program"),
    (&["channel"], "the completion channel of verbs, and the channels of gRPC"),
    (&["arm", "ARM", "armed"], "a port is armed"),
    (&["op", "slot"], "the operation and the slots of a ring"),
    (&["board"], "the board of a device's asynchronous events"),
    (&["ticket"], "the number of a read, or of an attempt to link"),
    (&["abandoned"], "`CancelDecision::Abandon`, and the queue of a thread that has ended"),
    (&["incoming"], "the events of edge windows"),
    (&["cluster spec"], "the type of TensorFlow, where the pages compare"),
];

/// The names of the first column, and those of the column *Replaces*.
fn glossary() -> (Vec<String>, Vec<String>) {
    let text = std::fs::read_to_string(root().join(GLOSSARY)).expect("the glossary");
    let (mut names, mut older) = (Vec::new(), Vec::new());
    let mut has_older = false;
    for row in text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|')) {
        let cells: Vec<&str> = row.split('|').collect();
        let parts = |cell: &str| -> Vec<String> {
            let parts = cell.split(',').map(|part| part.trim().trim_matches('`').to_owned());
            parts.filter(|part| !part.is_empty()).collect()
        };
        let (first, last) = (cells[0], cells[cells.len() - 1]);
        if first.trim() == "Name" {
            has_older = last.trim() == "Replaces";
            continue;
        }
        names.extend(parts(first));
        if has_older {
            older.extend(parts(last));
        }
    }
    (names, older)
}

/// A text as its words in lower case, with one space before and after each. A comment or a
/// paragraph that goes on in the next line is not cut there.
fn spaced(text: &str) -> String {
    let lines = text.lines().map(|line| line.trim_start().trim_start_matches(['/', '!']));
    let mut spaced = String::from(" ");
    let mut before = ' ';
    for c in lines.flat_map(|line| line.chars().chain([' '])) {
        if c.is_uppercase() && before.is_lowercase() {
            spaced.push(' ');
        }
        match c {
            '_' | '-' => spaced.push(' '),
            c if c.is_alphanumeric() => spaced.extend(c.to_lowercase()),
            c if c.is_whitespace() => spaced.push(' '),
            c => spaced.extend([' ', c, ' ']),
        }
        before = c;
    }
    spaced.push(' ');
    spaced.split_whitespace().fold(String::from(" "), |text, word| text + word + " ")
}

/// A name, and the two forms of it that a spaced text may have: that of one and the plural.
struct ReplacedName {
    name: String,
    forms: [String; 2],
}

impl ReplacedName {
    fn new(name: String) -> Self {
        let spaced = spaced(&name);
        let one = spaced.trim_end();
        ReplacedName { forms: [format!("{one} "), format!("{one}s ")], name }
    }

    fn is_in(&self, spaced: &str) -> bool {
        self.forms.iter().any(|form| spaced.contains(form))
    }
}

/// The older names that have one meaning only.
fn gone() -> Vec<ReplacedName> {
    let (names, older) = glossary();
    let is_ambiguous = |name: &String| AMBIGUOUS.iter().any(|(words, _why)| words.contains(&name.as_str()));
    let gone = older.into_iter().filter(|name| !names.contains(name) && !is_ambiguous(name));
    gone.map(ReplacedName::new).collect()
}

#[test]
fn no_source_or_page_uses_a_name_that_the_glossary_replaces() {
    let gone = gone();
    assert!(gone.len() > 50, "only {} names: the glossary is not where it is read", gone.len());
    let pages = files(&["docs"], "md");
    let pages = pages.iter().filter(|(path, _)| path != Path::new(GLOSSARY));
    let texts = sources().iter().map(|source| (&source.path, &source.text));
    let mut broken = Vec::new();
    for (path, text) in texts.chain(pages.map(|(path, text)| (path, text))) {
        let text = spaced(text);
        let found = gone.iter().filter(|gone| gone.is_in(&text));
        broken.extend(found.map(|gone| format!("{}: {}", path.display(), gone.name)));
    }
    assert!(broken.is_empty(), "{} uses of replaced names:\n{}", broken.len(), broken.join("\n"));
    let (_, older) = glossary();
    for word in AMBIGUOUS.iter().flat_map(|(words, _why)| *words) {
        assert!(older.iter().any(|name| name == word), "{word} replaces nothing: strike it");
    }
}

#[test]
fn a_replaced_name_is_found() {
    let gone = gone();
    let said = |text: &str| gone.iter().any(|gone| gone.is_in(&spaced(text)));
    assert!(said("a.inbox.pop()") && said("let loan_lease = 1;") && said("LoanLease") && said("two leases"));
    assert!(said("// it was held\n// up there") && said("fn turned_away()"));
    assert!(!said("please, release the loan") && !said("|held| up") && !said("its slot"));
}
