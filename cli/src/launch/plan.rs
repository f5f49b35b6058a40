//! What the processes of this host need of the system, before any is started.

use super::environment::{Launched, inherited};
use crate::error::{CliError, print};
use std::collections::BTreeMap;
use std::ffi::OsString;
use tensorwire::{Config, ResourcePlan};

/// Resources whose limit all processes of this host share.
const OF_ALL: [&str; 6] =
    ["threads", "memory", "memory of the cgroup", "queue pairs", "completion queues", "memory regions"];

/// Those whose lack ends processes, later than their start.
const KILLS: [&str; 2] = ["memory", "memory of the cgroup"];

/// Prints the plan of one process, and their number. The settings are those of the environment: a
/// program may have others.
///
/// # Errors
/// [`CliError::Failed`] if a limit is too low, [`CliError::Usage`] if a setting is wrong.
pub fn show(members: &[Launched]) -> Result<(), CliError> {
    let Some(member) = members.first() else { return Err(CliError::Usage("no process".into())) };
    let mut variables: BTreeMap<OsString, OsString> = inherited().collect();
    variables.extend(member.variables.iter().map(|(name, value)| ((*name).into(), value.into())));
    let config = Config::builder().environment(variables).build();
    let plan = ResourcePlan::with_devices(&config.map_err(|error| CliError::Usage(error.to_string()))?);
    print(&format!("{} processes on this host, each with:\n{plan}", members.len()))?;
    let short = plan.resources().iter().find(|resource| resource.is_hard && resource.is_short());
    if let Some(short) = short {
        return Err(CliError::Failed(format!("a limit is too low: {short}")));
    }
    for one in plan.resources().iter().filter(|one| OF_ALL.contains(&one.name)) {
        let mut all = one.clone();
        all.need = one.need.saturating_mul(members.len() as u64);
        all.because = format!("{} processes, each {}", members.len(), one.because);
        if !all.is_short() {
            continue;
        }
        if all.is_hard || KILLS.contains(&all.name) {
            return Err(CliError::Failed(format!("a limit is too low: {all}")));
        }
        print(&format!("all processes may need more than there is: {all}\n"))?;
    }
    Ok(())
}
