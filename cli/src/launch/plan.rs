//! What the processes of this host need of the system, before any is started.

use super::environment::{Launched, inherited};
use crate::error::{CliError, print};
use std::collections::BTreeMap;
use std::ffi::OsString;
use tensorwire::{Config, ResourcePlan};

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
    for name in ["memory", "memory of the cgroup"] {
        let Some(one) = plan.resources().iter().find(|resource| resource.name == name) else { continue };
        let need = one.need.saturating_mul(members.len() as u64);
        if let Some(limit) = one.limit.filter(|limit| *limit < need) {
            let [need, limit] = [need, limit].map(|bytes| bytes >> 20);
            let what = format!(
                "all processes together may need {need} MiB of memory, and {limit} MiB are available ({}): \
                 lower pool_size or queue_depth, or use fewer processes",
                one.origin
            );
            return Err(CliError::Failed(what));
        }
    }
    Ok(())
}
