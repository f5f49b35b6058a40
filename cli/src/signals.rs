//! The signals that this process handles.

/// Those of `signals` that whoever started this process does not have it ignore, as nohup(1) does
/// with SIGHUP.
pub fn not_ignored(signals: &[i32]) -> impl Iterator<Item = i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit 0 is signal 1.
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    signals.iter().copied().filter(move |signal| mask >> (signal - 1) & 1 == 0)
}
