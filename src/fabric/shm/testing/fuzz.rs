//! Entry points for fuzz targets: the decoders of a peer's bytes. Each function checks properties
//! that hold for any input.

use super::hostile_peer::OPTIONS;
use crate::fabric::shm::connect::address::{HostId, ShmAddress};
use crate::fabric::shm::connect::hello::{HandshakeMessage, MAX_BYTES, MAX_REGIONS};
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::fabric::shm::memory::order::{ORDER_WORDS, Order};

pub use super::hostile_program::hostile_peer;

/// Bytes of the longest error: it may quote a peer, shortened.
const MAX_ERROR: usize = 1024;

fn is_short(why: &dyn std::fmt::Display) {
    assert!(why.to_string().len() <= MAX_ERROR, "{why}");
}

/// An address that is accepted encodes to the same bytes.
pub fn address(bytes: &[u8]) {
    match ShmAddress::from_bytes(bytes) {
        Ok(address) => {
            assert_eq!(address.to_bytes(), bytes);
            address.socket(address.host).expect("a token is a name");
            assert!(address.check_same_host(address.host, address.uid).is_ok());
            if let Err(why) = address.check_same_host(HostId::here().expect("/proc"), 0) {
                is_short(&why);
            }
        }
        Err(why) => is_short(&why),
    }
}

/// A message of the handshake that is accepted encodes to the same bytes. Reasons are shown only.
pub fn handshake(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let message = match HandshakeMessage::from_bytes(bytes) {
        Ok(message) => message,
        Err(why) => return is_short(&why),
    };
    let again = message.to_bytes();
    assert!(again.len() <= MAX_BYTES);
    match &message {
        HandshakeMessage::Refused(_) => {
            let shown = HandshakeMessage::from_bytes(&again).expect("what was written");
            assert_eq!(shown.to_bytes(), again);
            return;
        }
        HandshakeMessage::Hello(hello) => {
            assert!(hello.regions.len() <= MAX_REGIONS);
            let layout = SegmentLayout::new(&OPTIONS).expect("in range");
            match hello.check_settings(&OPTIONS, &layout).and_then(|()| hello.check(&OPTIONS)) {
                Ok(()) => assert_eq!(hello.segment, layout.bytes() as u64),
                Err(why) => is_short(&why),
            }
        }
        HandshakeMessage::Ready => {}
    }
    assert_eq!(again, bytes);
}

/// The words of an order that are accepted encode to an equal order.
pub fn order(words: [u64; ORDER_WORDS]) {
    match Order::from_words(|k| words[k]) {
        Ok(order) => {
            let again = order.to_words();
            assert_eq!(Order::from_words(|k| again[k]), Ok(order));
        }
        Err(why) => is_short(&why),
    }
}
