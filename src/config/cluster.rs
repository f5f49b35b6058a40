//! The members of a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Every job with the addresses of its tasks: task n of a job is at place n of its list.
pub type Cluster = BTreeMap<String, Vec<HostPort>>;

/// Where a task's bootstrap service listens: a name or an IP address, and a port that is not 0.
///
/// A name is not resolved here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    host: String,
    port: u16,
}

/// A text that is no `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} must be HOST:PORT, the host a name, an IPv4 address or an IPv6 address in brackets, the port 1 to 65535"
)]
pub struct HostPortError(String);

impl HostPort {
    /// The host: a name, or an IP address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, 1 to 65,535.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The host as an IP address; `None` if it is a name.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl FromStr for HostPort {
    type Err = HostPortError;

    fn from_str(text: &str) -> Result<Self, HostPortError> {
        split(text).ok_or_else(|| HostPortError(text.chars().take(80).collect()))
    }
}

impl TryFrom<SocketAddr> for HostPort {
    type Error = HostPortError;

    fn try_from(address: SocketAddr) -> Result<Self, HostPortError> {
        address.to_string().parse()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostPort { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

fn split(text: &str) -> Option<HostPort> {
    let (host, port) = text.rsplit_once(':')?;
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().ok()?.to_string(),
        None if is_name(host) => host.to_string(),
        None => return None,
    };
    Some(HostPort { host, port })
}

fn is_name(host: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let name = !host.is_empty() && host.len() <= 253 && host.bytes().all(allowed);
    // A name of digits and dots only was meant as an address: it must be one.
    let numeric = host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    name && (!numeric || host.parse::<IpAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_read_and_written_back() {
        for text in ["127.0.0.1:4000", "node-7.rack_2.example:1", "[::1]:65535"] {
            assert_eq!(text.parse::<HostPort>().expect(text).to_string(), text);
        }
        let v6: HostPort = "[::1]:9".parse().expect("v6");
        assert_eq!((v6.host(), v6.port(), v6.ip()), ("::1", 9, Some(Ipv6Addr::LOCALHOST.into())));
    }

    #[test]
    fn what_is_no_host_and_port_is_refused() {
        for text in [
            "",
            ":1",
            "host",
            "host:",
            "host:0",
            "host:65536",
            "host:+1",
            "::1:4",
            "[::1:4",
            "[ho]:4",
            "a b:1",
            "1.2.3:4",
        ] {
            assert!(text.parse::<HostPort>().is_err(), "{text:?}");
        }
        assert!(HostPort::try_from(SocketAddr::from(([127, 0, 0, 1], 0))).is_err(), "port 0");
    }
}
