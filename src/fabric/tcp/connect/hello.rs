//! The first bytes of a connection, in each direction.

use super::address::{TcpByteReader, Token, VERSION};

const MAGIC: [u8; 8] = *b"twtcphlo";
/// Bytes of a hello.
pub(in crate::fabric::tcp) const BYTES: usize = 8 + 2 + 1 + 1 + 4 + 16;

/// Who says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fabric::tcp) enum Speaker {
    Initiator = 1,
    Acceptor = 2,
}

/// A hello: the token of the endpoint that it is for, which proves who says it.
#[derive(Clone, Copy, Debug)]
pub(in crate::fabric::tcp) struct Hello {
    pub speaker: Speaker,
    /// Number of the connection among those of the link: 0 for the main one.
    pub stream: u8,
    /// How often the link's connections have been made before, failed attempts included. The
    /// acceptor says it to ask for new connections: the number of those that broke.
    pub number: u32,
    pub token: Token,
}

impl Hello {
    pub(in crate::fabric::tcp) fn to_bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.speaker as u8;
        bytes[11] = self.stream;
        bytes[12..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..].copy_from_slice(&self.token.0);
        bytes
    }

    /// Decodes a hello. `None` for anything else.
    pub(in crate::fabric::tcp) fn from_bytes(bytes: &[u8; BYTES]) -> Option<Self> {
        let mut reader = TcpByteReader(bytes);
        if reader.take::<8>()? != MAGIC || u16::from_le_bytes(reader.take()?) != VERSION {
            return None;
        }
        let [speaker, stream] = reader.take()?;
        let speaker = match speaker {
            1 => Speaker::Initiator,
            2 => Speaker::Acceptor,
            _ => return None,
        };
        let number = u32::from_le_bytes(reader.take()?);
        Some(Hello { speaker, stream, number, token: Token(reader.take()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_comes_back_and_another_version_or_speaker_is_none() {
        for speaker in [Speaker::Initiator, Speaker::Acceptor] {
            let hello = Hello { speaker, stream: 9, number: 0x0403_0201, token: Token([5; 16]) };
            let bytes = hello.to_bytes();
            let back = Hello::from_bytes(&bytes).expect("a hello");
            assert!(back.speaker == speaker && back.stream == 9 && back.token.is(&hello.token));
            assert_eq!(back.number, hello.number);
            for at in 0..11 {
                let mut wrong = bytes;
                wrong[at] ^= 0x40;
                assert!(Hello::from_bytes(&wrong).is_none(), "byte {at}");
            }
        }
    }
}
