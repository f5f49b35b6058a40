//! The promises of `Cargo.toml` and the top level of the project. A toolchain and a C linker are
//! enough, and the minimum Rust version is true. The licence texts are there, and no folder is
//! empty.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Build-time helpers that need more than a Rust toolchain: protoc, clang, cmake, a C compiler, C
/// headers.
const NEED_MORE_THAN_RUST: &[&str] = &[
    "prost-build",
    "protobuf-src",
    "protoc-bin-vendored",
    "bindgen",
    "clang-sys",
    "cmake",
    "cc",
    "pkg-config",
    "vcpkg",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(root()).output();
    let output = output.unwrap_or_else(|e| panic!("{program} can't be started: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?} failed: {errors}");
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

pub fn rustc() -> String {
    std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned())
}

/// `cargo metadata` for this platform and the default features, as the lock file has it.
fn metadata() -> Value {
    let verbose = output_of(&rustc(), &["-vV"]);
    let host = verbose.lines().find_map(|l| l.strip_prefix("host: ")).expect("rustc names its host");
    let arguments = ["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", host];
    serde_json::from_str(&output_of(env!("CARGO"), &arguments)).expect("cargo metadata prints JSON")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("cargo metadata has no text under {key}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("cargo metadata has no list under {key}"))
}

fn package<'a>(metadata: &'a Value, id: &str) -> &'a Value {
    list(metadata, "packages").iter().find(|p| text(p, "id") == id).expect("each node is a package")
}

fn ours(metadata: &Value) -> &Value {
    package(metadata, text(&metadata["resolve"], "root"))
}

/// The packages that a plain `cargo build` compiles: the library's and the program's.
fn built(metadata: &Value) -> Vec<&Value> {
    let members = list(metadata, "workspace_members").iter();
    built_for(metadata, members.map(|id| id.as_str().expect("an id is text")).collect())
}

/// The packages that a library user compiles.
fn built_for_library(metadata: &Value) -> Vec<&Value> {
    built_for(metadata, vec![text(&metadata["resolve"], "root")])
}

/// These packages, and what they depend on but for development dependencies.
fn built_for<'a>(metadata: &'a Value, mut waiting: Vec<&'a str>) -> Vec<&'a Value> {
    let resolve = &metadata["resolve"];
    let nodes: BTreeMap<&str, &Value> = list(resolve, "nodes").iter().map(|n| (text(n, "id"), n)).collect();
    let mut reached = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !reached.insert(id) {
            continue;
        }
        // Cargo lists dependencies of `cfg(tensorwire_loom)` for every platform; only the loom
        // tests set that.
        let counts = |k: &Value| k["kind"] != "dev" && k["target"] != "cfg(tensorwire_loom)";
        let is_built = |d: &&Value| {
            list(d, "dep_kinds").iter().any(counts) && is_enabled(metadata, nodes[id], text(d, "pkg"))
        };
        waiting.extend(list(nodes[id], "deps").iter().filter(is_built).map(|d| text(d, "pkg")));
    }
    reached.into_iter().map(|id| package(metadata, id)).collect()
}

/// Whether a dependency that cargo lists is more than a weak one (`ring?/std`). Cargo lists these
/// also if no feature turns the package on, and does not build them then.
fn is_enabled(metadata: &Value, node: &Value, dependency: &str) -> bool {
    let (own, name) = (package(metadata, text(node, "id")), text(package(metadata, dependency), "name"));
    let declared: Vec<&Value> =
        list(own, "dependencies").iter().filter(|d| d["name"] == name && d["kind"] != "dev").collect();
    if declared.is_empty() || declared.iter().any(|d| d["optional"] == false) {
        return true;
    }
    let called: Vec<&str> = declared.iter().map(|d| d["rename"].as_str().unwrap_or(name)).collect();
    let enabled = list(node, "features").iter().filter_map(Value::as_str);
    let mut parts = enabled.flat_map(|feature| list(&own["features"], feature)).filter_map(Value::as_str);
    let turns_on = |part: &str| {
        let part = part.strip_prefix("dep:").unwrap_or(part);
        called
            .iter()
            .any(|name| part == *name || part.strip_prefix(name).is_some_and(|rest| rest.starts_with('/')))
    };
    parts.any(turns_on)
}

#[test]
fn a_weak_dependency_counts_only_if_a_feature_turns_it_on() {
    let metadata = metadata();
    let nodes = list(&metadata["resolve"], "nodes");
    let listed = |name: &str, dependency: &str| {
        let node =
            nodes.iter().find(|n| text(package(&metadata, text(n, "id")), "name") == name).expect(name);
        let deps = list(node, "deps").iter().map(|d| text(d, "pkg"));
        let found: Vec<&str> = deps.filter(|id| text(package(&metadata, id), "name") == dependency).collect();
        found.first().map(|id| is_enabled(&metadata, node, id))
    };
    assert_ne!(listed("rustls-webpki", "ring"), Some(true), "it would be built");
    assert_eq!(listed("tonic", "hyper"), Some(true), "an optional one that a feature turns on");
    assert_eq!(listed("tensorwire", "tonic"), Some(true));
}

/// `1.95`, `1.95.0` and `1.95.0-nightly` as numbers that compare.
fn version(text: &str) -> (u32, u32, u32) {
    let numbers = text.split(['-', '+', ' ']).next().unwrap_or_default();
    let mut parts = numbers.split('.').map(|p| p.parse().unwrap_or_else(|_| panic!("{text} is no version")));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

#[test]
fn a_build_needs_no_protoc_no_clang_no_cmake_and_no_c_compiler() {
    let metadata = metadata();
    let built = built(&metadata);
    let names: Vec<&str> = built.iter().map(|p| text(p, "name")).collect();
    for expected in ["tensorwire", "tonic", "serde_derive", "clap"] {
        assert!(names.contains(&expected), "{expected} is not in the tree: the walk is broken ({names:?})");
    }
    let guilty: Vec<&&str> = names.iter().filter(|n| NEED_MORE_THAN_RUST.contains(n)).collect();
    assert!(guilty.is_empty(), "the build would need more than Rust and a C linker: {guilty:?}");
    let linking: Vec<&str> =
        built.iter().filter(|p| !p["links"].is_null()).map(|p| text(p, "name")).collect();
    assert!(linking.is_empty(), "packages that link a C library: {linking:?}");
}

#[test]
fn a_library_user_builds_nothing_that_only_the_program_needs() {
    let metadata = metadata();
    let names: Vec<&str> = built_for_library(&metadata).into_iter().map(|p| text(p, "name")).collect();
    assert!(names.contains(&"tensorwire") && names.contains(&"tonic"), "the walk is broken: {names:?}");
    for foreign in ["tensorwire-cli", "clap", "hdrhistogram", "serde_json", "indicatif"] {
        assert!(!names.contains(&foreign), "{foreign} comes with the library");
    }
    let features = &ours(&metadata)["features"];
    assert_eq!(features["default"], Value::from(Vec::<Value>::new()), "a user asked for none of these");
}

#[test]
fn the_walk_over_the_dependency_tree_tells_a_development_dependency_from_a_normal_one() {
    let metadata = metadata();
    let everything: Vec<&str> = list(&metadata, "packages").iter().map(|p| text(p, "name")).collect();
    let built: Vec<&str> = built(&metadata).into_iter().map(|p| text(p, "name")).collect();
    assert!(everything.contains(&"proptest") && !built.contains(&"proptest"));
    assert!(everything.contains(&"prost-build") && !built.contains(&"prost-build"));
}

#[test]
fn this_crate_has_no_build_script() {
    let metadata = metadata();
    let targets = list(ours(&metadata), "targets");
    assert!(!targets.iter().any(|t| list(t, "kind").contains(&Value::from("custom-build"))));
}

#[test]
fn the_minimum_rust_version_is_no_lower_than_what_any_dependency_states() {
    let metadata = metadata();
    let minimum = version(text(ours(&metadata), "rust_version"));
    for package in list(&metadata, "packages") {
        let Some(stated) = package["rust_version"].as_str() else { continue };
        assert!(version(stated) <= minimum, "{} needs Rust {stated}", text(package, "name"));
    }
}

#[test]
fn the_compiler_in_use_is_at_least_the_minimum_rust_version() {
    let metadata = metadata();
    let minimum = text(ours(&metadata), "rust_version");
    let line = output_of(&rustc(), &["--version"]);
    let used = line.split_whitespace().nth(1).expect("`rustc --version` prints `rustc VERSION ...`");
    assert!(version(used) >= version(minimum), "rustc is {used}, rust-version in Cargo.toml is {minimum}");
    let exactly = version(used).0 == version(minimum).0 && version(used).1 == version(minimum).1;
    if !exactly {
        println!("skipped: only Rust {minimum} itself proves that it is enough; this is {used}");
    }
}

#[test]
fn the_minimum_rust_version_is_high_enough_for_the_edition() {
    let metadata = metadata();
    assert_eq!(text(ours(&metadata), "edition"), "2024");
    assert!(version(text(ours(&metadata), "rust_version")) >= (1, 85, 0), "edition 2024 came with Rust 1.85");
}

#[test]
fn the_licence_texts_are_there_and_are_what_the_manifest_names() {
    let metadata = metadata();
    assert_eq!(text(ours(&metadata), "license"), "MIT OR Apache-2.0");
    for (file, opening) in [("LICENSE-MIT", "MIT License"), ("LICENSE-APACHE", "Apache License")] {
        let text = std::fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(text.trim_start().starts_with(opening), "{file} is not the {opening}");
    }
}

#[test]
fn every_dependency_of_a_build_may_be_used_under_a_permissive_licence() {
    const PERMISSIVE: &[&str] = &[
        "MIT",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "Zlib",
        "Unlicense",
        "Unicode-3.0",
        "0BSD",
    ];
    let metadata = metadata();
    for package in built(&metadata) {
        let licence = text(package, "license");
        // A choice needs one permissive part, a conjunction (`AND`) has to be permissive in every
        // part.
        let all = |choice: &str| {
            choice.split(" AND ").all(|one| PERMISSIVE.contains(&one.trim_matches(['(', ')', ' '])))
        };
        let plain = licence.split(" AND ").all(|part| part.replace('/', " OR ").split(" OR ").any(all));
        assert!(plain, "{} is under {licence}", text(package, "name"));
    }
}

#[test]
fn the_manifest_says_what_the_crate_is_to_someone_who_finds_it() {
    let metadata = metadata();
    let package = ours(&metadata);
    assert!(!text(package, "description").is_empty());
    let readme = text(package, "readme");
    assert!(root().join(readme).is_file(), "Cargo.toml names {readme}, which is not there");
}

/// Bytes of all files under `folder`.
fn bytes_under(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries
        .map(|entry| entry.expect("the folder can be read"))
        .map(|entry| match entry.metadata().expect("the file can be read") {
            about if about.is_dir() => bytes_under(&entry.path()),
            about => about.len(),
        })
        .sum()
}

#[test]
fn every_folder_of_the_top_level_has_content() {
    for folder in ["src", "cli", "proto", "tuning", "benches", "tests", "examples"] {
        let bytes = bytes_under(&root().join(folder));
        assert!(bytes > 500, "{folder}/ holds {bytes} bytes: that is no content");
    }
    assert!(root().join("Cargo.lock").is_file(), "Cargo.lock belongs to the project");
}

/// The packages of a lock file.
fn locked(file: &str) -> Vec<toml::Value> {
    let lock = std::fs::read_to_string(root().join(file)).expect("the lock file is text");
    let lock: toml::Table = lock.parse().expect("the lock file is TOML");
    lock["package"].as_array().expect("packages are an array of tables").clone()
}

#[test]
fn the_lock_file_of_the_fuzz_targets_goes_with_that_of_the_library() {
    let (ours_locked, fuzz_locked) = (locked("Cargo.lock"), locked("fuzz/Cargo.lock"));
    let versions = |package: &toml::Value| (package["name"].clone(), package["version"].clone());
    for package in &fuzz_locked {
        let (name, version) = versions(package);
        let is_shared = ours_locked.iter().any(|other| other["name"] == name);
        let is_same = ours_locked.iter().any(|other| versions(other) == (name.clone(), version.clone()));
        assert!(
            is_same || !is_shared,
            "fuzz/Cargo.lock has {name:?} {version:?}, and Cargo.lock another version"
        );
    }
    let metadata = metadata();
    let needed = list(ours(&metadata), "dependencies").iter();
    let needed = needed.filter(|it| it["kind"] != "dev" && it["optional"] == false);
    let needed: BTreeSet<&str> = needed.map(|it| text(it, "name")).collect();
    let library = fuzz_locked.iter().find(|package| package["name"].as_str() == Some("tensorwire"));
    let named = library.and_then(|it| it["dependencies"].as_array()).expect("the library is locked");
    // A version follows the name if there are several.
    let named = named.iter().filter_map(|it| it.as_str()?.split(' ').next());
    assert_eq!(needed, named.collect(), "dependencies in Cargo.toml (left) and in fuzz/Cargo.lock (right)");
}

#[test]
fn every_fuzz_target_has_a_corpus_and_every_corpus_a_target() {
    let manifest = std::fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("the manifest is text");
    let manifest: toml::Table = manifest.parse().expect("the manifest is TOML");
    let bins = manifest["bin"].as_array().expect("the targets are an array of tables");
    let targets: BTreeSet<String> =
        bins.iter().map(|bin| bin["name"].as_str().expect("a target has a name").to_owned()).collect();
    let corpus = root().join("fuzz/corpus");
    let folders = std::fs::read_dir(&corpus).expect("fuzz/corpus can be read");
    let folders: BTreeSet<String> = folders
        .map(|folder| folder.expect("fuzz/corpus can be read").file_name())
        .map(|name| name.into_string().expect("names are UTF-8"))
        .collect();
    assert_eq!(targets, folders, "targets of fuzz/Cargo.toml (left) and folders of fuzz/corpus (right)");
    for target in &targets {
        assert!(bytes_under(&corpus.join(target)) > 0, "fuzz/corpus/{target} has no seeds");
    }
}
