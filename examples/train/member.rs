//! The processes of a run, and what they and the one that started them say to each other.
//!
//! All of it is JSON, a message on a line, through the standard input and output of the child.

use crate::exchange::Traffic;
use crate::plan::Plan;
use crate::worker::{Outcome, Progress};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Job {
    /// Owns parameters.
    Server,
    /// Works out gradients.
    Worker,
}

impl Job {
    /// The name of the job in the cluster.
    pub fn name(self) -> &'static str {
        match self {
            Job::Server => "ps",
            Job::Worker => "worker",
        }
    }
}

/// One process of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// What it does.
    pub job: Job,
    /// Its number among those that do the same.
    pub task: usize,
}

impl Member {
    /// All processes of a plan: servers first.
    pub fn all(plan: &Plan) -> Vec<Member> {
        let servers = (0..plan.servers).map(|task| Member { job: Job::Server, task });
        servers.chain((0..plan.workers).map(|task| Member { job: Job::Worker, task })).collect()
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job.name(), self.task)
    }
}

/// The first line that a child reads: all that it must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Which process it is.
    pub member: Member,
    /// The run.
    pub plan: Plan,
    /// Where each server listens, as `address:port`.
    pub servers: Vec<String>,
    /// Where each worker listens.
    pub workers: Vec<String>,
    /// Bytes of memory to register.
    pub pool_bytes: u64,
    /// The core to run on.
    pub core: Option<usize>,
    /// Who makes progress.
    pub poll: String,
    /// What moves the bytes.
    pub fabric: String,
    /// Whether it asks for tensors in advance.
    pub standing: bool,
    /// The RDMA device to use.
    pub device: Option<String>,
    /// The process that started it: without that it must not live on.
    pub parent: u32,
}

/// The second and last line that a child reads: everyone is done, so nobody needs anything of anyone any more.
pub const FINISH: &str = "finish";

impl Assignment {
    /// All members and their addresses, as the engine's `cluster` setting has them.
    pub fn cluster(&self) -> String {
        let (servers, workers) = (self.servers.join(","), self.workers.join(","));
        format!("{}={servers};{}={workers}", Job::Server.name(), Job::Worker.name())
    }
}

/// The lines that a child writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// How far the run is; from worker 0 only.
    Progress(Progress),
    /// All steps are done. What it sent may still be on its way, so it waits for [`FINISH`].
    Done,
    /// The last message of a run that went well.
    Summary {
        /// From workers only.
        outcome: Option<Outcome>,
        /// What it moved.
        traffic: Traffic,
    },
    /// The last message of a run that did not.
    Failed {
        /// What happened.
        error: String,
    },
}
