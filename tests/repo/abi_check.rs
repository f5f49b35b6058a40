//! Our declarations of libibverbs are those of its header. Each struct, field, value and prototype
//! is compared with that of rdma-sys, and with that of a C compiler.
//!
//! Needs libibverbs-dev, librdmacm-dev, libclang and a C compiler; so it hangs on the feature
//! `abi-check`.

#![allow(unsafe_code)] // offsets and sizes of fields, in closures that are never called

mod scan;
mod table;
mod witness;

use scan::{Function, declared, declared_in, functions};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use table::{Constant, Extent, Field, Layout, Place, Size, constants, layouts};
use witness::Witness;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fabric/verbs").join(path)
}

fn our_functions() -> Vec<Function> {
    functions(&std::fs::read_to_string(source("library.rs")).expect("sources are UTF-8"))
}

/// What is wrong with a struct, if theirs is as given.
fn differences(layout: &Layout, who: &str, theirs: Size, place: impl Fn(&Field) -> Place) -> Vec<String> {
    let Layout { name, extent, ours, .. } = layout;
    let mut wrong = Vec::new();
    let fits = match extent {
        Extent::Whole => ours.bytes == theirs.bytes,
        Extent::Start | Extent::End => ours.bytes <= theirs.bytes,
    };
    if !fits || ours.align != theirs.align {
        wrong.push(format!("{name} is {ours:?}, in {who} {theirs:?}"));
    }
    let front = if *extent == Extent::End { theirs.bytes.saturating_sub(ours.bytes) } else { 0 };
    for field in &layout.fields {
        let ours = Place { offset: field.ours.offset + front, ..field.ours };
        let theirs = place(field);
        if ours != theirs {
            wrong.push(format!("{name}.{} is at {ours:?}, in {who} at {theirs:?}", field.name));
        }
    }
    wrong
}

/// Values that are not theirs.
fn other_values(constants: &[Constant], who: &str, theirs: impl Fn(&Constant) -> Option<i64>) -> Vec<String> {
    let differs = |c: &Constant| {
        let theirs = theirs(c).filter(|theirs| *theirs != c.ours)?;
        Some(format!("{} is {}, in {who} {theirs}", c.name, c.ours))
    };
    constants.iter().filter_map(differs).collect()
}

#[test]
fn structs_and_values_are_those_of_rdma_sys() {
    let mut wrong: Vec<String> =
        layouts().iter().flat_map(|l| differences(l, "rdma-sys", l.theirs, |field| field.theirs)).collect();
    wrong.extend(other_values(&constants(), "rdma-sys", |c| c.theirs));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let nowhere: Vec<&str> = constants().iter().filter(|c| c.theirs.is_none()).map(|c| c.name).collect();
    let nameless = [
        "IBV_LINK_LAYER_UNSPECIFIED",
        "IBV_LINK_LAYER_INFINIBAND",
        "IBV_LINK_LAYER_ETHERNET",
        "IBV_QPF_GRH_REQUIRED",
    ];
    assert_eq!(
        nowhere, nameless,
        "only values of enumerations without a name are left to the C compiler alone"
    );
}

#[test]
fn structs_values_and_prototypes_are_those_of_the_header() {
    let (layouts, constants, functions) = (layouts(), constants(), our_functions());
    let witness = Witness::of(&layouts, &constants, &functions);
    let mut wrong: Vec<String> = layouts
        .iter()
        .flat_map(|l| {
            let place = |field: &Field| witness.place(&format!("{}.{}", l.name, field.name));
            differences(l, "the header", witness.size(l.name), place)
        })
        .collect();
    wrong.extend(other_values(&constants, "the header", |c| Some(witness.value(c.name))));
    for function in &functions {
        let (prototype, version) = witness.prototype_and_version(&function.symbol);
        if !prototype {
            wrong.push(format!("{function:?} has another prototype in the header"));
        }
        if !version {
            wrong.push(format!("{} is found in another version than a linked program gets", function.symbol));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn another_prototype_is_noticed() {
    let with = |takes: &[&str]| Function {
        symbol: "ibv_dealloc_pd".into(),
        takes: takes.iter().map(|t| (*t).to_owned()).collect(),
        returns: Some("c_int".into()),
    };
    for (takes, same) in
        [(&["*mut ibv_pd"][..], true), (&["*mut ibv_cq"], false), (&["*mut ibv_pd", "u8"], false)]
    {
        let witness = Witness::of(&[], &[], &[with(takes)]);
        assert_eq!(witness.prototype_and_version("ibv_dealloc_pd"), (same, true), "{takes:?}");
    }
}

#[test]
fn nothing_is_declared_that_is_not_compared() {
    let compared: BTreeSet<String> = layouts()
        .iter()
        .flat_map(|l| {
            let fields = l.fields.iter().map(|field| format!("{}.{}", l.name, field.name));
            fields.chain([l.name.to_owned()]).collect::<Vec<_>>()
        })
        .chain(constants().iter().map(|c| c.name.to_owned()))
        .collect();
    let declared = declared_in(&source("sys"));
    assert!(declared.len() > 300, "only {} names found: the scan is broken", declared.len());
    let forgotten: Vec<_> = declared.difference(&compared).collect();
    assert!(forgotten.is_empty(), "not in the tables of tests/repo/abi_check/table.rs: {forgotten:?}");
    let gone: Vec<_> = compared.difference(&declared).collect();
    assert!(gone.is_empty(), "not found by the scan: {gone:?}");
}

#[test]
fn every_function_of_the_library_is_found() {
    let text = std::fs::read_to_string(source("library.rs")).expect("sources are UTF-8");
    let (_, list) = text.split_once("\nlibrary! {").expect("the list of functions");
    let (list, _) = list.split_once("\n}").expect("the end of the list");
    assert_eq!(our_functions().len(), list.matches(": fn(").count());
    assert!(our_functions().iter().any(|f| f.symbol == "ibv_reg_mr_iova2" && f.takes.len() == 5));
}

#[test]
fn the_scan_finds_what_is_added() {
    let text = "pub const NEW: u32 = 1;\n\n#[repr(C)]\npub struct ibv_new {\n    /// Doc.\n    pub a: \
        u8,\n    b: u8,\n}\n\
                pub union ibv_both {\n    pub c: u8,\n}\npub unsafe fn f(\n    x: u8,\n) {\n}\n";
    let found: Vec<String> = declared(text).into_iter().collect();
    assert_eq!(found, ["NEW", "ibv_both", "ibv_both.c", "ibv_new", "ibv_new.a"]);
}

#[test]
#[should_panic(expected = "a declaration of a form not known: pub static NEW")]
fn a_declaration_of_another_form_is_refused() {
    declared("pub static NEW: u32 = 1;\n");
}

#[test]
fn a_difference_is_said_with_both_sides() {
    let place = Place { offset: 8, bytes: 4 };
    let layout = |extent| Layout {
        name: "ibv_x",
        c_type: "struct ibv_x",
        extent,
        ours: Size { bytes: 16, align: 8 },
        theirs: Size { bytes: 16, align: 8 },
        fields: vec![Field { name: "y", ours: place, theirs: place }],
    };
    let with = |extent, bytes, offset| {
        let place = |_: &Field| Place { offset, bytes: 4 };
        differences(&layout(extent), "C", Size { bytes, align: 8 }, place)
    };
    assert!(with(Extent::Whole, 16, 8).is_empty());
    assert_eq!(with(Extent::Whole, 24, 12).len(), 2);
    assert!(with(Extent::Start, 24, 8).is_empty());
    assert_eq!(with(Extent::Start, 8, 8).len(), 1);
    assert!(with(Extent::End, 24, 16).is_empty());
    assert_eq!(with(Extent::End, 24, 8).len(), 1);
    let value = [Constant { name: "IBV_X", ours: 1, theirs: Some(2) }];
    assert_eq!(other_values(&value, "C", |c| c.theirs), ["IBV_X is 1, in C 2"]);
}
