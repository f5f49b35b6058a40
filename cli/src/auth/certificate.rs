//! What a certificate in PEM form says about its key and its end (RFC 5280, section 4.1).

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use std::path::Path;
use time::{Date, Month, OffsetDateTime, Time};

/// The DER of an Ed25519 key up to the key itself (RFC 8410).
const ED25519: [u8; 10] = [0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// Parts of a certificate.
pub struct CertificateFacts {
    /// In DER.
    subject: Vec<u8>,
    key: Vec<u8>,
    not_after: OffsetDateTime,
}

impl CertificateFacts {
    pub fn read(path: &Path) -> Result<Self, String> {
        let der = CertificateDer::from_pem_file(path).map_err(|error| error.to_string())?;
        parse(&der).ok_or_else(|| "it is no certificate".into())
    }

    /// Fails unless the certificate is for this Ed25519 key and this common name, and holds at
    /// `now`.
    pub fn check(&self, key: &[u8; 32], name: &str, now: OffsetDateTime) -> Result<(), String> {
        if self.key != [&ED25519[..], key].concat() {
            return Err("it is for another key than that of ca.key".into());
        }
        // The name is the last part of a subject that has no other.
        if !self.subject.ends_with(name.as_bytes()) {
            return Err(format!("its subject is not {name}: remove it and ca.key for a new authority"));
        }
        if self.not_after <= now {
            return Err(format!(
                "it held until {}: remove it and ca.key for a new authority",
                self.not_after
            ));
        }
        Ok(())
    }
}

fn parse(der: &[u8]) -> Option<CertificateFacts> {
    let mut certificate = value(&mut &*der, SEQUENCE)?;
    let mut fields = value(&mut certificate, SEQUENCE)?;
    if fields.first() == Some(&VERSION) {
        value(&mut fields, VERSION)?;
    }
    // Serial number, algorithm and issuer.
    for tag in [0x02, SEQUENCE, SEQUENCE] {
        value(&mut fields, tag)?;
    }
    let mut validity = value(&mut fields, SEQUENCE)?;
    any(&mut validity)?;
    let not_after = moment(any(&mut validity)?)?;
    let subject = value(&mut fields, SEQUENCE)?.to_vec();
    Some(CertificateFacts { subject, key: value(&mut fields, SEQUENCE)?.to_vec(), not_after })
}

/// Takes the next value, which has this tag.
fn value<'a>(input: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    any(input).filter(|(found, _)| *found == tag).map(|(_, value)| value)
}

/// Takes the next value with its tag.
fn any<'a>(input: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&[tag, first], rest) = input.split_first_chunk::<2>()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 | 0x82 => {
            let (len, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (value, rest) = rest.split_at_checked(len)?;
    *input = rest;
    Some((tag, value))
}

/// A time of the form `YYMMDDhhmmssZ`, or with four digits of the year.
fn moment((tag, text): (u8, &[u8])) -> Option<OffsetDateTime> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let (year, rest) = text.split_at_checked(if tag == GENERALIZED_TIME { 4 } else { 2 })?;
    let year: i32 = year.parse().ok()?;
    let year = match tag {
        GENERALIZED_TIME => year,
        UTC_TIME => year + if year < 50 { 2000 } else { 1900 },
        _ => return None,
    };
    let pair = |at: usize| rest.get(at..at + 2)?.parse::<u8>().ok();
    let date = Date::from_calendar_date(year, Month::try_from(pair(0)?).ok()?, pair(2)?).ok()?;
    Some(date.with_time(Time::from_hms(pair(4)?, pair(6)?, pair(8)?).ok()?).assume_utc())
}
