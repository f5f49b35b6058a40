//! The hosts of a run over several of them, and the secret by which the processes know each other.

use crate::error::Result;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The port of the first process of a run over hosts; the next ones count up.
const FIRST_PORT: usize = 47_000;

/// A host, and how a program is started there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainHost {
    address: IpAddr,
    /// The words before the program, such as `ssh NAME`.
    pub starter: Vec<String>,
}

/// A list of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostList(Vec<TrainHost>);

impl HostList {
    /// The host of the process with this number.
    pub fn of(&self, process: usize) -> &TrainHost {
        &self.0[process % self.0.len()]
    }

    /// The addresses of so many processes, as `address:port`.
    pub fn addresses(&self, processes: usize) -> Vec<String> {
        let address = |process| match self.of(process).address {
            IpAddr::V4(ip) => format!("{ip}:{}", FIRST_PORT + process),
            IpAddr::V6(ip) => format!("[{ip}]:{}", FIRST_PORT + process),
        };
        (0..processes).map(address).collect()
    }
}

/// `10.0.0.1=ssh a,10.0.0.2=ssh b`
pub fn hosts(text: &str) -> std::result::Result<HostList, String> {
    let host = |part: &str| {
        let (address, words) = part.split_once('=')?;
        let starter: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        Some(TrainHost { address: address.trim().parse().ok()?, starter })
            .filter(|host| !host.starter.is_empty())
    };
    let read = |part: &str| {
        host(part).ok_or_else(|| format!("`{part}` is not ADDRESS=COMMAND, such as 10.0.0.1=ssh a"))
    };
    Ok(HostList(text.split(',').map(read).collect::<std::result::Result<_, _>>()?))
}

/// A secret in a file, which ends with this value.
#[derive(Debug)]
pub struct Secret(PathBuf);

impl Secret {
    /// Draws a secret.
    pub fn draw() -> Result<Secret> {
        let mut bytes = [0; 32];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let path = std::env::temp_dir().join(format!("train-{}.secret", std::process::id()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let secret = Secret(path);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        file.write_all(hex.as_bytes())?;
        Ok(secret)
    }

    /// The file, which the hosts must share.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_dealt_out_and_each_process_has_a_port() {
        let list = hosts("10.0.0.1=ssh a,fe80::1=ip netns exec b").expect("hosts");
        assert_eq!(list.addresses(3), ["10.0.0.1:47000", "[fe80::1]:47001", "10.0.0.1:47002"]);
        assert_eq!(list.of(3).starter, ["ip", "netns", "exec", "b"]);
        for wrong in ["", "10.0.0.1", "10.0.0.1=", "a=ssh a", "10.0.0.1=ssh a,,"] {
            assert!(hosts(wrong).expect_err(wrong).contains("ADDRESS=COMMAND"), "{wrong}");
        }
    }

    #[test]
    fn a_secret_is_its_owners_and_ends_with_its_value() {
        use std::os::unix::fs::PermissionsExt;
        let secret = Secret::draw().expect("a secret");
        let path = secret.path().to_owned();
        assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&path).expect("text").len(), 64);
        drop(secret);
        assert!(!path.exists());
    }
}
