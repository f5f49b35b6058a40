//! Rendezvous keys: which tensor, from where, to where (specification 2.2).
//!
//! A key has exactly one spelling, so two keys are the same if and only if their bytes are. Parsing
//! borrows every part from the text and allocates only to report an error.
//!
//! The engine never writes a key as one text: its messages carry the parts, and its tables hold
//! them in [`EdgeName`](super::EdgeName). [`RendezvousKey`] is the whole text of the
//! specification. Only tests, benchmarks and fuzz targets read and write it.

use super::cluster::check_job;
use super::text::quote;
use std::fmt;
use std::str::FromStr;

/// Bytes of the longest device name and of the longest edge name.
pub const MAX_NAME: usize = 2048;

/// A device of a cluster: `/job:worker/replica:0/task:1/device:CPU:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName<'a> {
    /// The job: 1 to 64 letters, digits, `_` and `-`, a letter or digit first.
    pub job: &'a str,
    /// The replica of the job.
    pub replica: u32,
    /// The task within the job.
    pub task: u32,
    /// The type of device: upper-case letters, digits and `_`; starts with a letter.
    pub kind: &'a str,
    /// Which of the task's devices of this type.
    pub number: u32,
}

/// The five parts of a key:
/// `source;incarnation of the source (16 hex digits);destination;edge name;frame:iteration`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RendezvousKey<'a> {
    /// The device that produces the tensor.
    pub source: DeviceName<'a>,
    /// The number that the source's process drew when it started.
    pub source_incarnation: u64,
    /// The device that consumes the tensor.
    pub destination: DeviceName<'a>,
    /// The name of the edge: 1 to [`MAX_NAME`] bytes, no `;`, no control character.
    pub edge: &'a str,
    /// The frame (of a loop) in which the edge is.
    pub frame: u64,
    /// The iteration of that frame.
    pub iteration: u64,
}

/// The part of a key that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyPart {
    /// The whole: it has not five parts.
    Whole,
    /// The source's device name.
    Source,
    /// 16 hex digits.
    SourceIncarnation,
    /// The destination's device name.
    Destination,
    /// The edge's name.
    Edge,
    /// The frame, or the colon behind it.
    Frame,
    /// The number behind the colon.
    Iteration,
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyPart::Whole => "key",
            KeyPart::Source => "source",
            KeyPart::SourceIncarnation => "source incarnation",
            KeyPart::Destination => "destination",
            KeyPart::Edge => "edge name",
            KeyPart::Frame => "frame",
            KeyPart::Iteration => "iteration",
        })
    }
}

/// A text that is no rendezvous key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad rendezvous key {key}: {part}: {why}")]
#[non_exhaustive]
pub struct KeyError {
    /// The key in quotes, escaped, and shortened if it is long.
    pub key: String,
    /// Which part is wrong.
    pub part: KeyPart,
    /// The text of that part, and its rule.
    pub why: String,
}

/// A text that is no device name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad device name {name}: {why}")]
#[non_exhaustive]
pub struct DeviceNameError {
    /// The name in quotes, escaped, and shortened if it is long.
    pub name: String,
    /// The violated rule, and the allowed values.
    pub why: String,
}

impl<'a> DeviceName<'a> {
    /// Reads a device name, whole and in its one spelling.
    ///
    /// # Errors
    /// If `name` is anything else.
    pub fn parse(name: &'a str) -> Result<Self, DeviceNameError> {
        parse_device(name).map_err(|why| DeviceNameError { name: quote(name), why })
    }

    /// Checks a name that was made from parts. If this is `Ok`, [`DeviceName::parse`] reads the
    /// text of `Display`. It allocates only on failure.
    ///
    /// # Errors
    /// If the job or the kind has a character that it may not have, or the whole is longer than
    /// [`MAX_NAME`].
    pub fn check(&self) -> Result<(), DeviceNameError> {
        self.flaw().map_or(Ok(()), |why| Err(DeviceNameError { name: quote(&self.to_string()), why }))
    }

    fn flaw(&self) -> Option<String> {
        if let Err(why) =
            check_job(self.job).map_err(|error| error.to_string()).and_then(|()| check_kind(self.kind))
        {
            return Some(why);
        }
        let numbers = [self.replica, self.task, self.number].map(digits).iter().sum::<usize>();
        let fixed = "/job:/replica:/task:/device::".len();
        check_length(fixed + self.job.len() + self.kind.len() + numbers).err()
    }
}

impl<'a> RendezvousKey<'a> {
    /// Reads a key, whole and in its one spelling.
    ///
    /// # Errors
    /// If `key` is anything else; the error quotes it and names the part.
    pub fn parse(key: &'a str) -> Result<Self, KeyError> {
        parse_key(key).map_err(|(part, why)| KeyError { key: quote(key), part, why })
    }

    /// Checks a key that was made from parts. If this is `Ok`, [`RendezvousKey::parse`] reads the
    /// text of `Display`. It allocates only on failure.
    ///
    /// # Errors
    /// If a device name or the edge name breaks the rules; the error names the part.
    pub fn check(&self) -> Result<(), KeyError> {
        let flaw = (self.source.flaw().map(|why| (KeyPart::Source, why)))
            .or_else(|| self.destination.flaw().map(|why| (KeyPart::Destination, why)))
            .or_else(|| check_edge(self.edge).err().map(|why| (KeyPart::Edge, why)));
        flaw.map_or(Ok(()), |(part, why)| Err(KeyError { key: quote(&self.to_string()), part, why }))
    }
}

impl fmt::Display for DeviceName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceName { job, replica, task, kind, number } = self;
        write!(f, "/job:{job}/replica:{replica}/task:{task}/device:{kind}:{number}")
    }
}

impl fmt::Display for RendezvousKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RendezvousKey { source, source_incarnation, destination, edge, frame, iteration } = self;
        write!(f, "{source};{source_incarnation:016x};{destination};{edge};{frame}:{iteration}")
    }
}

fn parse_key(key: &str) -> Result<RendezvousKey<'_>, (KeyPart, String)> {
    let mut parts = key.split(';');
    let five = (parts.next(), parts.next(), parts.next(), parts.next(), parts.next());
    let (Some(source), Some(incarnation), Some(destination), Some(edge), Some(place)) = five else {
        return Err((KeyPart::Whole, part_count(key)));
    };
    if parts.next().is_some() {
        return Err((KeyPart::Whole, part_count(key)));
    }
    let source = parse_device(source).map_err(|why| (KeyPart::Source, why))?;
    let source_incarnation =
        parse_incarnation(incarnation).map_err(|why| (KeyPart::SourceIncarnation, why))?;
    let destination = parse_device(destination).map_err(|why| (KeyPart::Destination, why))?;
    check_edge(edge).map_err(|why| (KeyPart::Edge, why))?;
    let (frame, iteration) = place
        .split_once(':')
        .ok_or_else(|| (KeyPart::Frame, format!("{} must be FRAME:ITERATION", quote(place))))?;
    let frame = decimal(frame, u64::MAX).map_err(|why| (KeyPart::Frame, why))?;
    let iteration = decimal(iteration, u64::MAX).map_err(|why| (KeyPart::Iteration, why))?;
    Ok(RendezvousKey { source, source_incarnation, destination, edge, frame, iteration })
}

fn part_count(key: &str) -> String {
    let count = key.split(';').count();
    format!(
        "5 parts between ';' are needed, not {count}: SOURCE;INCARNATION;DESTINATION;EDGE;FRAME:ITERATION"
    )
}

fn parse_device(name: &str) -> Result<DeviceName<'_>, String> {
    check_length(name.len())?;
    let mut rest = name;
    let job = field(name, &mut rest, "/job:")?;
    let replica = field(name, &mut rest, "/replica:")?;
    let task = field(name, &mut rest, "/task:")?;
    let device = field(name, &mut rest, "/device:")?;
    if !rest.is_empty() {
        return Err(format!("{} has {} after the device", quote(name), quote(rest)));
    }
    let (kind, number) =
        device.split_once(':').ok_or_else(|| format!("device {} must be TYPE:NUMBER", quote(device)))?;
    check_job(job).map_err(|error| error.to_string())?;
    let replica = decimal(replica, u32::MAX).map_err(|why| format!("replica {why}"))?;
    let task = decimal(task, u32::MAX).map_err(|why| format!("task {why}"))?;
    check_kind(kind)?;
    let number = decimal(number, u32::MAX).map_err(|why| format!("device number {why}"))?;
    Ok(DeviceName { job, replica, task, kind, number })
}

/// The text behind `prefix` in `rest`, up to the next '/'. Moves `rest` behind it.
fn field<'a>(name: &str, rest: &mut &'a str, prefix: &str) -> Result<&'a str, String> {
    let Some(tail) = rest.strip_prefix(prefix) else {
        let expected = "/job:J/replica:R/task:T/device:TYPE:N";
        return Err(format!("{} has no '{prefix}' where it must be: {expected}", quote(name)));
    };
    let (value, after) = tail.split_at(tail.find('/').unwrap_or(tail.len()));
    *rest = after;
    Ok(value)
}

fn parse_incarnation(text: &str) -> Result<u64, String> {
    let lower_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let number = u64::from_str_radix(text, 16).ok();
    number
        .filter(|_| text.len() == 16 && text.bytes().all(lower_hex))
        .ok_or_else(|| format!("{} must be 16 lower-case hex digits", quote(text)))
}

/// A number in the one spelling that `Display` gives it.
fn decimal<T: FromStr + fmt::Display>(text: &str, max: T) -> Result<T, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    let number = if plain { text.parse().ok() } else { None };
    number.ok_or_else(|| {
        format!("{} must be a decimal number from 0 to {max} without sign or leading zeros", quote(text))
    })
}

fn digits(number: u32) -> usize {
    number.checked_ilog10().map_or(1, |log| log as usize + 1)
}

fn check_length(bytes: usize) -> Result<(), String> {
    if bytes > MAX_NAME {
        return Err(format!("a device name of {bytes} bytes is too long: at most {MAX_NAME} are allowed"));
    }
    Ok(())
}

fn check_kind(kind: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    if kind.starts_with(|first: char| first.is_ascii_uppercase()) && kind.bytes().all(allowed) {
        return Ok(());
    }
    Err(format!("device type {} must be upper-case letters, digits and '_', a letter first", quote(kind)))
}

/// Checks the name of an edge; the error is the violated rule.
pub(super) fn check_edge(edge: &str) -> Result<(), String> {
    if edge.is_empty() || edge.len() > MAX_NAME {
        return Err(format!("a name of {} bytes: 1 to {MAX_NAME} are allowed", edge.len()));
    }
    match edge.char_indices().find(|(_, c)| *c == ';' || c.is_control()) {
        Some((at, c)) => {
            Err(format!("it has {c:?} at byte {at}: neither ';' nor control characters are allowed"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "key_tests.rs"]
mod tests;
