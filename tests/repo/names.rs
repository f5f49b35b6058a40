//! A name has one meaning: no two types of the library and the program share a name.

use crate::source::{is_generated, root, sources};
use std::collections::BTreeMap;
use std::path::PathBuf;
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
