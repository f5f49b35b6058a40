//! Keys and secrets show in no `Debug` text: a type that holds one writes its own.

use crate::source::sources;
use syn::visit::Visit;
use syn::{Attribute, Field, Fields, GenericArgument, Item, PathArguments, PathSegment, Type, TypeSlice};

/// Names of fields that hold a key or a secret. Keys of tables have other types than `u32`.
const SECRET: &[&str] = &["rkey", "lkey", "secret", "token"];
const KEY: &str = "key";
/// Types of such fields that write a `Debug` text without the secret.
const HIDDEN: &[&str] = &["Token", "CancelToken"];
/// Where bytes are offers and addresses, which may hold a token.
const OFFERS: &[&str] = &["src/bootstrap", "src/node"];

/// Types that derive `Debug` all the same, and why.
const SHOWN: &[(&str, &str)] = &[
    ("ibv_sge", "a declaration of libibverbs, of which no text is made"),
    ("ibv_wr_rdma", "a declaration of libibverbs, of which no text is made"),
    ("ShmAddress", "its token is the name of a socket, which the kernel shows to all"),
    ("RecvTensorRequest", "its bytes name an edge"),
    ("RecvTensorPart", "its bytes are those of a tensor"),
];

/// The types of a file that hold a key and derive `Debug`.
#[derive(Default)]
struct Showing {
    found: Vec<String>,
    /// Whether bytes count as a secret.
    bytes: bool,
}

/// Whether a type derives `Debug`. The derives of prost do so too, unless they are told to skip it.
fn derives_debug(attributes: &[Attribute]) -> bool {
    let named = |name: &str| {
        let lists = attributes.iter().filter(|attribute| attribute.path().is_ident(name));
        let lists = lists.filter_map(|attribute| attribute.meta.require_list().ok());
        let texts: Vec<String> = lists.map(|list| list.tokens.to_string().replace(' ', "")).collect();
        texts.join(",")
    };
    let is_skipped = named("prost").split(',').any(|word| word == "skip_debug");
    named("derive").split(',').any(|path| match path.rsplit("::").next() {
        Some("Debug") => true,
        Some("Message" | "Oneof") => !is_skipped,
        _ => false,
    })
}

fn is_secret(field: &Field) -> bool {
    let Some(name) = &field.ident else { return false };
    let is = |ty: &str| matches!(&field.ty, Type::Path(path) if path.path.is_ident(ty));
    let is_hidden = HIDDEN.iter().any(|ty| is(ty));
    SECRET.iter().any(|secret| name == secret) && !is_hidden || (name == KEY && is("u32"))
}

fn is_bytes(field: &Field) -> bool {
    let mut bytes = Bytes(false);
    bytes.visit_type(&field.ty);
    bytes.0
}

/// Whether a type has bytes in it, as `Vec<u8>` or `[u8]`.
struct Bytes(bool);

fn is_byte(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.is_ident("u8"))
}

impl<'ast> Visit<'ast> for Bytes {
    fn visit_type_slice(&mut self, slice: &'ast TypeSlice) {
        self.0 |= is_byte(&slice.elem);
    }

    fn visit_path_segment(&mut self, segment: &'ast PathSegment) {
        if let PathArguments::AngleBracketed(list) = &segment.arguments {
            let of_bytes =
                |argument: &GenericArgument| matches!(argument, GenericArgument::Type(ty) if is_byte(ty));
            self.0 |= segment.ident == "Vec" && list.args.iter().any(of_bytes);
        }
        syn::visit::visit_path_segment(self, segment);
    }
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
        let is_found = |field: &Field| is_secret(field) || self.bytes && is_bytes(field);
        if derives_debug(attributes) && fields.into_iter().flatten().any(is_found) {
            self.found.push(name.to_string());
        }
    }
}

fn showing(text: &str, bytes: bool) -> Vec<String> {
    let mut showing = Showing { found: Vec::new(), bytes };
    showing.visit_file(&syn::parse_file(text).expect("Rust"));
    showing.found
}

#[test]
fn no_type_that_holds_a_key_derives_debug() {
    let mut found: Vec<String> = Vec::new();
    for source in sources().iter().filter(|source| !source.is_test) {
        let has_offers = OFFERS.iter().any(|folder| source.path.starts_with(folder));
        found.extend(showing(&source.text, has_offers));
    }
    let shown: Vec<&str> = SHOWN.iter().map(|(name, _)| *name).collect();
    let new: Vec<_> = found.iter().filter(|name| !shown.contains(&name.as_str())).collect();
    assert!(new.is_empty(), "{new:?} hold a key and derive Debug: write one without the key");
    let gone: Vec<_> = shown.iter().filter(|name| !found.iter().any(|other| other == *name)).collect();
    assert!(gone.is_empty(), "{gone:?} show no key: take them off the list");
}

#[test]
fn a_key_in_a_struct_or_a_variant_is_found() {
    assert_eq!(showing("#[derive(Clone, Debug)] struct A { key: u32 }", false), ["A"]);
    assert_eq!(showing("mod m { #[derive(Debug)] enum B { One { rkey: u32 }, Two } }", false), ["B"]);
    assert!(showing("#[derive(Clone)] struct A { key: u32 }", false).is_empty());
    assert!(showing("#[derive(Debug)] struct A<K> { key: K }", false).is_empty());
}

#[test]
fn a_token_and_the_bytes_of_an_offer_are_found() {
    assert_eq!(showing("#[derive(Debug)] struct A { token: [u8; 16] }", false), ["A"]);
    assert!(showing("#[derive(Debug)] struct A { token: Token }", false).is_empty());
    for text in ["#[derive(Debug)] struct A { offer: Vec<u8> }", "#[derive(Debug)] enum A { B(Box<[u8]>) }"] {
        assert_eq!(showing(text, true), ["A"]);
        assert!(showing(text, false).is_empty(), "no module of offers");
    }
}

#[test]
fn a_derive_of_prost_shows_all_fields_unless_it_skips_debug() {
    let text = "#[derive(Clone, ::prost::Message)] struct A { offer: ::prost::alloc::vec::Vec<u8> }";
    assert_eq!(showing(text, true), ["A"]);
    assert_eq!(showing("#[derive(::prost::Oneof)] enum A { B(Vec<u8>) }", true), ["A"]);
    assert!(showing(&format!("#[prost(skip_debug)] {text}"), true).is_empty());
}
