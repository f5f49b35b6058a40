//! The TCP fabric over the loopback interface.

use crate::harness::Harness;
use std::net::Ipv6Addr;
use tensorwire::Pool;
use tensorwire::internals::fabric::tcp::{TcpFabric, TcpOptions};

fn fabric(pool: &Pool, options: TcpOptions) -> TcpFabric {
    TcpFabric::new(pool, options).expect("a fabric")
}

/// The defaults.
pub struct Tcp;

impl Harness for Tcp {
    type Fabric = TcpFabric;
    const COMPLETES_ALONE: bool = true;
    const COMPLETES_UNCHECKED: bool = true;

    fn fabric(pool: &Pool) -> TcpFabric {
        fabric(pool, TcpOptions::default())
    }
}

/// Every payload goes by the bulk connection, and large ones take several polls.
pub struct TcpSmallPieces;

impl Harness for TcpSmallPieces {
    type Fabric = TcpFabric;
    const COMPLETES_ALONE: bool = true;
    const COMPLETES_UNCHECKED: bool = true;

    fn fabric(pool: &Pool) -> TcpFabric {
        fabric(pool, TcpOptions { main_bytes: 0, poll_bytes: 64 << 10, ..TcpOptions::default() })
    }
}

/// Large payloads go by several connections, over IPv6 where there is any.
pub struct TcpStriped;

impl Harness for TcpStriped {
    type Fabric = TcpFabric;
    const COMPLETES_ALONE: bool = true;
    const COMPLETES_UNCHECKED: bool = true;

    fn fabric(pool: &Pool) -> TcpFabric {
        let mut options = TcpOptions { streams: 4, ..TcpOptions::default() };
        if std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            options.bind = Ipv6Addr::LOCALHOST.into();
        }
        fabric(pool, options)
    }
}
