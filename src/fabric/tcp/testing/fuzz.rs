//! Entry points for fuzz targets: the decoders of a peer's bytes. Each function checks properties
//! that hold for any input.

use crate::fabric::tcp::connect::address::TcpAddress;
use crate::fabric::tcp::connect::hello::{BYTES, Hello};
use crate::fabric::tcp::frame::{DecodedFrame, Frame};

pub use super::hostile_program::hostile_peer;

/// Bytes of the longest error.
const MAX_ERROR: usize = 512;

/// An address that is accepted encodes to the same bytes.
pub fn address(bytes: &[u8]) {
    match TcpAddress::from_bytes(bytes) {
        Ok(address) => assert_eq!(address.to_bytes(), bytes),
        Err(why) => assert!(why.to_string().len() <= MAX_ERROR, "{why}"),
    }
}

/// A hello that is accepted encodes to the same bytes.
pub fn hello(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<BYTES>() else { return };
    if let Some(hello) = Hello::from_bytes(bytes) {
        assert_eq!(&hello.to_bytes(), bytes);
    }
}

/// The headers of a stream: each one that is accepted encodes to the same bytes.
pub fn frames(mut bytes: &[u8]) {
    loop {
        match Frame::decode(bytes) {
            Ok(Some(DecodedFrame { frame, header, acknowledged })) => {
                assert_eq!(&frame.header(acknowledged.unwrap_or(0))[..], &bytes[..header]);
                bytes = &bytes[header..];
            }
            Ok(None) => return assert!(bytes.len() < 32),
            Err(why) => return assert!(why.to_string().len() <= MAX_ERROR, "{why}"),
        }
    }
}
