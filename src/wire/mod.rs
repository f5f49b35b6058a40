//! Plain data: names, element types, shapes, statuses, and the layout of messages between peers.
//!
//! Nothing here behaves: no I/O but for the number of this process's user, no clock, no memory
//! management. Everything that reads a peer's
//! bytes lives here, is length-checked term by term, and returns an error rather than panicking.

mod checksum;
mod cluster;
mod dtype;
mod edge;
mod edge_id;
mod generation;
mod grant;
mod immediate;
mod incarnation;
mod key;
mod lack;
mod loss;
pub mod message;
mod shape;
mod short_message;
mod source;
mod status;
mod step_id;
mod text;
mod time;
mod user;

pub use checksum::checksum_of;
pub use cluster::{
    Cluster, ClusterError, HostPort, HostPortError, JobError, MAX_CLUSTER_TEXT, MAX_JOB, TaskId, TaskIdError,
};
pub use dtype::{DType, Element};
pub use edge::{EdgeName, EdgeNameError, EdgeSide};
pub use edge_id::EdgeId;
pub use generation::Generation;
pub use grant::Grant;
pub use immediate::{Immediate, ImmediateError, Slot};
pub use incarnation::Incarnation;
pub use key::{DeviceName, DeviceNameError, KeyError, KeyPart, MAX_NAME, RendezvousKey};
pub use lack::is_lack;
pub(crate) use lack::{LACK_REMEDY, LACKS};
pub use loss::LossCause;
pub(crate) use shape::MAX_INLINE_RANK;
pub use shape::{MAX_DIM, MAX_RANK, Shape, ShapeError, TensorMeta};
pub use short_message::{SHORT_MESSAGE, SHORT_WORDS, ShortMessage, UnreadMessage};
pub use source::source_of;
pub use status::{Code, Status};
pub use step_id::StepId;
pub(crate) use text::quote;
pub use text::shorten;
pub use time::{AtomicTime, Time};
pub(crate) use user::own_user;
