//! The records of a store file, and how they become a table.
//!
//! A file has a header and records. A record is the length of its body (u32), the xxh3 checksum of
//! the body (u64), and the body. The body is the operation (u8), the length of the key (u16), the
//! key, and the value. All numbers are little-endian. A writer that dies leaves part of a record at
//! the end. Such an end counts for nothing, and the next writer cuts it off.

use super::table::{MAX_KEY, MAX_VALUE, StoreTable};
use crate::wire::checksum_of;

/// Opens every file. The last byte is the version.
pub const HEADER: &[u8; 8] = b"twstore\x01";

const PREFIX: usize = 12;
const SET: u8 = 1;
const DELETE: u8 = 2;
/// Bytes of the longest body.
const MAX_BODY: usize = 3 + MAX_KEY + MAX_VALUE;

/// A change of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogRecord<'a> {
    Set(&'a str, &'a [u8]),
    Delete(&'a str),
}

impl LogRecord<'_> {
    pub fn write(&self, out: &mut Vec<u8>) {
        let (operation, key, value) = match self {
            LogRecord::Set(key, value) => (SET, key, *value),
            LogRecord::Delete(key) => (DELETE, key, &[][..]),
        };
        let mut body = vec![operation];
        // A key has 1,024 bytes at most.
        body.extend((key.len() as u16).to_le_bytes());
        body.extend(key.as_bytes());
        body.extend(value);
        out.extend((body.len() as u32).to_le_bytes());
        out.extend(checksum_of(&body).to_le_bytes());
        out.extend(body);
    }
}

/// Applies the records of `bytes`, which follow on what the table has. Returns how many bytes were
/// whole records.
///
/// # Errors
/// What is wrong with a record that is no unfinished end.
pub fn apply(table: &mut StoreTable, bytes: &[u8]) -> Result<usize, &'static str> {
    let mut at = 0;
    while let Some((body, next)) = body_at(bytes, at)? {
        let changed = match record(body).ok_or("a record with a right checksum makes no sense")? {
            LogRecord::Set(key, value) => table.set(key, value),
            LogRecord::Delete(key) => {
                table.delete(key);
                Ok(())
            }
        };
        changed.map_err(|_| "it has more keys or bytes than a store holds")?;
        at = next;
    }
    Ok(at)
}

/// The body of the record at `at`, and where the next one begins. `None` at the end, also if that
/// is unfinished.
fn body_at(bytes: &[u8], at: usize) -> Result<Option<(&[u8], usize)>, &'static str> {
    let Some((prefix, rest)) = bytes[at..].split_first_chunk::<PREFIX>() else { return Ok(None) };
    let [a, b, c, d, checksum @ ..] = *prefix;
    let (length, checksum) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(checksum));
    // A file system may have made the file longer before it had the bytes.
    let is_blank = || bytes[at..].iter().all(|byte| *byte == 0);
    if !(3..=MAX_BODY).contains(&length) {
        return if is_blank() { Ok(None) } else { Err("a record has an impossible length") };
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    if checksum_of(body) == checksum {
        return Ok(Some((body, at + PREFIX + length)));
    }
    if rest.len() == length { Ok(None) } else { Err("the checksum of a record is wrong") }
}

fn record(body: &[u8]) -> Option<LogRecord<'_>> {
    let ([operation, low, high], rest) = body.split_first_chunk::<3>()?;
    let (key, value) = rest.split_at_checked(usize::from(u16::from_le_bytes([*low, *high])))?;
    let key = str::from_utf8(key).ok()?;
    match *operation {
        SET => Some(LogRecord::Set(key, value)),
        DELETE if value.is_empty() => Some(LogRecord::Delete(key)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(records: &[LogRecord<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.write(&mut bytes));
        bytes
    }

    #[test]
    fn records_come_back_and_every_unfinished_end_counts_for_nothing() {
        let first = written(&[LogRecord::Set("a", b"1"), LogRecord::Set("b", b"2"), LogRecord::Delete("a")]);
        let whole = [first.clone(), written(&[LogRecord::Set("c", &[9; 100])])].concat();
        for cut in first.len()..whole.len() {
            for blank in [0, 5] {
                let mut table = StoreTable::default();
                let bytes = [&whole[..cut], &vec![0; blank]].concat();
                let read = apply(&mut table, &bytes);
                // Zeros behind half a record can only be told from damage at the very end.
                if blank == 0 || cut == first.len() {
                    assert_eq!(read, Ok(first.len()), "cut at {cut}");
                    assert_eq!(table.entries().collect::<Vec<_>>(), [("b", &b"2"[..])]);
                }
            }
        }
        let mut table = StoreTable::default();
        assert_eq!(apply(&mut table, &whole), Ok(whole.len()));
        assert_eq!(table.get("c"), Some(&[9; 100][..]));
    }

    #[test]
    fn a_damaged_record_before_the_end_is_an_error() {
        let whole = written(&[LogRecord::Set("a", b"1"), LogRecord::Set("b", b"2")]);
        for at in 0..whole.len() / 2 {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            let mut table = StoreTable::default();
            let read = apply(&mut table, &bytes);
            // A longer length may reach beyond the end, as that of an unfinished record does.
            assert!(read.is_err() || (at < 4 && read == Ok(0)), "byte {at}: {read:?}");
        }
    }

    #[test]
    fn bytes_of_strangers_never_panic() {
        let mut seed = 1u64;
        for length in 0..300 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 56) as u8 & if seed & 1 == 0 { 0x03 } else { 0xff }
                })
                .collect();
            let _ = apply(&mut StoreTable::default(), &bytes);
            for operation in [SET, DELETE, 7] {
                let mut body = vec![operation];
                body.extend(&bytes);
                let _ = record(&body);
            }
        }
    }
}
