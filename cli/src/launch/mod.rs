//! `tensorwire launch`: starts the processes of a cluster on this host.
//!
//! | file | content |
//! |---|---|
//! | `layout` | the members, their names, hosts and addresses |
//! | `environment` | the variables of each member |
//! | `member` | the step between the launcher and the program |
//! | `processes` | starting, waiting, ending |
//! | `groups` | what members have left behind |
//! | `output` | the lines that members write |
//! | `hosts` | what to type on each host |
//! | `plan` | what the processes need of the system |

mod environment;
mod groups;
mod hosts;
mod layout;
mod member;
mod output;
mod plan;
mod processes;

pub use member::{MemberArgs, become_program};

use crate::error::{CliError, print};
use environment::{CoreList, Master};
use layout::{HostSlots, JobSizes, Layout};
use std::ffi::OsString;
use std::time::Duration;

/// The first port of each of several hosts.
const FIRST_PORT: u16 = 29600;
/// Seconds until those that don't end are killed.
const GRACE: u64 = 5;

/// Starts processes of any program on this host as the members of a cluster.
///
/// Each finds its name, the cluster and its cores in its environment: TENSORWIRE_JOB,
/// TENSORWIRE_TASK, TENSORWIRE_CLUSTER, TENSORWIRE_CORES. Also RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Their output comes line by line, with the name in
/// front. When one fails, the others are ended. The exit status is that of the first one that
/// failed, or 128 and the number of the signal that has killed it. Ctrl-C and SIGTERM are passed
/// on; the second one kills. What members have started ends with them, if it is in their groups.
#[derive(clap::Args, Debug)]
pub struct LaunchArgs {
    /// Processes of this host
    #[arg(short = 'n', value_name = "N", required_unless_present_any = ["jobs", "hosts"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=2048), conflicts_with_all = ["jobs", "hosts"])]
    processes: Option<u32>,
    /// The job whose tasks they are
    #[arg(long, value_name = "NAME", default_value = "worker", conflicts_with = "jobs")]
    job: String,
    /// Several jobs with the number of their tasks, such as ps=1,worker=3. Ranks, and places on
    /// hosts, are given in the order of their names
    #[arg(long, value_name = "JOBS")]
    jobs: Option<JobSizes>,
    /// CPU cores such as 0,2-3, dealt out to the processes of this host in equal parts
    #[arg(long, value_name = "LIST")]
    cores: Option<CoreList>,
    /// Hosts with the number of their processes, such as a:4,b:4. Without --host-rank, prints what
    /// to type on each host
    #[arg(long, value_name = "HOSTS")]
    hosts: Option<HostSlots>,
    /// The number of this host in --hosts, from 0 on
    #[arg(long, value_name = "K", requires = "hosts", conflicts_with = "processes")]
    host_rank: Option<u32>,
    /// With --hosts: the first port on each host. A process uses this port and its number on the
    /// host; MASTER_PORT follows on them
    #[arg(long, value_name = "PORT", default_value_t = FIRST_PORT, requires = "hosts")]
    #[arg(conflicts_with = "processes")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Seconds between the request to end and the kill, when a process has failed
    #[arg(long, value_name = "SECONDS", default_value_t = GRACE)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=3600))]
    grace: u64,
    /// Print what each process needs of the system, and the limits of this one, instead of starting
    /// the program. Exit status 1 if a limit is too low
    #[arg(long)]
    plan: bool,
    /// The program and its arguments
    #[arg(last = true, required_unless_present = "plan", value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Starts the processes, and waits for them.
pub fn run(args: LaunchArgs) -> Result<(), CliError> {
    let jobs = |count| match args.jobs.clone() {
        Some(jobs) => Ok(jobs),
        None => JobSizes::of(&args.job, count).map_err(CliError::Usage),
    };
    let (layout, host, master) = match &args.hosts {
        Some(hosts) => {
            if args.plan && args.host_rank.is_none() {
                let what = "--plan compares the need with the limits of one host: run it on each host, with \
                            its number: --host-rank 0, 1 ...";
                return Err(CliError::Usage(what.into()));
            }
            let layout =
                Layout::on_hosts(&jobs(hosts.processes())?, hosts, args.port).map_err(CliError::Usage)?;
            let Some(host) = args.host_rank else { return print(&hosts::commands(&args, hosts)) };
            if host as usize >= hosts.count() {
                let what = format!("--host-rank {host}: --hosts has {} hosts, from 0 on", hosts.count());
                return Err(CliError::Usage(what));
            }
            (layout, host, hosts.master(args.port).map_err(CliError::Usage)?)
        }
        None => {
            let jobs = jobs(args.processes.unwrap_or(1))?;
            let ports = layout::free_ports(jobs.processes() as usize + 1)
                .map_err(|error| CliError::failed("looking for free ports", error))?;
            // One more than there are processes.
            let (of_master, ports) =
                ports.split_first().ok_or_else(|| CliError::Usage("no process".into()))?;
            let master = Master { host: of_master.ip().to_string(), port: of_master.port() };
            (Layout::on_this_host(&jobs, ports).map_err(CliError::Usage)?, 0, master)
        }
    };
    let members =
        environment::members(&layout, host, args.cores.as_ref(), &master).map_err(CliError::Usage)?;
    if args.plan {
        return plan::show(&members);
    }
    processes::run(&members, &args.command, Duration::from_secs(args.grace))
}
