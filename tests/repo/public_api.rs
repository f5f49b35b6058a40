//! What users see of the library: each type has an example, and documents name what is there.

use crate::errors::exported;
use crate::source::{files, root, sources};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::Visit;
use syn::{Attribute, Ident};

/// Exported types without an example of their own, and why.
const WITHOUT_EXAMPLE: &[(&str, &str)] = &[
    ("BulkReceive", "a setting: the example is that of `ConfigValues`"),
    ("FabricKind", "a setting"),
    ("LockPolicy", "a setting: the example is that of `ConfigValues`"),
    ("MemoryWindows", "a setting"),
    ("PagePolicy", "a setting: the example is that of `ConfigValues`"),
    ("PeerLoss", "a setting: the example is that of `ConfigValues`"),
    ("PollMode", "a setting: the example is that of `ConfigValues`"),
    ("WaitStrategy", "a setting"),
    ("PageKind", "a figure of `RegionReport`"),
    ("MissingPeer", "a part of `BootstrapError`"),
    ("PlannedResource", "a part of `ResourcePlan`"),
    ("RemoteStore", "the example is that of `StoreOptions`"),
    ("StoreServer", "the example is that of `StoreOptions`"),
    ("TlsFiles", "a part of `AuthSettings`"),
    ("Element", "sealed: the example is that of `DType`"),
    ("Receivable", "sealed"),
    ("Sendable", "sealed"),
];

/// Errors that a user holds longer than it takes to print them.
const ERRORS_WITH_EXAMPLE: &[&str] = &["Error", "MakeMutError"];

/// Types by name, and whether their documentation has an example.
#[derive(Default)]
struct Examples(BTreeMap<String, bool>);

impl Examples {
    fn add(&mut self, name: &Ident, attributes: &[Attribute]) {
        let is_fence = |attribute: &Attribute| {
            attribute.path().is_ident("doc")
                && attribute
                    .meta
                    .require_name_value()
                    .is_ok_and(|doc| quoted(&doc.value).trim_start().starts_with("```"))
        };
        *self.0.entry(name.to_string()).or_default() |= attributes.iter().any(is_fence);
    }
}

/// The text of a literal; nothing for other expressions.
fn quoted(value: &syn::Expr) -> String {
    match value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => text.value(),
        _ => String::new(),
    }
}

impl<'ast> Visit<'ast> for Examples {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident, &item.attrs);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident, &item.attrs);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident, &item.attrs);
    }
}

fn examples(text: &str) -> BTreeMap<String, bool> {
    let mut examples = Examples::default();
    examples.visit_file(&syn::parse_file(text).expect("Rust"));
    examples.0
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn each_exported_type_has_an_example() {
    let exported = exported(&text("src/lib.rs"));
    let sources = sources();
    let library = sources.iter().filter(|source| source.path.starts_with("src") && !source.is_test);
    let types: BTreeMap<String, bool> = library.flat_map(|source| examples(&source.text)).collect();
    let excepted: BTreeSet<&str> = WITHOUT_EXAMPLE.iter().map(|(name, _why)| *name).collect();
    let is_plain_error = |name: &str| name.ends_with("Error") && !ERRORS_WITH_EXAMPLE.contains(&name);
    let lacks = |name: &&String| types.get(*name) == Some(&false) && !is_plain_error(name);
    let lacking: BTreeSet<&str> = exported.iter().filter(lacks).map(String::as_str).collect();
    assert!(exported.len() > 60 && types["Node"] && types["Tensor"], "the walk is broken");
    let missing: Vec<_> = lacking.difference(&excepted).collect();
    assert!(missing.is_empty(), "types without an example: {missing:?}");
    let needless: Vec<_> = excepted.difference(&lacking).collect();
    assert!(needless.is_empty(), "strike them from the list: {needless:?}");
}

/// The names after `Type::` in code spans, such as `Node::step` of "`Node::step(id)`".
fn named<'a>(page: &'a str, types: &BTreeSet<String>) -> BTreeSet<(&'a str, &'a str)> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let spans = page.split('`').skip(1).step_by(2);
    let pairs = spans.flat_map(|span| span.match_indices("::").map(move |(at, _)| span.split_at(at)));
    let pairs = pairs.map(|(before, after)| {
        let owner = before.rsplit(|c| !is_name(c)).next().unwrap_or_default();
        (owner, after[2..].split(|c| !is_name(c)).next().unwrap_or_default())
    });
    pairs.filter(|(owner, name)| types.contains(*owner) && !name.is_empty()).collect()
}

/// Each name that can follow `Type::` of an exported type.
#[derive(Default)]
struct Members {
    owner: Option<String>,
    names: BTreeSet<(String, String)>,
}

impl Members {
    fn add(&mut self, name: &Ident) {
        self.names.extend(self.owner.iter().map(|owner| (owner.clone(), name.to_string())));
    }

    fn within(&mut self, owner: &Ident, visit: impl FnOnce(&mut Self)) {
        let outer = self.owner.replace(owner.to_string());
        visit(self);
        self.owner = outer;
    }
}

impl<'ast> Visit<'ast> for Members {
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let syn::Type::Path(path) = &*item.self_ty else { return };
        let Some(last) = path.path.segments.last() else { return };
        self.within(&last.ident, |inner| syn::visit::visit_item_impl(inner, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig.ident);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.add(&item.ident);
    }

    /// Functions inside `internal!`.
    fn visit_impl_item_macro(&mut self, item: &'ast syn::ImplItemMacro) {
        let tokens: Vec<_> = item.mac.tokens.clone().into_iter().collect();
        for pair in tokens.windows(2) {
            if let [proc_macro2::TokenTree::Ident(word), proc_macro2::TokenTree::Ident(name)] = pair
                && word == "fn"
            {
                self.add(name);
            }
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        let fields = item.fields.iter().filter_map(|field| field.ident.as_ref());
        self.within(&item.ident, |inner| fields.for_each(|field| inner.add(field)));
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.within(&item.ident, |inner| item.variants.iter().for_each(|variant| inner.add(&variant.ident)));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let functions = item.items.iter().filter_map(|item| match item {
            syn::TraitItem::Fn(function) => Some(&function.sig.ident),
            _ => None,
        });
        self.within(&item.ident, |inner| functions.for_each(|function| inner.add(function)));
    }
}

fn members(text: &str) -> BTreeSet<(String, String)> {
    let mut members = Members::default();
    members.visit_file(&syn::parse_file(text).expect("Rust"));
    members.names
}

/// Types whose names a macro makes of a list: settings and counters.
fn from_macros(owner: &str) -> bool {
    ["Builder", "ConfigValues", "Counter", "Gauge"].contains(&owner)
}

#[test]
fn each_name_of_the_library_in_a_document_exists() {
    let types: BTreeSet<String> =
        exported(&text("src/lib.rs")).into_iter().filter(|name| !from_macros(name)).collect();
    let known: BTreeSet<_> = files(&["src"], "rs").iter().flat_map(|(_, text)| members(text)).collect();
    let pages = files(&["docs"], "md").into_iter().map(|(path, page)| (path.display().to_string(), page));
    let pages: Vec<_> = pages.chain([("README.md".to_owned(), text("README.md"))]).collect();
    let mut count = 0;
    let mut wrong = Vec::new();
    for (path, page) in &pages {
        for (owner, name) in named(page, &types) {
            count += 1;
            if !known.contains(&(owner.to_owned(), name.to_owned())) {
                wrong.push(format!("{path}: {owner}::{name}"));
            }
        }
    }
    assert!(count > 50, "only {count} names found: the walk is broken");
    assert!(wrong.is_empty(), "these do not exist:\n{}", wrong.join("\n"));
}

#[test]
fn no_document_depends_on_internals() {
    let guide =
        files(&["docs/guide"], "md").into_iter().map(|(path, page)| (path.display().to_string(), page));
    for (path, page) in guide.chain([("README.md".to_owned(), text("README.md"))]) {
        assert!(!page.contains("internals::"), "{path}: a user has no `internals`");
    }
}

#[test]
fn examples_and_names_are_found() {
    let types = examples("/// A.\n///\n/// ```\n/// x\n/// ```\nstruct A; /// B.\nenum B {} trait C {}");
    assert_eq!(types.values().copied().collect::<Vec<_>>(), [true, false, false]);
    let ours = BTreeSet::from(["Node".to_owned()]);
    let page = "See `Node::step(1)`, Node::x, `crate::Node::edge_to` and `Vec::new`.";
    assert_eq!(named(page, &ours), BTreeSet::from([("Node", "edge_to"), ("Node", "step")]));
    let found = members(
        "impl Node { pub fn step(&self) {} } impl fmt::Debug for Node { fn fmt(&self) {} } \
        enum Error { Lost } struct Cell { bytes: u64 }",
    );
    let found: Vec<_> = found.iter().map(|(owner, name)| format!("{owner}::{name}")).collect();
    assert_eq!(found, ["Cell::bytes", "Error::Lost", "Node::fmt", "Node::step"]);
}
