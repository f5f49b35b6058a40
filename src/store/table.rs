//! The entries of a store, and their limits. Plain state: no I/O, no clock.

use super::error::StoreError;
use crate::wire::quote;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Bytes of the longest key.
pub const MAX_KEY: usize = 1024;
/// Bytes of the longest value.
pub const MAX_VALUE: usize = 64 * 1024;
/// Keys of one store.
pub const MAX_KEYS: usize = 1 << 16;
/// Bytes of all keys and values of one store.
pub const MAX_BYTES: usize = 64 << 20;

/// Fails for a key that no store takes.
pub fn check_key(key: &str) -> Result<(), StoreError> {
    match key.len() {
        1..=MAX_KEY => Ok(()),
        bytes => Err(StoreError::Key { key: quote(key), bytes, most: MAX_KEY }),
    }
}

/// Fails for a value that no store takes.
pub fn check_value(key: &str, value: &[u8]) -> Result<(), StoreError> {
    match value.len() {
        0..=MAX_VALUE => Ok(()),
        bytes => Err(StoreError::Value { key: quote(key), bytes, most: MAX_VALUE }),
    }
}

/// The entries.
#[derive(Clone, Debug, Default)]
pub(super) struct StoreTable {
    entries: BTreeMap<String, Vec<u8>>,
    /// Bytes of all keys and values.
    bytes: usize,
}

impl StoreTable {
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.entries.get(key).map(Vec::as_slice)
    }

    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.bytes = self.check_room(key, value)?;
        self.entries.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// Fails if the entry would break a limit. Returns the bytes of all keys and values with it.
    pub fn check_room(&self, key: &str, value: &[u8]) -> Result<usize, StoreError> {
        check_key(key)?;
        check_value(key, value)?;
        let old = self.entries.get(key).map(|value| key.len() + value.len());
        let keys = self.entries.len() + usize::from(old.is_none());
        let bytes = self.bytes - old.unwrap_or(0) + key.len() + value.len();
        if keys > MAX_KEYS || bytes > MAX_BYTES {
            return Err(StoreError::Full {
                key: quote(key),
                keys: self.entries.len(),
                most_keys: MAX_KEYS,
                bytes: self.bytes,
                most_bytes: MAX_BYTES,
            });
        }
        Ok(bytes)
    }

    /// The sum, which the caller stores.
    pub fn sum(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        let Some(value) = self.get(key) else { return Ok(amount) };
        let number = str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
        number.and_then(|number| number.checked_add(amount)).ok_or_else(|| StoreError::NotANumber {
            key: quote(key),
            value: quote(&String::from_utf8_lossy(value)),
            amount,
        })
    }

    pub fn delete(&mut self, key: &str) -> bool {
        let removed = self.entries.remove_entry(key);
        self.bytes -= removed.as_ref().map_or(0, |(key, value)| key.len() + value.len());
        removed.is_some()
    }

    /// The number of keys that begin with `prefix`.
    pub fn count(&self, prefix: &str) -> usize {
        let from = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(|(key, _)| key.starts_with(prefix)).count()
    }

    pub fn entries(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value.as_slice()))
    }

    /// The keys that are not set.
    pub fn missing<'a>(&self, keys: &[&'a str]) -> Vec<&'a str> {
        keys.iter().copied().filter(|key| !self.entries.contains_key(*key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_beyond_their_limits_are_refused_and_change_nothing() {
        let mut table = StoreTable::default();
        let (long, big) = ("k".repeat(MAX_KEY + 1), vec![0; MAX_VALUE + 1]);
        let refused = table.set(&long, b"").unwrap_err().to_string();
        assert!(refused.contains("has 1025 bytes: it must have 1 to 1024"), "{refused}");
        let refused = table.set("k", &big).unwrap_err().to_string();
        assert!(refused.contains("\"k\" has 65537 bytes: at most 65536"), "{refused}");
        assert!(matches!(table.set("", b""), Err(StoreError::Key { .. })));
        table.set(&long[1..], &big[1..]).unwrap();
        assert_eq!((table.count(""), table.bytes), (1, MAX_KEY + MAX_VALUE));
    }

    #[test]
    fn a_full_store_takes_a_key_again_once_another_is_gone() {
        let mut table = StoreTable::default();
        for number in 0..MAX_KEYS {
            table.set(&number.to_string(), b"").unwrap();
        }
        let refused = table.set("more", b"").unwrap_err().to_string();
        assert!(refused.contains("no room for the key \"more\": the store has 65536 keys"), "{refused}");
        table.set("0", b"a new value").unwrap();
        assert!(table.delete("1") && !table.delete("1"));
        table.set("more", b"").unwrap();
    }

    #[test]
    fn the_sum_of_all_bytes_is_bounded_and_follows_every_change() {
        let (mut table, value) = (StoreTable::default(), vec![7; MAX_VALUE]);
        let mut count = 0;
        while table.set(&format!("{count:04}"), &value).is_ok() {
            count += 1;
        }
        assert_eq!(count, MAX_BYTES / (MAX_VALUE + 4));
        table.set("0000", b"short").unwrap();
        table.set("more", &value[9..]).unwrap();
        for number in 0..count {
            table.delete(&format!("{number:04}"));
        }
        assert!(table.delete("more"));
        assert_eq!(table.bytes, 0);
    }

    #[test]
    fn a_sum_needs_a_number_and_may_not_overflow() {
        let mut table = StoreTable::default();
        assert_eq!(table.sum("n", -3).unwrap(), -3);
        for (value, amount) in [("many", 1), ("", 0), ("1.5", 1), ("9223372036854775807", 1)] {
            table.set("n", value.as_bytes()).unwrap();
            let refused = table.sum("n", amount).unwrap_err().to_string();
            assert!(refused.contains("must be a decimal number, and the sum an i64"), "{refused}");
        }
        table.set("n", &[0xff]).unwrap();
        assert!(table.sum("n", 1).is_err());
        table.set("n", b"-9").unwrap();
        assert_eq!(table.sum("n", 10).unwrap(), 1);
    }

    #[test]
    fn keys_are_counted_by_prefix() {
        let mut table = StoreTable::default();
        for key in ["a", "a/1", "a/2", "ab", "b"] {
            table.set(key, b"").unwrap();
        }
        assert_eq!((table.count(""), table.count("a"), table.count("a/"), table.count("c")), (5, 4, 2, 0));
        assert_eq!(table.missing(&["b", "c", "a", "d"]), ["c", "d"]);
    }
}
