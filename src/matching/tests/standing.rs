//! The cost of standing requests, when there are many.

use super::forged_messages::Nobody;
use super::*;
use crate::fabric::Fabric;
use crate::fabric::sim::{SimNetwork, SimOptions, SimPort};
use crate::link::{Handler, Links};
use crate::matching::{RemoteSettings, StandingChange, WindowHandler};
use rustix::time::{ClockId, clock_gettime};

const CHANGED: u64 = 500;
const STANDING: u64 = 20_000;

/// A poller without links.
struct Alone {
    links: Links<SimPort>,
    handler: WindowHandler,
}

impl Alone {
    fn new() -> Alone {
        let Side { pool, .. } = side(2);
        let port = SimNetwork::new(1, SimOptions::default()).process(&pool).port().expect("a port");
        let link =
            LinkSettings { small_tensor_bytes: 128, validate: false, borrow: true, max_ready_bytes: 1 << 16 };
        let settings = RemoteSettings::new(link, 8);
        let members = Members::new(["a", "b"].map(|job| TaskId::new(job, 0).expect("a task")).to_vec());
        let me = members.all()[SENDER].clone();
        let handler = WindowHandler::new(me, 1, members, settings, Arc::default(), Arc::new(Nobody));
        Alone { links: Links::new(port, pool, CountersWriter::new()), handler }
    }

    fn change(&mut self, change: StandingChange) {
        let command = RemoteCommand::Standing(change);
        let returned = self.handler.command(&mut self.links, command, Time::ZERO);
        assert!(returned.is_none(), "it refers to what is there");
    }

    fn begin(&mut self, id: u64) {
        let edge = EdgeName::new(DEVICES[1], DEVICES[0], &format!("x{id}")).expect("an edge");
        let key = TensorKey { edge: EdgeKey { name: Arc::new(edge), frame: 0, iteration: 0 }, step: 1 };
        self.change(StandingChange::Begun { id, peer: TO_RECEIVER, key, window: 4 });
    }

    /// The time on the CPU in which standing requests begin, change and end.
    fn changes(&mut self, first: u64) -> Duration {
        let on_cpu = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        let before = on_cpu();
        for id in first..first + CHANGED {
            self.begin(id);
            self.change(StandingChange::Window { id, window: 8 });
            self.change(StandingChange::Ended { id });
        }
        on_cpu() - before
    }
}

#[test]
fn changes_of_standing_requests_take_no_longer_beside_many_others() {
    let mut alone = Alone::new();
    let before = alone.changes(0);
    (CHANGED..CHANGED + STANDING).for_each(|id| alone.begin(id));
    let measured = (0..3).map(|round| alone.changes((1 + round) * CHANGED + STANDING));
    let beside = measured.min().expect("three");
    println!("{CHANGED} begin, change and end in {before:?}, and in {beside:?} beside {STANDING} others");
    assert!(beside < 8 * before, "{beside:?}, where it was {before:?}");
}
