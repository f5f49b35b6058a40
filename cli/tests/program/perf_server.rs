//! The server of `tensorwire perf`, its client, and strangers that connect to it.

use crate::perf::{SOON, alone, program, report, run, text, ticks, two_cores};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A user that owns nothing.
const NOBODY: u32 = 65534;

/// The program with more of an environment.
fn with(arguments: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = program(arguments);
    command.envs(environment.iter().copied());
    command
}

/// A server of a test at a free port, with the command line of its client. Killed when dropped.
struct Served {
    server: Option<Child>,
    port: u16,
}

impl Served {
    fn start(arguments: &str) -> Self {
        Served::start_by(program, arguments)
    }

    /// Starts the program with `start`.
    fn start_by(start: impl Fn(&str) -> Command, arguments: &str) -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0");
        let port = free.and_then(|listener| listener.local_addr()).expect("a port").port();
        let server = start(&format!("perf {arguments} -p {port}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        Served { server: Some(server), port }
    }

    /// Connects as soon as the server listens.
    fn connect(&self) -> TcpStream {
        let since = Instant::now();
        loop {
            match TcpStream::connect(("127.0.0.1", self.port)) {
                Ok(stream) => return stream,
                Err(error) => assert!(since.elapsed() < SOON, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Connects, and proves to be a client by this user.
    fn connect_proven(&self) -> TcpStream {
        let mut stream = self.connect();
        let mut greeting = [0; 26];
        // The server may have no room for it.
        if stream.read_exact(&mut greeting).is_ok() {
            let opening = [&[24][..], &greeting[10..], &[0; 4], b"perf"].concat();
            drop(stream.write_all(&opening));
        }
        stream
    }

    /// Runs a client, which waits for the server to listen. Returns the outputs of both.
    fn client(self, test: &str, options: &str) -> (Output, Output) {
        self.client_by(program, test, options)
    }

    /// Like [`Served::client`]; starts the program with `start`.
    fn client_by(mut self, start: impl Fn(&str) -> Command, test: &str, options: &str) -> (Output, Output) {
        let client = start(&format!("perf {test} localhost -p {} {options}", self.port)).output();
        let client = client.expect("the program starts");
        let mut server = self.server.take().expect("started");
        let since = Instant::now();
        while server.try_wait().expect("ours").is_none() && since.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(5));
        }
        let late = server.try_wait().expect("ours").is_none();
        server.kill().expect("ours");
        assert!(!late, "the server does not end; its client said {}", text(&client.stderr));
        (client, server.wait_with_output().expect("ours"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

#[test]
fn what_nobody_can_read_ends_no_server_and_changes_no_exit_status() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("it is there");
    let output = program("perf compare --turns 4").stderr(full()).output();
    assert_eq!(output.expect("it starts").status.code(), Some(2));
    let member = ["launch-member", "--parent", &std::process::id().to_string(), "--", "./no such program"];
    let output = program("").args(member).stderr(full()).output();
    assert_eq!(output.expect("it starts").status.code(), Some(127));

    let mut server = Served::start("write_lat -s 64");
    drop(server.server.as_mut().and_then(|server| server.stderr.take()));
    // The server says that it is no client.
    let mut stranger = server.connect();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it listens");
    drop(stranger.read_to_end(&mut Vec::new()));
    std::thread::sleep(Duration::from_millis(200));
    assert!(
        server.server.as_mut().expect("ours").try_wait().expect("ours").is_none(),
        "the server has ended"
    );
}

#[test]
fn a_server_and_a_client_measure_each_test() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for test in ["write_lat", "write_bw", "send_lat", "read_lat", "rendezvous_lat"] {
        let path = folder.path().join(test);
        let served = Served::start(&format!("{test} -s 64"));
        let options = format!("-s 64 -n 100 --turns 2 --pool 8MiB --json {}", path.display());
        let (client, server) = served.client(test, &options);
        assert!(server.status.success(), "{test}: {}", text(&server.stderr));
        assert!(text(&server.stdout).contains(&format!("waiting for a client of {test}")), "{test}");
        let report = report(&path, &client);
        let row = &report["results"][0];
        assert_eq!((&row["bytes"], &row["iterations"]), (&64.into(), &100.into()), "{test}");
        assert_eq!(report["references"].as_array().map(Vec::len), Some(0), "{test}: no memory is shared");
    }
}

#[test]
fn a_duration_is_kept_by_a_server_and_a_client() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let since = Instant::now();
    let (client, server) = Served::start("read_lat").client("read_lat", "-s 8 -D 0.1 --pool 8MiB");
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
}

#[test]
fn a_client_that_asks_for_something_else_than_its_server_is_refused_on_both_sides() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    for (server, client, options, reason) in [
        ("write_lat", "read_lat", "-s 8", "started for write_lat and the client runs read_lat"),
        ("write_lat -s 8 -t 64", "write_lat", "-s 8,16", "--sizes is 8 at the server and 8,16 at the client"),
        (
            "write_bw --fabric shm",
            "write_bw",
            "--fabric verbs",
            "--fabric is shm at the server and verbs at the client",
        ),
    ] {
        let (client, server) = Served::start(server).client(client, options);
        assert_eq!((client.status.code(), server.status.code()), (Some(1), Some(2)), "{reason}");
        for said in [text(&client.stderr), text(&server.stderr)] {
            assert!(said.contains(reason), "no {reason} in {said}");
        }
    }
}

/// The sockets that listen at the port, each as the hexadecimal address of the kernel's table.
fn listeners(port: u16) -> Vec<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let tables: Vec<String> = tables.into_iter().flatten().collect();
    let fields = tables.iter().flat_map(|table| table.lines()).map(|line| line.split_whitespace());
    let local = fields.filter_map(|mut fields| {
        let local = fields.nth(1)?.to_owned();
        (fields.nth(1)? == "0A").then_some(local)
    });
    local.filter_map(|local| local.strip_suffix(&format!(":{port:04X}")).map(str::to_owned)).collect()
}

/// Waits for a connection with this port at its end, or at the other one, that is probed: the
/// kernel's table has the timer of the next probe.
fn wait_for_probes(port: u16, is_local: bool) {
    let port = format!(":{port:04X}");
    let is_probed = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, "01", _, timer, ..] = fields[..] else { return false };
        let end = if is_local { local } else { remote };
        end.ends_with(&port) && timer.starts_with("02:")
    };
    let since = Instant::now();
    while !std::fs::read_to_string("/proc/net/tcp").expect("procfs").lines().any(is_probed) {
        assert!(since.elapsed() < SOON, "the connection is not probed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_server_and_a_client_notice_the_end_of_the_others_host() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let served = Served::start("write_lat -s 8");
    let _client = served.connect_proven();
    wait_for_probes(served.port, true);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("bound").port();
    let mut client = program(&format!("perf write_lat 127.0.0.1 -s 8 -p {port}"))
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    wait_for_probes(port, false);
    client.kill().expect("ours");
    client.wait().expect("ours");
}

#[test]
fn a_server_listens_on_loopback_and_serves_its_client_after_strangers() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let served = Served::start("write_lat -s 8");
    // One that goes at once, one that speaks another language, and one that says nothing.
    drop(served.connect());
    let mut other = served.connect();
    other.write_all(&[b'G'; 200]).expect("written");
    // Longer than any name.
    let mut garbage = served.connect();
    garbage.write_all(&[0xff; 300]).expect("written");
    let _silent = served.connect();
    assert_eq!(listeners(served.port), ["0100007F"], "127.0.0.1 and nothing else");
    let (client, server) = served.client("write_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
    let said = text(&server.stderr);
    assert!(said.matches("is no client's").count() >= 2, "{said}");
    assert!(said.contains("what is no opening of a connection"), "{said}");
    assert!(text(&server.stdout).contains("at 127.0.0.1:"), "{}", text(&server.stdout));
}

/// Sets how many descriptors the process of a child may have.
fn limit_files(child: &Child, current: Option<u64>) {
    let pid = rustix::process::Pid::from_child(child);
    let maximum = getrlimit(Resource::Nofile).maximum;
    prlimit(Some(pid), Resource::Nofile, Rlimit { current, maximum }).expect("a child of this user");
}

#[test]
fn a_server_that_lacks_descriptors_says_so_and_serves_its_client_later() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let mut served = Served::start("write_lat -s 8");
    drop(served.connect());
    let server = served.server.as_mut().expect("started");
    let mut said = BufReader::new(server.stderr.take().expect("piped"));
    // Fewer than it has: standard input, output and error alone.
    limit_files(server, Some(3));
    let _waits = TcpStream::connect(("127.0.0.1", served.port)).expect("it listens");
    let mut line = String::new();
    while !line.contains("no connection can be taken: Too many open files") {
        line.clear();
        assert!(said.read_line(&mut line).expect("UTF-8") > 0, "the server has ended");
    }
    assert!(line.contains("ulimit -n"), "{line}");
    limit_files(served.server.as_ref().expect("started"), Some(1024));
    let (client, server) = served.client("write_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
}

#[test]
fn a_client_hears_at_once_that_its_server_has_failed() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    // Too few for a node, and enough for the server.
    let limited = |arguments: &str| {
        let mut command = Command::new("sh");
        let script = "ulimit -n 16; exec \"$0\" $1";
        command.args(["-c", script, env!("CARGO_BIN_EXE_tensorwire"), arguments]);
        command
    };
    let served = Served::start_by(limited, "rendezvous_lat -s 8");
    let since = Instant::now();
    let (client, server) = served.client("rendezvous_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
    let (ours, theirs) = (text(&client.stderr), text(&server.stderr));
    println!("after {:?}: {ours}", since.elapsed());
    assert!(!client.status.success() && !server.status.success(), "{ours}{theirs}");
    assert!([&ours, &theirs].iter().all(|said| said.contains("raise `ulimit -n`")), "{ours}{theirs}");
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
}

#[test]
fn a_flood_of_connections_is_said_in_few_lines() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let served = Served::start("write_lat -s 8");
    let since = Instant::now();
    // Several reasons by turns. Some wait for the greeting, so that the kernel knows them.
    for turn in 0..300 {
        let mut stream = served.connect();
        if turn % 2 == 0 {
            drop(stream.read_exact(&mut [0; 26]));
            drop(stream.write_all(&[0xff; 300]));
        }
    }
    let seconds = since.elapsed().as_secs_f64();
    let (client, server) = served.client("write_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
    let said = text(&server.stderr);
    let lines = said.matches("is no client's").count();
    println!("{lines} lines of 300 connections in {seconds:.1} s");
    assert!(lines >= 2 && lines as f64 <= 4.0 * (seconds + 10.0), "{said}");
}

#[test]
fn a_server_listens_elsewhere_only_if_it_is_told_to() {
    let _alone = alone();
    let plain = |arguments: &str| with(arguments, &[("TENSORWIRE_AUTH", "plain")]);
    let served = Served::start_by(plain, "write_lat -s 8 --listen 0.0.0.0");
    let since = Instant::now();
    while listeners(served.port).is_empty() {
        assert!(since.elapsed() < SOON, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(listeners(served.port), ["00000000"]);
    let output = run("perf write_lat --listen ::1 HOST");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn a_server_beyond_loopback_needs_a_proof_or_is_told_not_to() {
    let output = run("perf write_lat -s 8 --listen 0.0.0.0");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("0.0.0.0 is not loopback") && said.contains("TENSORWIRE_SECRET_FILE"), "{said}");
}

#[test]
fn a_setting_of_proofs_that_is_wrong_is_named_by_its_variable() {
    for (variable, value) in [("TENSORWIRE_AUTH", "maybe"), ("TENSORWIRE_TLS_KEY", "/nowhere")] {
        for test in ["write_lat", "rendezvous_lat"] {
            let mut program = with(&format!("perf {test} -s 8 --listen 127.0.0.1"), &[(variable, value)]);
            let output = program.output().expect("it starts");
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(1) && said.contains(variable), "{test}: {said}");
        }
    }
}

#[test]
fn a_server_and_its_client_prove_a_secret_and_another_secret_is_refused() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let secrets = ["ours", "another"].map(|name| {
        let path = folder.path().join(name).display().to_string();
        assert!(run(&format!("auth secret {path}")).status.success());
        path
    });
    let by = |secret: &str| {
        let secret = secret.to_owned();
        move |arguments: &str| with(arguments, &[("TENSORWIRE_SECRET_FILE", &secret)])
    };
    let served = Served::start_by(by(&secrets[0]), "send_lat -s 8 --listen 0.0.0.0");
    let arguments = format!("perf send_lat 127.0.0.1 -p {} -s 8 -n 100 --turns 2 --pool 8MiB", served.port);
    drop(served.connect());
    for (client, why) in [
        (by(&secrets[1])(&arguments), "do all members have the same secret_file?"),
        (program(&arguments), "its auth is secret"),
    ] {
        let mut client = client;
        let client = client.output().expect("it starts");
        let said = text(&client.stderr);
        assert!(client.status.code() == Some(1) && said.contains(why), "{said}");
    }
    let (client, server) = served.client_by(by(&secrets[0]), "send_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
    assert!(text(&server.stdout).contains("which proves itself by secret"), "{}", text(&server.stdout));
}

#[test]
fn a_process_of_another_user_is_neither_client_nor_server() {
    let _alone = alone();
    if !two_cores() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start a process of another user");
    }
    let this = std::fs::File::open(env!("CARGO_BIN_EXE_tensorwire")).expect("the program");
    let as_nobody = |arguments: &str| {
        // By its descriptor, as another user may not enter the folder.
        let mut command = Command::new(format!("/proc/self/fd/{}", this.as_raw_fd()));
        command.args(arguments.split_whitespace()).uid(NOBODY).gid(NOBODY).current_dir("/");
        command
    };
    // What the kernel says of the other side, or that one itself.
    let names_the_users = |said: &str| said.contains("another user") || said.contains("it runs as user");
    let options = "-s 8 -n 100 --turns 2 --pool 8MiB";
    let served = Served::start("write_lat -s 8");
    drop(served.connect());
    let client = as_nobody(&format!("perf write_lat 127.0.0.1 -p {} {options}", served.port)).output();
    let client = client.expect("it starts");
    let said = text(&client.stderr);
    assert!(client.status.code() == Some(1) && names_the_users(&said), "{said}");
    let (client, server) = served.client("write_lat", options);
    assert!(client.status.success() && server.status.success(), "{}", text(&client.stderr));
    assert!(text(&server.stderr).contains("it runs as user 65534"), "{}", text(&server.stderr));

    let served = Served::start_by(as_nobody, "write_lat -s 8");
    drop(served.connect());
    let client = run(&format!("perf write_lat 127.0.0.1 -p {} {options}", served.port));
    let said = text(&client.stderr);
    assert!(client.status.code() == Some(1) && names_the_users(&said), "{said}");
}

#[test]
fn a_client_without_a_server_is_told_how_to_start_one() {
    if !two_cores() {
        return;
    }
    let served = Served::start("write_lat"); // its port is free again once it is gone
    let port = served.port;
    drop(served);
    let output = run(&format!("perf write_lat localhost -p {port}"));
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains(&format!("localhost at port {port}")) && said.contains("without a host"), "{said}");
}

#[test]
#[ignore = "takes long: tests/nightly"]
fn clients_that_trickle_keep_neither_the_places_nor_a_processor() {
    /// More than the server has places.
    const TRICKLES: usize = 70;
    /// How long the server is watched, and its processor time then, in ticks of 10 ms. A test on a
    /// busy machine asserts five times this. Places are taken for 5 s.
    const WATCHED: (Duration, u64) = (Duration::from_secs(2), 10);
    /// How long the server waits for the first message of a connection.
    const FIRST_MESSAGE: Duration = Duration::from_secs(5);
    let _alone = alone();
    if !two_cores() {
        return;
    }
    // Half of them are clients that have proven their name. Of files, either the places run out
    // first or the descriptors.
    for files in [1024, 48] {
        let limited = |arguments: &str| {
            let mut command = Command::new("sh");
            let script = format!("ulimit -n {files} && exec \"$0\" \"$@\"");
            command.args(["-c", &script, env!("CARGO_BIN_EXE_tensorwire")]).args(arguments.split(' '));
            command
        };
        let served = Served::start_by(limited, "write_lat -s 8");
        let connect = |k: usize| if k.is_multiple_of(2) { served.connect_proven() } else { served.connect() };
        let mut trickles: Vec<_> = (0..TRICKLES).map(connect).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            // The first byte is the length of an opening, or it begins that of a message.
            let message = 60_u32.to_le_bytes().into_iter().chain(std::iter::repeat(b' '));
            for byte in message.take_while(|_| !stopped.load(Ordering::Relaxed)) {
                // A write fails once the server has closed the connection.
                trickles.retain_mut(|stream| stream.write_all(&[byte]).is_ok());
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let server = served.server.as_ref().expect("started").id();
        let before = ticks(server);
        std::thread::sleep(WATCHED.0);
        let used = ticks(server) - before;
        println!("{files} files: {used} ticks in {:?} (bound {})", WATCHED.0, WATCHED.1);
        // The client comes when the first ones have had their time.
        std::thread::sleep(FIRST_MESSAGE + Duration::from_secs(1) - WATCHED.0);
        let (client, server) = served.client("write_lat", "-s 8 -n 100 --turns 2 --pool 8MiB");
        stop.store(true, Ordering::Relaxed);
        thread.join().expect("no panic");
        assert!(used < 5 * WATCHED.1, "{files} files: {used} ticks");
        assert!(client.status.success(), "{}{}", text(&client.stderr), text(&server.stderr));
        assert!(server.status.success(), "{}", text(&server.stderr));
        let said = text(&server.stderr);
        assert!(said.contains("did not prove its name within"), "{said}");
    }
}

/// Connects to a port without an end, silent and with garbage in turns. Ends when it is dropped.
struct PortFlood {
    /// Connections, and those that nobody listened to any more.
    counts: Arc<[AtomicUsize; 2]>,
    stop: Arc<AtomicBool>,
}

impl PortFlood {
    fn start(port: u16) -> Self {
        /// Pause between two connections.
        const PAUSE: Duration = Duration::from_micros(200);
        let flood = PortFlood { counts: Arc::default(), stop: Arc::default() };
        let (counts, stop) = (flood.counts.clone(), flood.stop.clone());
        std::thread::spawn(move || {
            let mut open = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(mut stream) => {
                        let count = counts[0].fetch_add(1, Ordering::Relaxed);
                        drop(stream.write_all(&[0xff; 64][..64 * (count % 2)]));
                        open.push(stream);
                    }
                    Err(_) => _ = counts[1].fetch_add(1, Ordering::Relaxed),
                }
                std::thread::sleep(PAUSE);
            }
        });
        flood
    }

    fn counts(&self) -> [usize; 2] {
        [0, 1].map(|at| self.counts[at].load(Ordering::Relaxed))
    }
}

impl Drop for PortFlood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A server has its port closed once it has its client, so the flood meets nobody then.
#[test]
fn a_flood_on_the_port_of_a_server_stops_neither_its_client_nor_the_measurement() {
    /// Bound for the median of a small write during the flood, which shares the processors: so many
    /// times the one before, or `WRITE` if that is longer.
    const SLOWER: u32 = 20;
    const WRITE: Duration = Duration::from_micros(20);
    let _alone = alone();
    if !two_cores() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let [secret, json] = ["secret", "report"].map(|name| folder.path().join(name));
    assert!(run(&format!("auth secret {}", secret.display())).status.success());
    let secret = secret.to_str().expect("UTF-8");
    // A proof of the secret takes longer than that of the user.
    for environment in [&[][..], &[("TENSORWIRE_SECRET_FILE", secret)]] {
        let start = |arguments: &str| with(arguments, environment);
        let median = |served: Served| {
            let options = format!("-s 8 -D 0.5 --pool 8MiB --json {}", json.display());
            let (client, server) = served.client_by(start, "write_lat", &options);
            assert!(server.status.success(), "{}", text(&server.stderr));
            let report = report(&json, &client);
            Duration::from_nanos(report["results"][0]["p50_ns"].as_f64().expect("a number") as u64)
        };
        let before = median(Served::start_by(start, "write_lat -s 8"));
        let served = Served::start_by(start, "write_lat -s 8");
        drop(served.connect());
        let flood = PortFlood::start(served.port);
        // More strangers than the server has places.
        std::thread::sleep(Duration::from_millis(400));
        let since = Instant::now();
        let during = median(served);
        let [count, refused] = flood.counts();
        println!(
            "p50 {before:?} before and {during:?} during, {:?} in all; {count} connections and {refused} \
             refused",
            since.elapsed()
        );
        assert!(count > 128 && refused > 0, "no flood: {count}, {refused}");
        assert!(during < WRITE.max(before * SLOWER), "{during:?}");
    }
}
