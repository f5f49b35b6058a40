//! The clusters of `tests/common`, with the `settings` of the part that includes this file.

use super::{settings, shared};
use tensorwire::{Builder, Node};

#[allow(dead_code)] // not every part makes single members
pub fn member(cluster: &str, task: u32) -> Builder {
    settings().iter().fold(shared::member(cluster, task), |builder, (key, value)| builder.set(*key, *value))
}

pub fn run(members: usize, settings: &[(&str, &str)], body: impl Fn(&Node, u32) + Send + Sync + 'static) {
    run_each(members, |_| settings.to_vec(), body);
}

pub fn run_each<'a>(
    members: usize,
    more: impl Fn(u32) -> Vec<(&'a str, &'a str)>,
    body: impl Fn(&Node, u32) + Send + Sync + 'static,
) {
    shared::run_each(members, |task| [settings(), &more(task)].concat(), body);
}

pub fn two_members(more: &[(&str, &str)]) -> [Node; 2] {
    shared::two_members(&[settings(), more].concat())
}
