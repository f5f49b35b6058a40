//! Generated files are up to date: code from `proto/`, reference pages from the tables in the code.
//!
//! After a change, `TENSORWIRE_TEST_BLESS=1 cargo test --test repo codegen` writes the files anew.
//! Nothing here needs protoc, and building the crate needs no code generation.

use std::path::Path;
use tonic_prost_build::{Builder, configure};

#[test]
fn the_checked_in_grpc_code_is_what_the_proto_file_says() {
    // The bytes of a tensor are references, too.
    let builder = configure().bytes(".tensorwire.v1.RecvTensorPart.data");
    // Their offers hold tokens: src/bootstrap/messages.rs has their texts.
    let builder = builder.skip_debug(["GetRemoteAddressRequest", "GetRemoteAddressResponse"]);
    check(&["bootstrap", "recv_tensor"], "src/bootstrap/generated.rs", builder);
}

#[test]
fn the_checked_in_grpc_code_of_the_store_is_what_the_proto_file_says() {
    // The values are the program's, and have no text.
    let hidden = ["SetRequest", "GetResponse", "CompareAndSetRequest", "CompareAndSetResponse"];
    check(&["store"], "src/bootstrap/store/generated.rs", configure().skip_debug(hidden));
}

#[test]
fn the_checked_in_messages_of_serialised_tensors_are_what_the_proto_file_says() {
    // Strings are references to the tensor that they came in.
    check(&["tensor"], "src/memory/serialized/generated.rs", configure().bytes("."));
}

#[test]
fn the_checked_in_reference_is_what_the_program_says() {
    compare("docs/reference/settings.md", &tensorwire::internals::config::reference());
    compare("docs/reference/counters.md", &tensorwire::internals::telemetry::reference());
}

fn check(protos: &[&str], generated: &str, builder: Builder) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let protos: Vec<_> = protos.iter().map(|proto| format!("tensorwire/v1/{proto}.proto")).collect();
    let descriptors =
        protox::compile(&protos, [root.join("proto")]).unwrap_or_else(|error| panic!("{protos:?}: {error}"));
    let out = tempfile::tempdir().expect("a temporary folder");
    builder
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)
        .expect("code is generated");
    let fresh = std::fs::read_to_string(out.path().join("tensorwire.v1.rs")).expect("the generated file");

    compare(generated, &fresh);
}

/// Compares a checked-in file with what it must be, or writes it.
fn compare(path: &str, fresh: &str) {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("TENSORWIRE_TEST_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&target, fresh).expect("the checked-in file can be written");
    }
    let kept = std::fs::read_to_string(&target).unwrap_or_default();
    if let Some(line) = first_difference(&kept, fresh) {
        panic!(
            "{path} differs from what is generated, first in line {line}; run \
             `TENSORWIRE_TEST_BLESS=1 cargo test --test repo codegen` and commit the result"
        );
    }
}

/// The number of the first line in which the two differ.
fn first_difference(kept: &str, fresh: &str) -> Option<usize> {
    if kept == fresh {
        return None;
    }
    let same = kept.lines().zip(fresh.lines()).take_while(|(a, b)| a == b).count();
    Some(same + 1)
}
