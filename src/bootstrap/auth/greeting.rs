//! The first bytes of a connection: the greeting of the side that listens, and the opening of the
//! side that calls. Their lengths are bounded, and a stranger learns only the mode from them.

use super::AuthMode;
use crate::wire::TaskId;

/// Opens every greeting. The last byte is the version of the frames and of the proofs.
const MAGIC: [u8; 8] = *b"tw-boot\x02";

/// Bytes of a number that is drawn for one connection.
pub(super) const NONCE: usize = 16;
/// Bytes of the authentication code of an opening.
pub(super) const MAC: usize = 32;

/// What the side that listens says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) mode: AuthMode,
    pub(super) verdict: Verdict,
    /// The caller sends it back, so that bytes which were sent before the check have no effect.
    pub(super) nonce: [u8; NONCE],
}

/// Whether a caller may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum Verdict {
    Welcome,
    /// The caller runs as another user.
    OtherUser,
    /// The caller is on another host.
    OtherHost,
    /// The caller has not proven its name.
    Unproven,
}

impl Verdict {
    const ALL: [Verdict; 4] = [Verdict::Welcome, Verdict::OtherUser, Verdict::OtherHost, Verdict::Unproven];

    pub(super) fn to_byte(self) -> u8 {
        Self::ALL.iter().position(|verdict| *verdict == self).unwrap_or(Self::ALL.len()) as u8
    }

    /// An unknown byte is a refusal.
    pub(super) fn from_byte(byte: u8) -> Self {
        Self::ALL.get(usize::from(byte)).copied().unwrap_or(Verdict::Unproven)
    }
}

impl Greeting {
    pub(super) const LEN: usize = MAGIC.len() + 2 + NONCE;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let (magic, rest) = bytes.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        let (codes, nonce) = rest.split_at_mut(2);
        codes.copy_from_slice(&[self.mode.to_byte(), self.verdict.to_byte()]);
        nonce.copy_from_slice(&self.nonce);
        bytes
    }

    /// `None` for bytes that are no greeting of this version.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let ([mode, verdict], nonce) = rest.split_first_chunk::<2>()?;
        Some(Greeting {
            mode: AuthMode::from_byte(*mode)?,
            verdict: Verdict::from_byte(*verdict),
            nonce: nonce.try_into().ok()?,
        })
    }
}

/// What the side that calls says first. Nothing in it is believed before it is proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Opening {
    pub(super) nonce: [u8; NONCE],
    /// With [`AuthMode::Secret`] an authentication code under the secret. Other modes send zeros,
    /// and read none of it.
    pub(super) mac: [u8; MAC],
    /// The member that calls.
    pub(super) from: TaskId,
}

/// Bytes before the name of the job.
const FIXED: usize = NONCE + MAC + 4;

impl Opening {
    /// Bytes of the longest opening, without its length.
    pub(super) const MAX: usize = FIXED + crate::wire::MAX_JOB;

    /// The frame, which begins with the length of the rest in one byte.
    pub(super) fn encode(&self) -> Vec<u8> {
        let job = self.from.job().as_bytes();
        let len = (FIXED + job.len()) as u8; // MAX is below 256
        [&[len][..], &self.nonce, &self.mac, &self.from.task().to_be_bytes(), job].concat()
    }

    /// Reads what follows the length.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (nonce, rest) = bytes.split_first_chunk::<NONCE>()?;
        let (mac, rest) = rest.split_first_chunk::<MAC>()?;
        let (task, job) = rest.split_first_chunk::<4>()?;
        let job = std::str::from_utf8(job).ok()?;
        let from = TaskId::new(job, u32::from_be_bytes(*task)).ok()?;
        Some(Opening { nonce: *nonce, mac: *mac, from })
    }
}

const _: () = assert!(Opening::MAX < 256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        for verdict in Verdict::ALL {
            let greeting = Greeting { mode: AuthMode::Secret, verdict, nonce: [7; NONCE] };
            assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
        }
        for job in ["w", &"j".repeat(crate::wire::MAX_JOB)] {
            let from = TaskId::new(job, u32::MAX).unwrap();
            let opening = Opening { nonce: [9; NONCE], mac: [5; MAC], from };
            let frame = opening.encode();
            assert_eq!(usize::from(frame[0]), frame.len() - 1);
            assert_eq!(Opening::decode(&frame[1..]), Some(opening));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let greeting = Greeting { mode: AuthMode::Uid, verdict: Verdict::Welcome, nonce: [0; NONCE] };
        let good = greeting.encode();
        for place in 0..MAGIC.len() + 1 {
            let mut bad = good;
            bad[place] ^= 0x40;
            assert_eq!(Greeting::decode(&bad), None, "byte {place}");
        }
        let mut unknown = good;
        unknown[MAGIC.len() + 1] = 200;
        assert_eq!(Greeting::decode(&unknown).unwrap().verdict, Verdict::Unproven);
        let from = TaskId::new("worker", 1).unwrap();
        let opening = Opening { nonce: [0; NONCE], mac: [0; MAC], from }.encode();
        assert_eq!(Opening::decode(&opening[1..FIXED + 1]), None, "no job");
        assert_eq!(Opening::decode(&opening[1..10]), None, "cut");
        let odd = [&opening[1..], b"\xff\n"].concat();
        assert_eq!(Opening::decode(&odd), None, "no name");
    }
}
