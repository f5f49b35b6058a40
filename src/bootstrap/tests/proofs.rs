//! Each mode of proof: members join, and whoever can't prove a name does not.

use super::certificates::{Authority, write};
use super::*;
use crate::bootstrap::auth::{AuthSettings, Authenticator, Verdict};
use crate::bootstrap::connector::Connector;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::SystemTime;
use tempfile::TempDir;
use tokio::runtime::Runtime;

pub(super) fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A file with a secret.
pub(super) fn secret(folder: &TempDir, name: &str, text: &str) -> AuthSettings {
    let path = folder.path().join(name);
    write(&path, text.as_bytes());
    AuthSettings::Secret(path)
}

pub(super) const GOOD: &str = "0123456789abcdef0123456789abcdef\n";
pub(super) const OTHER: &str = "0123456789abcdef0123456789abcdeF\n";

pub(super) fn with(auth: &AuthSettings, cluster: &Cluster, task: u32) -> BootstrapOptions {
    BootstrapOptions { auth: auth.clone(), ..options(cluster, task) }
}

pub(super) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The outcome of connecting as worker `me` with the member at the address of worker `to`, in its
/// words.
fn connect(auth: &AuthSettings, cluster: &Cluster, me: u32, to: u32) -> Result<(), String> {
    connect_with(Authenticator::open(auth, &name("worker", me)).unwrap(), cluster, to)
}

/// The same as whom `auth` says.
fn connect_with(auth: Authenticator, cluster: &Cluster, to: u32) -> Result<(), String> {
    let (auth, address) = (Arc::new(auth), address(cluster, "worker", to));
    let connector = Connector { auth, peer: name("worker", to), address, limit: LONG };
    runtime().block_on(connector.connect()).map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn members_with_one_secret_join() {
    let (cluster, folder) = (workers(3), folder());
    let auth = secret(&folder, "secret", GOOD);
    let members: Vec<Member> = (0..3).map(|task| Member::start(with(&auth, &cluster, task))).collect();
    members.iter().for_each(Member::join);
    members[1].service.stop("training is done", LONG).unwrap();
    assert_eq!(members[0].peering.await_loss().1, LossCause::Left("training is done".into()));
}

#[test]
fn another_secret_is_refused_on_both_sides() {
    let (cluster, folder) = (workers(2), folder());
    let first = Member::start(with(&secret(&folder, "one", GOOD), &cluster, 0));
    let second = Member::start(with(&secret(&folder, "two", OTHER), &cluster, 1));
    for (member, peer) in [(&first, 1), (&second, 0)] {
        let error = member.await_missing("is not proven to be");
        println!("{error}");
        assert!(error.contains(&format!("not proven to be worker/{peer}: TLS failed")), "{error}");
        assert!(error.contains("do all members have the same secret_file?"), "{error}");
        assert!(!error.contains("01234567"), "{error}");
        assert!(member.peering.told().is_empty());
    }
    // The one that gives up first does not hide why the other one waits.
    drop(second);
    let error = first.await_missing("nobody listens");
    assert!(error.contains("is not proven to be worker/1: TLS failed"), "{error}");
}

/// The callers know the listener's public key, which it shows to every stranger. So it is the
/// listener that refuses: with a wrong secret, the caller of this program would do that first.
#[test]
fn a_caller_without_the_key_of_its_name_is_refused_although_it_believes_the_listener() {
    let (cluster, folder) = (workers(2), folder());
    let (good, bad) = (secret(&folder, "good", GOOD), secret(&folder, "bad", OTHER));
    let first = Member::start(with(&good, &cluster, 0));
    let open = |auth, task| Authenticator::open(auth, &name("worker", task)).unwrap();
    let (real, stranger, other) = (open(&good, 1), open(&bad, 1), open(&good, 7));
    let call = |shown, signer| {
        let mut auth = open(&good, 1);
        auth.forge(shown, signer);
        connect_with(auth, &cluster, 0)
    };
    assert_eq!(call(&real, &real), Ok(()), "it knows the listener");
    // A key of another secret, another member's key, and the right key that others can only show.
    for (shown, signer) in [(&stranger, &stranger), (&other, &other), (&real, &stranger)] {
        let error = call(shown, signer).expect_err("it lacks the key");
        println!("{error}");
        assert!(error.contains("TLS failed: received fatal alert"), "{error}");
    }
    assert!(first.peering.told().is_empty());
}

#[test]
fn a_member_with_the_secret_is_the_one_that_it_says_or_nobody() {
    let (cluster, folder) = (workers(2), folder());
    let auth = secret(&folder, "secret", GOOD);
    let _first = Member::start(with(&auth, &cluster, 0));
    assert_eq!(connect(&auth, &cluster, 1, 0), Ok(()));
    // It expects worker/1, and worker/0 answers.
    let auth = Arc::new(Authenticator::open(&auth, &name("worker", 1)).unwrap());
    let (peer, address) = (name("worker", 1), address(&cluster, "worker", 0));
    let error = runtime().block_on(Connector { auth, peer, address, limit: LONG }.connect()).unwrap_err();
    assert!(error.to_string().contains("TLS failed"), "{error}");
}

/// Copies bytes both ways between a caller and a member, and keeps those of the caller.
fn relay(caller: TcpStream, to: &str) -> Vec<u8> {
    let member = TcpStream::connect(to).unwrap();
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let mut kept = Vec::new();
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            kept.extend(&bytes[..len]);
            if to.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
        drop(to.shutdown(std::net::Shutdown::Both));
        kept
    };
    let (back_from, back_to) = (member.try_clone().unwrap(), caller.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || copy(back_from, back_to));
        copy(caller, member)
    })
}

/// Accepts one caller of worker/0 with this number, and has it prove its name.
fn accept(auth: &Authenticator, listener: &TcpListener) -> Result<TaskId, String> {
    let stream = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    runtime().block_on(async {
        let proven = auth.accept(tokio::net::TcpStream::from_std(stream).unwrap());
        let proven = tokio::time::timeout(LONG, proven).await.expect("it ends");
        proven.map(|admitted| admitted.name).map_err(|error| error.to_string())
    })
}

#[test]
fn a_recorded_proof_is_good_for_one_connection() {
    let folder = folder();
    let auth = secret(&folder, "secret", GOOD);
    let open = |task| Authenticator::open(&auth, &name("worker", task)).unwrap();
    let (own, real) = (open(0), TcpListener::bind("127.0.0.1:0").unwrap());
    let to = real.local_addr().unwrap().to_string();
    // A good proof, through a man in the middle who only listens.
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = middle.local_addr().unwrap().to_string();
    let kept = std::thread::scope(|scope| {
        let kept = scope.spawn(|| relay(middle.accept().unwrap().0, &to));
        let member = scope.spawn(|| accept(&own, &real));
        let connector = Connector { auth: Arc::new(open(1)), peer: name("worker", 0), address, limit: LONG };
        drop(runtime().block_on(connector.connect()).expect("it only listens"));
        assert_eq!(member.join().unwrap(), Ok(name("worker", 1)));
        kept.join().unwrap()
    });
    assert!(kept.len() > 300, "{} bytes", kept.len());
    assert!(!kept.windows(8).any(|part| GOOD.as_bytes().starts_with(part)), "the secret travels");
    // As it was, and with the number of the new connection in place of the old one.
    for (with_new_number, refusal) in [(false, "no opening"), (true, "TLS failed")] {
        let outcome = std::thread::scope(|scope| {
            let member = scope.spawn(|| accept(&own, &real));
            let mut again = TcpStream::connect(&to).unwrap();
            let (mut greeting, mut replayed) = ([0; 26], kept.clone());
            again.read_exact(&mut greeting).unwrap();
            if with_new_number {
                replayed[1..17].copy_from_slice(&greeting[10..]);
            }
            // It may be closed half way.
            drop(again.write_all(&replayed));
            member.join().unwrap()
        });
        let error = outcome.expect_err("a replay");
        assert!(error.contains(refusal), "{error}");
    }
}

/// Listens at the address of worker/0, and has neither the secret nor a certificate. Returns what
/// worker/1 says to it.
pub(super) fn told_to_an_impostor(auth: &AuthSettings) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let auth = Arc::new(Authenticator::open(auth, &name("worker", 1)).unwrap());
    let connector =
        Connector { auth: auth.clone(), peer: name("worker", 0), address, limit: Duration::from_secs(2) };
    std::thread::scope(|scope| {
        let told = scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            stream.set_read_timeout(Some(LONG)).unwrap();
            stream.write_all(auth.refusal(Verdict::Welcome).as_ref()).unwrap();
            let mut got = Vec::new();
            drop(stream.read_to_end(&mut got));
            got
        });
        runtime().block_on(connector.connect()).expect_err("nothing was proven");
        told.join().unwrap()
    })
}

#[test]
fn an_opening_shows_the_secret_to_one_listener_on_one_connection() {
    let folder = folder();
    let (good, other) = (secret(&folder, "good", GOOD), secret(&folder, "other", OTHER));
    let said = told_to_an_impostor(&good);
    let open = |auth: &AuthSettings, task| Authenticator::open(auth, &name("worker", task)).unwrap();
    let listens = open(&good, 0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // What worker/0 knows after the opening of a caller.
    let has_secret = |call: &dyn Fn(TcpStream)| {
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        accepted.set_nonblocking(true).unwrap();
        std::thread::scope(|scope| {
            let greeted = scope.spawn(|| {
                runtime().block_on(async {
                    let accepted = tokio::net::TcpStream::from_std(accepted).unwrap();
                    listens.greet(accepted).await.map(|greeted| greeted.has_secret)
                })
            });
            call(caller);
            greeted.join().unwrap().expect("an opening")
        })
    };
    let calls = |auth: &AuthSettings, to: u32| {
        let auth = open(auth, 1);
        has_secret(&|caller| {
            caller.set_nonblocking(true).unwrap();
            runtime().block_on(async {
                let caller = tokio::net::TcpStream::from_std(caller).unwrap();
                // The listener hangs up after the opening.
                auth.connect(caller, &name("worker", to)).await.map(|_| ()).unwrap_err();
            });
        })
    };
    assert!(calls(&good, 0));
    assert!(!calls(&good, 2), "it calls another member");
    assert!(!calls(&other, 0), "it has another secret");
    let is_repeated = has_secret(&|mut caller| {
        let (mut greeting, mut said) = ([0; 26], said[..OPENING].to_vec());
        caller.read_exact(&mut greeting).unwrap();
        said[1..17].copy_from_slice(&greeting[10..]);
        caller.write_all(&said).unwrap();
    });
    assert!(!is_repeated, "it is the code for another number");
}

/// Bytes of the opening of worker/1.
const OPENING: usize = 59;

#[test]
fn an_impostor_at_a_members_address_is_told_the_callers_name_only() {
    let folder = folder();
    let tls = AuthSettings::Tls(Authority::new().worker(folder.path(), 1));
    for auth in [secret(&folder, "secret", GOOD), tls] {
        let got = told_to_an_impostor(&auth);
        // The number of the greeting, a code, the name, and a ClientHello, which is one record of
        // TLS.
        let (opening, hello) = got.split_at(OPENING);
        let (number, rest) = opening.split_at(17);
        assert_eq!(number, [&[58][..], &[0; 16]].concat());
        assert_eq!(rest[32..], [&[0, 0, 0, 1][..], b"worker"].concat());
        assert_eq!(rest[..32] != [0; 32], matches!(auth, AuthSettings::Secret(_)));
        assert_eq!((&hello[..2], hello[5]), (&[22, 3][..], 1), "a handshake, a ClientHello");
        assert_eq!(usize::from(u16::from_be_bytes([hello[3], hello[4]])), hello.len() - 5, "and no more");
        assert!(!hello.windows(6).any(|part| part == b"worker"), "no certificate");
    }
}

#[test]
fn a_caller_that_is_led_to_its_own_port_is_refused() {
    let (cluster, folder) = (workers(2), folder());
    let first = Member::start(with(&secret(&folder, "secret", GOOD), &cluster, 0));
    let real = address(&cluster, "worker", 0);
    let mirror = TcpListener::bind(address(&cluster, "worker", 1)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| relay(mirror.accept().unwrap().0, &real));
        let error = first.await_missing("is not proven to be worker/1");
        assert!(error.contains("TLS failed"), "{error}");
        first.stop();
    });
}

/// Runs in a process of its own, as the log is for all threads.
#[test]
fn no_secret_and_no_key_is_in_the_log_or_in_a_debug_text() {
    if std::env::var(PART).is_err() {
        run_again("proofs::no_secret_and_no_key_is_in_the_log_or_in_a_debug_text", "log", None);
        return;
    }
    // Of every program in this process.
    let log = Log::of("");
    tracing::subscriber::set_global_default(log.clone()).expect("the only one of this process");
    let folders = [folder(), folder()];
    let authority = Authority::new();
    let tls = [0, 1].map(|task| AuthSettings::Tls(authority.worker(folders[task as usize].path(), task)));
    let good = secret(&folders[0], "good", GOOD);
    let bad = secret(&folders[0], "bad", OTHER);
    let mut hidden = vec![GOOD.trim().to_owned(), OTHER.trim().to_owned()];
    for folder in &folders {
        let key = std::fs::read_to_string(folder.path().join("own.key")).unwrap();
        hidden.extend(key.lines().filter(|line| !line.starts_with("---")).map(str::to_owned));
    }
    for auth in [[good.clone(), good.clone()], [good, bad], tls] {
        let cluster = workers(2);
        let members = [0, 1].map(|task| Member::start(with(&auth[task as usize], &cluster, task)));
        match auth[0] == auth[1] || matches!(auth[0], AuthSettings::Tls(_)) {
            true => members.iter().for_each(Member::join),
            false => drop(members[0].await_missing("TLS failed")),
        }
        hidden.iter().for_each(|part| assert!(!format!("{:?} {auth:?}", members[0].service).contains(part)));
    }
    let log = log.text();
    assert!(log.contains("linked with worker/1") && log.contains("was refused"), "{log}");
    for part in hidden {
        assert!(part.len() >= 32 && !log.contains(&part), "a secret is in the log");
        let bytes = format!("{:?}", part.as_bytes());
        assert!(!log.contains(bytes.trim_matches(['[', ']'])), "a secret is in the log, as numbers");
    }
}

#[test]
fn a_secret_that_is_open_to_others_short_or_missing_stops_the_start_and_is_never_shown() {
    use std::os::unix::fs::PermissionsExt;
    let (cluster, folder) = (workers(1), folder());
    let refusal = |auth: &AuthSettings| {
        let member = Member::new(with(auth, &cluster, 0));
        let error = member.service.start().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("01234567"), "{error:?}");
        assert!(!format!("{:?} {:?}", member.service, with(auth, &cluster, 0)).contains("01234567"));
        error.to_string()
    };
    let good = secret(&folder, "open", GOOD);
    std::fs::set_permissions(folder.path().join("open"), PermissionsExt::from_mode(0o644)).unwrap();
    let error = refusal(&good);
    assert!(error.contains("others may read") && error.contains("worker/0 can't prove who it is"), "{error}");
    let error = refusal(&secret(&folder, "short", "0123456789abcdef0123456789abcde\n"));
    assert!(error.contains("31 bytes, and 32 are the least"), "{error}");
    let error = refusal(&AuthSettings::Secret(folder.path().join("none")));
    assert!(error.contains("secret_file = ") && error.contains("No such file"), "{error}");
}

#[test]
fn members_with_certificates_join_and_renewed_certificates_need_no_restart() {
    let (cluster, authority) = (workers(2), Authority::new());
    let folders = [folder(), folder()];
    let files = [0, 1].map(|task| authority.worker(folders[task as usize].path(), task));
    let start =
        |task: u32| Member::start(with(&AuthSettings::Tls(files[task as usize].clone()), &cluster, task));
    let first = start(0);
    let second = start(1);
    first.join();
    second.join();
    second.stop();
    first.peering.await_loss();
    // A new authority shuts out whoever has a certificate of the old one only.
    assert_eq!(connect(&AuthSettings::Tls(files[1].clone()), &cluster, 1, 0), Ok(()));
    let fresh = Authority::new();
    fresh.worker(folders[0].path(), 0);
    // So that it is the member that refuses.
    fresh.add(&files[1].ca);
    let begin = Instant::now();
    loop {
        let outcome = connect(&AuthSettings::Tls(files[1].clone()), &cluster, 1, 0);
        if outcome.as_ref().is_err_and(|error| error.contains("received fatal alert")) {
            break;
        }
        assert!(begin.elapsed() < LONG, "the member still has its old files: {outcome:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    fresh.worker(folders[1].path(), 1);
    let second = start(1);
    second.join();
    first.join();
    // A file that is broken meanwhile changes nothing.
    write(&files[0].certificate, b"half a certif");
    std::thread::sleep(Duration::from_millis(600));
    second.stop();
    let third = start(1);
    third.join();
    first.join();
}

#[test]
fn a_certificate_of_another_authority_another_member_or_the_past_is_refused() {
    let (cluster, authority) = (workers(2), Authority::new());
    let (mine, theirs) = (folder(), folder());
    let own = AuthSettings::Tls(authority.worker(mine.path(), 0));
    let first = Member::start(with(&own, &cluster, 0));
    let refused = |files: TlsFiles, me: u32| {
        let error = connect(&AuthSettings::Tls(files), &cluster, me, 0).unwrap_err();
        println!("{error}");
        error
    };
    let good = authority.worker(theirs.path(), 1);
    assert_eq!(connect(&AuthSettings::Tls(good), &cluster, 1, 0), Ok(()));
    // Another authority, on both sides and on the caller's only.
    let stranger = Authority::new();
    let error = refused(stranger.worker(theirs.path(), 1), 1);
    assert!(error.contains("TLS failed: invalid peer certificate"), "{error}");
    assert!(error.contains("an authority that is in the tls_ca of both"), "{error}");
    let files = stranger.worker(theirs.path(), 1);
    authority.add(&files.ca);
    let error = refused(files, 1);
    // It has seen the certificate of worker/0, and found it good, before it is refused itself.
    assert!(error.contains("TLS failed: received fatal alert"), "{error}");
    assert!(error.contains("an authority that is in the tls_ca of both"), "{error}");
    // A certificate that was good when this process read it.
    let until = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap() + Duration::from_secs(2);
    let files = authority.issue(theirs.path(), "tensorwire:worker/1", until);
    let auth = Arc::new(Authenticator::open(&AuthSettings::Tls(files), &name("worker", 1)).unwrap());
    std::thread::sleep(Duration::from_secs(3));
    let (peer, at) = (name("worker", 0), address(&cluster, "worker", 0));
    let connector = Connector { auth, peer, address: at, limit: LONG };
    let error = runtime().block_on(connector.connect()).unwrap_err().to_string();
    assert!(error.contains("TLS failed: received fatal alert: CertificateExpired"), "{error}");
    // worker/1 says that it is worker/7. This program does not even start so; it is done by hand.
    let error =
        Authenticator::open(&AuthSettings::Tls(authority.worker(theirs.path(), 1)), &name("worker", 7));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("no alternative name URI:tensorwire:worker/7"), "{error}");
    let error = impostor(&authority.worker(theirs.path(), 1), &address(&cluster, "worker", 0));
    assert!(error.contains("the proof failed"), "{error}");
    // The member that answers has the certificate of another one.
    let files = authority.worker(theirs.path(), 1);
    let auth = Arc::new(Authenticator::open(&AuthSettings::Tls(files), &name("worker", 1)).unwrap());
    let (peer, address) = (name("worker", 5), address(&cluster, "worker", 0));
    let error = runtime().block_on(Connector { auth, peer, address, limit: LONG }.connect()).unwrap_err();
    assert!(error.to_string().contains("NotValidForName"), "{error}");
    assert!(first.peering.told().is_empty());
}

/// Has a good certificate, of worker/1, and calls as worker/7.
fn impostor(files: &TlsFiles, address: &str) -> String {
    let settings = AuthSettings::Tls(files.clone());
    let mut auth = Authenticator::open(&settings, &name("worker", 1)).unwrap();
    auth.call_oneself(name("worker", 7));
    let (peer, address) = (name("worker", 0), address.to_owned());
    let connector = Connector { auth: Arc::new(auth), peer, address, limit: LONG };
    runtime().block_on(connector.connect()).unwrap_err().to_string()
}

#[test]
fn a_certificate_that_no_peer_would_believe_stops_the_start() {
    let (cluster, folder, authority) = (workers(1), folder(), Authority::new());
    let open = |files: &TlsFiles| Authenticator::open(&AuthSettings::Tls(files.clone()), &name("worker", 0));
    let refusal = |files: &TlsFiles| {
        let member = Member::new(with(&AuthSettings::Tls(files.clone()), &cluster, 0));
        let error = member.service.start().unwrap_err().to_string();
        println!("{error}");
        assert!(error.contains(&format!("tls_certificate = {}", files.certificate.display())), "{error}");
        error
    };
    let files = authority.worker(folder.path(), 0);
    assert!(open(&files).is_ok());
    let (ca, good) = (std::fs::read(&files.ca).unwrap(), std::fs::read(&files.certificate).unwrap());
    Authority::new().worker(folder.path(), 0);
    write(&files.ca, &ca);
    let signer = format!("no authority of tls_ca = {} has signed it", files.ca.display());
    assert!(refusal(&files).contains(&signer));
    let past = Duration::from_secs(1_000_000_000);
    authority.issue(folder.path(), "tensorwire:worker/0", past);
    assert!(refusal(&files).contains("certificate expired"));
    // A key of another certificate.
    write(&files.certificate, &good);
    let error = open(&files).err().unwrap().to_string();
    assert!(error.contains("tls_key = "), "{error}");
}

#[test]
fn a_key_that_is_open_to_others_or_missing_stops_the_start() {
    use std::os::unix::fs::PermissionsExt;
    let (cluster, folder) = (workers(1), folder());
    let files = Authority::new().worker(folder.path(), 0);
    let refusal = |files: &TlsFiles| {
        let auth = AuthSettings::Tls(files.clone());
        Member::new(with(&auth, &cluster, 0)).service.start().unwrap_err().to_string()
    };
    std::fs::set_permissions(&files.key, PermissionsExt::from_mode(0o640)).unwrap();
    let error = refusal(&files);
    assert!(error.contains("tls_key = ") && error.contains("chmod 600"), "{error}");
    std::fs::set_permissions(&files.key, PermissionsExt::from_mode(0o600)).unwrap();
    for (key, path) in [("tls_ca", &files.ca), ("tls_certificate", &files.certificate)] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o664)).unwrap();
        let error = refusal(&files);
        assert!(error.contains(&format!("{key} = ")) && error.contains("others may write it"), "{error}");
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
    }
    let missing = TlsFiles { ca: PathBuf::from("/nowhere/ca.pem"), ..files.clone() };
    assert!(refusal(&missing).contains("tls_ca = /nowhere/ca.pem"), "{}", refusal(&missing));
    write(&files.key, b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n");
    let error = refusal(&files);
    assert!(error.contains("tls_key = ") && !error.contains("c2VjcmV0"), "{error}");
}

#[test]
fn members_with_different_modes_name_both() {
    let (cluster, folder) = (workers(2), folder());
    let first = Member::start(with(&secret(&folder, "secret", GOOD), &cluster, 0));
    let second = Member::start(with(&AuthSettings::Plain, &cluster, 1));
    let error = first.await_missing("its auth is plain. This process has secret, and so must the member");
    assert!(error.contains("worker/1"), "{error}");
    second.await_missing("its auth is secret. This process has plain");
}

#[test]
fn a_connection_that_ends_before_the_proof_is_named() {
    let cluster = workers(2);
    let listener = TcpListener::bind(address(&cluster, "worker", 0)).unwrap();
    let member = Member::start(options(&cluster, 1));
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| drop(listener.accept().unwrap()));
        member.await_missing("ended the connection before the proof was done");
        closing.join().unwrap();
    });
}

#[test]
fn members_that_ask_for_plain_join_without_a_proof() {
    let cluster = workers(2);
    let members = [0, 1].map(|task| Member::start(with(&AuthSettings::Plain, &cluster, task)));
    members.iter().for_each(Member::join);
}
