//! A program: a seed, settings, and a list of actions. Any part of the list is a program too.

use std::fmt;
use tensorwire::internals::matching::WINDOWS;
use tensorwire::internals::protocol::WindowOptions;
use tensorwire::{DType, Shape, TensorMeta};

/// The number of a process.
pub type At = usize;

/// Number of edge names.
pub const NAMES: u64 = 3;
/// Number of steps; the upper half belongs to a sequence.
pub const STEPS: u64 = 6;

#[derive(Clone, Debug)]
pub struct Program {
    /// Seeds the network, and the order in which processes poll.
    pub seed: u64,
    pub settings: Settings,
    pub actions: Vec<Action>,
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub processes: usize,
    pub depth: u32,
    pub small_tensor_bytes: u32,
    pub max_requests: u32,
    pub max_outstanding_sends: u32,
    pub pool_bytes: u64,
    pub borrow: bool,
    /// Whether the loss of a peer ends all calls.
    pub loss_is_fatal: bool,
    pub lends: bool,
    /// Bytes of the longest message of the fabric.
    pub max_message: usize,
    /// Bytes that a process lends at a time.
    pub max_lent_bytes: u64,
    /// Default timeout of receives, in us.
    pub recv_timeout: u64,
    /// In microseconds.
    pub cancel_grace: u64,
    /// The longest delay of the network, in us.
    pub delay: u64,
    /// Largest number of completions of one poll.
    pub poll_batch: usize,
    /// The longest delay between the arrival of an operation and its local completion, in us.
    pub completion_delay: u64,
    /// How often a post finds the queue full, per thousand.
    pub full_per_mille: u32,
    /// One bit for each process that validates.
    pub validating: u32,
    /// How often a bit flips on the way to one of these, per thousand tensors.
    pub flip_per_mille: u32,
    pub windows: WindowOptions,
}

impl Settings {
    /// Whether no program can exhaust the pool.
    pub fn is_roomy(&self) -> bool {
        self.pool_bytes >= ROOMY
    }

    /// Whether each edge has a number. Otherwise a receive may keep others from their values: an
    /// edge that waits or has waited for a value keeps its number until the step ends.
    pub fn numbers_all_edges(&self) -> bool {
        self.windows.max_edges >= WINDOWS.max_edges
    }

    /// Whether a process validates.
    pub fn validates(&self, at: At) -> bool {
        self.validating >> at & 1 == 1
    }
}

/// A pool that no program fills.
pub const ROOMY: u64 = 2 << 20;
/// A limit that no program reaches.
pub const UNLIMITED: u32 = 512;

/// The key under which a tensor is sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub from: At,
    pub to: At,
    pub name: u64,
    pub step: u64,
    pub frame: u64,
}

impl Key {
    pub fn is_local(&self) -> bool {
        self.from == self.to
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { from, to, name, step, frame } = self;
        write!(f, "{from}->{to} e{name} step {step} frame {frame}")
    }
}

/// The device of a process.
pub fn device(at: At) -> String {
    format!("/job:w/replica:0/task:{at}/device:CPU:0")
}

/// The last name is so long that its messages travel in fragments.
pub fn edge_name(name: u64) -> String {
    let length = if name + 1 == NAMES { 600 } else { 1 };
    format!("e{}{name}", "_".repeat(length))
}

/// Unrelated ids; those of the upper half belong to a sequence.
pub fn step_id(step: u64) -> u64 {
    match step.checked_sub(STEPS / 2) {
        None => 1 + step * 7919,
        Some(nth) => SEQUENCE + nth,
    }
}

/// The base of the sequence.
pub const SEQUENCE: u64 = 1 << 40;

/// An element type and a shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    pub dtype: DType,
    pub dims: Vec<u64>,
    /// Bytes of the serialised form, for types that have one.
    pub serialized: u64,
}

impl Form {
    pub fn meta(&self) -> TensorMeta {
        let shape = Shape::new(&self.dims).expect("a shape");
        let meta = match self.dtype.size() {
            Some(_) => TensorMeta::new(self.dtype, shape),
            None => TensorMeta::serialized(self.dtype, shape, self.serialized),
        };
        meta.expect("a size")
    }
}

/// How the user of a receive gets its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveKind {
    /// From a handle.
    Pending,
    /// By a callback.
    Callback,
    /// From a call that waits for it.
    Direct,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Begin {
        at: At,
        step: u64,
    },
    /// Makes a standing request for an edge. The step of the key is ignored.
    Stand {
        key: Key,
        window: u32,
    },
    /// Sets the window of the `nth` standing request.
    Window {
        nth: usize,
        window: u32,
    },
    /// Drops the `nth` standing request.
    Unstand {
        nth: usize,
    },
    Send {
        key: Key,
        /// `None` for a dead value.
        form: Option<Form>,
    },
    /// Sends values of one process and one step by one call.
    SendAll {
        values: Vec<(Key, Option<Form>)>,
    },
    /// Receives values of one process and one step by one call.
    ReceiveAll {
        keys: Vec<Key>,
        /// In microseconds.
        timeout: u64,
    },
    /// Waits for values of one process and one step by one call.
    WaitForAll {
        keys: Vec<Key>,
        /// One form for each key, or none.
        into: Vec<Form>,
        /// In microseconds.
        timeout: u64,
    },
    Receive {
        key: Key,
        into: Option<Form>,
        /// In microseconds; `None` for the default.
        timeout: Option<u64>,
        kind: ReceiveKind,
    },
    /// Cancels the `nth` open call.
    Cancel {
        nth: usize,
    },
    /// Drops the `nth` open call without a callback.
    DropPending {
        nth: usize,
    },
    /// Drops the `nth` held tensor.
    Release {
        nth: usize,
    },
    Abort {
        at: At,
        step: u64,
    },
    /// Aborts a step of the sequence and all later ones.
    AbortFrom {
        at: At,
        step: u64,
    },
    Cleanup {
        at: At,
        step: u64,
    },
    /// Asks which values were not taken, and does not wait for the answers.
    Flush {
        at: At,
    },
    Progress {
        at: At,
        times: u32,
    },
    /// Random processes poll, and the time advances from event to event.
    Run {
        rounds: u32,
    },
    /// In microseconds; no process polls meanwhile.
    Advance {
        time: u64,
    },
    Kill {
        at: At,
        /// Time after which the bootstrap service reports the death, in us.
        told: Option<u64>,
    },
    /// A clean stop.
    Leave {
        at: At,
    },
    Return {
        at: At,
    },
    Cut {
        a: At,
        b: At,
    },
    Stall {
        at: At,
        time: u64,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Begin { at, step } => write!(f, "{at} begins step {step}"),
            Action::Stand { key, window } => {
                write!(f, "{key} and later steps get standing requests, window {window}")
            }
            Action::Window { nth, window } => write!(f, "standing request #{nth} gets window {window}"),
            Action::Unstand { nth } => write!(f, "standing request #{nth} ends"),
            Action::Send { key, form: Some(form) } => write!(f, "send {key}: {form}"),
            Action::Send { key, form: None } => write!(f, "send {key}: dead"),
            Action::SendAll { values } => {
                write!(f, "send at once")?;
                values.iter().try_for_each(|(key, form)| match form {
                    Some(form) => write!(f, ", {key}: {form}"),
                    None => write!(f, ", {key}: dead"),
                })
            }
            Action::ReceiveAll { keys, timeout } => {
                write!(f, "receive at once within {timeout} us")?;
                keys.iter().try_for_each(|key| write!(f, ", {key}"))
            }
            Action::WaitForAll { keys, into, timeout } => {
                write!(f, "wait for {timeout} us")?;
                keys.iter().try_for_each(|key| write!(f, ", {key}"))?;
                into.iter().try_for_each(|form| write!(f, ", into {form}"))
            }
            Action::Receive { key, into, timeout, kind } => {
                write!(f, "receive {key}")?;
                if let Some(into) = into {
                    write!(f, " into {into}")?;
                }
                if let Some(timeout) = timeout {
                    write!(f, " within {timeout} us")?;
                }
                f.write_str(match kind {
                    ReceiveKind::Pending => "",
                    ReceiveKind::Callback => ", called back",
                    ReceiveKind::Direct => ", directly",
                })
            }
            Action::Cancel { nth } => write!(f, "cancel #{nth}"),
            Action::DropPending { nth } => write!(f, "drop pending #{nth}"),
            Action::Release { nth } => write!(f, "release tensor #{nth}"),
            Action::Abort { at, step } => write!(f, "{at} aborts step {step}"),
            Action::AbortFrom { at, step } => write!(f, "{at} aborts the sequence from step {step} on"),
            Action::Cleanup { at, step } => write!(f, "{at} cleans step {step} up"),
            Action::Flush { at } => write!(f, "{at} flushes"),
            Action::Progress { at, times } => write!(f, "{at} makes progress {times} times"),
            Action::Run { rounds } => write!(f, "run {rounds} rounds"),
            Action::Advance { time } => write!(f, "{time} us go by"),
            Action::Kill { at, told: Some(told) } => write!(f, "{at} dies, which is told after {told} us"),
            Action::Kill { at, told: None } => write!(f, "{at} dies"),
            Action::Leave { at } => write!(f, "{at} leaves"),
            Action::Return { at } => write!(f, "{at} comes back"),
            Action::Cut { a, b } => write!(f, "the link {a}-{b} is cut"),
            Action::Stall { at, time } => write!(f, "{at} is stalled for {time} us"),
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.meta().fmt(f)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, {:?}", self.seed, self.settings)?;
        self.actions.iter().enumerate().try_for_each(|(at, action)| writeln!(f, "{at:4}  {action}"))
    }
}
