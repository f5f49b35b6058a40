//! Limits of what a member says of itself.

use super::super::generated as grpc;
use super::super::options::MAX_HOST_ID;
use super::super::shared::MAX_REASON;
use super::protocol::Raw;
use super::*;

#[test]
fn a_host_id_beyond_its_bound_is_refused() {
    let cluster = workers(2);
    let _member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    let mut hello = |host_id: String| {
        let member = grpc::Member { incarnation: 7, host_id };
        let caller = Some(raw.caller.clone());
        let request = grpc::HelloRequest { caller, member: Some(member), ..Default::default() };
        raw.runtime.block_on(raw.grpc.hello(request)).map(|_| ())
    };
    for len in [0, MAX_HOST_ID + 1] {
        let error = hello("h".repeat(len)).unwrap_err();
        assert!(error.message().contains("1 to 128 bytes"), "{error}");
    }
    // It is part of log lines and of errors.
    let error = hello("here\nERROR a line of its own".into()).unwrap_err();
    assert!(error.message().contains("control characters"), "{error}");
    hello("h".repeat(MAX_HOST_ID)).expect("the longest");
}

#[test]
fn what_a_member_says_of_its_lack_is_cut_and_has_no_control_characters() {
    let cluster = workers(2);
    let member = Member::start(options(&cluster, 1));
    let mut raw = Raw::new(&cluster, 7);
    let itself = Some(grpc::Member { incarnation: 7, host_id: "raw".into() });
    let lack = format!("\x1b[2J{}", "no".repeat(MAX_REASON));
    let request =
        grpc::HelloRequest { caller: raw.caller.clone().into(), member: itself, cluster: "".into(), lack };
    raw.runtime.block_on(raw.grpc.hello(request)).expect("it is met");
    let error = member.await_missing(r"worker/0 says: \u{1b}[2Jnono");
    assert!(error.len() < 2 * MAX_REASON, "{} bytes", error.len());
}
