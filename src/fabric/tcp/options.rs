//! Settings of the fabric, and their check.

use crate::fabric::{FabricError, FabricKind};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// Bulk connections that a link can have.
pub(super) const MAX_STREAMS: u8 = 15;
/// Addresses that an endpoint offers at most.
pub(super) const MAX_ADDRESSES: usize = 8;

/// Settings of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// The address of this host on which endpoints listen. Port numbers are the kernel's choice.
    pub bind: IpAddr,
    /// The addresses that peers are told, tried in this order; empty for `bind`. At most 8. Must be
    /// given if `bind` is unspecified (`0.0.0.0` or `::`).
    pub advertise: Vec<IpAddr>,
    /// Connections of a link for large payloads, 1 to 15; between two ends the smaller number
    /// counts. One more carries everything else.
    pub streams: u8,
    /// Writes and answers of at most so many bytes go by the main connection, in one system call
    /// with their header. 0 to 1 MiB.
    pub main_bytes: u32,
    /// Bytes that one poll moves for a link in each direction, about; at least 64 KiB.
    pub poll_bytes: u64,
    /// The `SO_BUSY_POLL` of the sockets, at most a second; 0 for none. With any other value Linux
    /// looks at the NIC once in each read of an empty socket, as reads do not block. Without
    /// CAP_NET_ADMIN it may be `net.core.busy_read` at most, or it is left out.
    pub busy_poll: Duration,
    /// How long a peer may be out of reach before its link ends, 1 s to an hour. Half of it is for
    /// each connection to notice (`TCP_USER_TIMEOUT`, keep-alive), and half for new connections.
    pub user_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            bind: Ipv4Addr::LOCALHOST.into(),
            advertise: Vec::new(),
            streams: 1,
            main_bytes: 64 << 10,
            poll_bytes: 4 << 20,
            busy_poll: Duration::from_micros(50),
            user_timeout: Duration::from_secs(10),
        }
    }
}

/// An option that is out of range.
pub(super) fn refuse(option: &'static str, value: u64, allowed: &'static str) -> FabricError {
    FabricError::Option { fabric: FabricKind::Tcp, option, value, allowed }
}

impl TcpOptions {
    /// How long sent bytes may stay unacknowledged, and a connection silent, before it counts as
    /// broken.
    pub(super) fn time_to_notice(&self) -> Duration {
        self.user_timeout / 2
    }

    /// Time between two signs of life of a silent connection. The kernel counts in seconds.
    pub(super) fn keep_alive(&self) -> Duration {
        (self.time_to_notice() / 4).max(Duration::from_secs(1))
    }

    /// How long a connection may have been of no use before the kernel breaks it. It looks at a
    /// silent one only when a sign of life is due.
    pub(super) fn longest_silence(&self) -> Duration {
        self.time_to_notice() + 2 * self.keep_alive()
    }

    /// How long both sides try to replace connections that broke.
    pub(super) fn time_to_repair(&self) -> Duration {
        self.user_timeout - self.time_to_notice()
    }

    /// The addresses that peers are told.
    pub(super) fn advertised(&self) -> &[IpAddr] {
        if self.advertise.is_empty() { std::slice::from_ref(&self.bind) } else { &self.advertise }
    }

    /// Refuses values out of range.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        if !(1..=MAX_STREAMS).contains(&self.streams) {
            return Err(refuse("streams", self.streams.into(), "1 to 15"));
        }
        if self.main_bytes > 1 << 20 {
            return Err(refuse("main_bytes", self.main_bytes.into(), "0 to 1048576"));
        }
        if self.poll_bytes < 64 << 10 {
            return Err(refuse("poll_bytes", self.poll_bytes, "at least 65536"));
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        if self.busy_poll > Duration::from_secs(1) {
            return Err(refuse("busy_poll", millis(self.busy_poll), "0 to 1000 ms"));
        }
        if !(1000..=3_600_000).contains(&millis(self.user_timeout)) {
            return Err(refuse("user_timeout", millis(self.user_timeout), "1,000 to 3,600,000 ms"));
        }
        if self.advertise.len() > MAX_ADDRESSES {
            return Err(refuse("advertise", self.advertise.len() as u64, "8 addresses at most"));
        }
        if let Some(address) = self.advertised().iter().find(|address| address.is_unspecified()) {
            return Err(FabricError::Unavailable {
                fabric: FabricKind::Tcp,
                why: format!(
                    "peers can't connect to {address}: set the address of this host that they reach, by \
                     `bind` or `advertise`"
                ),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_out_of_range_is_refused_by_name() {
        assert!(TcpOptions::default().check().is_ok());
        let said = |change: fn(&mut TcpOptions)| {
            let mut options = TcpOptions::default();
            change(&mut options);
            options.check().expect_err("refused").to_string()
        };
        assert_eq!(said(|o| o.streams = 0), "tcp: streams is 0: 1 to 15");
        assert!(said(|o| o.streams = 16).contains("streams is 16"));
        assert!(said(|o| o.main_bytes = 2 << 20).contains("main_bytes is 2097152"));
        assert!(said(|o| o.poll_bytes = 1).contains("poll_bytes is 1"));
        assert!(said(|o| o.busy_poll = Duration::from_secs(2)).contains("busy_poll is 2000"));
        assert!(said(|o| o.user_timeout = Duration::ZERO).contains("user_timeout is 0"));
        assert!(said(|o| o.bind = Ipv4Addr::UNSPECIFIED.into()).contains("peers can't connect to 0.0.0.0"));
        assert!(said(|o| o.advertise = vec![o.bind; 9]).contains("advertise is 9"));
        let everywhere = TcpOptions {
            bind: Ipv4Addr::UNSPECIFIED.into(),
            advertise: vec![Ipv4Addr::LOCALHOST.into()],
            ..TcpOptions::default()
        };
        assert!(everywhere.check().is_ok());
    }
}
