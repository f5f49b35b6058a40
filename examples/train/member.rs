//! The processes of a run, and their messages to and from the process that started them.
//!
//! A message is a line of JSON on the standard input or output of the child.

use crate::exchange::Traffic;
use crate::plan::Plan;
use crate::worker::{Outcome, Progress};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Job {
    /// Owns parameters.
    Server,
    /// Computes gradients.
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
    /// Its role.
    pub job: Job,
    /// Its number among the processes of the same role.
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

/// The first line that a child reads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// The role and number of the child.
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
    /// The `poll` setting.
    pub poll: String,
    /// The `fabric` setting.
    pub fabric: String,
    /// Whether edges have standing requests.
    pub standing: bool,
    /// The RDMA device to use.
    pub device: Option<String>,
    /// The secret of the cluster, if it is on several hosts.
    pub secret_file: Option<PathBuf>,
    /// The process that started it. The child ends with it.
    pub parent: u32,
}

/// The second and last line that a child reads: all processes are done.
pub const FINISH: &str = "finish";

impl Assignment {
    /// The `cluster` setting: all members and their addresses.
    pub fn cluster(&self) -> String {
        let (servers, workers) = (self.servers.join(","), self.workers.join(","));
        format!("{}={servers};{}={workers}", Job::Server.name(), Job::Worker.name())
    }
}

/// The lines that a child writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// The progress of the run; from worker 0 only.
    Progress(Progress),
    /// It has joined all others.
    Joined,
    /// All steps are done. Peers may still need its tensors, so it waits for [`FINISH`].
    Done,
    /// The last message after success.
    Summary {
        /// The results of a worker; `None` of a server.
        outcome: Option<Outcome>,
        /// The traffic of the process.
        traffic: Traffic,
    },
    /// The last message after a failure.
    Failed {
        /// The error, on one line.
        error: String,
    },
}
