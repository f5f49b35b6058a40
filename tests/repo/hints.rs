//! What the compiler says of code that uses the library wrongly.

use crate::packaging::rustc;
use std::path::{Path, PathBuf};
use std::process::Command;

const SENDS_WHAT_CAN_BE_WRITTEN: &str = "
    pub fn f(step: &tensorwire::Step, edge: &tensorwire::Edge, tensor: tensorwire::TensorMut) {
        let _ = step.send(edge, tensor);
    }";

/// The library that was built last, which is the one of this test.
fn library(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder).expect("the folder of this program").flatten();
    let built = files.filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with("libtensorwire-") && name.ends_with(".rlib")
    });
    let age = |file: &std::fs::DirEntry| file.metadata().and_then(|data| data.modified()).expect("a time");
    built.max_by_key(age).expect("the library was built").path()
}

#[test]
fn a_tensor_that_can_be_written_is_not_sent_and_the_error_says_to_freeze_it() {
    let program = std::env::current_exe().expect("this program");
    let folder = program.parent().expect("its folder");
    let work = tempfile::tempdir().expect("a folder");
    let source = work.path().join("lib.rs");
    std::fs::write(&source, SENDS_WHAT_CAN_BE_WRITTEN).expect("written");
    let output = Command::new(rustc())
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--out-dir"])
        .arg(work.path())
        .arg(format!("-Ldependency={}", folder.display()))
        .arg(format!("--extern=tensorwire={}", library(folder).display()))
        .arg(&source)
        .output()
        .expect("rustc can be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it compiles");
    for part in
        ["`TensorMut` can't be sent", "expected a `Tensor`", "freeze it first, with `.freeze()`", "E0277"]
    {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}
