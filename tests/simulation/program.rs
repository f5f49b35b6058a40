//! What is run: a seed, settings, and a list of actions of which any part is a program too.

use std::fmt;
use tensorwire::{DType, Shape, TensorMeta};

/// A process, by its number.
pub type At = usize;

/// Names that edges have.
pub const NAMES: u64 = 3;
/// Steps that there are; the upper half belongs to a sequence.
pub const STEPS: u64 = 6;

#[derive(Clone, Debug)]
pub struct Program {
    /// The network's, and the order's in which processes make progress.
    pub seed: u64,
    pub settings: Settings,
    pub actions: Vec<Action>,
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub processes: usize,
    pub depth: u32,
    pub lanes: u8,
    pub small_tensor_bytes: u32,
    pub max_requests: u32,
    pub max_routes: u32,
    pub max_deferred: u32,
    pub max_outstanding_sends: u32,
    pub pool_bytes: u64,
    pub borrow: bool,
    /// Whether the loss of a peer ends everything.
    pub loss_is_fatal: bool,
    pub lends: bool,
    /// How much a process lends at a time, in bytes.
    pub max_lent_bytes: u64,
    /// How long receives wait that don't say, in us.
    pub recv_timeout: u64,
    /// In us.
    pub cancel_grace: u64,
    /// The longest way through the network, in us.
    pub delay: u64,
    /// How much a poll brings at most.
    pub poll_batch: usize,
    /// How long after its arrival an operation completes at most, in us.
    pub completion_delay: u64,
    /// How often posting finds the queue full, in a thousand.
    pub full_per_mille: u32,
    /// A bit for each process that validates what it receives.
    pub validating: u32,
    /// How often a bit flips on the way to one of them, in a thousand tensors.
    pub flip_per_mille: u32,
}

impl Settings {
    /// Whether the pool never runs out of room, whatever a program does.
    pub fn is_roomy(&self) -> bool {
        self.pool_bytes >= ROOMY
    }

    /// Whether a process validates.
    pub fn validates(&self, at: At) -> bool {
        self.validating >> at & 1 == 1
    }

    /// Whether no limit is ever reached, whatever a program does.
    pub fn is_unlimited(&self) -> bool {
        self.max_requests >= UNLIMITED && self.max_routes >= UNLIMITED
    }
}

/// A pool that no program fills.
pub const ROOMY: u64 = 2 << 20;
/// A limit that no program reaches.
pub const UNLIMITED: u32 = 512;

/// What a tensor is sent and received under.
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Begin {
        at: At,
        step: u64,
    },
    /// The tensors of an edge are to be asked for in advance; the key's step does not count.
    Stand {
        key: Key,
        window: u32,
    },
    /// So many steps in advance, for the `nth` such edge.
    Window {
        nth: usize,
        window: u32,
    },
    /// Not any more, for the `nth` such edge.
    Unstand {
        nth: usize,
    },
    Send {
        key: Key,
        /// `None` for a dead value.
        form: Option<Form>,
    },
    /// All of one process and one step, by one call.
    SendAll {
        values: Vec<(Key, Option<Form>)>,
    },
    /// The same.
    ReceiveAll {
        keys: Vec<Key>,
        /// In us.
        timeout: u64,
    },
    Receive {
        key: Key,
        into: Option<Form>,
        /// In us; `None` for the usual one.
        timeout: Option<u64>,
        called_back: bool,
    },
    /// Of the `nth` call that is open.
    Cancel {
        nth: usize,
    },
    /// Of the `nth` call without a callback that is open.
    DropPending {
        nth: usize,
    },
    /// Of the `nth` tensor that is held.
    Release {
        nth: usize,
    },
    Abort {
        at: At,
        step: u64,
    },
    Cleanup {
        at: At,
        step: u64,
    },
    Progress {
        at: At,
        times: u32,
    },
    /// Progress of random processes, and the time goes on from event to event.
    Run {
        rounds: u32,
    },
    /// In us; nobody makes progress meanwhile.
    Advance {
        time: u64,
    },
    Kill {
        at: At,
        /// When the others hear of it by another way than the fabric, in us.
        told: Option<u64>,
    },
    /// As it should: everything is closed.
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
                write!(f, "{key} and later steps are asked for, {window} in advance")
            }
            Action::Window { nth, window } => write!(f, "of standing #{nth} {window} in advance"),
            Action::Unstand { nth } => write!(f, "standing #{nth} ends"),
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
            Action::Receive { key, into, timeout, called_back } => {
                write!(f, "receive {key}")?;
                if let Some(into) = into {
                    write!(f, " into {into}")?;
                }
                if let Some(timeout) = timeout {
                    write!(f, " within {timeout} us")?;
                }
                f.write_str(if *called_back { ", called back" } else { "" })
            }
            Action::Cancel { nth } => write!(f, "cancel #{nth}"),
            Action::DropPending { nth } => write!(f, "drop pending #{nth}"),
            Action::Release { nth } => write!(f, "release tensor #{nth}"),
            Action::Abort { at, step } => write!(f, "{at} aborts step {step}"),
            Action::Cleanup { at, step } => write!(f, "{at} cleans step {step} up"),
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
