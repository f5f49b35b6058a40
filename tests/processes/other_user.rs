//! Members of two users: shared memory is for one.

use crate::common::other::{Other, other_user, wait_to_be_told};
use crate::common::{SOON, cluster, member, over_verbs};
use std::io::Write;
use std::time::Instant;
use tensorwire::Node;

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Starts a member that proves its name by a secret, in a file of the present user, and joins.
fn join(cluster: &str, task: u32, other_has_started: impl FnOnce()) -> (Node, String) {
    let mut secret = tempfile::NamedTempFile::new().expect("a file that no other user may read");
    secret.write_all(SECRET.as_bytes()).expect("written");
    let path = secret.path().to_str().expect("UTF-8");
    let node = member(cluster, task).set("fabric", "shm").set("secret_file", path);
    let node = node.start().expect("the node starts");
    println!("started");
    other_has_started();
    let began = Instant::now();
    let error = node.join().expect_err("the users differ").to_string();
    println!("w/{task} after {:?}: {error}", began.elapsed());
    assert!(began.elapsed() < SOON / 10, "{:?}: {error}", began.elapsed());
    (node, error)
}

#[test]
#[ignore = "a role, not a test"]
fn role_of_another_user() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    let (_node, error) = join(&cluster, 1, || {});
    println!("ended: {error}");
    wait_to_be_told();
}

#[test]
fn members_of_two_users_on_shared_memory_end_both_joins_at_once() {
    let Some(user) = other_user().filter(|_| !over_verbs()) else { return };
    let cluster = cluster(2);
    let mut other = Other::start_as(user, "other_user::role_of_another_user", &cluster, &[]);
    let (_node, error) = join(&cluster, 0, || drop(other.wait_for("started")));
    let theirs = other.wait_for("ended: ");
    for (error, peer) in [(&error, 1), (&theirs, 0)] {
        assert!(error.contains(&format!("can't link with w/{peer}")), "{error}");
        assert!(error.contains("runs as user 65534") || error.contains("runs as user 0"), "{error}");
    }
    other.say("stop");
}

#[test]
#[ignore = "a role, not a test"]
fn role_without_a_user_of_its_own() {
    let cluster = std::env::var("TEST_CLUSTER").expect("started by a test");
    for (fabric, auth) in [("shm", "plain"), ("tcp", "uid")] {
        let node = member(&cluster, 0).set("fabric", fabric).set("auth", auth);
        let error = node.start().expect_err("its user stands for others").to_string();
        println!("{auth}: {error}");
        assert!(error.contains("of this user namespace stands for all users outside of it"), "{error}");
    }
}

/// In a user namespace without a map each user has one number, also those whose processes are
/// strangers.
#[test]
fn a_process_whose_user_stands_for_others_uses_neither_shared_memory_nor_its_uid() {
    let program = std::env::current_exe().expect("procfs");
    let role = "other_user::role_without_a_user_of_its_own";
    let mut command = std::process::Command::new("unshare");
    command.arg("--user").arg(program).args([role, "--exact", "--ignored", "--nocapture"]);
    let output = command.env("TEST_CLUSTER", cluster(1)).output();
    let Some(output) = output.ok().filter(|output| !output.stdout.is_empty()) else {
        return println!("skipped: user namespaces are not allowed here");
    };
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}
