//! `tensorwire auth` as a user runs it, and members that join with what it made.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use tensorwire::{AuthMode, Node};

/// A user that owns nothing.
const NOBODY: u32 = 65534;

fn auth(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tensorwire")).arg("auth").args(arguments).output().expect("it starts")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("the file is there").permissions().mode() & 0o777
}

/// Joins two members whose settings are those of `set`.
fn join(set: impl Fn(u32) -> Vec<(&'static str, String)>, expected: AuthMode) {
    let held: Vec<_> =
        (0..2).map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let addresses: Vec<_> = held.iter().map(|port| port.local_addr().expect("bound").to_string()).collect();
    drop(held);
    let cluster = format!("worker={}", addresses.join(","));
    let nodes: Vec<Node> = (0..2)
        .map(|task| {
            let builder = Node::builder().without_environment().member("worker", task);
            let builder = builder.set("cluster", &cluster).set("pool_size", "1MiB");
            let builder =
                set(task).into_iter().fold(builder, |builder, (key, value)| builder.set(key, value));
            let config = builder.join_timeout(Duration::from_secs(20)).build().expect("good settings");
            assert_eq!(config.auth_mode(), expected);
            Node::start(&config).expect("it starts")
        })
        .collect();
    std::thread::scope(|scope| {
        for node in &nodes {
            scope.spawn(|| node.join().expect("both are there"));
        }
    });
}

#[test]
fn members_join_with_a_secret_that_only_its_owner_can_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("secret");
    let made = auth(&["secret", text(&file)]);
    assert!(made.status.success(), "{made:?}");
    assert_eq!(mode(&file), 0o600);
    let secret = fs::read_to_string(&file).expect("text");
    assert_eq!(secret.trim().len(), 64);
    assert!(!String::from_utf8_lossy(&made.stdout).contains(secret.trim()), "it shows the secret");
    join(|_| vec![("secret_file", text(&file).into())], AuthMode::Secret);
    let again = auth(&["secret", text(&file)]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists already"), "{again:?}");
    assert_eq!(fs::read_to_string(&file).expect("text"), secret);
}

#[test]
fn members_join_with_certificates_and_a_second_run_renews_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: String| text(&folder.path().join(name)).to_owned();
    let settings = |task| {
        vec![
            ("tls_ca", at("ca.pem".into())),
            ("tls_certificate", at(format!("worker-{task}.pem"))),
            ("tls_key", at(format!("worker-{task}.key"))),
        ]
    };
    let made = auth(&["certificates", text(folder.path()), "--cluster", "worker=a:1,b:1"]);
    assert!(made.status.success(), "{made:?}");
    for key in ["ca.key", "worker-0.key", "worker-1.key"] {
        assert_eq!(mode(&folder.path().join(key)), 0o600, "{key}");
    }
    join(settings, AuthMode::Tls);
    let before =
        ["ca.pem", "worker-0.pem", "worker-1.pem"].map(|name| fs::read(at(name.into())).expect(name));
    let renewed = auth(&["certificates", text(folder.path()), "--member", "worker/1", "--days", "3"]);
    assert!(renewed.status.success(), "{renewed:?}");
    let after = ["ca.pem", "worker-0.pem", "worker-1.pem"].map(|name| fs::read(at(name.into())).expect(name));
    assert_eq!((&before[0], &before[1]), (&after[0], &after[1]));
    assert_ne!(before[2], after[2]);
    join(settings, AuthMode::Tls);
}

#[test]
fn a_folder_with_half_an_authority_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("ca.pem"), "x").expect("a file");
    let refused = auth(&["certificates", text(folder.path()), "--member", "worker/1"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("it has ca.pem and no ca.key"), "{refused:?}");
    assert_eq!(auth(&["certificates", text(folder.path())]).status.code(), Some(2), "no members");
}

#[test]
fn an_authority_with_an_open_key_another_key_or_no_time_left_signs_nothing() {
    let folders = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
    let [own, other] = [0, 1].map(|number: usize| folders[number].path());
    let sign = |folder: &Path| auth(&["certificates", text(folder), "--member", "worker/1"]);
    for folder in [own, other] {
        assert!(sign(folder).status.success());
    }
    let refusal = || {
        let refused = sign(own);
        assert_eq!(refused.status.code(), Some(1));
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let key = own.join("ca.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).expect("own file");
    let error = refusal();
    assert!(error.contains("ca.key: others may read or write it (mode 0640): chmod 600"), "{error}");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("own file");
    let good = fs::read(own.join("ca.pem")).expect("ca.pem");
    fs::copy(other.join("ca.pem"), own.join("ca.pem")).expect("copied");
    let error = refusal();
    assert!(error.contains("ca.pem: it is for another key than that of ca.key"), "{error}");
    fs::write(own.join("ca.pem"), "half a certif").expect("written");
    assert!(refusal().contains("ca.pem: "), "{}", refusal());
    fs::write(own.join("ca.pem"), &good).expect("written");
    assert!(sign(own).status.success());
    // The end of an authority, whose signature nobody looks at here.
    let mut der = pem::parse(&good).expect("PEM").into_contents();
    let is_time = |part: &[u8]| part[..2] == [0x17, 13] && part[2..14].iter().all(u8::is_ascii_digit);
    let times: Vec<usize> = (0..der.len() - 15).filter(|at| is_time(&der[*at..at + 15])).collect();
    assert_eq!(times.len(), 2, "begin and end");
    der[times[1] + 2..times[1] + 4].copy_from_slice(b"99");
    let ended = pem::encode(&pem::Pem::new("CERTIFICATE", der));
    fs::write(own.join("ca.pem"), ended).expect("written");
    let error = refusal();
    assert!(error.contains("ca.pem: it held until 1999"), "{error}");
    // Each authority has a name of its own, at the end of its subject.
    let mut der = pem::parse(&good).expect("PEM").into_contents();
    let at = der.windows(9).rposition(|part| part == b"authority").expect("a name");
    der[at + 9..at + 26].copy_from_slice(b" 0000000000000000");
    fs::write(own.join("ca.pem"), pem::encode(&pem::Pem::new("CERTIFICATE", der))).expect("written");
    let error = refusal();
    assert!(error.contains("ca.pem: its subject is not tensorwire authority "), "{error}");
}

#[test]
fn a_folder_that_others_may_write_holds_no_authority() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("own folder");
    let refused = auth(&["certificates", text(folder.path()), "--member", "worker/1"]);
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("others may write it (mode 0777): chmod go-w"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).expect("own folder").count(), 0);
    // One that the program makes is good, whatever the umask.
    let made = folder.path().join("fresh");
    let script = r#"umask 0; exec "$0" auth certificates "$1" --member worker/1"#;
    let program = env!("CARGO_BIN_EXE_tensorwire");
    let output = Command::new("sh").args(["-c", script, program, text(&made)]).output().expect("a shell");
    assert!(output.status.success() && mode(&made) == 0o755, "{output:?}");
}

#[test]
fn a_folder_or_an_authority_of_another_user_signs_nothing() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can make files of another user");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let certificates = || auth(&["certificates", text(folder.path()), "--member", "worker/1"]);
    assert!(certificates().status.success());
    let before = fs::read(folder.path().join("worker-1.pem")).expect("made");
    for of in [folder.path().to_owned(), folder.path().join("ca.key"), folder.path().join("ca.pem")] {
        std::os::unix::fs::chown(&of, Some(NOBODY), None).expect("root may");
        let refused = certificates();
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && error.contains("it belongs to user 65534"), "{error}");
        std::os::unix::fs::chown(&of, Some(0), None).expect("root may");
    }
    assert_eq!(fs::read(folder.path().join("worker-1.pem")).expect("still there"), before);
    assert!(certificates().status.success());
}
