//! The rules that hold the source tree together, checked on the source text.
//!
//! Each module under `src/` may import only some of the others. Only a few may hold `unsafe` code.
//! Only `node`, `bootstrap` and `store` ask the system for the time. Files stay small. The compiler
//! checks none of this. Comments, strings and links of documentation are no imports.

mod locks;
mod rules;

use crate::source::{root, sources};
use rules::{LAYERS, MUTANTS, check_file};
use std::path::Path;

#[test]
fn every_source_file_keeps_the_rules_of_its_module() {
    let check = |source: &crate::source::Source| {
        let mut broken = check_file(&source.path, &source.text, source.is_test);
        broken.extend(locks::check(&source.path, &source.text, source.is_test));
        broken
    };
    let broken: Vec<String> = sources().iter().flat_map(check).collect();
    assert!(broken.is_empty(), "{} rules broken:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn each_place_for_a_lock_is_a_file_or_a_module() {
    for (place, _why) in locks::LOCKS {
        let is_there = root().join(place).is_dir() || root().join(format!("{place}.rs")).is_file();
        assert!(is_there, "{place} is in the list of locks, and there is no such file");
    }
}

#[test]
fn every_module_under_src_has_a_place_in_the_layers() {
    for entry in std::fs::read_dir(root().join("src")).expect("src can be read") {
        let entry = entry.expect("src can be read");
        let name = entry.file_name().into_string().expect("names are UTF-8");
        let module = name.trim_end_matches(".rs");
        if ["lib", "documents", MUTANTS].contains(&module) {
            continue;
        }
        assert!(
            LAYERS.iter().any(|layer| layer.name == module),
            "src/{name} has no place in the table of layers"
        );
    }
}

#[test]
fn the_table_of_layers_has_no_cycle_and_names_only_modules() {
    assert!(LAYERS.len() > 5, "the table is not where it is read");
    for (at, layer) in LAYERS.iter().enumerate() {
        assert!(root().join("src").join(&layer.name).is_dir(), "{} is no module", layer.name);
        for import in &layer.imports {
            let below = LAYERS.iter().position(|layer| layer.name == *import);
            assert!(
                below.is_some_and(|below| below < at),
                "{} imports {import}, which is not above it",
                layer.name
            );
        }
    }
}

/// What the rules say of a file with this path and text.
fn says(path: &str, text: &str) -> String {
    check_file(Path::new(path), text, false).join("\n")
}

#[test]
fn an_upward_import_is_found_however_it_is_written() {
    for text in [
        "use crate::node::Node;",
        "use crate::{wire::Grant, node::{Node, Peer}};",
        "use crate :: node :: Node ;",
        "pub use crate::r#node::Node;",
        "fn f() -> crate::node::Node { todo() }",
        "use super::node::Node;",
        "mod inner { use super::super::node::Node; }",
        "mod inner { use super::{super::node::Node, x}; }",
        "use tensorwire::node::Node;",
        "use ::tensorwire::{node::Node};",
        "use crate::{self as root, wire};",
        "use crate as root;",
        "use crate::*;",
        "use crate::Node;",
        "macro_rules! m { () => { $crate::node::Node } }",
    ] {
        let said = says("src/link/mod.rs", &format!("//! Module.\n{text}"));
        assert!(said.contains("link may not import"), "{text} passed: {said:?}");
    }
    let said = says("src/link/slot.rs", "use super::super::node::Node;");
    assert!(said.contains("src/link/slot.rs:1: link may not import node"), "{said:?}");
}

#[test]
fn a_downward_import_and_a_module_s_own_names_pass() {
    for text in [
        "use crate::wire::Grant;",
        "use crate::{memory::{Pool, Tensor}, wire::Grant, link::Slot};",
        "use super::slot::Slot;",
        "// use crate::node::Node;\n/* crate::node /* crate::config */ */ /// [`crate::node::Node`]",
        "const S: &str = \"crate::node\"; const R: &str = r#\"use \"crate::node\"#; const B: &[u8] = \
            b\"crate::node\";",
        "fn f<'a>(x: &'a u8) -> char { '\"' } // crate::node",
        "pub(crate) fn f() {} pub(in crate::link) fn g() {}",
        "mod tests { use super::*; use super::slot::Slot; }",
    ] {
        let said = says("src/link/ring.rs", text);
        assert!(said.is_empty(), "{text}: {said}");
    }
}

#[test]
fn modules_side_by_side_do_not_import_each_other() {
    assert!(says("src/protocol/x.rs", "use crate::fabric::Port;").contains("protocol may not import fabric"));
    assert!(
        says("src/fabric/x.rs", "use crate::protocol::Event;").contains("fabric may not import protocol")
    );
    assert!(
        says("src/bootstrap/x.rs", "use crate::config::Config;").contains("bootstrap may not import config")
    );
    assert!(
        says("src/memory/x.rs", "use crate::telemetry::Counter;").contains("memory may not import telemetry")
    );
    assert!(says("src/node/x.rs", "use crate::{bootstrap::B, config::C, telemetry::T};").is_empty());
}

#[test]
fn unsafe_code_outside_its_modules_is_found() {
    let code = "fn f() { unsafe { g() } }";
    for path in [
        "src/link/x.rs",
        "src/fabric/x.rs",
        "src/fabric/verbs/device/x.rs",
        "src/wire/x.rs",
        "cli/src/perf/x.rs",
        "src/lib.rs",
    ] {
        assert!(says(path, code).contains("unsafe"), "{path} passed");
        assert!(says(path, "#![allow(unsafe_code)]").contains("unsafe"), "{path} passed");
    }
    for path in ["src/memory/x.rs", "src/engine/x.rs", "src/fabric/shm/x.rs", "cli/src/reference/x.rs"] {
        assert!(says(path, code).is_empty(), "{path}: {}", says(path, code));
    }
    assert!(says("src/link/x.rs", "#![deny(unsafe_code)] // unsafe").is_empty());
}

#[test]
fn a_lock_on_the_data_path_is_found_and_so_is_the_permission_to_have_one() {
    let said = |path: &str, text: &str| locks::check(Path::new(path), text, false).join("\n");
    for text in [
        "use std::sync::Mutex;",
        "use std::sync::{Arc, RwLock};",
        "static S: std::sync::Condvar = std::sync::Condvar::new();",
        "use std::sync::mpsc::channel;",
        "#![allow(clippy::disallowed_types)]",
        "#[expect(clippy::disallowed_methods)] fn f() {}",
    ] {
        for path in [
            "src/link/x.rs",
            "src/matching/mod.rs",
            "src/memory/pool/magazine/mod.rs",
            "src/fabric/shm/memory/ring.rs",
        ] {
            assert!(said(path, text).contains("locks.rs"), "{text} passed in {path}");
        }
        assert!(
            said("src/bootstrap/x.rs", text).is_empty() && said("src/engine/executor.rs", text).is_empty()
        );
    }
    assert!(said("src/link/x.rs", "#[cfg(test)] mod tests { use std::sync::Mutex; } // Mutex").is_empty());
}

#[test]
fn clippy_denies_locks_in_the_whole_library() {
    let root_file = std::fs::read_to_string(root().join("src/lib.rs")).expect("the crate root");
    assert!(
        root_file
            .contains("#![cfg_attr(not(test), deny(clippy::disallowed_types, clippy::disallowed_methods))]")
    );
    let lints = std::fs::read_to_string(root().join("clippy.toml")).expect("clippy's settings");
    let program = std::fs::read_to_string(root().join("cli/src/main.rs")).expect("the program");
    assert!(program.contains("#![cfg_attr(not(test), deny(clippy::disallowed_macros))]"));
    assert!(lints.contains("\"std::eprintln\"") && lints.contains("\"std::println\""));
    for denied in ["std::sync::Mutex", "std::sync::RwLock", "std::sync::Condvar", "std::sync::mpsc::channel"]
    {
        assert!(lints.contains(&format!("\"{denied}\"")), "{denied} is not denied");
    }
}

#[test]
fn asking_for_the_time_below_node_is_found_outside_tests() {
    for call in [
        "Instant::now()",
        "std::time::SystemTime :: now()",
        "rustix::time::clock_gettime(id)",
        "_rdtsc()",
        "start.elapsed()",
    ] {
        let said = says("src/engine/x.rs", &format!("fn f() {{ {call}; }}"));
        assert!(said.contains("asks the system for the time"), "{call} passed");
        assert!(says("src/node/x.rs", &format!("fn f() {{ {call}; }}")).is_empty());
        let in_test = format!("#[cfg(test)]\nmod tests {{ fn f() {{ {call}; }} }}");
        assert!(says("src/engine/x.rs", &in_test).is_empty());
        let after_test = format!("{in_test}\nfn g() {{ {call}; }}");
        assert!(says("src/engine/x.rs", &after_test).contains("time"), "{call} after a test module passed");
        let not_test = format!("#[cfg(not(test))]\nmod real {{ fn f() {{ {call}; }} }}");
        assert!(says("src/engine/x.rs", &not_test).contains("time"), "{call} under not(test) passed");
    }
    let test_file = check_file(Path::new("src/engine/tests.rs"), "fn f() { Instant::now(); }", true);
    assert!(test_file.is_empty());
}

#[test]
fn an_unfinished_function_an_async_one_and_an_rpc_type_are_found() {
    assert!(says("src/link/x.rs", "fn f() { todo!() }").contains("todo!"));
    assert!(says("src/node/x.rs", "fn f() { unimplemented!(\"later\") }").contains("unimplemented!"));
    assert!(says("src/engine/x.rs", "async fn f() {}").contains("async"));
    assert!(says("src/node/x.rs", "use tokio::net::TcpStream;").contains("tokio"));
    assert!(
        says("src/bootstrap/x.rs", "async fn f(s: tonic::Status) { tokio::spawn(g()).await; }").is_empty()
    );
    let serialized = "src/memory/serialized/x.rs";
    assert!(says(serialized, "use prost::Message;").is_empty());
    assert!(says(serialized, "use tonic::Status;").contains("tonic outside bootstrap"));
    assert!(says("src/memory/x.rs", "use prost::Message;").contains("prost outside bootstrap"));
}

#[test]
fn a_module_without_documentation_and_a_file_too_long_to_read_are_found() {
    assert!(says("src/link/mod.rs", "mod slot;").contains("//!"));
    let long = "\n".repeat(rules::MAX_LINES + 1);
    assert!(says("src/link/x.rs", &long).contains("lines"));
    assert!(says("src/link/x.rs", &"\n".repeat(rules::MAX_LINES)).is_empty());
    assert!(says("src/bootstrap/x.rs", &format!("// @generated\n{long}")).is_empty());
}
