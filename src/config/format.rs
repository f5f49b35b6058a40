//! The text form of each kind of value, and its TOML form.

use super::choice::NamedValues;
use crate::fabric::verbs::device::{AUTO, MAX_RAILS};
use crate::fabric::{FabricKind, FabricSet};
use crate::wire::{Cluster, ClusterError, HostPort, TaskId};
use std::borrow::Cow;
use std::fmt::Display;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use toml::Spanned;
use toml::de::DeValue;

/// Why a text is not a value. `None`: the key's `allowed` text is the whole reason.
pub(super) type InvalidValue = Option<String>;

/// Why a TOML value is not a value of the key.
pub(super) enum InvalidToml {
    /// It is of the wrong type.
    Value,
    /// A part of it is wrong.
    Entry {
        /// Where the part is in the file.
        span: Range<usize>,
        /// What the part must be.
        why: String,
    },
}

/// One kind of value: its text form and its TOML form.
pub(super) trait Format {
    /// The parsed type.
    type Value;
    /// Name of the kind in the reference.
    const KIND: &'static str;

    /// Parses the text form.
    fn read(text: &str) -> Result<Self::Value, InvalidValue>;

    /// Writes the text form, which `read` parses back.
    fn write(value: &Self::Value) -> String;

    /// The text form of a TOML value.
    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        value.as_str().map(str::to_string).ok_or(InvalidToml::Value)
    }
}

/// ASCII letters, digits, `_` and `-`, as [`TaskId`](crate::wire::TaskId) takes them.
pub(super) struct JobName;

impl Format for JobName {
    type Value = String;
    const KIND: &'static str = "name";

    fn read(text: &str) -> Result<String, InvalidValue> {
        TaskId::new(text, 0).map(|_| text.to_string()).map_err(|_| None)
    }

    fn write(value: &String) -> String {
        value.clone()
    }
}

/// Names of RDMA devices, which are folders of `/sys/class/infiniband`, or `auto`.
pub(super) struct RdmaDeviceNames;

/// Bytes of the longest device name in the kernel (`IB_DEVICE_NAME_MAX` without the final zero).
const NIC_NAME: usize = 63;

impl Format for RdmaDeviceNames {
    type Value = String;
    const KIND: &'static str = "names";

    fn read(text: &str) -> Result<String, InvalidValue> {
        let mut names: Vec<&str> = Vec::new();
        for name in text.split(',').map(str::trim) {
            let wrong = |c: char| c == '/' || !c.is_ascii_graphic();
            let is_name = (1..=NIC_NAME).contains(&name.len()) && ![".", ".."].contains(&name);
            if !is_name || name.contains(wrong) {
                return Err(None);
            }
            if names.contains(&name) {
                return Err(Some(format!("{name} is in the list twice: name each device once")));
            }
            names.push(name);
        }
        if names.len() > MAX_RAILS || names.len() > 1 && names.contains(&AUTO) {
            return Err(None);
        }
        Ok(names.join(","))
    }

    fn write(value: &String) -> String {
        value.clone()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        list_or_text(value)
    }
}

/// The text form of a TOML text, or of a list of texts.
fn list_or_text(value: &DeValue<'_>) -> Result<String, InvalidToml> {
    match value.as_array() {
        Some(names) => {
            let names: Option<Vec<_>> = names.iter().map(|name| name.get_ref().as_str()).collect();
            Ok(names.ok_or(InvalidToml::Value)?.join(","))
        }
        None => value.as_str().map(str::to_string).ok_or(InvalidToml::Value),
    }
}

/// A whole number.
pub(super) struct Number<T>(PhantomData<T>);

impl<T: FromStr + Display> Format for Number<T> {
    type Value = T;
    const KIND: &'static str = "number";

    fn read(text: &str) -> Result<T, InvalidValue> {
        digits(text).ok_or(None)
    }

    fn write(value: &T) -> String {
        value.to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        text_or_integer(value)
    }
}

/// `true` or `false`.
pub(super) struct Bool;

impl Format for Bool {
    type Value = bool;
    const KIND: &'static str = "switch";

    fn read(text: &str) -> Result<bool, InvalidValue> {
        text.parse().map_err(|_| None)
    }

    fn write(value: &bool) -> String {
        value.to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        value.as_bool().map(|on| on.to_string()).ok_or(InvalidToml::Value)
    }
}

/// A number of bytes: `64MiB`, or a plain number.
pub(super) struct ByteSize;

const BYTE_UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)];

impl Format for ByteSize {
    type Value = u64;
    const KIND: &'static str = "bytes";

    fn read(text: &str) -> Result<u64, InvalidValue> {
        with_unit(text, &BYTE_UNITS).ok_or(None)
    }

    fn write(value: &u64) -> String {
        in_largest_unit(*value, &BYTE_UNITS)
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        text_or_integer(value)
    }
}

/// A time span: `250ms`.
pub(super) struct DurationText;

const TIME_UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl Format for DurationText {
    type Value = Duration;
    const KIND: &'static str = "duration";

    fn read(text: &str) -> Result<Duration, InvalidValue> {
        if digits::<u64>(text).is_some() {
            return Err(Some(format!(
                "a duration needs a unit: {text}s, {text}ms, {text}us, {text}m or {text}h"
            )));
        }
        with_unit(text, &TIME_UNITS).map(Duration::from_nanos).ok_or(None)
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        text_or_integer(value)
    }

    fn write(value: &Duration) -> String {
        match u64::try_from(value.as_nanos()) {
            Ok(0) => "0s".to_string(),
            Ok(nanos) => in_largest_unit(nanos, &TIME_UNITS),
            // Longer than any key allows. The error shows the length.
            Err(_) => format!("{}s", value.as_secs()),
        }
    }
}

/// An IP address and port.
pub(super) struct SocketAddress;

impl Format for SocketAddress {
    type Value = SocketAddr;
    const KIND: &'static str = "address";

    fn read(text: &str) -> Result<SocketAddr, InvalidValue> {
        text.parse().map_err(|_| None)
    }

    fn write(value: &SocketAddr) -> String {
        value.to_string()
    }
}

/// Where a file lies, absolute or from the working directory.
pub(super) struct FilePath;

impl Format for FilePath {
    type Value = PathBuf;
    const KIND: &'static str = "path";

    fn read(text: &str) -> Result<PathBuf, InvalidValue> {
        if text.is_empty() || text.contains('\0') { Err(None) } else { Ok(text.into()) }
    }

    fn write(value: &PathBuf) -> String {
        value.display().to_string()
    }
}

/// One of a few names.
pub(super) struct OneOf<T>(PhantomData<T>);

impl<T: NamedValues> Format for OneOf<T> {
    type Value = T;
    const KIND: &'static str = "choice";

    fn read(text: &str) -> Result<T, InvalidValue> {
        T::NAMES.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or(None)
    }

    fn write(value: &T) -> String {
        let named = T::NAMES.iter().find(|(_, other)| other == value);
        named.map(|(name, _)| (*name).to_string()).unwrap_or_default()
    }
}

/// `auto`, or one of a few names. With `auto` the program chooses.
pub(super) struct AutoOr<T>(PhantomData<T>);

impl<T: NamedValues> Format for AutoOr<T> {
    type Value = Option<T>;
    const KIND: &'static str = "choice";

    fn read(text: &str) -> Result<Option<T>, InvalidValue> {
        if text == "auto" { Ok(None) } else { OneOf::read(text).map(Some) }
    }

    fn write(value: &Option<T>) -> String {
        value.as_ref().map_or_else(|| "auto".to_string(), OneOf::write)
    }
}

/// `auto`, or the fabrics that a node may use: `shm,verbs`. With `auto` it may use every one.
pub(super) struct AutoOrFabrics;

impl Format for AutoOrFabrics {
    type Value = Option<FabricSet>;
    const KIND: &'static str = "fabrics";

    fn read(text: &str) -> Result<Option<FabricSet>, InvalidValue> {
        if text == "auto" {
            return Ok(None);
        }
        let mut kinds = Vec::new();
        for name in text.split(',').map(str::trim) {
            let kind = FabricKind::NAMED.into_iter().find(|kind| kind.to_string() == name);
            let kind = kind.ok_or(None)?;
            if kinds.contains(&kind) {
                return Err(Some(format!("{name} is in the list twice: name each once")));
            }
            kinds.push(kind);
        }
        if kinds.len() > 1 && kinds.contains(&FabricKind::Grpc) {
            return Err(Some("grpc is no fabric, and goes with none: name it alone, or leave it out".into()));
        }
        Ok(Some(kinds.into_iter().collect()))
    }

    fn write(value: &Option<FabricSet>) -> String {
        value.map_or_else(|| "auto".to_string(), |set| set.to_string())
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        list_or_text(value)
    }
}

/// Numbers of CPUs: `0,2-3`. Kept in order, each once.
pub(super) struct CpuList;

/// The highest CPU number in an affinity mask of the usual size.
const MAX_CPU: usize = 1023;

impl Format for CpuList {
    type Value = Vec<usize>;
    const KIND: &'static str = "CPUs";

    fn read(text: &str) -> Result<Vec<usize>, InvalidValue> {
        let mut cpus = Vec::new();
        for item in text.split(',').map(str::trim) {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let (first, last) = (cpu(first)?, cpu(last)?);
            if first > last {
                return Err(Some(format!("the range {item} runs backwards: write {last}-{first}")));
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(Some(format!("CPU {cpu} is in the list twice: name each once")));
                }
                cpus.push(cpu);
            }
        }
        Ok(cpus)
    }

    fn write(value: &Vec<usize>) -> String {
        value.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        match value.as_array() {
            Some(cpus) => {
                let numbers: Option<Vec<_>> =
                    cpus.iter().map(|cpu| cpu.get_ref().as_integer().map(ToString::to_string)).collect();
                Ok(numbers.ok_or(InvalidToml::Value)?.join(","))
            }
            None => text_or_integer(value),
        }
    }
}

fn cpu(text: &str) -> Result<usize, InvalidValue> {
    digits(text).filter(|cpu| *cpu <= MAX_CPU).ok_or(None)
}

/// Jobs with the addresses of their tasks: `ps=HOST:PORT,HOST:PORT;worker=HOST:PORT`.
impl Format for Cluster {
    type Value = Cluster;
    const KIND: &'static str = "cluster";

    fn read(text: &str) -> Result<Cluster, InvalidValue> {
        text.parse().map_err(|error: ClusterError| Some(error.to_string()))
    }

    fn write(value: &Cluster) -> String {
        value.to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<String, InvalidToml> {
        let Some(jobs) = value.as_table() else {
            return value.as_str().map(str::to_string).ok_or(InvalidToml::Value);
        };
        let entries: Result<Vec<_>, _> = jobs.iter().map(|(job, tasks)| toml_job(job, tasks)).collect();
        Ok(entries?.join(";"))
    }
}

/// The text form of one entry of a cluster's table: `ps = ["HOST:PORT", "HOST:PORT"]`.
fn toml_job(job: &Spanned<Cow<'_, str>>, tasks: &Spanned<DeValue<'_>>) -> Result<String, InvalidToml> {
    let refused = |span, why| InvalidToml::Entry { span, why };
    TaskId::new(job.get_ref().as_ref(), 0).map_err(|error| refused(job.span(), error.to_string()))?;
    let job = job.get_ref();
    let Some(list) = tasks.get_ref().as_array() else {
        return Err(refused(
            tasks.span(),
            format!("job {job}: its tasks must be an array, each a string \"HOST:PORT\""),
        ));
    };
    let address = |task: &Spanned<DeValue<'_>>| {
        let text = task.get_ref().as_str().ok_or_else(|| {
            refused(task.span(), format!("job {job}: a task must be a string, \"HOST:PORT\""))
        })?;
        let parsed = text.parse().map_err(|error| refused(task.span(), format!("job {job}: {error}")));
        parsed.map(|address: HostPort| address.to_string())
    };
    let addresses: Result<Vec<_>, _> = list.iter().map(address).collect();
    Ok(format!("{job}={}", addresses?.join(",")))
}

fn text_or_integer(value: &DeValue<'_>) -> Result<String, InvalidToml> {
    let text = value.as_str().map(str::to_string);
    text.or_else(|| value.as_integer().map(ToString::to_string)).ok_or(InvalidToml::Value)
}

/// Digits only: no sign, no blanks.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    digits::<u64>(number)?.checked_mul(*factor)
}

fn in_largest_unit(value: u64, units: &[(&str, u64)]) -> String {
    let unit = units.iter().find(|(_, factor)| value != 0 && value.is_multiple_of(*factor));
    unit.map_or_else(|| value.to_string(), |(name, factor)| format!("{}{name}", value / factor))
}
