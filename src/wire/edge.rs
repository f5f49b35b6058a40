//! An edge's name without the parts that change: source, destination, and name.

use super::cluster::{JobError, TaskId};
use super::key::{DeviceName, DeviceNameError, check_edge};
use super::text::quote;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Why three names are no edge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EdgeNameError {
    /// A device name is not well-formed.
    #[error(transparent)]
    Device(#[from] DeviceNameError),
    /// A device is of a replica that no cluster has.
    #[error("device '{device}' is of replica {replica}: only replica 0 exists")]
    Replica {
        /// As given, such as `/job:worker/replica:1/task:0/device:CPU:0`.
        device: String,
        /// The number in the device name.
        replica: u32,
    },
    /// The job of a device breaks the rule for job names.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The edge's name is not well-formed.
    #[error("bad edge name {name}: {why}")]
    Name {
        /// The name in quotes, escaped, and shortened if it is long.
        name: String,
        /// The violated rule.
        why: String,
    },
}

/// Source device, destination device and name of an edge, checked, with a hash computed once.
///
/// The hash is keyed by a secret of the process, so a peer can't choose names that collide;
/// equality still compares every byte.
#[derive(Clone)]
pub struct EdgeName {
    source: String,
    destination: String,
    name: String,
    source_task: TaskId,
    destination_task: TaskId,
    hash: u64,
    /// Where the tables of senders and of receivers have found the edge last.
    places: [PlaceHint; 2],
}

/// A number that makes a search short if it is right. A clone starts without one.
#[derive(Debug)]
struct PlaceHint(AtomicU32);

impl Default for PlaceHint {
    fn default() -> Self {
        PlaceHint(AtomicU32::new(u32::MAX))
    }
}

impl Clone for PlaceHint {
    fn clone(&self) -> Self {
        PlaceHint::default()
    }
}

/// The end of an edge that is in this process.
///
/// ```
/// # let node = tensorwire::internals::doc_node();
/// use tensorwire::EdgeSide;
/// let reports = node.edges(100)?.edges;
/// let sending = reports.iter().filter(|edge| edge.side == EdgeSide::Sender);
/// assert_eq!(sending.count(), 0, "it has no peers");
/// # Ok::<(), tensorwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EdgeSide {
    /// This process sends on the edge.
    Sender,
    /// This process receives on the edge.
    Receiver,
}

impl EdgeName {
    /// An edge from one device to another.
    ///
    /// # Errors
    /// If a device name or the edge's name is not well-formed (specification 2.2). If a device has
    /// a replica other than 0, which no cluster has.
    pub fn new(source: &str, destination: &str, name: &str) -> Result<Self, EdgeNameError> {
        let (from, to) = (DeviceName::parse(source)?, DeviceName::parse(destination)?);
        check_edge(name).map_err(|why| EdgeNameError::Name { name: quote(name), why })?;
        let (source_task, destination_task) = (task_of(&from)?, task_of(&to)?);
        let hash = secret().hash_one((source, destination, name));
        let (source, destination, name) = (source.into(), destination.into(), name.into());
        let places = Default::default();
        Ok(EdgeName { source, destination, name, source_task, destination_task, hash, places })
    }

    /// The device that sends.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The device that receives.
    pub fn destination(&self) -> &str {
        &self.destination
    }

    /// Tells edges of the same two devices apart, such as `grad/7`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The task that sends.
    pub fn source_task(&self) -> &TaskId {
        &self.source_task
    }

    /// The task that receives.
    pub fn destination_task(&self) -> &TaskId {
        &self.destination_task
    }

    /// The hash of the three names, which was computed once. It differs in each process.
    #[inline]
    pub fn hash_of_names(&self) -> u64 {
        self.hash
    }

    /// Bytes of memory, the three names included.
    pub fn memory(&self) -> usize {
        let tasks = self.source_task.job().len() + self.destination_task.job().len();
        let names = self.source.capacity() + self.destination.capacity() + self.name.capacity();
        size_of::<EdgeName>() + tasks + names
    }

    /// The place that was noted last. It may be that of another edge by now.
    #[inline]
    pub fn place(&self, side: EdgeSide) -> u32 {
        self.places[side as usize].0.load(Ordering::Relaxed)
    }

    /// Notes where a table has found the edge.
    pub fn note_place(&self, side: EdgeSide, place: u32) {
        self.places[side as usize].0.store(place, Ordering::Relaxed);
    }

    /// The same edge with this hash: two edges can be made to collide.
    #[cfg(test)]
    pub(crate) fn with_hash(self, hash: u64) -> Self {
        EdgeName { hash, ..self }
    }
}

fn task_of(device: &DeviceName<'_>) -> Result<TaskId, EdgeNameError> {
    if device.replica != 0 {
        return Err(EdgeNameError::Replica { device: device.to_string(), replica: device.replica });
    }
    Ok(TaskId::new(device.job, device.task)?)
}

fn secret() -> &'static RandomState {
    static SECRET: OnceLock<RandomState> = OnceLock::new();
    SECRET.get_or_init(RandomState::new)
}

impl PartialEq for EdgeName {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
            || self.hash == other.hash
                && self.name == other.name
                && self.source == other.source
                && self.destination == other.destination
    }
}

impl Eq for EdgeName {}

/// By source, destination and name.
impl Ord for EdgeName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        if std::ptr::eq(self, other) {
            return std::cmp::Ordering::Equal;
        }
        (&self.source, &self.destination, &self.name).cmp(&(&other.source, &other.destination, &other.name))
    }
}

impl PartialOrd for EdgeName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Hash for EdgeName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Display for EdgeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {} '{}'", self.source, self.destination, self.name)
    }
}

impl fmt::Debug for EdgeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = "/job:w/replica:0/task:0/device:CPU:0";

    #[test]
    fn a_bad_name_is_quoted_as_it_was_given() {
        let text = |name: &str| EdgeName::new(DEVICE, DEVICE, name).expect_err("refused").to_string();
        assert_eq!(
            text("grad;w1"),
            "bad edge name \"grad;w1\": it has ';' at byte 4: neither ';' nor control characters are allowed"
        );
        assert_eq!(text(""), "bad edge name \"\": a name of 0 bytes: 1 to 2048 are allowed");
    }
}
