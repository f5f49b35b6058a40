//! The checked-in gRPC code is what `proto/` says.
//!
//! After a change of the .proto, `TENSORWIRE_TEST_BLESS=1 cargo test --test codegen` writes the code anew. Nothing
//! here needs protoc, and building the crate needs no code generation.

use std::path::Path;

const GENERATED: &str = "src/bootstrap/generated.rs";

#[test]
fn the_checked_in_grpc_code_is_what_the_proto_file_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let descriptors = protox::compile(["tensorwire/v1/bootstrap.proto"], [root.join("proto")])
        .expect("proto/tensorwire/v1/bootstrap.proto compiles");
    let out = tempfile::tempdir().expect("a temporary folder");
    tonic_prost_build::configure()
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)
        .expect("code is generated");
    let fresh = std::fs::read_to_string(out.path().join("tensorwire.v1.rs")).expect("the generated file");

    let target = root.join(GENERATED);
    if std::env::var_os("TENSORWIRE_TEST_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&target, &fresh).expect("the checked-in file can be written");
    }
    let kept = std::fs::read_to_string(&target).unwrap_or_default();
    if let Some(line) = first_difference(&kept, &fresh) {
        panic!(
            "{GENERATED} differs from what proto/ generates, first in line {line}; \
             run `TENSORWIRE_TEST_BLESS=1 cargo test --test codegen` and commit the result"
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
