//! Foreign memory, over shared memory or the fabric that `TENSORWIRE_TEST_FABRIC` names.
//! `tests/verbs/nodes.rs` has the same cases on the scripted libibverbs.

use crate::foreign_cases as cases;

const HERE: &[(&str, &str)] = &[];

#[test]
fn tensors_outside_the_pool_travel_and_it_is_counted_how() {
    cases::travel(HERE);
}

#[test]
fn memory_that_is_mapped_anew_at_the_same_address_is_sent_as_it_is_now() {
    cases::mapped_anew(HERE);
}

#[test]
fn an_arena_that_is_the_owner_is_used_again_and_again() {
    cases::arena(HERE);
}

#[test]
fn tensors_are_received_into_memory_outside_the_pool() {
    cases::received(HERE);
}

#[test]
fn a_receive_that_is_given_up_lets_go_of_the_memory() {
    cases::given_up(HERE);
}

#[test]
fn standing_requests_are_received_into_memory_outside_the_pool_and_sent_from_it() {
    cases::standing(HERE);
}

#[test]
fn memory_outside_the_pool_goes_from_a_process_to_itself_as_it_is() {
    cases::to_itself(HERE);
}

#[test]
fn a_send_for_which_the_pool_has_no_room_says_so_or_needs_none() {
    cases::no_room(HERE);
}

#[test]
fn a_send_that_needs_a_copy_waits_for_room_in_the_pool() {
    cases::waits_for_room(HERE);
}

#[test]
fn a_send_that_is_refused_has_copied_and_registered_nothing() {
    cases::refused(HERE);
}

#[test]
fn memory_is_unmapped_while_a_callback_waits() {
    cases::ends_beside_callbacks(HERE);
}
