//! The messages of the handshake, and the files that go with them.

use super::address::{ByteReader, EndpointToken, VERSION};
use crate::fabric::LinkOptions;
use crate::fabric::shm::memory::layout::SegmentLayout;
use crate::wire::shorten;

const MAGIC: [u8; 8] = *b"twshmhlo";
const HELLO: u8 = 1;
const REFUSED: u8 = 2;
const READY: u8 = 3;

/// Pool regions that a process may share.
pub(crate) const MAX_REGIONS: usize = 32;
/// Bytes of the longest message.
pub(crate) const MAX_BYTES: usize = 1024;
/// Bytes of the longest reason.
const MAX_REASON: usize = 512;

/// An endpoint's description of itself. The files of its segment, its doorbells and its regions go
/// with it, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShmHello {
    /// Token of the sender.
    pub from: EndpointToken,
    /// Token of the endpoint that the sender expects.
    pub to: EndpointToken,
    pub depth: u32,
    pub generation: u8,
    /// Whether the sender's process takes part in heavy barriers.
    pub has_barriers: bool,
    /// Bytes of the sender's segment.
    pub segment: u64,
    /// Number and bytes of each region of the sender's pool.
    pub regions: Vec<(u16, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeMessage {
    Hello(ShmHello),
    /// The other side refuses, with the reason.
    Refused(String),
    /// The other side has accepted the hello, and the link is up for it.
    Ready,
}

impl HandshakeMessage {
    /// Encodes the message.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAX_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        match self {
            HandshakeMessage::Hello(hello) => hello.append(&mut bytes),
            HandshakeMessage::Refused(why) => {
                bytes.push(REFUSED);
                let mut end = why.len().min(MAX_REASON);
                while !why.is_char_boundary(end) {
                    end -= 1;
                }
                bytes.extend(&why.as_bytes()[..end]);
            }
            HandshakeMessage::Ready => bytes.push(READY),
        }
        bytes
    }

    /// Decodes a message of a peer.
    ///
    /// # Errors
    /// The mistake, for the peer.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = ByteReader(bytes);
        if reader.take::<8>() != Some(MAGIC) {
            return Err(format!("{} bytes that are no message of the handshake", bytes.len()));
        }
        let version = reader.take().map(u16::from_le_bytes);
        if version != Some(VERSION) {
            let version = version.unwrap_or(0);
            return Err(format!("it speaks version {version}, this side {VERSION}: run the same release"));
        }
        match reader.take() {
            Some([HELLO]) => ShmHello::read(&mut reader)
                .map(HandshakeMessage::Hello)
                .ok_or_else(|| format!("its hello of {} bytes is cut short or too long", bytes.len())),
            Some([REFUSED]) => {
                let why = String::from_utf8_lossy(reader.0);
                Ok(HandshakeMessage::Refused(shorten(&why, MAX_REASON)))
            }
            Some([READY]) if reader.0.is_empty() => Ok(HandshakeMessage::Ready),
            kind => Err(format!("a message of {} bytes and the unknown kind {kind:?}", bytes.len())),
        }
    }
}

impl ShmHello {
    fn append(&self, bytes: &mut Vec<u8>) {
        bytes.extend([HELLO, self.generation, u8::from(self.has_barriers)]);
        bytes.extend(self.depth.to_le_bytes());
        bytes.extend(self.segment.to_le_bytes());
        bytes.extend(self.from);
        bytes.extend(self.to);
        bytes.extend((self.regions.len() as u16).to_le_bytes());
        for (id, len) in &self.regions {
            bytes.extend(id.to_le_bytes());
            bytes.extend(len.to_le_bytes());
        }
    }

    /// Decodes a hello, to the end of the bytes.
    fn read(reader: &mut ByteReader<'_>) -> Option<ShmHello> {
        let [generation, has_barriers] = reader.take()?;
        if has_barriers > 1 {
            return None;
        }
        let depth = u32::from_le_bytes(reader.take()?);
        let segment = u64::from_le_bytes(reader.take()?);
        let (from, to) = (reader.take()?, reader.take()?);
        let count = usize::from(u16::from_le_bytes(reader.take()?));
        if count > MAX_REGIONS {
            return None;
        }
        let mut regions = Vec::with_capacity(count);
        for _ in 0..count {
            let id = u16::from_le_bytes(reader.take()?);
            regions.push((id, u64::from_le_bytes(reader.take()?)));
        }
        let has_barriers = has_barriers == 1;
        let hello = ShmHello { from, to, depth, generation, has_barriers, segment, regions };
        reader.0.is_empty().then_some(hello)
    }

    /// Checks that a peer has the settings of this side.
    ///
    /// # Errors
    /// The first difference, with both values.
    pub(crate) fn check_settings(&self, options: &LinkOptions, layout: &SegmentLayout) -> Result<(), String> {
        agree("depth", self.depth.into(), options.depth.into())?;
        agree("segment bytes", self.segment, layout.bytes() as u64)
    }

    /// Checks the rest of a peer's hello.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check(&self, options: &LinkOptions) -> Result<(), String> {
        agree("generation", self.generation.into(), options.generation.into())?;
        for (k, (id, _)) in self.regions.iter().enumerate() {
            if self.regions[..k].iter().any(|(other, _)| other == id) {
                return Err(format!("it has two regions with the number {id}"));
            }
        }
        Ok(())
    }
}

fn agree(what: &str, theirs: u64, ours: u64) -> Result<(), String> {
    if theirs == ours {
        return Ok(());
    }
    Err(format!("it wants {what} {theirs}, this side {ours}: give both the same"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options() -> LinkOptions {
        LinkOptions { depth: 64, receives: 0, generation: 5 }
    }

    fn hello() -> ShmHello {
        let segment = SegmentLayout::new(&options()).expect("in range").bytes() as u64;
        let regions = vec![(0, 1 << 30), (7, 4096)];
        let (from, to) = ([1; 16], [2; 16]);
        ShmHello { from, to, depth: 64, generation: 5, has_barriers: true, segment, regions }
    }

    #[test]
    fn the_words_of_a_refusal_control_no_terminal() {
        let bytes = HandshakeMessage::Refused("\x1b[2J\nno".into()).to_bytes();
        let Ok(HandshakeMessage::Refused(why)) = HandshakeMessage::from_bytes(&bytes) else {
            panic!("refused")
        };
        assert_eq!(why, "\\u{1b}[2J\\nno");
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(
            kind in 0u8..5,
            tail in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut bytes = HandshakeMessage::Ready.to_bytes();
            bytes.pop();
            bytes.push(kind);
            bytes.extend(tail);
            match HandshakeMessage::from_bytes(&bytes) {
                Ok(HandshakeMessage::Refused(_)) | Err(_) => {}
                Ok(message) => prop_assert_eq!(message.to_bytes(), bytes),
            }
        }
    }

    #[test]
    fn every_message_comes_back_and_fits() {
        let regions = (0..MAX_REGIONS as u16).map(|id| (id, u64::MAX)).collect();
        let long = ShmHello { regions, ..hello() };
        for message in
            [HandshakeMessage::Hello(hello()), HandshakeMessage::Hello(long), HandshakeMessage::Ready]
        {
            let bytes = message.to_bytes();
            assert!(bytes.len() <= MAX_BYTES);
            assert_eq!(HandshakeMessage::from_bytes(&bytes), Ok(message));
        }
        let long = HandshakeMessage::Refused("ü".repeat(400)).to_bytes();
        assert!(long.len() <= MAX_BYTES);
        assert_eq!(HandshakeMessage::from_bytes(&long), Ok(HandshakeMessage::Refused("ü".repeat(256))));
    }

    #[test]
    fn a_hello_that_is_cut_anywhere_is_refused() {
        let bytes = HandshakeMessage::Hello(hello()).to_bytes();
        for end in 0..bytes.len() {
            assert!(HandshakeMessage::from_bytes(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let mut bytes = HandshakeMessage::Hello(hello()).to_bytes();
        bytes[8] = 77;
        assert!(HandshakeMessage::from_bytes(&bytes).expect_err("refused").contains("version 77"));
    }

    #[test]
    fn a_disagreement_is_refused_with_both_values() {
        let layout = SegmentLayout::new(&options()).expect("in range");
        let check = |hello: &ShmHello| hello.check_settings(&options(), &layout);
        assert_eq!((check(&hello()), hello().check(&options())), (Ok(()), Ok(())));
        let differs = |hello: ShmHello| {
            assert_eq!(hello.check(&options()), Ok(()), "nothing else is wrong");
            check(&hello).expect_err("it differs")
        };
        let refused = |hello: ShmHello| {
            assert_eq!(check(&hello), Ok(()), "no setting differs");
            hello.check(&options()).expect_err("refused")
        };
        let depth = differs(ShmHello { depth: 128, ..hello() });
        assert!(depth.contains("depth 128") && depth.contains("this side 64"), "{depth}");
        assert!(differs(ShmHello { segment: 4096, ..hello() }).contains("segment bytes 4096"));
        assert!(refused(ShmHello { generation: 6, ..hello() }).contains("generation 6"));
        assert!(refused(ShmHello { regions: vec![(4, 1), (4, 2)], ..hello() }).contains("number 4"));
    }
}
