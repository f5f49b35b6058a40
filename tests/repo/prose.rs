//! Sentences of comments and pages are short, and no doc only repeats a name.

use crate::source::{files, is_generated};
use crate::text::{Block, blocks, pages, without_addresses};
use std::collections::BTreeSet;
use std::path::Path;
use syn::visit::Visit;
use syn::{Attribute, Expr, ExprLit, Ident, Lit, Meta};

/// The longest sentence in words.
const LONGEST: usize = 25;

/// Words that tell nothing beside a name.
const EMPTY: &[&str] = &["a", "an", "the", "of", "this", "that", "its", "is", "it", "one"];

/// A colon or a semicolon ends a sentence if a capital, a quotation or code follows it.
fn ends_sentence(word: &str, next: &str) -> bool {
    let word = word.trim_end_matches([')', '"', '*', '_', '`']);
    let opens = next.starts_with(|c: char| c.is_ascii_uppercase() || "`\"(*[".contains(c));
    word.ends_with(['.', '!', '?']) || word.ends_with([':', ';']) && opens
}

/// The sentences of a paragraph, as counts of words.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut found = Vec::new();
    let mut from = 0;
    for at in 0..words.len() {
        if words.get(at + 1).is_none_or(|next| ends_sentence(words[at], next)) {
            found.push((at + 1 - from, words[from..=at].join(" ")));
            from = at + 1;
        }
    }
    found
}

fn long_sentences(path: &Path, blocks: Vec<Block>) -> Vec<String> {
    let of_block = |block: Block| {
        let long =
            sentences(&without_addresses(&block.text)).into_iter().filter(|(words, _)| *words > LONGEST);
        long.map(|(words, text)| format!("{}:{}: {words} words: {text}", path.display(), block.line))
            .collect::<Vec<_>>()
    };
    blocks.into_iter().flat_map(of_block).collect()
}

#[test]
fn no_sentence_has_more_than_25_words() {
    let rust = files(&["src", "cli/src"], "rs").into_iter().filter(|(_, text)| !is_generated(text));
    let comments = rust.map(|(path, text)| (path, Block::of_comments(&text)));
    let pages = pages().into_iter().map(|(path, text)| (path, blocks(text.lines().enumerate())));
    let all: Vec<_> = comments.chain(pages).collect();
    let counted: usize = all.iter().map(|(_, blocks)| blocks.len()).sum();
    assert!(counted > 3000, "only {counted} paragraphs: the walk is broken");
    let long: Vec<String> =
        all.into_iter().flat_map(|(path, blocks)| long_sentences(&path, blocks)).collect();
    assert!(long.is_empty(), "{} sentences are too long:\n{}", long.len(), long.join("\n"));
}

#[test]
fn a_sentence_that_is_too_long_is_found() {
    let long = |text: &str| long_sentences(Path::new("x.md"), blocks(text.lines().enumerate())).len();
    let [short, longer] = [25, 26].map(|count| vec!["word"; count].join(" "));
    assert_eq!((long(&short), long(&longer), long(&format!("{short}. {short}."))), (0, 1, 0));
    assert_eq!(long(&format!("# {short}\n{short}\n\n* {short}\n* {short}\n1. {short}")), 0);
    assert_eq!(long(&format!("```\n{longer}\n```\n| {longer} |\n    {longer}")), 0);
    assert_eq!(long(&format!("[{short}](word word)")), 0);
    assert_eq!((long(&format!("{short}: Word")), long(&format!("{short}: word"))), (0, 1));
    let comment = |text: &str| long_sentences(Path::new("x.rs"), Block::of_comments(text)).len();
    assert_eq!(comment(&format!("/// {short}\nfn f() {{}}\n// {short}\n//! {short}")), 0);
    assert_eq!(comment(&format!("    // {short}\n    // word")), 1);
}

/// The words of a name or a text, in lower case and without an `s` at the end.
fn words(text: &str) -> BTreeSet<String> {
    let mut spaced = String::new();
    let mut before = ' ';
    for c in text.chars() {
        if c.is_uppercase() && before.is_lowercase() {
            spaced.push(' ');
        }
        spaced.push(c);
        before = c;
    }
    let words = spaced.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
    words.map(|word| word.trim_end_matches('s').to_owned()).filter(|word| !word.is_empty()).collect()
}

/// Docs of one line that hold no word but those of the names around them.
#[derive(Default)]
struct Repeated {
    /// The words of the item that this one is part of.
    around: BTreeSet<String>,
    found: Vec<(usize, String)>,
}

/// The text of a doc comment of one line.
fn one_line(attributes: &[Attribute]) -> Option<(usize, String)> {
    let line = |attribute: &Attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &pair.value else { return None };
        pair.path.is_ident("doc").then(|| (text.span().start().line, text.value()))
    };
    let lines: Vec<_> = attributes.iter().filter_map(line).collect();
    <[_; 1]>::try_from(lines).ok().map(|[line]| line)
}

/// Whether a doc has a constant, a type or a message in code.
fn names_another(doc: &str) -> bool {
    doc.split('`').skip(1).step_by(2).any(|code| code.contains(|c: char| c.is_uppercase()))
}

impl Repeated {
    fn check(&mut self, attributes: &[Attribute], name: &Ident) {
        let Some((line, doc)) = one_line(attributes).filter(|(_, doc)| !names_another(doc)) else { return };
        let own = words(&name.to_string());
        let known = |word: &String| {
            own.contains(word)
                || self.around.contains(word)
                || EMPTY.iter().any(|empty| empty.trim_end_matches('s') == word)
        };
        if words(&doc).iter().all(known) {
            self.found.push((line, format!("`{name}`: {}", doc.trim())));
        }
    }

    /// Checks an item and then its parts.
    fn enter(&mut self, attributes: &[Attribute], name: &Ident, parts: impl FnOnce(&mut Repeated)) {
        self.check(attributes, name);
        let around = std::mem::replace(&mut self.around, words(&name.to_string()));
        parts(self);
        self.around = around;
    }
}

impl<'ast> Visit<'ast> for Repeated {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.enter(&item.attrs, &item.ident, |own| syn::visit::visit_item_struct(own, item));
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.enter(&item.attrs, &item.ident, |own| syn::visit::visit_item_enum(own, item));
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.enter(&item.attrs, &item.ident, |own| syn::visit::visit_item_union(own, item));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.enter(&item.attrs, &item.ident, |own| syn::visit::visit_item_trait(own, item));
    }

    fn visit_variant(&mut self, item: &'ast syn::Variant) {
        self.check(&item.attrs, &item.ident);
        let around = self.around.clone();
        self.around.extend(words(&item.ident.to_string()));
        syn::visit::visit_variant(self, item);
        self.around = around;
    }

    fn visit_field(&mut self, item: &'ast syn::Field) {
        if let Some(name) = &item.ident {
            self.check(&item.attrs, name);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check(&item.attrs, &item.sig.ident);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check(&item.attrs, &item.sig.ident);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check(&item.attrs, &item.sig.ident);
        syn::visit::visit_trait_item_fn(self, item);
    }

    fn visit_trait_item_type(&mut self, item: &'ast syn::TraitItemType) {
        self.check(&item.attrs, &item.ident);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|last| words(&last.ident.to_string())),
            _ => None,
        };
        let around = std::mem::replace(&mut self.around, owner.unwrap_or_default());
        syn::visit::visit_item_impl(self, item);
        self.around = around;
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.check(&item.attrs, &item.ident);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.check(&item.attrs, &item.ident);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.check(&item.attrs, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.check(&item.attrs, &item.ident);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.check(&item.attrs, &item.ident);
        syn::visit::visit_item_mod(self, item);
    }
}

fn repeated(text: &str) -> Vec<(usize, String)> {
    let mut repeated = Repeated::default();
    repeated.visit_file(&syn::parse_file(text).expect("Rust"));
    repeated.found
}

#[test]
fn no_doc_only_repeats_the_name_of_its_item() {
    let mut broken = Vec::new();
    for (path, text) in files(&["src", "cli/src"], "rs") {
        if !is_generated(&text) {
            let found = repeated(&text).into_iter();
            broken.extend(found.map(|(line, doc)| format!("{}:{line}: {doc}", path.display())));
        }
    }
    assert!(broken.is_empty(), "{} docs only repeat a name:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn a_doc_that_only_repeats_a_name_is_found() {
    let said = |text: &str| repeated(text).into_iter().map(|(line, _)| line).collect::<Vec<_>>();
    assert_eq!(said("/// The pool size.\nconst POOL_SIZE: u32 = 1;\n/// In bytes.\nconst B: u8 = 1;"), [1]);
    assert_eq!(said("struct Link {\n/// The edges of this link.\nedges: u8,\n/// From 0.\nslot: u8 }"), [2]);
    assert_eq!(said("impl Link {\n/// The link's name.\nfn name(&self) {} }"), [2]);
    assert_eq!(said("enum E { A {\n/// The A.\nb: u8 } }"), [2]);
    assert!(said("/// One of `IBV_MTU_*`.\nconst MTU: u8 = 1;").is_empty());
    assert!(said("/// The name.\n///\n/// # Panics\nfn name() {}").is_empty());
}
