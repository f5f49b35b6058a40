//! From settings to a node that runs.

use super::error::NodeError;
use super::process::Node;
use crate::config::{Builder, Config};

/// Collects the settings of a [`Node`], by the names that `tensorwire config` lists.
#[derive(Default)]
#[must_use]
pub struct NodeBuilder {
    settings: Builder,
}

impl NodeBuilder {
    pub(super) fn new() -> Self {
        NodeBuilder { settings: Config::builder() }
    }

    /// Which task of the cluster this process is.
    pub fn member(mut self, job: &str, task: u32) -> Self {
        self.settings = self.settings.member(job, task);
        self
    }

    /// Sets a key to what the text says, as in a file or a variable: `("cluster",
    /// "ps=127.0.0.1:4000;worker=127.0.0.1:5000")`. What is wrong with it comes out at [`NodeBuilder::start`].
    pub fn set(mut self, key: &str, value: impl Into<String>) -> Self {
        self.settings = self.settings.set(key, value);
        self
    }

    /// Reads settings from a TOML file too; what is set here wins over it.
    pub fn file(mut self, path: impl Into<std::path::PathBuf>) -> Self {
        self.settings = self.settings.file(path);
        self
    }

    /// Does not read `TENSORWIRE_*` variables.
    pub fn without_environment(mut self) -> Self {
        self.settings = self.settings.without_environment();
        self
    }

    /// Checks the settings, makes the pool, and starts to listen for the other members.
    ///
    /// # Errors
    /// If a setting is wrong, or what it asks for can't be had.
    pub fn start(self) -> Result<Node, NodeError> {
        Node::start(&self.settings.build()?)
    }
}
