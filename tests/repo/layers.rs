//! The rules that hold the source tree together, checked on the source text itself.
//!
//! Each room under `src/` may know only some of the others (see [`layers`]); only a few may hold `unsafe`
//! code; below `node` nobody asks the system for the time; files stay small. The compiler checks none of
//! this, so this test does. Comments, strings and doc links don't count: only code makes an edge.

mod lexer;
mod locks;
mod rules;

use rules::{ROOMS, check_file};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Every `.rs` file under `dir`, as paths relative to the crate's root.
fn sources(root: &Path, dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(root.join(dir)).expect("the source tree can be read") {
        let entry = entry.expect("the source tree can be read");
        let path = dir.join(entry.file_name());
        if entry.file_type().expect("the source tree can be read").is_dir() {
            sources(root, &path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn tree() -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    sources(root(), Path::new("src"), &mut paths);
    sources(root(), Path::new("cli/src"), &mut paths);
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(root().join(&path)).expect("sources are UTF-8");
            (path, text)
        })
        .collect()
}

#[test]
fn every_source_file_keeps_the_rules_of_its_room() {
    let files = tree();
    assert!(files.len() > 10, "only {} files found under src: the walk is broken", files.len());
    let tests: BTreeSet<PathBuf> =
        files.iter().flat_map(|(path, text)| rules::test_files_named_in(path, text)).collect();
    let is_test = |path: &Path| tests.iter().any(|t| path == t || path.starts_with(t.with_extension("")));
    let broken: Vec<String> = files
        .iter()
        .flat_map(|(path, text)| {
            let mut broken = check_file(path, text, is_test(path));
            broken.extend(locks::check(path, text, is_test(path)));
            broken
        })
        .collect();
    assert!(broken.is_empty(), "{} rules broken:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn every_folder_under_src_is_a_room_with_a_place_in_the_layers() {
    for entry in std::fs::read_dir(root().join("src")).expect("src can be read") {
        let entry = entry.expect("src can be read");
        let name = entry.file_name().into_string().expect("names are UTF-8");
        let room = name.trim_end_matches(".rs");
        if name == "lib.rs" {
            continue;
        }
        assert!(ROOMS.iter().any(|r| r.name == room), "src/{name} has no place in the table of layers");
    }
}

#[test]
fn the_table_of_layers_has_no_cycle_and_names_only_rooms() {
    // Rooms are listed from the bottom up, so each may name only rooms above its own line.
    for (i, room) in ROOMS.iter().enumerate() {
        for known in room.knows {
            let at =
                ROOMS.iter().position(|r| r.name == *known).unwrap_or_else(|| panic!("{known} is no room"));
            assert!(at < i, "{} knows {known}, which is not below it", room.name);
        }
    }
}

/// What the rules say of a file with this path and text.
fn says(path: &str, text: &str) -> String {
    check_file(Path::new(path), text, false).join("\n")
}

#[test]
fn an_upward_edge_is_found_however_it_is_written() {
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
        "use crate::{self as face, wire};",
        "use crate as face;",
        "use crate::*;",
        "use crate::Node;",
        "macro_rules! m { () => { $crate::node::Node } }",
    ] {
        let said = says("src/link/mod.rs", &format!("//! Room.\n{text}"));
        assert!(said.contains("link may not know"), "{text} passed: {said:?}");
    }
    let said = says("src/link/slot.rs", "use super::super::node::Node;");
    assert!(said.contains("src/link/slot.rs:1: link may not know node"), "{said:?}");
}

#[test]
fn a_downward_edge_and_a_room_s_own_names_pass() {
    for text in [
        "use crate::wire::Grant;",
        "use crate::{memory::{Pool, Tensor}, wire::Grant, link::Slot};",
        "use super::slot::Slot;",
        "// use crate::node::Node;\n/* crate::node /* crate::config */ */ /// [`crate::node::Node`]",
        "const S: &str = \"crate::node\"; const R: &str = r#\"use \"crate::node\"#; const B: &[u8] = b\"crate::node\";",
        "fn f<'a>(x: &'a u8) -> char { '\"' } // crate::node",
        "pub(crate) fn f() {} pub(in crate::link) fn g() {}",
        "mod tests { use super::*; use super::slot::Slot; }",
    ] {
        let said = says("src/link/ring.rs", text);
        assert!(said.is_empty(), "{text}: {said}");
    }
}

#[test]
fn rooms_side_by_side_do_not_know_each_other() {
    assert!(says("src/protocol/x.rs", "use crate::fabric::Port;").contains("protocol may not know fabric"));
    assert!(says("src/fabric/x.rs", "use crate::protocol::Event;").contains("fabric may not know protocol"));
    assert!(
        says("src/bootstrap/x.rs", "use crate::config::Config;").contains("bootstrap may not know config")
    );
    assert!(
        says("src/memory/x.rs", "use crate::telemetry::Counter;").contains("memory may not know telemetry")
    );
    assert!(says("src/node/x.rs", "use crate::{bootstrap::B, config::C, telemetry::T};").is_empty());
}

#[test]
fn unsafe_code_outside_its_rooms_is_found() {
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
fn a_lock_on_the_data_path_is_found_and_so_is_leave_to_have_one() {
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
            "src/rendezvous/remote/mod.rs",
            "src/memory/pool/magazine.rs",
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
    let face = std::fs::read_to_string(root().join("src/lib.rs")).expect("the crate's face");
    assert!(
        face.contains("#![cfg_attr(not(test), deny(clippy::disallowed_types, clippy::disallowed_methods))]")
    );
    let lints = std::fs::read_to_string(root().join("clippy.toml")).expect("clippy's settings");
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
fn a_file_is_a_test_file_when_its_parent_says_so() {
    let named = |path, text| rules::test_files_named_in(Path::new(path), text);
    assert_eq!(named("src/link/mod.rs", "#[cfg(test)] mod tests;"), [Path::new("src/link/tests.rs")]);
    assert_eq!(
        named("src/wire/key.rs", "#[cfg(test)]\n#[path = \"key_tests.rs\"]\nmod tests;"),
        [Path::new("src/wire/key_tests.rs")]
    );
    assert_eq!(named("src/wire/key.rs", "#[cfg(test)] mod tests;"), [Path::new("src/wire/key/tests.rs")]);
    assert!(named("src/wire/mod.rs", "mod key; #[cfg(test)] mod tests {} mod other;").is_empty());
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
fn a_room_without_a_word_on_what_it_is_for_and_a_file_too_long_to_read_are_found() {
    assert!(says("src/link/mod.rs", "mod slot;").contains("//!"));
    let long = "\n".repeat(rules::MAX_LINES + 1);
    assert!(says("src/link/x.rs", &long).contains("lines"));
    assert!(says("src/link/x.rs", &"\n".repeat(rules::MAX_LINES)).is_empty());
    assert!(says("src/bootstrap/x.rs", &format!("// @generated\n{long}")).is_empty());
}
