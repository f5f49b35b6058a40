//! The members of a launch: their names, hosts and addresses.

use super::environment::Master;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use tensorwire::{Cluster, HostPort, TaskId};

/// Jobs with the number of their tasks, in the order of their names. The setting `cluster` has them
/// in this order, and so has whoever finds the member of a rank in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSizes(Vec<(String, u32)>);

/// The most members.
const MAX_MEMBERS: u32 = 2048;

impl JobSizes {
    /// `tasks` tasks of a single job.
    pub fn of(job: &str, tasks: u32) -> Result<Self, String> {
        Self::checked(vec![(job.to_owned(), tasks)])
    }

    pub fn processes(&self) -> u32 {
        self.0.iter().map(|(_, tasks)| tasks).sum()
    }

    fn names(&self) -> Result<Vec<TaskId>, String> {
        let tasks = self.0.iter().flat_map(|(job, tasks)| (0..*tasks).map(move |task| (job, task)));
        tasks.map(|(job, task)| TaskId::new(job, task).map_err(|error| error.to_string())).collect()
    }

    fn checked(mut jobs: Vec<(String, u32)>) -> Result<Self, String> {
        jobs.sort();
        for (at, (job, tasks)) in jobs.iter().enumerate() {
            TaskId::new(job, 0).map_err(|error| error.to_string())?;
            if *tasks == 0 || *tasks > MAX_MEMBERS {
                return Err(format!("job {job} has {tasks} tasks: 1 to {MAX_MEMBERS} are allowed"));
            }
            if jobs[..at].iter().any(|(other, _)| other == job) {
                return Err(format!("job {job} is listed twice"));
            }
        }
        let sizes = JobSizes(jobs);
        match sizes.0.iter().map(|(_, tasks)| u64::from(*tasks)).sum::<u64>() {
            0 => Err("it has no job".into()),
            all if all > MAX_MEMBERS.into() => {
                Err(format!("{all} processes: at most {MAX_MEMBERS} are started"))
            }
            _ => Ok(sizes),
        }
    }
}

impl fmt::Display for JobSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        listed(f, &self.0, '=')
    }
}

fn listed(f: &mut fmt::Formatter<'_>, parts: &[(String, u32)], separator: char) -> fmt::Result {
    let parts = parts.iter().map(|(name, count)| format!("{name}{separator}{count}"));
    f.write_str(&parts.collect::<Vec<_>>().join(","))
}

impl FromStr for JobSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let job = |part: &str| {
            let (job, tasks) = part.split_once('=').ok_or_else(|| format!("`{part}` is not JOB=TASKS"))?;
            let tasks = tasks.parse().map_err(|_| format!("`{part}`: the number of tasks is no number"))?;
            Ok((job.to_owned(), tasks))
        };
        Self::checked(text.split(',').map(job).collect::<Result<_, String>>()?)
    }
}

/// Hosts with the number of their processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSlots(Vec<(String, u32)>);

impl HostSlots {
    pub fn processes(&self) -> u32 {
        self.0.iter().map(|(_, slots)| slots).sum()
    }

    /// How many processes the host of this `--host-rank` has.
    pub fn processes_of(&self, host: u32) -> Result<u32, String> {
        let found = self.0.get(host as usize).map(|(_, slots)| *slots);
        found.ok_or_else(|| format!("--host-rank {host}: --hosts has {} hosts, from 0 on", self.0.len()))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(host, _)| host.as_str())
    }

    /// The first host, at the port behind those of its processes.
    pub fn master(&self, base: u16) -> Result<Master, String> {
        let (host, slots) = &self.0[0];
        let address = address(host, base, *slots)?;
        Ok(Master { host: host.trim_matches(['[', ']']).to_owned(), port: address.port() })
    }
}

impl fmt::Display for HostSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        listed(f, &self.0, ':')
    }
}

impl FromStr for HostSlots {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let host = |part: &str| {
            let (host, slots) =
                part.rsplit_once(':').ok_or_else(|| format!("`{part}` is not HOST:PROCESSES"))?;
            let slots: u32 =
                slots.parse().map_err(|_| format!("`{part}`: the number of processes is no number"))?;
            if slots == 0 || slots > MAX_MEMBERS {
                return Err(format!("`{part}`: 1 to {MAX_MEMBERS} processes are allowed"));
            }
            // Tells whether it is a host.
            address(host, 1, 0)?;
            Ok((host.to_owned(), slots))
        };
        let hosts: Vec<(String, u32)> = text.split(',').map(host).collect::<Result<_, String>>()?;
        for (at, (host, _)) in hosts.iter().enumerate() {
            if hosts[..at].iter().any(|(other, _)| other == host) {
                return Err(format!("host {host} is listed twice"));
            }
        }
        Ok(HostSlots(hosts))
    }
}

fn address(host: &str, base: u16, number: u32) -> Result<HostPort, String> {
    let port = u32::from(base) + number;
    if port > u16::MAX.into() {
        return Err(format!("port {port} of {host} does not exist: choose a lower --port"));
    }
    format!("{host}:{port}").parse().map_err(|error| format!("host {host}: {error}"))
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub name: TaskId,
    pub address: HostPort,
    /// The number of its host.
    pub host: u32,
    /// Its number on that host.
    pub local_rank: u32,
}

/// All processes, in the order of their ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(pub Vec<Placed>);

impl Layout {
    /// One process for each address of this host.
    pub fn on_this_host(jobs: &JobSizes, addresses: &[SocketAddr]) -> Result<Self, String> {
        let place = |((name, address), local_rank): ((TaskId, &SocketAddr), u32)| {
            let address = HostPort::try_from(*address).map_err(|error| error.to_string())?;
            Ok(Placed { name, address, host: 0, local_rank })
        };
        let named = jobs.names()?.into_iter().zip(addresses).zip(0..);
        Ok(Layout(named.map(place).collect::<Result<_, String>>()?))
    }

    /// Fills one host after the other.
    pub fn on_hosts(jobs: &JobSizes, hosts: &HostSlots, base: u16) -> Result<Self, String> {
        let (processes, slots) = (jobs.processes(), hosts.processes());
        if processes != slots {
            return Err(format!("--jobs has {processes} processes, and --hosts has room for {slots}"));
        }
        let slots = (0..)
            .zip(&hosts.0)
            .flat_map(|(host, (name, slots))| (0..*slots).map(move |slot| (host, name, slot)));
        let place = |(name, (host, host_name, local_rank)): (TaskId, (u32, &String, u32))| {
            Ok(Placed { name, address: address(host_name, base, local_rank)?, host, local_rank })
        };
        Ok(Layout(jobs.names()?.into_iter().zip(slots).map(place).collect::<Result<_, String>>()?))
    }

    /// The setting `cluster`.
    pub fn cluster(&self) -> Result<Cluster, String> {
        let mut jobs: Vec<(String, Vec<HostPort>)> = Vec::new();
        for placed in &self.0 {
            match jobs.iter_mut().find(|(job, _)| job == placed.name.job()) {
                Some((_, tasks)) => tasks.push(placed.address.clone()),
                None => jobs.push((placed.name.job().to_owned(), vec![placed.address.clone()])),
            }
        }
        Cluster::new(jobs).map_err(|error| error.to_string())
    }
}

/// The first and the last port that the system gives to sockets that ask for any.
const PORTS_OF_SYSTEM: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// Addresses of this host, at which nobody may be able to listen.
pub fn any_addresses(count: usize) -> Vec<SocketAddr> {
    loopback_addresses(0).map(|address| (address, 1).into()).take(count).collect()
}

/// Addresses of this host with a free port each. The ports differ as long as there are enough: a
/// process that listens on all interfaces takes its port on all addresses.
///
/// The system gives none of these ports to sockets that ask for any. Links of a process that starts
/// before another one are such.
pub fn free_addresses(count: usize) -> std::io::Result<Vec<SocketAddr>> {
    let range = std::fs::read_to_string(PORTS_OF_SYSTEM).unwrap_or_default();
    let ports: Vec<u16> = ports_outside(&range).take(PORTS).collect();
    // Ports are bound only for the look, so launches look in places that they draw. In containers
    // that share a network they may have the same process id.
    let draw = || getrandom::u32().map_err(|error| std::io::Error::other(error.to_string()));
    let first = draw()? as usize % ports.len().max(1);
    let mut next = ports.iter().cycle().skip(first);
    let free_at = |address| {
        let mut bound = next.by_ref().take(ports.len());
        let free = bound.find_map(|port| TcpListener::bind((address, *port)).ok());
        free.map_or_else(|| TcpListener::bind((address, 0)), Ok)?.local_addr()
    };
    loopback_addresses(draw()?).take(count).map(free_at).collect()
}

/// The ports that launches use. Many services have ports below these.
const PORTS: usize = 16 * 1024;

/// An address for each process, so that each has all ports for its links. `draw` says the first
/// one. All of 127.0.0.0/8 is loopback.
fn loopback_addresses(draw: u32) -> impl Iterator<Item = Ipv4Addr> {
    let [_, a, b, c] = draw.to_be_bytes();
    let first = u32::from(Ipv4Addr::new(127, 128 | a & 63, b, c.max(1)));
    (first..).map(Ipv4Addr::from)
}

/// The ports outside a range in the form of [`PORTS_OF_SYSTEM`], without those of system services.
fn ports_outside(range: &str) -> impl Iterator<Item = u16> + use<> {
    let mut ends = range.split_whitespace().map_while(|end| end.parse().ok());
    // The kernel's usual range, if it does not tell.
    let (first, last) = (ends.next().unwrap_or(32_768), ends.next().unwrap_or(60_999));
    (1024..first).rev().chain((last..=u16::MAX).skip(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn refused<T: FromStr<Err = String> + std::fmt::Debug>(text: &str, part: &str) {
        let error = text.parse::<T>().unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }

    #[test]
    fn ranks_are_in_the_order_of_the_cluster() {
        let jobs: JobSizes = "worker=2,ps=1".parse().unwrap();
        let names: Vec<String> = jobs.names().unwrap().iter().map(TaskId::to_string).collect();
        assert_eq!((jobs.processes(), names.join(" ")), (3, "ps/0 worker/0 worker/1".into()));
        let on_hosts = Layout::on_hosts(&jobs, &"b:2,a:1".parse().unwrap(), 4000).unwrap();
        let here = Layout::on_this_host(&jobs, &free_addresses(3).unwrap()).unwrap();
        for layout in [on_hosts, here] {
            let cluster = layout.cluster().unwrap();
            let ranks = layout.0.iter().map(|placed| (placed.name.clone(), &placed.address));
            assert!(ranks.eq(cluster.members()), "{cluster}");
        }
        for (text, part) in [
            ("", "is not JOB=TASKS"),
            ("ps", "is not JOB=TASKS"),
            ("ps=0", "ps has 0 tasks"),
            ("ps=x", "no number"),
            ("ps=1,ps=2", "listed twice"),
            ("-=1", "job"),
            ("a=2000,b=2000", "4000 processes"),
            ("a=4294967295,b=4294967295", "tasks"),
        ] {
            refused::<JobSizes>(text, part);
        }
    }

    #[test]
    fn hosts_are_filled_one_after_the_other() {
        let hosts: HostSlots = "a.example:2,[::1]:1".parse().unwrap();
        let layout = Layout::on_hosts(&"ps=1,worker=2".parse().unwrap(), &hosts, 4000).unwrap();
        let cluster = layout.cluster().unwrap().to_string();
        assert_eq!(cluster, "ps=a.example:4000;worker=a.example:4001,[::1]:4000");
        assert_eq!(
            layout.0.iter().map(|at| (at.host, at.local_rank)).collect::<Vec<_>>(),
            [(0, 0), (0, 1), (1, 0)]
        );
        assert_eq!(hosts.master(4000).unwrap(), Master { host: "a.example".into(), port: 4002 });
        let error = Layout::on_hosts(&"worker=4".parse().unwrap(), &hosts, 4000).unwrap_err();
        assert!(error.contains("4 processes, and --hosts has room for 3"), "{error}");
        let error = Layout::on_hosts(&"worker=3".parse().unwrap(), &hosts, 65535).unwrap_err();
        assert!(error.contains("port 65536 of a.example does not exist"), "{error}");
        for (text, part) in [
            ("a", "is not HOST:PROCESSES"),
            ("a:0", "1 to 2048"),
            ("a:x", "no number"),
            ("a:1,a:2", "listed twice"),
            ("a b:1", "host a b"),
            (":1", "host "),
        ] {
            refused::<HostSlots>(text, part);
        }
    }

    #[test]
    fn free_addresses_are_different_and_on_the_loopback_interface() {
        let range = std::fs::read_to_string(PORTS_OF_SYSTEM).unwrap();
        let ends: Vec<u16> = range.split_whitespace().map(|end| end.parse().unwrap()).collect();
        let free = free_addresses(300).unwrap();
        assert!(any_addresses(300).iter().all(|any| any.ip().is_loopback()));
        for at in &free {
            assert!(at.ip().is_loopback(), "{at}");
            assert!(at.port() < ends[0] || at.port() > ends[1] || ends[0] < 1100, "{at} in {range}");
        }
        let ips: BTreeSet<_> = free.iter().map(SocketAddr::ip).collect();
        let ports: BTreeSet<_> = free.iter().map(SocketAddr::port).collect();
        assert_eq!((ips.len(), ports.len()), (300, 300));
        let layout = Layout::on_this_host(&JobSizes::of("w", 300).unwrap(), &free).unwrap();
        // It refuses an address that comes twice.
        assert_eq!(layout.cluster().unwrap().members().count(), 300);
    }

    /// As do two launches in containers that share a network, where both have the same process id.
    #[test]
    fn two_launches_of_one_process_id_choose_other_addresses() {
        let [one, other] = [(); 2].map(|()| BTreeSet::from_iter(free_addresses(3).unwrap()));
        assert!(one.is_disjoint(&other), "{one:?} and {other:?}");
    }

    #[test]
    fn ports_of_the_system_and_of_its_services_are_left_out() {
        let all = |range| ports_outside(range).collect::<Vec<_>>();
        assert_eq!(all("1026\t65533\n"), [1025, 1024, 65534, 65535]);
        assert!(all("1024 65535").is_empty());
        assert_eq!(all(""), all("32768 60999"));
        assert_eq!(all("32768 60999").len(), (32_768 - 1024) + (65_535 - 60_999));
    }
}
