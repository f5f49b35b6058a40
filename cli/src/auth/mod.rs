//! `tensorwire auth`: makes what the members of a cluster prove their names with.

mod authority;
mod certificate;
mod private_file;

use crate::error::{CliError, print};
use authority::Authority;
use std::path::{Path, PathBuf};
use tensorwire::TaskId;
use tensorwire::internals::wire::Cluster;

/// Bytes of a new secret, before they are written as hexadecimal digits.
const SECRET: usize = 32;

/// Makes a secret or certificates, with which the members of a cluster prove who they are.
#[derive(clap::Subcommand, Debug)]
pub enum AuthCommand {
    /// Makes a file with a new secret, which only its owner can read. All members get a copy, and
    /// name it by secret_file.
    Secret {
        /// The new file
        file: PathBuf,
    },
    /// Makes an authority and a certificate for each member.
    ///
    /// The folder gets ca.pem, and JOB-INDEX.pem and JOB-INDEX.key of each member. They are the
    /// files of tls_ca, tls_certificate and tls_key. The authority's key, ca.key, stays with the
    /// operator. If the folder has an authority already, it signs the new certificates. Running
    /// members read renewed files by themselves.
    Certificates {
        /// The folder, which is made if it is not there
        folder: PathBuf,
        /// The members as the setting cluster has them: JOB=HOST:PORT,HOST:PORT;JOB=...
        #[arg(long, value_name = "CLUSTER", required_unless_present = "member")]
        cluster: Option<Cluster>,
        /// A member, as JOB/INDEX; may be repeated
        #[arg(long, value_name = "JOB/INDEX")]
        member: Vec<TaskId>,
        /// Days for which the members' certificates hold
        #[arg(long, value_name = "DAYS", default_value_t = 365)]
        #[arg(value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

/// Makes the files.
pub fn run(command: AuthCommand) -> Result<(), CliError> {
    match command {
        AuthCommand::Secret { file } => secret(&file),
        AuthCommand::Certificates { folder, cluster, member, days } => {
            let listed = cluster.iter().flat_map(|cluster| cluster.members().map(|(task, _)| task));
            let mut members: Vec<TaskId> = listed.chain(member).collect();
            members.sort();
            members.dedup();
            certificates(&folder, &members, days)
        }
    }
}

fn secret(file: &Path) -> Result<(), CliError> {
    let mut bytes = [0; SECRET];
    let failed =
        |error: &dyn std::fmt::Display| CliError::failed(format!("making {}", file.display()), error);
    getrandom::fill(&mut bytes).map_err(|error| failed(&error))?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    private_file::create(file, (text + "\n").as_bytes()).map_err(|error| failed(&error))?;
    print(&format!(
        "{}: copy it to each member, readable by its user only, and set secret_file\n",
        file.display()
    ))
}

fn certificates(folder: &Path, members: &[TaskId], days: u32) -> Result<(), CliError> {
    let failed = |error| CliError::failed(format!("making certificates in {}", folder.display()), error);
    private_file::make_folder(folder).map_err(failed)?;
    let authority = Authority::of(folder).map_err(failed)?;
    for member in members {
        authority.issue(folder, member, days).map_err(failed)?;
    }
    print(&format!(
        "{}: {} certificates for {days} days. Each member gets ca.pem, JOB-INDEX.pem and JOB-INDEX.key \
         (tls_ca, tls_certificate, tls_key); ca.key stays here\n",
        folder.display(),
        members.len()
    ))
}
