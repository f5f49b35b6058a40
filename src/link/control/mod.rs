//! The control queue of a link: messages in order, under credits, in batches and in fragments.

pub(super) mod batch;
pub(super) mod dispatch;
pub(super) mod send_queue;
pub(super) mod texts;
