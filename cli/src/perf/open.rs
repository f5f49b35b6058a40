//! The workload of each test, on each fabric.

use super::cache_line::CacheLine;
use super::control_channel::ControlChannel;
use super::fabric_name::FabricName;
use super::fabrics::MeasuredFabric;
use super::layout::Set;
use super::options::Test;
use super::read_lat::{self, ReadLat};
use super::rendezvous_batch::RendezvousBatch;
use super::rendezvous_lat::RendezvousLat;
use super::rendezvous_standing::RendezvousStanding;
use super::ring_64::Ring64;
use super::send_lat::SendLat;
use super::workload::{Initiator, Responder};
use super::write_bw::{self, WriteBw};
use super::write_lat::WriteLat;
use crate::error::CliError;
use crate::reference::word_mapping::WordMapping;
use std::sync::Arc;
use tensorwire::internals::fabric::Role;
use tensorwire::internals::fabric::shm::ShmFabric;
use tensorwire::internals::fabric::tcp::TcpFabric;
use tensorwire::internals::fabric::verbs::VerbsFabric;

/// Opens the measuring side of a test. The responder opens at the same time.
pub fn initiator(
    test: &Test,
    max_bytes: usize,
    mapping: Option<&Arc<WordMapping>>,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Initiator>, CliError> {
    Ok(match test {
        Test::CacheLine => Box::new(CacheLine::new(shared(mapping)?, Set::Test)),
        Test::Ring64 { depth } => Box::new(Ring64::initiator(shared(mapping)?, Set::Test, *depth)),
        Test::RendezvousLat(options) if options.batch() > 0 => {
            Box::new(RendezvousBatch::open(0, options, channel)?)
        }
        Test::RendezvousLat(options) if options.standing() > 0 => {
            Box::new(RendezvousStanding::open(0, options, channel)?)
        }
        Test::RendezvousLat(options) => Box::new(RendezvousLat::open(0, options, channel)?),
        _ => match fabric(test) {
            FabricName::Shm => initiator_on::<ShmFabric>(test, max_bytes, channel)?,
            FabricName::Verbs => initiator_on::<VerbsFabric>(test, max_bytes, channel)?,
            FabricName::Tcp => initiator_on::<TcpFabric>(test, max_bytes, channel)?,
            FabricName::Auto | FabricName::Grpc => return Err(not_bare(test)),
        },
    })
}

fn initiator_on<F: MeasuredFabric>(
    test: &Test,
    max_bytes: usize,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Initiator>, CliError> {
    Ok(match test {
        Test::WriteLat(options) => {
            Box::new(WriteLat::<F>::open(Role::Initiator, options, max_bytes, channel)?)
        }
        Test::WriteBw(options) => Box::new(WriteBw::<F>::open(options, max_bytes, channel)?),
        Test::SendLat(options) => Box::new(SendLat::<F>::open(Role::Initiator, options, channel)?),
        Test::ReadLat(options) => Box::new(ReadLat::<F>::open(options, max_bytes, channel)?),
        other => return Err(not_bare(other)),
    })
}

/// Opens the answering side of a test.
pub fn responder(
    test: &Test,
    max_bytes: usize,
    mapping: Option<&Arc<WordMapping>>,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Responder>, CliError> {
    Ok(match test {
        Test::CacheLine => Box::new(CacheLine::new(shared(mapping)?, Set::Test)),
        Test::Ring64 { depth } => Box::new(Ring64::responder(shared(mapping)?, Set::Test, *depth)),
        Test::RendezvousLat(options) if options.batch() > 0 => {
            Box::new(RendezvousBatch::open(1, options, channel)?)
        }
        Test::RendezvousLat(options) if options.standing() > 0 => {
            Box::new(RendezvousStanding::open(1, options, channel)?)
        }
        Test::RendezvousLat(options) => Box::new(RendezvousLat::open(1, options, channel)?),
        _ => match fabric(test) {
            FabricName::Shm => responder_on::<ShmFabric>(test, max_bytes, channel)?,
            FabricName::Verbs => responder_on::<VerbsFabric>(test, max_bytes, channel)?,
            FabricName::Tcp => responder_on::<TcpFabric>(test, max_bytes, channel)?,
            FabricName::Auto | FabricName::Grpc => return Err(not_bare(test)),
        },
    })
}

fn responder_on<F: MeasuredFabric>(
    test: &Test,
    max_bytes: usize,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Responder>, CliError> {
    Ok(match test {
        Test::WriteLat(options) => {
            Box::new(WriteLat::<F>::open(Role::Acceptor, options, max_bytes, channel)?)
        }
        Test::WriteBw(options) => Box::new(write_bw::passive::<F>(options, max_bytes, channel)?),
        Test::SendLat(options) => Box::new(SendLat::<F>::open(Role::Acceptor, options, channel)?),
        Test::ReadLat(options) => Box::new(read_lat::passive::<F>(options, max_bytes, channel)?),
        other => return Err(not_bare(other)),
    })
}

/// The fabric of a test that runs on one.
fn fabric(test: &Test) -> FabricName {
    test.fabric().map(|options| options.fabric).unwrap_or_default()
}

fn not_bare(test: &Test) -> CliError {
    CliError::Failed(format!("{} does not run on the bare fabric", test.name()))
}

fn shared(mapping: Option<&Arc<WordMapping>>) -> Result<&Arc<WordMapping>, CliError> {
    mapping.ok_or_else(|| CliError::Failed("only processes of --local share memory".into()))
}
