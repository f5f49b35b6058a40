//! `tensorwire launch`: starts the processes of a cluster on this host.
//!
//! | file | content |
//! |---|---|
//! | `layout` | the members, their names, hosts and addresses |
//! | `environment` | the variables of each member |
//! | `member` | the step between the launcher and the program |
//! | `descriptors` | what the launcher itself needs of the system |
//! | `processes` | starting, waiting, ending |
//! | `groups` | what members have left behind |
//! | `output` | the lines that members write |
//! | `hosts` | what to type on each host |
//! | `plan` | what the processes need of the system |

mod descriptors;
mod environment;
mod groups;
mod hosts;
mod layout;
mod member;
mod output;
mod plan;
mod processes;

pub use member::{MemberArgs, become_program, tied};

use crate::error::{CliError, print};
use environment::{CoreList, Master};
use layout::{HostSlots, JobSizes, Layout};
use std::ffi::OsString;
use std::time::Duration;

/// The first port of each of several hosts.
const FIRST_PORT: u16 = 29600;
/// Seconds until those that don't end are killed.
const GRACE: u64 = 30;

/// Starts processes of any program on this host as the members of a cluster.
///
/// Each finds its name, the cluster and its cores in its environment: TENSORWIRE_JOB,
/// TENSORWIRE_TASK, TENSORWIRE_CLUSTER, TENSORWIRE_CORES. Also RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Their output comes line by line, with the name in
/// front. When one fails, the others are ended. The exit status is that of the first one that
/// failed, or 128 and the number of the signal that has killed it. Ctrl-C, SIGTERM, SIGHUP and
/// SIGQUIT are passed on; the second one kills, and so does the end of --grace. SIGUSR1 and SIGUSR2
/// are passed on, and end nothing. What members have started ends with them, if it is in their
/// groups.
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
    /// Seconds until what runs is killed, after a process has failed or a signal was passed on
    #[arg(long, value_name = "SECONDS", default_value_t = GRACE)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=3600))]
    grace: u64,
    /// Each process tells on standard error which fabric it uses to each other one, and why
    #[arg(long)]
    paths: bool,
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
    let jobs = match (&args.jobs, &args.hosts) {
        (Some(jobs), _) => Ok(jobs.clone()),
        (None, Some(hosts)) => JobSizes::of(&args.job, hosts.processes()),
        (None, None) => JobSizes::of(&args.job, args.processes.unwrap_or(1)),
    };
    let jobs = jobs.map_err(CliError::Usage)?;
    let here = match (&args.hosts, args.host_rank) {
        (Some(hosts), Some(host)) => hosts.processes_of(host).map_err(CliError::Usage)?,
        (Some(hosts), None) => return show_commands(&args, &jobs, hosts),
        (None, _) => jobs.processes(),
    };
    if !args.plan {
        descriptors::check(here)?;
    }
    let (layout, master) = match &args.hosts {
        Some(hosts) => on_hosts(&jobs, hosts, args.port).map_err(CliError::Usage)?,
        None => on_this_host(&jobs, args.plan)?,
    };
    let host = args.host_rank.unwrap_or(0);
    let mut members =
        environment::members(&layout, host, args.cores.as_ref(), &master).map_err(CliError::Usage)?;
    if args.paths {
        let printing = || (environment::PRINT_PATHS, "true".to_owned());
        members.iter_mut().for_each(|member| member.variables.push(printing()));
    }
    if args.plan {
        plan::show(&members)?;
        return descriptors::check(here);
    }
    processes::run(&members, &args.command, Duration::from_secs(args.grace))
}

/// Prints what to type on each of several hosts.
fn show_commands(args: &LaunchArgs, jobs: &JobSizes, hosts: &HostSlots) -> Result<(), CliError> {
    if args.plan {
        let what = "--plan compares the need with the limits of one host: run it on each host, with its \
                    number: --host-rank 0, 1 ...";
        return Err(CliError::Usage(what.into()));
    }
    if let Some(word) = args.command.iter().find(|word| word.to_str().is_none()) {
        let what = format!(
            "the word {word:?} of the program's command is no UTF-8, so it can't be printed for other hosts"
        );
        return Err(CliError::Usage(what));
    }
    on_hosts(jobs, hosts, args.port).map_err(CliError::Usage)?;
    let settings = hosts::RepeatedSettings::of(args, std::env::vars_os()).map_err(CliError::Usage)?;
    print(&hosts::commands(args, hosts, &settings))
}

fn on_hosts(jobs: &JobSizes, hosts: &HostSlots, port: u16) -> Result<(Layout, Master), String> {
    Ok((Layout::on_hosts(jobs, hosts, port)?, hosts.master(port)?))
}

/// A plan opens nothing, so its ports are not looked for.
fn on_this_host(jobs: &JobSizes, is_plan: bool) -> Result<(Layout, Master), CliError> {
    // One more than there are processes.
    let count = jobs.processes() as usize + 1;
    let addresses = match is_plan {
        true => layout::any_addresses(count),
        false => layout::free_addresses(count)
            .map_err(|error| CliError::failed("looking for free ports", error))?,
    };
    let (master, addresses) = addresses.split_first().ok_or_else(|| CliError::Usage("no process".into()))?;
    let at = Master { host: master.ip().to_string(), port: master.port() };
    Ok((Layout::on_this_host(jobs, addresses).map_err(CliError::Usage)?, at))
}
