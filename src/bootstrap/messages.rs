//! `Debug` texts of the messages that have an offer. They leave it out, as it may hold a token.

use super::generated::{GetRemoteAddressRequest, GetRemoteAddressResponse};
use std::fmt;

impl fmt::Debug for GetRemoteAddressRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GetRemoteAddressRequest { caller, generation, offer } = self;
        write!(f, "GetRemoteAddressRequest({caller:?}, generation {generation}, {} bytes)", offer.len())
    }
}

impl fmt::Debug for GetRemoteAddressResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GetRemoteAddressResponse({} bytes)", self.offer.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_message_has_no_byte_of_its_offer() {
        let offer = vec![222, 173];
        let request = GetRemoteAddressRequest { caller: None, generation: 7, offer: offer.clone() };
        assert_eq!(format!("{request:?}"), "GetRemoteAddressRequest(None, generation 7, 2 bytes)");
        let response = GetRemoteAddressResponse { offer };
        assert_eq!(format!("{response:?}"), "GetRemoteAddressResponse(2 bytes)");
    }
}
