//! Members whose names lead to several addresses.

use super::*;
use crate::bootstrap::auth::{Authenticator, ProofError};
use crate::bootstrap::connector::Connector;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};

/// The outcome of calling worker 0 as worker 1 at these addresses one after the other, in words.
fn reach(cluster: &Cluster, addresses: &[SocketAddr], limit: Duration) -> Result<(), String> {
    let auth = options(cluster, 1).auth;
    let auth = Arc::new(Authenticator::open(&auth, &name("worker", 1)).unwrap());
    let connector = Connector { auth, peer: name("worker", 0), address: "name:1".into(), limit };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reached = runtime.block_on(connector.connect_first(addresses, Instant::now() + limit));
    reached.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn a_name_with_several_addresses_leads_to_the_one_that_is_the_members() {
    let cluster = workers(2);
    let _first = Member::start(options(&cluster, 0));
    let member: SocketAddr = address(&cluster, "worker", 0).parse().unwrap();
    // The tests give no member an address above 250.
    let beside = |last: u8| {
        let IpAddr::V4(ip) = member.ip() else { unreachable!("workers have such") };
        let [a, b, c, _] = ip.octets();
        SocketAddr::from(([a, b, c, last], member.port()))
    };
    // Other programs have the port there. One talks, and the other one does not.
    let (talking, silent, nobodys) = (beside(251), beside(252), beside(253));
    let talker = TcpListener::bind(talking).unwrap();
    let _silent = TcpListener::bind(silent).unwrap();
    std::thread::spawn(move || {
        // Callers hang up.
        talker.incoming().for_each(|caller| _ = caller.unwrap().write_all(&[b'x'; 1024]));
    });
    assert_eq!(reach(&cluster, &[talking, nobodys, member], LONG), Ok(()));
    let brief = Duration::from_secs(2);
    assert_eq!(reach(&cluster, &[silent, member], brief), Ok(()), "half of the time is left");
    for addresses in [[talking, nobodys], [nobodys, talking]] {
        let error = reach(&cluster, &addresses, LONG).unwrap_err();
        assert_eq!(error, ProofError::NoGreeting.to_string(), "somebody listens");
    }
    let error = reach(&cluster, &[silent, nobodys], brief).unwrap_err();
    assert!(error.contains("name:1 never answered within 2s"), "{error}");
    let error = reach(&cluster, &[nobodys], LONG).unwrap_err();
    assert!(error.contains("refused"), "{error}");
}
