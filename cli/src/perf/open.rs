//! Which workload a test is, on which fabric.

use super::control_channel::ControlChannel;
use super::fabrics::MeasuredFabric;
use super::options::{FabricName, Test};
use super::plan::Settings;
use super::read_lat::{self, ReadLat};
use super::rendezvous_batch::RendezvousBatch;
use super::rendezvous_lat::RendezvousLat;
use super::rendezvous_standing::RendezvousStanding;
use super::send_lat::SendLat;
use super::workload::{Initiator, Responder, Subject};
use super::write_bw::{self, WriteBw};
use super::write_lat::WriteLat;
use crate::CliError;
use crate::reference::{CacheLine, Ring64, SharedMapping};
use std::sync::Arc;
use tensorwire::internals::fabric::Role;
use tensorwire::internals::fabric::shm::ShmFabric;
use tensorwire::internals::fabric::verbs::VerbsFabric;

/// Opens the measuring side of the test that was asked for. The responder opens at the same time.
pub fn initiator(
    test: Test,
    settings: &Settings,
    shared: Option<&Arc<SharedMapping>>,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Initiator>, CliError> {
    match (test, settings.fabric) {
        (Test::CacheLine, _) => Ok(Box::new(CacheLine::new(bare(shared)?, Subject::Test))),
        (Test::Ring64, _) => Ok(Box::new(Ring64::initiator(bare(shared)?, Subject::Test, settings.depth))),
        (Test::RendezvousLat, _) if settings.batch > 0 => {
            Ok(Box::new(RendezvousBatch::open(0, settings, channel)?))
        }
        (Test::RendezvousLat, _) if settings.standing > 0 => {
            Ok(Box::new(RendezvousStanding::open(0, settings, channel)?))
        }
        (Test::RendezvousLat, _) => Ok(Box::new(RendezvousLat::open(0, settings, channel)?)),
        (_, FabricName::Shm) => initiator_on::<ShmFabric>(test, settings, channel),
        (_, FabricName::Verbs) => initiator_on::<VerbsFabric>(test, settings, channel),
    }
}

fn initiator_on<F: MeasuredFabric>(
    test: Test,
    settings: &Settings,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Initiator>, CliError> {
    Ok(match test {
        Test::WriteBw => Box::new(WriteBw::<F>::open(settings, channel)?),
        Test::SendLat => Box::new(SendLat::<F>::open(Role::Initiator, settings, channel)?),
        Test::ReadLat => Box::new(ReadLat::<F>::open(settings, channel)?),
        _ => Box::new(WriteLat::<F>::open(Role::Initiator, settings, channel)?),
    })
}

/// Opens the answering side of the test that was asked for.
pub fn responder(
    test: Test,
    settings: &Settings,
    shared: Option<&Arc<SharedMapping>>,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Responder>, CliError> {
    match (test, settings.fabric) {
        (Test::CacheLine, _) => Ok(Box::new(CacheLine::new(bare(shared)?, Subject::Test))),
        (Test::Ring64, _) => Ok(Box::new(Ring64::responder(bare(shared)?, Subject::Test, settings.depth))),
        (Test::RendezvousLat, _) if settings.batch > 0 => {
            Ok(Box::new(RendezvousBatch::open(1, settings, channel)?))
        }
        (Test::RendezvousLat, _) if settings.standing > 0 => {
            Ok(Box::new(RendezvousStanding::open(1, settings, channel)?))
        }
        (Test::RendezvousLat, _) => Ok(Box::new(RendezvousLat::open(1, settings, channel)?)),
        (_, FabricName::Shm) => responder_on::<ShmFabric>(test, settings, channel),
        (_, FabricName::Verbs) => responder_on::<VerbsFabric>(test, settings, channel),
    }
}

fn responder_on<F: MeasuredFabric>(
    test: Test,
    settings: &Settings,
    channel: &mut ControlChannel,
) -> Result<Box<dyn Responder>, CliError> {
    Ok(match test {
        Test::WriteBw => Box::new(write_bw::passive::<F>(settings, channel)?),
        Test::SendLat => Box::new(SendLat::<F>::open(Role::Acceptor, settings, channel)?),
        Test::ReadLat => Box::new(read_lat::passive::<F>(settings, channel)?),
        _ => Box::new(WriteLat::<F>::open(Role::Acceptor, settings, channel)?),
    })
}

fn bare(shared: Option<&Arc<SharedMapping>>) -> Result<&Arc<SharedMapping>, CliError> {
    shared.ok_or_else(|| CliError::Failed("bare memory is shared by processes of --local alone".into()))
}
