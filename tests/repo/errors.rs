//! The page of errors and the public error enums have the same variants.

use crate::source::{root, sources};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::Visit;
use syn::{Item, ItemEnum, UseTree, Visibility};

const PAGE: &str = "docs/reference/errors.md";

/// The variants of each error enum, by the name of the enum.
type Errors = BTreeMap<String, BTreeSet<String>>;

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names that `pub use` items of this text bring to its root.
pub fn exported(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for item in syn::parse_file(text).expect("Rust").items {
        if let Item::Use(item) = item
            && matches!(item.vis, Visibility::Public(_))
        {
            leaves(&item.tree, &mut names);
        }
    }
    names
}

fn leaves(tree: &UseTree, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => leaves(&path.tree, names),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, names)),
        UseTree::Name(name) => drop(names.insert(name.ident.to_string())),
        UseTree::Rename(_) | UseTree::Glob(_) => panic!("the crate root exports single names"),
    }
}

/// The enums of a file that derive an `Error`.
#[derive(Default)]
struct Declared(Errors);

impl<'ast> Visit<'ast> for Declared {
    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        let derives = item.attrs.iter().filter(|attribute| attribute.path().is_ident("derive"));
        let mut derived = derives.filter_map(|attribute| attribute.meta.require_list().ok());
        let is_error = |list: &syn::MetaList| list.tokens.to_string().ends_with("Error");
        if derived.any(is_error) {
            let variants = item.variants.iter().map(|variant| variant.ident.to_string()).collect();
            self.0.insert(item.ident.to_string(), variants);
        }
    }
}

fn declared(text: &str) -> Errors {
    let mut declared = Declared::default();
    declared.visit_file(&syn::parse_file(text).expect("Rust"));
    declared.0
}

/// Each table whose heading begins with the name of an enum: the first cells of its rows.
fn described(page: &str) -> Errors {
    let section = |section: &str| {
        let (name, _) = section.strip_prefix('`')?.split_once('`')?;
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
        Some((name.to_owned(), rows.map(|(variant, _)| variant.to_owned()).collect()))
    };
    page.split("\n## ").filter_map(section).collect()
}

#[test]
fn the_page_of_errors_has_every_variant_of_every_public_error_and_no_other() {
    let exported = exported(&text("src/lib.rs"));
    let sources = sources();
    let library = sources.iter().filter(|source| source.path.starts_with("src") && !source.is_test);
    let mut declared: Errors = library.flat_map(|source| declared(&source.text)).collect();
    declared.retain(|name, _| exported.contains(name));
    assert!(declared.len() > 15 && declared.contains_key("LossCause"), "the walk is broken");

    let described = described(&text(PAGE));
    let pairs = |errors: &Errors| -> BTreeSet<String> {
        errors.iter().flat_map(|(name, all)| all.iter().map(move |one| format!("{name}::{one}"))).collect()
    };
    let (declared, described) = (pairs(&declared), pairs(&described));
    let missing: Vec<_> = declared.difference(&described).collect();
    let invented: Vec<_> = described.difference(&declared).collect();
    assert!(missing.is_empty(), "{PAGE} lacks {missing:?}");
    assert!(invented.is_empty(), "{PAGE} has {invented:?}, which the library has not");
}

#[test]
fn the_page_of_errors_names_every_public_error() {
    let page = text(PAGE);
    let errors = exported(&text("src/lib.rs")).into_iter().filter(|name| name.ends_with("Error"));
    let missing: Vec<String> = errors.filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "{PAGE} lacks {missing:?}");
}

#[test]
fn exports_errors_and_tables_are_found() {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(exported("pub use a::{B, c::D}; use e::F; pub use g::H;"), set(&["B", "D", "H"]));
    let errors =
        declared("#[derive(Debug, thiserror::Error)] enum A { B, C(u8) } #[derive(Debug)] enum D { E }");
    assert_eq!(errors, Errors::from([("A".to_owned(), set(&["B", "C"]))]));
    let page = "# x\n## `A`: y\n| variant | z |\n|---|---|\n| `B` | c |\n\n## Other\n| `D` | e |\n";
    assert_eq!(described(page), Errors::from([("A".to_owned(), set(&["B"]))]));
}
