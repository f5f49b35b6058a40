//! The address of an endpoint. Only the endpoint that it connects to reads it.

use crate::fabric::{FabricError, FabricKind};
use rustix::net::SocketAddrUnix;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;

/// Version of the address, the handshake and the segment's layout. They change together.
pub(crate) const VERSION: u16 = 6;

const MAGIC: [u8; 8] = *b"twshmadr";
const BYTES: usize = 8 + 2 + 16 + 8 + 8 + 16 + 4 + 4 + 16;

/// Where sockets are files. Containers of one IPC namespace have it in common.
const DIRECTORY: &str = "/dev/shm";

/// A random number. It names an endpoint and its socket, so that no two endpoints meet by accident.
/// The kernel lists the names of sockets to every user: it proves nothing, and is no secret.
pub(crate) type EndpointToken = [u8; 16];

/// Identifies a host. Two processes with equal values can reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostId {
    /// The boot id, which the kernel draws at each boot.
    boot: [u8; 16],
    /// The network namespace, which bounds abstract socket names.
    network: u64,
    /// The PID namespace, which gives process ids their meaning.
    pids: u64,
    /// Device and inode of [`DIRECTORY`]. Zeros if there is none.
    directory: [u64; 2],
}

/// The host, user, process and socket of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShmAddress {
    pub host: HostId,
    pub uid: u32,
    pub pid: u32,
    pub token: EndpointToken,
}

impl HostId {
    /// The host of this process.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub(crate) fn here() -> Result<Self, FabricError> {
        let os = |path: &'static str| {
            move |source| FabricError::Os {
                fabric: FabricKind::Shm,
                tried: format!("reading {path}"),
                remedy: "mount /proc, or raise the limit of open files (ulimit -n) if there are too many",
                source,
            }
        };
        const BOOT: &str = "/proc/sys/kernel/random/boot_id";
        let namespace = |path| Ok::<_, FabricError>(std::fs::metadata(path).map_err(os(path))?.ino());
        let text = std::fs::read_to_string(BOOT).map_err(os(BOOT))?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16)
            .map_err(|e| os(BOOT)(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))?;
        let (network, pids) = (namespace("/proc/self/ns/net")?, namespace("/proc/self/ns/pid")?);
        let directory = std::fs::metadata(DIRECTORY).map_or([0; 2], |it| [it.dev(), it.ino()]);
        Ok(HostId { boot: boot.to_be_bytes(), network, pids, directory })
    }
}

/// Draws a token.
///
/// # Errors
/// If the kernel has no random numbers.
pub(crate) fn draw_token() -> Result<EndpointToken, FabricError> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| FabricError::Os {
        fabric: FabricKind::Shm,
        tried: "drawing a random socket name".into(),
        remedy: "let the process call getrandom(2)",
        source: error
            .raw_os_error()
            .map_or_else(|| std::io::Error::other(error.to_string()), std::io::Error::from_raw_os_error),
    })?;
    Ok(token)
}

impl HostId {
    /// Whether both are in one network namespace, where each reaches the abstract sockets of the
    /// other.
    pub(crate) fn has_network_of(self, other: HostId) -> bool {
        self.network == other.network
    }

    /// Whether both see the same files in [`DIRECTORY`].
    fn has_directory_of(self, other: HostId) -> bool {
        self.directory == other.directory && self.directory != [0; 2]
    }

    /// This host, from another network namespace.
    #[cfg(test)]
    pub(crate) fn elsewhere(self) -> HostId {
        HostId { network: self.network + 1, ..self }
    }

    /// Whether a process id means the same process to both.
    pub(crate) fn has_pids_of(self, other: HostId) -> bool {
        self.boot == other.boot && self.pids == other.pids
    }
}

impl ShmAddress {
    /// Encodes the address.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.host.boot);
        bytes.extend(self.host.network.to_le_bytes());
        bytes.extend(self.host.pids.to_le_bytes());
        self.host.directory.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(self.uid.to_le_bytes());
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(self.token);
        bytes
    }

    /// Decodes an address that a peer has sent.
    ///
    /// # Errors
    /// If it is no address of this version: [`FabricError::Disagreement`] if of another one.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, FabricError> {
        let refuse = |why| Err(FabricError::Peer { fabric: FabricKind::Shm, why });
        let mut reader = ByteReader(bytes);
        if reader.take::<8>() != Some(MAGIC) {
            return refuse(format!("its address of {} bytes is not one of this fabric", bytes.len()));
        }
        match reader.take().map(u16::from_le_bytes) {
            Some(VERSION) => {}
            version => {
                return differ(format!(
                    "its address has version {}, this side speaks {VERSION}: run the same release on both",
                    version.unwrap_or(0)
                ));
            }
        }
        reader.address().ok_or(()).or_else(|()| {
            refuse(format!("its address has {} bytes, version {VERSION} has {BYTES}", bytes.len()))
        })
    }

    /// Checks that a process of user `uid` on the host `here` can reach the endpoint.
    ///
    /// # Errors
    /// [`FabricError::Disagreement`] with the reason.
    pub(crate) fn check_same_host(&self, here: HostId, uid: u32) -> Result<(), FabricError> {
        if self.host.boot != here.boot {
            return differ("it runs on another host".into());
        }
        if !self.host.has_network_of(here) && !self.host.has_directory_of(here) {
            return differ(format!(
                "it is in another network namespace, and the two have no {DIRECTORY} in common: let both \
                 containers share either (docker run --ipc=host)"
            ));
        }
        check_uid(self.uid, uid).or_else(differ)
    }

    /// Checks that a process on the host `here` can watch the endpoint's process.
    ///
    /// # Errors
    /// [`FabricError::Disagreement`] with the reason.
    pub(crate) fn check_process(
        &self,
        here: HostId,
        has_peer_pidfd: impl FnOnce() -> bool,
    ) -> Result<(), FabricError> {
        match self.host.has_pids_of(here) || has_peer_pidfd() {
            true => Ok(()),
            false => differ(
                "it is in another PID namespace, and before Linux 6.5 no process of another one can be \
                 watched: let both containers share it (docker run --pid=host)"
                    .into(),
            ),
        }
    }

    /// The endpoint's socket, as a process on the host `from` reaches it: by an abstract name in
    /// one network namespace, else by a file. Only a file can outlive the process.
    pub(crate) fn socket(&self, from: HostId) -> Result<SocketAddrUnix, rustix::io::Errno> {
        let mut name = String::from("tensorwire-shm-");
        for byte in self.token {
            let _ = write!(name, "{byte:02x}"); // writing to a string can't fail
        }
        match self.host.has_network_of(from) {
            true => SocketAddrUnix::new_abstract_name(name.as_bytes()),
            false => SocketAddrUnix::new(format!("{DIRECTORY}/{name}")),
        }
    }
}

fn differ<T>(why: String) -> Result<T, FabricError> {
    Err(FabricError::Disagreement { fabric: FabricKind::Shm, why })
}

/// Checks that processes of these two users may share memory.
///
/// # Errors
/// If the users differ, with both.
pub(crate) fn check_uid(theirs: u32, ours: u32) -> Result<(), String> {
    if theirs == ours {
        return Ok(());
    }
    Err(format!("it runs as user {theirs}, this process as user {ours}: run both as the same user"))
}

/// Takes integers off the front of a peer's bytes.
pub(crate) struct ByteReader<'a>(pub &'a [u8]);

impl ByteReader<'_> {
    /// The next `N` bytes, if there are as many.
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// Decodes an address behind magic and version, to the end of the bytes.
    fn address(&mut self) -> Option<ShmAddress> {
        let boot = self.take()?;
        let (network, pids) = (u64::from_le_bytes(self.take()?), u64::from_le_bytes(self.take()?));
        let directory = [u64::from_le_bytes(self.take()?), u64::from_le_bytes(self.take()?)];
        let host = HostId { boot, network, pids, directory };
        let uid = u32::from_le_bytes(self.take()?);
        let pid = u32::from_le_bytes(self.take()?);
        let token = self.take()?;
        self.0.is_empty().then_some(ShmAddress { host, uid, pid, token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> ShmAddress {
        let host = HostId { boot: [7; 16], network: 42, pids: 43, directory: [44, 1] };
        ShmAddress { host, uid: 1000, pid: 4711, token: [9; 16] }
    }

    fn why(result: Result<impl std::fmt::Debug, FabricError>) -> String {
        result.expect_err("refused").to_string()
    }

    #[test]
    fn an_address_comes_back() {
        let bytes = address().to_bytes();
        assert_eq!(bytes.len(), BYTES);
        assert_eq!(ShmAddress::from_bytes(&bytes).expect("valid"), address());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(tail in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut bytes = address().to_bytes();
            bytes.truncate(10);
            bytes.extend(tail);
            if let Ok(address) = ShmAddress::from_bytes(&bytes) {
                prop_assert_eq!(address.to_bytes(), bytes);
            }
        }
    }

    #[test]
    fn another_version_and_foreign_bytes_are_refused_by_name() {
        let mut bytes = address().to_bytes();
        bytes[8] = 9;
        assert!(why(ShmAddress::from_bytes(&bytes)).contains("version 9"));
        assert!(why(ShmAddress::from_bytes(b"tcp://there")).contains("not one of this fabric"));
        assert!(why(ShmAddress::from_bytes(&address().to_bytes()[..40])).contains("40 bytes"));
    }

    #[test]
    fn a_process_that_can_not_be_watched_is_refused() {
        let here = address().host;
        let other = HostId { pids: 44, ..here };
        assert!(address().check_process(here, || false).is_ok());
        assert!(address().check_process(other, || true).is_ok());
        let text = why(address().check_process(other, || false));
        assert!(text.contains("another PID namespace") && text.contains("Linux 6.5"), "{text}");
    }

    #[test]
    fn another_host_or_user_is_refused_by_name() {
        let here = address().host;
        assert!(address().check_same_host(here, 1000).is_ok());
        let other_boot = HostId { boot: [8; 16], ..here };
        assert!(why(address().check_same_host(other_boot, 1000)).contains("another host"));
        let other = HostId { network: 43, ..here };
        assert!(address().check_same_host(other, 1000).is_ok(), "by a file");
        assert!(address().check_same_host(HostId { directory: [45, 1], ..here }, 1000).is_ok(), "by a name");
        for directory in [[45, 1], [0; 2]] {
            let text = why(address().check_same_host(HostId { directory, ..other }, 1000));
            assert!(text.contains("another network namespace, and the two have no /dev/shm"), "{text}");
        }
        let nowhere = HostId { directory: [0; 2], ..here };
        let address_of = |host| ShmAddress { host, ..address() };
        assert!(address_of(nowhere).check_same_host(HostId { network: 43, ..nowhere }, 1000).is_err());
        assert!(HostId { network: 43, ..here }.has_pids_of(here));
        assert!(!HostId { pids: 44, ..here }.has_pids_of(here));
        assert!(!other_boot.has_pids_of(here));
        let text = why(address().check_same_host(here, 7));
        assert!(text.contains("user 1000") && text.contains("user 7"), "{text}");
    }
}
