//! The place of this process among those that a launcher has started, from the variables that
//! launchers set.

use super::builder::Variables;
use super::error::{ConfigError, Origin};
use crate::wire::quote;
use std::ffi::OsStr;

/// The variables of one kind of launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first one that is set counts.
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: &'static [&'static str],
    /// It sets the variables also for a process that starts launchers itself.
    outer: bool,
}

/// The launchers, the innermost first: a batch system starts a launcher, which starts the members.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "tensorwire launch or torchrun",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: &["LOCAL_WORLD_SIZE"],
        outer: false,
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        outer: false,
    },
    Launcher {
        name: "a launcher with PMI",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: &["MPI_LOCALNRANKS"],
        outer: false,
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: "SLURM_LOCALID",
        // Its form for several hosts is 4(x2),3: the number of this host is not in it.
        local_size: &[],
        outer: true,
    },
];

/// The place of this process among those that a launcher has started.
///
/// `RANK` and `WORLD_SIZE` of `tensorwire launch` and torchrun count first. The variables of Open
/// MPI (`OMPI_COMM_WORLD_*`) follow, then those of PMI (`PMI_*`), then Slurm's (`SLURM_*`).
///
/// ```
/// use tensorwire::LaunchedRank;
/// let variables = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];
/// let found = LaunchedRank::of(variables.map(|(name, value)| (name.into(), value.into())))?;
/// assert_eq!(found.map(|found| (found.rank, found.size)), Some((3, 4)));
/// # Ok::<(), tensorwire::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchedRank {
    /// The number of this process, from 0 on.
    pub rank: u32,
    /// The number of processes.
    pub size: u32,
    /// The number of this process among those of its host.
    pub local_rank: Option<u32>,
    /// The number of processes of this host.
    pub local_size: Option<u32>,
    /// The variable that has the rank.
    pub variable: &'static str,
}

impl LaunchedRank {
    /// The place that the environment of this process says. `None` if no launcher has started it,
    /// or if only a rank or only a size is said.
    ///
    /// # Errors
    /// If a rank or size is no number, if a rank is not below its size, or if two launchers
    /// contradict each other.
    pub fn from_environment() -> Result<Option<Self>, ConfigError> {
        Self::of(std::env::vars_os())
    }

    /// The same from other variables.
    ///
    /// # Errors
    /// Like [`LaunchedRank::from_environment`].
    pub fn of(
        variables: impl IntoIterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
    ) -> Result<Option<Self>, ConfigError> {
        Self::find(&variables.into_iter().collect())
    }

    /// Whether a process that starts the members has the variables, too.
    pub(super) fn may_be_of_a_parent(&self) -> bool {
        LAUNCHERS.iter().any(|launcher| launcher.outer && launcher.rank == self.variable)
    }

    pub(super) fn find(variables: &Variables) -> Result<Option<Self>, ConfigError> {
        let mut found: Vec<(&Launcher, LaunchedRank)> = Vec::new();
        for launcher in &LAUNCHERS {
            if let Some(place) = launcher.place(variables)? {
                found.push((launcher, place));
            }
        }
        let mut found = found.into_iter();
        let Some((launcher, place)) = found.next() else { return Ok(None) };
        for (other, theirs) in found {
            // Launchers of different sizes are inside each other: torchrun once per host, started
            // by another one. With the same size they name the same processes.
            if !other.outer && theirs.size == place.size && theirs.rank != place.rank {
                let why = format!(
                    "{} says {}, with as many processes, and {} starts this one too: unset the variables of \
                     one of them",
                    other.rank, theirs.rank, launcher.name
                );
                return Err(refused(launcher.rank, &place.rank.to_string(), why));
            }
        }
        Ok(Some(place))
    }
}

impl Launcher {
    fn place(&self, variables: &Variables) -> Result<Option<LaunchedRank>, ConfigError> {
        let Some(rank) = number(variables, self.rank)? else { return Ok(None) };
        let Some(size) = first(variables, self.size)? else {
            // Programs of other kinds have a RANK too. Whoever needs the size says so.
            return Ok(None);
        };
        if rank >= size {
            let why = format!("{} is {size}, so it must be 0 to {}", self.size[0], size.saturating_sub(1));
            return Err(refused(self.rank, &rank.to_string(), why));
        }
        Ok(Some(LaunchedRank {
            rank,
            size,
            local_rank: number(variables, self.local_rank)?,
            local_size: first(variables, self.local_size)?,
            variable: self.rank,
        }))
    }
}

fn first(variables: &Variables, names: &[&'static str]) -> Result<Option<u32>, ConfigError> {
    for name in names {
        if let Some(number) = number(variables, name)? {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// The number in a variable; `None` if it is not set, or empty.
fn number(variables: &Variables, name: &'static str) -> Result<Option<u32>, ConfigError> {
    let Some(text) = text(variables, name)? else { return Ok(None) };
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits => Ok(Some(number)),
        _ => Err(refused(name, &text, "it must be a whole number from 0 to 4294967295".into())),
    }
}

/// The text of a variable; `None` if it is not set, or empty.
pub(super) fn text(variables: &Variables, name: &'static str) -> Result<Option<String>, ConfigError> {
    let Some(value) = variables.get(OsStr::new(name)).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    match value.to_str() {
        Some(text) => Ok(Some(text.to_owned())),
        None => Err(refused(name, &value.to_string_lossy(), "it is not UTF-8".into())),
    }
}

/// The error for a variable of a launcher.
pub(super) fn refused(name: &'static str, value: &str, why: String) -> ConfigError {
    let origin = Origin::Variable { name: name.into() };
    ConfigError::Value { origin, key: name, value: quote(value), why }
}
