//! The rules of the fabric contract (`tensorwire::fabric`), each tested on every fabric.
//!
//! `rules`, `holding`, `batches`, `short` and `sleeping` have the tests, generic over the fabric. A
//! new fabric implements `Harness` and adds one line of `conformance!`. `processes` and `many` have
//! the tests that need two real processes, `verbs` and `verbs_network` those that need an RDMA
//! device.

mod batches;
mod fake;
mod harness;
mod holding;
mod many;
mod multi;
mod processes;
mod rules;
mod short;
mod sleeping;
mod tcp;
mod verbs;
mod verbs_network;

use harness::Harness;
use std::time::Duration;
use tensorwire::Pool;
use tensorwire::internals::fabric::shm::{ShmFabric, ShmOptions};
use tensorwire::internals::fabric::sim::{SimFabric, SimNetwork, SimOptions};

struct Shm;

impl Harness for Shm {
    type Fabric = ShmFabric;

    fn fabric(pool: &Pool) -> ShmFabric {
        ShmFabric::new(pool, ShmOptions::default()).expect("a fabric")
    }
}

struct ShmSmallPolls;

impl Harness for ShmSmallPolls {
    type Fabric = ShmFabric;

    fn fabric(pool: &Pool) -> ShmFabric {
        // Bulk is pulled in small parts, so that every larger tensor takes several polls.
        ShmFabric::new(pool, ShmOptions { poll_bytes: 4096, ..ShmOptions::default() }).expect("a fabric")
    }
}

/// A virtual network whose time advances with each poll.
fn sim(pools: [&Pool; 2], options: SimOptions) -> [SimFabric; 2] {
    let network = SimNetwork::new(7, SimOptions { auto_advance: true, ..options });
    pools.map(|pool| network.process(pool))
}

struct Sim;

impl Harness for Sim {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        sim(pools, SimOptions::default())
    }
}

/// A network whose local completions come up to 1 ms late. A poll returns one completion at most.
struct SimSmallPolls;

impl Harness for SimSmallPolls {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        let completion_delay = Duration::ZERO..=Duration::from_millis(1);
        sim(pools, SimOptions { completion_delay, poll_batch: 1, ..SimOptions::default() })
    }
}

/// A network without loans, whose local completions come last.
struct SimWithoutLoans;

impl Harness for SimWithoutLoans {
    type Fabric = SimFabric;

    fn fabric(pool: &Pool) -> SimFabric {
        SimNetwork::new(7, SimOptions::default()).process(pool)
    }

    fn fabrics(pools: [&Pool; 2]) -> [SimFabric; 2] {
        let completion_delay = Duration::from_millis(1)..=Duration::from_millis(2);
        sim(pools, SimOptions { completion_delay, lends: false, poll_batch: 3, ..SimOptions::default() })
    }
}

conformance!(shm, Shm);
conformance!(shm_in_small_polls, ShmSmallPolls);
conformance!(multi_on_shm, multi::MultiShm);
conformance!(multi_on_tcp, multi::MultiTcp);
conformance!(sim, Sim);
conformance!(sim_slow_in_small_polls, SimSmallPolls);
conformance!(sim_without_loans, SimWithoutLoans);
conformance!(tcp_on_loopback, tcp::Tcp);
conformance!(tcp_in_small_pieces, tcp::TcpSmallPieces);
conformance!(tcp_striped, tcp::TcpStriped);
conformance!(verbs_on_a_device, verbs::VerbsDevice);
conformance!(verbs_in_small_pieces, verbs::VerbsSmall);
conformance!(verbs_on_a_fake_nic, fake::FakeNic);
conformance!(verbs_with_windows_on_a_fake_nic, fake::FakeWindows);

conformance! { verbs_with_windows_on_a_device, verbs::VerbsWindows,
    order_holds_within_a_link
    a_write_lands_at_its_grant_and_is_there_when_a_later_send_is
    an_inline_write_lands_and_makes_no_completion_for_its_sender
    a_large_write_lands_whole
    a_read_brings_the_bytes_into_the_start_of_its_target
    zero_length_operations_check_no_key
    a_write_outside_its_grant_fails_the_link_and_writes_nothing
    a_write_to_a_revoked_grant_fails_the_link_and_writes_nothing
    a_read_outside_its_grant_fails_the_link
    leave_to_write_is_no_leave_to_read
    a_full_queue_is_a_value_and_loses_nothing
    completions_are_neither_lost_nor_duplicated
    completions_of_an_earlier_link_never_come_on_a_later_one
    a_failed_link_fails_everything_outstanding_and_refuses_everything_later
    the_peer_of_a_failed_link_goes_down_too
    a_detached_link_releases_everything_and_the_peer_goes_down
    what_was_sent_before_a_link_was_closed_still_arrives
    a_revoked_tensor_comes_back_with_what_was_written
    what_has_failed_holds_no_memory
    order_holds_in_a_batch_and_across_its_ends
    all_of_a_batch_arrives_once_it_has_ended
}

// The other made-up devices: the rules that their narrowness, their stripes or their kind of
// network can break.
conformance! { verbs_on_a_narrow_fake, fake::FakeNarrow,
    order_holds_within_a_link
    a_write_lands_at_its_grant_and_is_there_when_a_later_send_is
    an_inline_write_lands_and_makes_no_completion_for_its_sender
    a_large_write_lands_whole
    a_message_consumes_a_receive_and_without_one_the_link_fails
    an_immediate_consumes_a_receive_and_without_one_nothing_is_written
    a_read_brings_the_bytes_into_the_start_of_its_target
    zero_length_operations_check_no_key
    a_source_is_held_until_local_completion_and_free_after
    a_write_outside_its_grant_fails_the_link_and_writes_nothing
    a_read_outside_its_grant_fails_the_link
    a_full_queue_is_a_value_and_loses_nothing
    completions_are_neither_lost_nor_duplicated
    completions_of_an_earlier_link_never_come_on_a_later_one
    a_failed_link_fails_everything_outstanding_and_refuses_everything_later
    a_detached_link_releases_everything_and_the_peer_goes_down
    what_was_sent_before_a_link_was_closed_still_arrives
    credits_are_cumulative_and_consume_nothing
    operands_that_make_no_sense_are_refused_and_cost_nothing
    a_local_completion_ends_the_sleep
    room_ends_the_sleep_of_one_who_found_the_queue_full
    arming_while_something_comes_loses_nothing
    memory_outside_the_pool_is_written_as_granted_or_refused
    order_holds_in_a_batch_and_across_its_ends
    all_of_a_batch_arrives_once_it_has_ended
    a_link_that_fails_in_a_batch_ends_all_of_it
}
conformance! { verbs_on_a_striped_fake, fake::FakeStriped,
    order_holds_within_a_link
    a_write_lands_at_its_grant_and_is_there_when_a_later_send_is
    a_large_write_lands_whole
    an_immediate_consumes_a_receive_and_without_one_nothing_is_written
    a_read_brings_the_bytes_into_the_start_of_its_target
    a_source_is_held_until_local_completion_and_free_after
    a_write_outside_its_grant_fails_the_link_and_writes_nothing
    a_write_to_a_revoked_grant_fails_the_link_and_writes_nothing
    a_full_queue_is_a_value_and_loses_nothing
    completions_are_neither_lost_nor_duplicated
    completions_of_an_earlier_link_never_come_on_a_later_one
    a_failed_link_fails_everything_outstanding_and_refuses_everything_later
    the_peer_of_a_failed_link_goes_down_too
    a_detached_link_releases_everything_and_the_peer_goes_down
    what_was_sent_before_a_link_was_closed_still_arrives
    a_revoked_tensor_comes_back_with_what_was_written
    a_local_completion_ends_the_sleep
    what_has_failed_holds_no_memory
    memory_outside_the_pool_is_written_as_granted_or_refused
    order_holds_in_a_batch_and_across_its_ends
    all_of_a_batch_arrives_once_it_has_ended
    a_link_that_fails_in_a_batch_ends_all_of_it
}
conformance! { verbs_on_fake_infiniband, fake::FakeInfiniBand,
    order_holds_within_a_link
    a_write_lands_at_its_grant_and_is_there_when_a_later_send_is
    a_large_write_lands_whole
    a_message_consumes_a_receive_and_without_one_the_link_fails
    a_read_brings_the_bytes_into_the_start_of_its_target
    zero_length_operations_check_no_key
    a_write_outside_its_grant_fails_the_link_and_writes_nothing
    a_write_to_a_revoked_grant_fails_the_link_and_writes_nothing
    a_read_outside_its_grant_fails_the_link
    leave_to_write_is_no_leave_to_read
    completions_of_an_earlier_link_never_come_on_a_later_one
    the_peer_of_a_failed_link_goes_down_too
    a_revoked_tensor_comes_back_with_what_was_written
    only_the_fabric_s_own_pool_can_be_reached_by_peers
    memory_outside_the_pool_is_written_as_granted_or_refused
}
