//! The variables in which a member finds who it is.

use super::layout::{Layout, Placed};
use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use tensorwire::TaskId;

/// Where programs meet that read MASTER_ADDR and MASTER_PORT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    pub host: String,
    pub port: u16,
}

/// CPU cores, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreList(Vec<usize>);

/// The highest core.
const MAX_CORE: usize = 1023;

impl FromStr for CoreList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|core| *core <= MAX_CORE);
        let part = |part: &str| -> Option<RangeInclusive<usize>> {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            number(first).zip(number(last)).filter(|(first, last)| first <= last).map(|(a, b)| a..=b)
        };
        let mut cores = Vec::new();
        for text in text.split(',') {
            let range = part(text)
                .ok_or_else(|| format!("`{text}` is not a core or a range of cores, such as 0 or 2-3"))?;
            cores.extend(range);
        }
        Ok(CoreList(cores))
    }
}

impl fmt::Display for CoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
    }
}

impl CoreList {
    /// The cores of one of `processes`: an equal part, or one core that several share.
    fn of(&self, process: usize, processes: usize) -> Result<String, String> {
        let cores = self.0.len();
        if cores > processes && !cores.is_multiple_of(processes) {
            return Err(format!("--cores: {cores} cores for {processes} processes: give each as many"));
        }
        let each = (cores / processes).max(1);
        let mine = (0..each).map(|number| self.0[(process * each + number) % cores].to_string());
        Ok(mine.collect::<Vec<_>>().join(","))
    }
}

/// A process that is to be started here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    pub name: TaskId,
    /// What it finds in its environment beside what the launcher has in its own.
    pub variables: Vec<(&'static str, String)>,
}

pub const BIND: &str = "TENSORWIRE_BIND";
pub const CORES: &str = "TENSORWIRE_CORES";
pub const PRINT_PATHS: &str = "TENSORWIRE_PRINT_PATHS";

/// Variables of the launcher's own environment that would contradict those of a member. A `*`
/// stands for any end. Another launcher that has started this one sets most of them.
const CONTRADICTING: [&str; 22] = [
    BIND,
    "TENSORWIRE_STORE",
    "TENSORWIRE_WORLD_SIZE",
    // With TORCHELASTIC_USE_AGENT_STORE a program of PyTorch waits for a store that nobody serves.
    "TORCHELASTIC_*",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "OMPI_COMM_WORLD_*",
    "PMI_*",
    "PMIX_ID",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_SERVER_*",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    // The other variables of Slurm are about the whole allocation.
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
];

/// What a member has of the launcher's own environment.
pub fn inherited() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| !contradicts(name.as_encoded_bytes()))
}

/// Where the only process of one of several hosts listens, if that is not its address in the
/// cluster: behind a forwarded port. Several processes can't share it, and nobody knows a port that
/// the system chooses.
fn bind_of_one() -> Option<String> {
    let bind = std::env::var(BIND).ok()?;
    let is_any_port = bind.parse().is_ok_and(|address: SocketAddr| address.port() == 0);
    (!is_any_port).then_some(bind)
}

/// Whether each member has this variable from the launcher, or from nobody.
pub fn is_of_members(name: &str) -> bool {
    matches!(name, "TENSORWIRE_JOB" | "TENSORWIRE_TASK" | "TENSORWIRE_CLUSTER")
        || contradicts(name.as_bytes())
}

fn contradicts(name: &[u8]) -> bool {
    CONTRADICTING.iter().any(|pattern| match pattern.strip_suffix('*') {
        Some(begin) => name.starts_with(begin.as_bytes()),
        None => name == pattern.as_bytes(),
    })
}

/// The processes of one host.
pub fn members(
    layout: &Layout,
    host: u32,
    cores: Option<&CoreList>,
    master: &Master,
) -> Result<Vec<Launched>, String> {
    let cluster = layout.cluster()?.to_string();
    let size = layout.0.len().to_string();
    let here: Vec<(usize, &Placed)> = layout.0.iter().enumerate().filter(|(_, at)| at.host == host).collect();
    let member = |(rank, at): &(usize, &Placed)| {
        let mut variables = vec![
            ("TENSORWIRE_JOB", at.name.job().to_owned()),
            ("TENSORWIRE_TASK", at.name.task().to_string()),
            ("TENSORWIRE_CLUSTER", cluster.clone()),
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.clone()),
            ("LOCAL_RANK", at.local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", here.len().to_string()),
            ("MASTER_ADDR", master.host.clone()),
            ("MASTER_PORT", master.port.to_string()),
        ];
        if let (1, true, Some(bind)) = (here.len(), layout.0.len() > 1, bind_of_one()) {
            variables.push((BIND, bind));
        }
        if let Some(cores) = cores {
            variables.push((CORES, cores.of(at.local_rank as usize, here.len())?));
        }
        Ok(Launched { name: at.name.clone(), variables })
    };
    here.iter().map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_dealt_out_in_equal_parts_or_shared() {
        let cores: CoreList = "0-3,6,7".parse().unwrap();
        let dealt =
            |processes| (0..processes).map(|at| cores.of(at, processes)).collect::<Result<Vec<_>, _>>();
        assert_eq!(dealt(3).unwrap(), ["0,1", "2,3", "6,7"]);
        assert_eq!(dealt(6).unwrap().join(" "), "0 1 2 3 6 7");
        assert_eq!(dealt(8).unwrap().join(" "), "0 1 2 3 6 7 0 1");
        assert_eq!(dealt(4).unwrap_err(), "--cores: 6 cores for 4 processes: give each as many");
        for wrong in ["", "a", "3-1", "1-", "2048", "-1"] {
            assert!(wrong.parse::<CoreList>().unwrap_err().contains("is not a core"), "{wrong}");
        }
    }

    #[test]
    fn each_process_of_a_host_is_told_who_it_is() {
        let hosts = "a:1,b:2".parse().unwrap();
        let layout = Layout::on_hosts(&"ps=1,worker=2".parse().unwrap(), &hosts, 4000).unwrap();
        let master = Master { host: "a".into(), port: 4001 };
        let here = members(&layout, 1, Some(&"5".parse().unwrap()), &master).unwrap();
        let told = |member: &Launched, name: &str| {
            let found = member.variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!(
            here.iter().map(|member| member.name.to_string()).collect::<Vec<_>>(),
            ["worker/0", "worker/1"]
        );
        let last = &here[1];
        assert_eq!(told(last, "TENSORWIRE_CLUSTER"), "ps=a:4000;worker=b:4000,b:4001");
        let ranks = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].map(|name| told(last, name));
        assert_eq!(ranks, ["2", "3", "1", "2"]);
        assert_eq!((told(last, "MASTER_ADDR"), told(last, "TENSORWIRE_CORES")), ("a".into(), "5".into()));
    }
}
