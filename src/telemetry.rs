//! stub
#![allow(missing_docs)]
#[derive(Default)]
pub struct C;
impl C {
    pub fn add(&self, _: u64) {}
}
#[derive(Default)]
pub struct Counters {
    pub tensors_sent: C,
    pub tensors_received: C,
    pub bytes_sent: C,
    pub bytes_received: C,
    pub messages_sent: C,
    pub messages_received: C,
    pub writes_posted: C,
    pub loans_posted: C,
    pub immediates_received: C,
    pub meta_responses: C,
    pub re_requests: C,
    pub small_responses: C,
    pub cancels_sent: C,
    pub cancels_received: C,
    pub credits_published: C,
    pub stale_generations: C,
    pub late_values: C,
    pub pool_exhausted: C,
    pub requests_deferred: C,
    pub errors_sent: C,
    pub errors_received: C,
    pub peers_lost: C,
    pub polls: C,
    pub idle_polls: C,
}
