//! The lines that members write, with their names in front.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of the longest line. A longer one comes in parts.
const MAX_LINE: u64 = 64 * 1024;

/// Threads that write a line to standard output or error, or wait to.
static WRITING: AtomicUsize = AtomicUsize::new(0);

/// Whether a line waits for whoever reads the output of this process.
pub fn is_writing() -> bool {
    WRITING.load(Ordering::Relaxed) > 0
}

/// Copies each line of `from` to `to`, which other members share, with `prefix` in front. Ends with
/// the input. What can't be written is dropped, so that no member waits for a reader that has gone.
pub fn forward(prefix: &str, from: impl Read, mut to: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend(prefix.as_bytes());
        match from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        to(&line);
    }
}

/// Writes a line to standard output, whole.
pub fn to_stdout(line: &[u8]) {
    write(line, || std::io::stdout().lock());
}

/// Writes a line to standard error, whole.
pub fn to_stderr(line: &[u8]) {
    write(line, || std::io::stderr().lock());
}

fn write<W: Write>(line: &[u8], to: impl FnOnce() -> W) {
    WRITING.fetch_add(1, Ordering::Relaxed);
    let mut to = to();
    // Nobody may read it any more.
    let _ = to.write_all(line).and_then(|()| to.flush());
    WRITING.fetch_sub(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarded(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        forward("[w:1] ", bytes, |line| lines.push(line.to_vec()));
        lines
    }

    #[test]
    fn each_line_has_the_prefix_whatever_its_bytes_are() {
        assert_eq!(forwarded(b"a\n\nb"), [&b"[w:1] a\n"[..], b"[w:1] \n", b"[w:1] b\n"]);
        assert_eq!(forwarded(b"\xff\0\n"), [b"[w:1] \xff\0\n"]);
        assert!(forwarded(b"").is_empty());
    }

    #[test]
    fn a_line_without_end_comes_in_parts() {
        let lines = forwarded(&vec![b'x'; 2 * MAX_LINE as usize + 1]);
        assert_eq!(lines.iter().map(|line| line.len() - 7).collect::<Vec<_>>(), [65536, 65536, 1]);
    }
}
