//! What the programs of a test inherit from whoever started it.

/// Whether programs that this test starts ignore the signal, as those of `nohup` and of `&` in a
/// script do. The launcher leaves it so.
pub fn is_ignored(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a line");
    let is_ignored = u64::from_str_radix(ignored.trim(), 16).expect("a mask") & 1 << (number - 1) != 0;
    if is_ignored {
        println!("skipped: signal {number} was ignored when this test began");
    }
    is_ignored
}
