//! `tensorwire devices`: the RDMA devices of this machine, and which devices, ports and GIDs would
//! be chosen and why.
//!
//! The facts come from the kernel's files, so libibverbs need not be installed. Only limits and
//! MTUs come from libibverbs. The exit status is 0 if the verbs fabric would start here, otherwise
//! 1, with all obstacles on one line.

mod json;
mod library;
mod text;

use crate::error::{CliError, print};
use std::path::{Path, PathBuf};
use tensorwire::Config;
use tensorwire::internals::fabric::verbs;
use tensorwire::internals::fabric::verbs::device::{self, Choices, Found, Refusal, UserAccess};
use tensorwire::internals::fabric::verbs::library::Library;
use tensorwire::internals::node;

/// Where the kernel shows this machine's devices.
const SYSFS: &str = "/sys";

/// Shows the RDMA devices of this machine, and which device, port and GID tensorwire chooses.
///
/// A device is shown with its ports, states, speeds, MTUs, NUMA node, GID tables and limits. The
/// choice follows the settings of the environment (RDMA_DEVICE, RDMA_GID_INDEX, ...) and of
/// --config.
#[derive(clap::Args, Debug)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// A configuration file with settings of devices; the environment wins over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The kernel's device tree, or a copy of another machine's
    #[arg(long, value_name = "DIR", default_value = SYSFS)]
    sysfs: PathBuf,
    /// The folder of the device files
    #[arg(long, value_name = "DIR", default_value = "/dev")]
    dev: PathBuf,
}

/// The facts to show.
struct DeviceReport {
    found: Found,
    /// The file of each device, and whether this process may use it.
    files: Vec<(Option<PathBuf>, UserAccess)>,
    library: Option<PathBuf>,
    /// Why limits and MTUs are unknown.
    untold: Vec<String>,
    choices: Result<Choices, Refusal>,
    /// The folder of the kernel's files.
    class: PathBuf,
}

/// Shows the devices.
pub fn run(args: DevicesArgs) -> Result<(), CliError> {
    let config = settings(args.config)?;
    let class = args.sysfs.join("class/infiniband");
    let mut found = device::read(&args.sysfs)
        .map_err(|error| CliError::failed(format!("reading {}", class.display()), error))?;
    // The library knows this machine only.
    let untold = if args.sysfs == Path::new(SYSFS) { complete(&mut found) } else { Vec::new() };
    let file = |device| (device::device_file(&args.dev, device), device::user_access(&args.dev, device));
    let report = DeviceReport {
        files: found.devices.iter().map(file).collect(),
        choices: device::choose(&found.devices, &node::rdma_settings(&config)),
        library: library::find(),
        untold,
        found,
        class,
    };
    print(&if args.json { json::render(&report)? } else { text::render(&report) })?;
    match report.obstacles() {
        none if none.is_empty() => Ok(()),
        some => Err(CliError::Failed(some.join("; and "))),
    }
}

/// Adds limits and MTUs from libibverbs. Returns why some are unknown.
fn complete(found: &mut Found) -> Vec<String> {
    if found.devices.is_empty() {
        return Vec::new();
    }
    let library = match Library::system() {
        Ok(library) => library,
        Err(error) => return vec![error.to_string()],
    };
    match verbs::complete(library, &mut found.devices) {
        Ok(silent) => silent.into_iter().map(|(_, error)| error.to_string()).collect(),
        Err(error) => vec![error.to_string()],
    }
}

/// The settings of devices, from the file and the environment. Other settings may be missing, and
/// their variables are ignored.
fn settings(file: Option<PathBuf>) -> Result<Config, CliError> {
    let builder = Config::builder()
        .member("devices", 0)
        .set("cluster", "devices=127.0.0.1:1")
        .set("world_size", "1")
        .environment(std::env::vars_os().filter(|(name, _)| name.to_string_lossy().contains("RDMA_")));
    let builder = match file {
        Some(file) => builder.file(file),
        None => builder,
    };
    builder.build().map_err(|error| CliError::Usage(error.to_string()))
}

impl DeviceReport {
    /// Every known reason why the verbs fabric would not start here.
    fn obstacles(&self) -> Vec<String> {
        let mut obstacles = Vec::new();
        match &self.choices {
            Err(Refusal::NoDevice) if !self.found.subsystem => obstacles.push(format!(
                "there is no RDMA device, nor the kernel's part for them ({} is not there): load the driver \
                 of the NIC (or of soft-RoCE: rdma_rxe), and see that the container, if this is one, \
                 shows it",
                self.class.display()
            )),
            Err(refusal) => obstacles.push(refusal.to_string()),
            Ok(choices) => obstacles.extend(choices.rails.iter().filter_map(|choice| {
                let at = self.found.devices.iter().position(|device| device.name == choice.device)?;
                refused(&choice.device, &self.files[at].1)
            })),
        }
        if self.library.is_none() {
            obstacles.push(format!(
                "{} was not found: install it (Debian: libibverbs1 and ibverbs-providers; Fedora: \
                 libibverbs)",
                library::NAME
            ));
        }
        obstacles
    }
}

/// Why this process can't use a device; `None` if it can.
fn refused(name: &str, access: &UserAccess) -> Option<String> {
    match access {
        UserAccess::Allowed => None,
        UserAccess::Refused { file, why } => Some(format!(
            "{name} can't be used by this process: {file}: {why}: give its user read and write permission \
             (and the container the device)"
        )),
        _ => {
            Some(format!("{name} can't be used by any program: the kernel's module ib_uverbs is not loaded"))
        }
    }
}
