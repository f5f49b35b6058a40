//! The key that is nearest to an unknown name.

use super::table::KEYS;

/// The key with the smallest edit distance to `name`, if it is small.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase().replace(['-', '.'], "_");
    if name.len() > 64 {
        return None;
    }
    let (key, distance) =
        KEYS.iter().map(|key| (key.name, distance(&name, key.name))).min_by_key(|near| near.1)?;
    (distance <= key.len() / 3 + 1).then_some(key)
}

/// The Levenshtein distance of two names in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_single_edits() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("cores", "cores"), 0);
    }

    #[test]
    fn a_slip_is_guessed_and_a_foreign_word_is_not() {
        assert_eq!(nearest("pool-size"), Some("pool_size"));
        assert_eq!(nearest("queue_dept"), Some("queue_depth"));
        assert_eq!(nearest("rendezvous_backend"), None);
        assert_eq!(nearest(&"x".repeat(100_000)), None);
    }
}
