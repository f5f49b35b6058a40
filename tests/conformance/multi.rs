//! Several fabrics behind one port: the rules hold for links on each of them.

use crate::harness::Harness;
use tensorwire::Pool;
use tensorwire::internals::fabric::multi::{FabricParts, MultiFabric};
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::tcp::{TcpFabric, TcpOptions};

fn tcp(pool: &Pool) -> Option<TcpFabric> {
    Some(TcpFabric::new(pool, TcpOptions::default()).expect("a fabric"))
}

/// Links on shared memory, the first part. TCP has no links.
pub struct MultiShm;

impl Harness for MultiShm {
    type Fabric = MultiFabric;

    fn fabric(pool: &Pool) -> MultiFabric {
        let shm = Some(ShmFabric::new(pool, ShmOptions::default()).expect("a fabric"));
        let parts = FabricParts { shm, tcp: tcp(pool), ..FabricParts::default() };
        MultiFabric::new(parts).expect("two parts")
    }
}

/// Links on TCP alone.
pub struct MultiTcp;

impl Harness for MultiTcp {
    type Fabric = MultiFabric;

    fn fabric(pool: &Pool) -> MultiFabric {
        let parts = FabricParts { tcp: tcp(pool), ..FabricParts::default() };
        MultiFabric::new(parts).expect("a part")
    }
}
