//! The order of the values of a key.

use super::model::{End, Model, Violation};
use super::program::Key;

/// Whether each of these differs from all other values of its key.
pub fn can_tell(model: &Model, key: Key, values: &[usize]) -> bool {
    values.iter().all(|value| model.is_unique(key, *value))
}

/// Receives get values in order. A late value must be excused by an earlier receive that failed.
pub fn order_is_kept(model: &Model) -> Result<(), Violation> {
    for (key, channel) in &model.channels {
        // For each receive that got a value: the value, and the number of failed receives before
        // it.
        let (mut got, mut failures) = (Vec::new(), 0);
        for call in &channel.calls {
            match model.calls[*call].end {
                Some(End::Got { value, .. }) => got.push((value, failures)),
                _ => failures += 1,
            }
        }
        got.retain(|(value, _)| can_tell(model, *key, &[*value]));
        let overtaken = |at: usize| {
            let (value, _) = got[at];
            got[..at].iter().find(|(earlier, _)| *earlier > value).map(|(_, failures)| (*failures, value))
        };
        let mut late: Vec<(usize, usize)> = (0..got.len()).filter_map(overtaken).collect();
        late.sort_unstable();
        if let Some((_, (_, value))) = late.iter().enumerate().find(|(at, (failures, _))| at >= failures) {
            let order: Vec<usize> = got.iter().map(|(value, _)| *value).collect();
            return Err(format!("receives of {key} got values {order:?}, and nothing excuses {value}"));
        }
    }
    Ok(())
}
