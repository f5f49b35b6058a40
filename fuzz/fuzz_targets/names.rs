//! Names that a peer sends: devices, edges and rendezvous keys. Each has one spelling: a parsed
//! name prints as the same text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fmt::Display;
use tensorwire::EdgeNameError;
use tensorwire::internals::wire::{DeviceName, EdgeName, MAX_NAME, RendezvousKey};

/// Bytes of an error's text at most, however long the name is.
const MAX_ERROR: usize = 8 * 1024;

fuzz_target!(|bytes: &[u8]| {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).expect("valid up to there"),
    };
    device(text);
    key(text);
    let mut lines = text.splitn(3, '\n');
    if let (Some(source), Some(destination), Some(name)) = (lines.next(), lines.next(), lines.next()) {
        edge(source, destination, name);
    }
});

fn is_short(error: &dyn Display) {
    let length = error.to_string().len();
    assert!(length <= MAX_ERROR, "an error of {length} bytes");
}

fn device(text: &str) {
    match DeviceName::parse(text) {
        Ok(device) => {
            assert_eq!(device.to_string(), text);
            assert!(text.len() <= MAX_NAME);
            device.check().expect("what parses is well-formed");
        }
        Err(error) => is_short(&error),
    }
}

fn key(text: &str) {
    let key = match RendezvousKey::parse(text) {
        Ok(key) => key,
        Err(error) => return is_short(&error),
    };
    assert_eq!(key.to_string(), text);
    assert!((1..=MAX_NAME).contains(&key.edge.len()));
    key.check().expect("what parses is well-formed");
    let made = edge(&key.source.to_string(), &key.destination.to_string(), key.edge);
    assert_eq!(made, key.source.replica == 0 && key.destination.replica == 0);
}

/// Whether three names are an edge.
fn edge(source: &str, destination: &str, name: &str) -> bool {
    let edge = match EdgeName::new(source, destination, name) {
        Ok(edge) => edge,
        Err(error) => {
            is_short(&error);
            let well_formed = DeviceName::parse(source).is_ok() && DeviceName::parse(destination).is_ok();
            assert!(well_formed || matches!(error, EdgeNameError::Device(_)), "{error}");
            return false;
        }
    };
    assert_eq!((edge.source(), edge.destination(), edge.name()), (source, destination, name));
    // Equal edges have equal hashes: the comparison begins with them.
    assert_eq!(EdgeName::new(source, destination, name).expect("once more"), edge);
    let device = DeviceName::parse(source).expect("a part of an edge");
    assert_eq!((edge.source_task().job(), edge.source_task().task()), (device.job, device.task));
    true
}
