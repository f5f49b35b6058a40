//! Keys and secrets show in no `Debug` text: a type that holds one writes its own.

use crate::source::sources;
use syn::visit::Visit;
use syn::{Attribute, Field, Fields, Item};

/// Names of fields that hold a key or a secret. Keys of tables have other types than `u32`.
const SECRET: &[&str] = &["rkey", "lkey", "secret"];
const KEY: &str = "key";

/// Types that derive `Debug` all the same, and why.
const SHOWN: &[(&str, &str)] = &[
    ("ibv_sge", "a declaration of libibverbs, of which no text is made"),
    ("ibv_wr_rdma", "a declaration of libibverbs, of which no text is made"),
    ("RemoteRegion", "its tests compare it, and no text is made of it"),
    ("PingTarget", "its tests compare it, and no text is made of it"),
];

/// The types of a file that hold a key and derive `Debug`.
#[derive(Default)]
struct Showing(Vec<String>);

fn derives_debug(attributes: &[Attribute]) -> bool {
    let derives = attributes.iter().filter(|attribute| attribute.path().is_ident("derive"));
    let mut lists = derives.filter_map(|attribute| attribute.meta.require_list().ok());
    lists.any(|list| list.tokens.to_string().split(", ").any(|name| name.trim() == "Debug"))
}

fn is_secret(field: &Field) -> bool {
    let Some(name) = &field.ident else { return false };
    let is_number = matches!(&field.ty, syn::Type::Path(path) if path.path.is_ident("u32"));
    SECRET.iter().any(|secret| name == secret) || (name == KEY && is_number)
}

impl<'ast> Visit<'ast> for Showing {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name, fields): (_, _, Vec<&Fields>) = match item {
            Item::Struct(item) => (&item.attrs, &item.ident, vec![&item.fields]),
            Item::Enum(item) => {
                (&item.attrs, &item.ident, item.variants.iter().map(|variant| &variant.fields).collect())
            }
            _ => return syn::visit::visit_item(self, item),
        };
        if derives_debug(attributes) && fields.into_iter().flatten().any(is_secret) {
            self.0.push(name.to_string());
        }
    }
}

fn showing(text: &str) -> Vec<String> {
    let mut showing = Showing::default();
    showing.visit_file(&syn::parse_file(text).expect("Rust"));
    showing.0
}

#[test]
fn no_type_that_holds_a_key_derives_debug() {
    let mut found: Vec<String> = Vec::new();
    sources().iter().filter(|source| !source.is_test).for_each(|source| found.extend(showing(&source.text)));
    let shown: Vec<&str> = SHOWN.iter().map(|(name, _)| *name).collect();
    let new: Vec<_> = found.iter().filter(|name| !shown.contains(&name.as_str())).collect();
    assert!(new.is_empty(), "{new:?} hold a key and derive Debug: write one without the key");
    let gone: Vec<_> = shown.iter().filter(|name| !found.iter().any(|other| other == *name)).collect();
    assert!(gone.is_empty(), "{gone:?} show no key: take them off the list");
}

#[test]
fn a_key_in_a_struct_or_a_variant_is_found() {
    assert_eq!(showing("#[derive(Clone, Debug)] struct A { key: u32 }"), ["A"]);
    assert_eq!(showing("mod m { #[derive(Debug)] enum B { One { rkey: u32 }, Two } }"), ["B"]);
    assert!(showing("#[derive(Clone)] struct A { key: u32 }").is_empty());
    assert!(showing("#[derive(Debug)] struct A<K> { key: K }").is_empty());
}
