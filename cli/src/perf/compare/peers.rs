//! The programs that are measured: how each is found and called, and which figure it prints.

use super::job::Job;
use super::parse;
use super::rows::Measure;
use crate::perf::cores::Cores;
use crate::perf::options::MIN_TURNS;
use clap::ValueEnum;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where the kernel lists RDMA devices.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

/// The smallest pool of ours, in bytes.
const POOL: usize = 64 << 20;
/// A pool of ours has room for the payload so many times, as `perf` demands.
const POOL_SHARE: usize = 8;
/// Round trips of gRPC calls take many times longer than the others. There are fewer of them by
/// this factor.
const CALLS_SHARE: u64 = 50;

/// A program of another project, which measures itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// UCX's tag_lat and tag_bw with UCX_TLS=posix
    UcxPosix,
    /// The same with UCX's default transports
    Ucx,
    /// UCX's ucp_put_bw with UCX_TLS=posix, one-sided as our write_bw
    UcxPut,
    /// UCX's tag_lat and tag_bw with UCX_TLS=tcp, over the loopback interface
    UcxTcp,
    /// iceoryx2's benchmark-publish-subscribe, without copies, between two threads
    Iceoryx2,
    /// perftest's ib_write_lat and ib_write_bw, where there is an RDMA device
    Perftest,
}

/// What a run is like. It is the same for all programs.
#[derive(Clone, Debug)]
pub struct Conditions {
    pub bytes: usize,
    /// Measured round trips, or operations.
    pub iterations: u64,
    pub warmup: u64,
    pub cores: Cores,
    pub profile: Option<String>,
    pub ib_dev: Option<String>,
    pub gid_index: Option<u8>,
}

/// How a peer is called.
pub struct Call {
    /// The server, which listens at the port, if there is one.
    pub server: Option<Job>,
    pub client: Job,
}

/// Ours: `rendezvous_lat` and `write_bw` on shared memory and TCP, `write_lat` and `write_bw` on
/// verbs.
pub fn ours(program: &Path, fabric: &str, measure: Measure, conditions: &Conditions, json: &Path) -> Job {
    let Conditions { bytes, iterations, .. } = conditions;
    let test = match (measure, fabric) {
        (Measure::Bandwidth, _) => "write_bw",
        (Measure::Latency, "verbs") => "write_lat",
        (Measure::Latency, _) => "rendezvous_lat",
    };
    let pool = POOL.max(bytes * POOL_SHARE);
    let mut job = Job::new(
        program,
        &format!("perf {test} --local --fabric {fabric} -s {bytes} -n {iterations} --pool {pool}"),
    );
    let mut add = |more: &str| job.arguments.extend(more.split_whitespace().map(str::to_owned));
    let (turns, warmup) = (MIN_TURNS, conditions.warmup);
    add(&format!("--turns {turns} --warmup {warmup}"));
    if fabric == "verbs" {
        add(match measure {
            Measure::Latency => "-t 256 -Q 1 -I 0", // as ib_write_lat
            Measure::Bandwidth => "-t 128 -Q 32",
        });
        device(conditions, &mut add);
    }
    if let (Some(profile), "rendezvous_lat") = (&conditions.profile, test) {
        add(&format!("--profile {profile}"));
    }
    on_cores(job, conditions, json)
}

/// Our latency over gRPC calls, the baseline that the fabrics replace. Profiles are for pollers and
/// queues, which calls have none of.
pub fn calls(program: &Path, conditions: &Conditions, json: &Path) -> Job {
    let iterations = (conditions.iterations / CALLS_SHARE).max(1);
    let warmup = conditions.warmup.min(iterations);
    let fewer = Conditions { iterations, warmup, profile: None, ..conditions.clone() };
    ours(program, "grpc", Measure::Latency, &fewer, json)
}

/// The bare cache line.
pub fn cache_line(program: &Path, conditions: &Conditions, json: &Path) -> Job {
    let job = Job::new(program, "perf cache_line --local -s 8 -n 2000 --warmup 200");
    on_cores(job, conditions, json)
}

fn on_cores(mut job: Job, conditions: &Conditions, json: &Path) -> Job {
    let Cores { initiator, responder } = conditions.cores;
    job.arguments.extend(["--cores".into(), format!("{initiator},{responder}"), "--json".into()]);
    job.arguments.push(json.to_string_lossy().into_owned());
    job
}

fn device(conditions: &Conditions, add: &mut impl FnMut(&str)) {
    if let Some(name) = &conditions.ib_dev {
        add(&format!("-d {name}"));
    }
    if let Some(index) = conditions.gid_index {
        add(&format!("-x {index}"));
    }
}

impl Peer {
    /// The name on the command line and in the report.
    pub fn name(self) -> &'static str {
        match self {
            Peer::UcxPosix => "ucx-posix",
            Peer::Ucx => "ucx",
            Peer::UcxPut => "ucx-put",
            Peer::UcxTcp => "ucx-tcp",
            Peer::Iceoryx2 => "iceoryx2",
            Peer::Perftest => "perftest",
        }
    }

    /// The fabric on which it is compared with ours.
    pub fn fabric(self) -> &'static str {
        match self {
            Peer::UcxPosix | Peer::Ucx | Peer::UcxPut | Peer::Iceoryx2 => "shm",
            Peer::UcxTcp => "tcp",
            Peer::Perftest => "verbs",
        }
    }

    /// Whether it measures this.
    pub fn has(self, measure: Measure) -> bool {
        match self {
            Peer::UcxPosix | Peer::Ucx | Peer::UcxTcp | Peer::Perftest => true,
            Peer::UcxPut => measure == Measure::Bandwidth,
            Peer::Iceoryx2 => measure == Measure::Latency,
        }
    }

    /// The program on `PATH`, the variable that names another one, and how to install it.
    fn source(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Peer::UcxPosix | Peer::Ucx | Peer::UcxPut | Peer::UcxTcp => (
                "ucx_perftest",
                "UCX_PERFTEST",
                "pip install libucx-cu12, then --ucx \"$(python3 -c 'import libucx; \
                 print(libucx.__path__[0])')/bin/ucx_perftest\"",
            ),
            Peer::Iceoryx2 => (
                "benchmark-publish-subscribe",
                "ICEORYX2_BENCHMARK",
                "git clone https://github.com/eclipse-iceoryx/iceoryx2 && cd iceoryx2 && cargo build \
                 --release --bin benchmark-publish-subscribe, then --iceoryx2 \
                 target/release/benchmark-publish-subscribe",
            ),
            Peer::Perftest => ("ib_write_lat", "PERFTEST", "apt-get install perftest"),
        }
    }

    /// Finds its program: the one that the command line names, or else the variable, or else on
    /// `PATH`.
    ///
    /// # Errors
    /// Why it is left out, and how to install it.
    pub fn find(self, given: Option<&Path>) -> Result<PathBuf, String> {
        let (name, variable, install) = self.source();
        if self == Peer::Perftest && !has_entries(Path::new(RDMA_DEVICES)) {
            return Err(format!(
                "this machine has no RDMA device ({RDMA_DEVICES} has none); with one, install it \
                 with: {install}"
            ));
        }
        let named = given.map(Path::to_owned).or_else(|| std::env::var_os(variable).map(PathBuf::from));
        if let Some(path) = named {
            let why = || format!("{} is no file; install it with: {install}", path.display());
            return if path.is_file() { Ok(path.clone()) } else { Err(why()) };
        }
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found =
            std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file());
        found.ok_or_else(|| {
            format!("{name} is not on PATH, and {variable} is not set; install it with: {install}")
        })
    }

    /// How it is called, with a port for its server.
    pub fn call(self, program: &Path, measure: Measure, conditions: &Conditions, port: u16) -> Call {
        match self {
            Peer::UcxPosix | Peer::Ucx | Peer::UcxPut | Peer::UcxTcp => {
                self.ucx(program, measure, conditions, port)
            }
            Peer::Iceoryx2 => Call { server: None, client: iceoryx2(program, conditions) },
            Peer::Perftest => perftest(program, measure, conditions, port),
        }
    }

    /// Its figure: nanoseconds, or 10^9 bytes a second.
    pub fn figure(self, measure: Measure, printed: &str) -> Result<f64, String> {
        match (self, measure) {
            (Peer::Iceoryx2, _) => parse::iceoryx2_latency_ns(printed),
            (Peer::Perftest, Measure::Latency) => parse::perftest_latency_ns(printed),
            (Peer::Perftest, Measure::Bandwidth) => parse::perftest_gb_s(printed),
            (_, Measure::Latency) => parse::ucx_latency_ns(printed),
            (_, Measure::Bandwidth) => parse::ucx_gb_s(printed),
        }
    }

    fn ucx(self, program: &Path, measure: Measure, conditions: &Conditions, port: u16) -> Call {
        let Conditions { bytes, iterations, warmup, cores, .. } = conditions;
        let test = match (self, measure) {
            (Peer::UcxPut, _) => "ucp_put_bw",
            (_, Measure::Latency) => "tag_lat",
            (_, Measure::Bandwidth) => "tag_bw",
        };
        let (transports, device) = match self {
            Peer::Ucx => (None, None),
            // Without it UCX takes the address of another interface, which is no faster.
            Peer::UcxTcp => (Some("tcp"), Some("lo")),
            _ => (Some("posix"), None),
        };
        let mut variables = vec![
            ("UCX_TLS", transports.map(OsString::from)),
            ("UCX_NET_DEVICES", device.map(OsString::from)),
            ("UCX_WARN_UNUSED_ENV_VARS", Some("n".into())),
        ];
        variables.extend(ucx_libraries(program).map(|folders| ("LD_LIBRARY_PATH", Some(folders))));
        let job = |host: &str, core: usize| {
            let arguments =
                format!("{host} -t {test} -s {bytes} -n {iterations} -w {warmup} -c {core} -p {port}");
            Job { variables: variables.clone(), ..Job::new(program, &arguments) }
        };
        Call { server: Some(job("", cores.responder)), client: job("127.0.0.1", cores.initiator) }
    }
}

fn has_entries(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

/// `LD_LIBRARY_PATH` with the folders of the libraries beside a program of the Python package,
/// which does not find them itself; `None` if there are none.
fn ucx_libraries(program: &Path) -> Option<OsString> {
    let package = program.parent()?.parent()?;
    let beside = std::fs::read_dir(package.parent()?).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let bundled: Vec<PathBuf> = beside.filter(|path| path.to_string_lossy().ends_with(".libs")).collect();
    if bundled.is_empty() {
        return None;
    }
    let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let inherited = std::env::split_paths(&inherited).filter(|path| !path.as_os_str().is_empty());
    std::env::join_paths([package.join("lib")].into_iter().chain(bundled).chain(inherited)).ok()
}

fn iceoryx2(program: &Path, conditions: &Conditions) -> Job {
    let Conditions { bytes, iterations, cores: Cores { initiator, responder }, .. } = conditions;
    Job::new(
        program,
        &format!(
            "--bench-ipc --iterations {iterations} --payload-size {bytes} --cpu-core-participant-1 \
             {initiator} --cpu-core-participant-2 {responder}"
        ),
    )
}

fn perftest(program: &Path, measure: Measure, conditions: &Conditions, port: u16) -> Call {
    let Conditions { bytes, iterations, cores, .. } = conditions;
    let (name, special) = match measure {
        Measure::Latency => ("ib_write_lat", "-I 0"),
        Measure::Bandwidth => ("ib_write_bw", "-t 128 -Q 32"),
    };
    let program = program.with_file_name(name);
    let job = |host: &str, core: usize| {
        let program = program.display();
        let mut arguments = format!("-c {core} {program} -F -p {port} -s {bytes} -n {iterations} {special}");
        device(conditions, &mut |more| arguments = format!("{arguments} {more}"));
        Job::new(Path::new("taskset"), &format!("{arguments} {host}"))
    };
    Call { server: Some(job("", cores.responder)), client: job("127.0.0.1", cores.initiator) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions() -> Conditions {
        let cores = Cores { initiator: 2, responder: 3 };
        let (profile, ib_dev, gid_index) = (None, Some("rxe0".into()), Some(1));
        Conditions { bytes: 64, iterations: 100, warmup: 10, cores, profile, ib_dev, gid_index }
    }

    #[test]
    fn the_server_runs_on_the_second_core_and_the_client_on_the_first() {
        let call = Peer::Ucx.call(Path::new("/u/ucx_perftest"), Measure::Latency, &conditions(), 5);
        let (server, client) = (call.server.unwrap().to_string(), call.client.to_string());
        assert!(server.ends_with("ucx_perftest -t tag_lat -s 64 -n 100 -w 10 -c 3 -p 5"), "{server}");
        assert!(
            client.ends_with("ucx_perftest 127.0.0.1 -t tag_lat -s 64 -n 100 -w 10 -c 2 -p 5"),
            "{client}"
        );
        assert!(!client.contains("UCX_TLS"), "the default transports: {client}");
        let call = Peer::UcxPosix.call(Path::new("/u/ucx_perftest"), Measure::Bandwidth, &conditions(), 5);
        let client = call.client.to_string();
        assert!(client.starts_with("UCX_TLS=posix ") && client.contains("-t tag_bw"), "{client}");

        let call = Peer::UcxPut.call(Path::new("/u/ucx_perftest"), Measure::Bandwidth, &conditions(), 5);
        let client = call.client.to_string();
        assert!(client.starts_with("UCX_TLS=posix ") && client.contains("-t ucp_put_bw"), "{client}");

        let call = Peer::UcxTcp.call(Path::new("/u/ucx_perftest"), Measure::Latency, &conditions(), 5);
        let client = call.client.to_string();
        assert!(client.starts_with("UCX_TLS=tcp UCX_NET_DEVICES=lo "), "{client}");

        let call = Peer::Perftest.call(Path::new("/p/ib_write_lat"), Measure::Bandwidth, &conditions(), 5);
        let expected = "taskset -c 2 /p/ib_write_bw -F -p 5 -s 64 -n 100 -t 128 -Q 32 -d rxe0 -x 1 127.0.0.1";
        assert_eq!(call.client.to_string(), expected);

        let call = Peer::Iceoryx2.call(Path::new("/b"), Measure::Latency, &conditions(), 5);
        let expected = "/b --bench-ipc --iterations 100 --payload-size 64 --cpu-core-participant-1 2 \
                        --cpu-core-participant-2 3";
        assert_eq!((call.server, call.client.to_string()), (None, expected.to_owned()));
    }

    #[test]
    fn ours_runs_under_the_same_conditions() {
        let conditions = Conditions { profile: Some("few-cores".into()), ..conditions() };
        let said = |fabric, measure| {
            ours(Path::new("/t"), fabric, measure, &conditions, Path::new("/j")).to_string()
        };
        let expected = "/t perf rendezvous_lat --local --fabric shm -s 64 -n 100 --pool 67108864 --turns 5 \
                        --warmup 10 --profile few-cores --cores 2,3 --json /j";
        assert_eq!(said("shm", Measure::Latency), expected);
        assert!(!said("shm", Measure::Bandwidth).contains("--profile"));
        let tcp = said("tcp", Measure::Latency);
        assert!(tcp.contains("perf rendezvous_lat --local --fabric tcp") && !tcp.contains("-d "), "{tcp}");
        let calls = calls(Path::new("/t"), &conditions, Path::new("/j")).to_string();
        assert!(calls.contains("--fabric grpc -s 64 -n 2 ") && calls.contains("--warmup 2 "), "{calls}");
        assert!(!calls.contains("--profile"), "calls refuse it: {calls}");
        let verbs = said("verbs", Measure::Latency);
        assert!(verbs.contains("perf write_lat") && verbs.contains("-I 0 -d rxe0 -x 1"), "{verbs}");
    }

    #[test]
    fn the_libraries_of_a_python_package_are_found_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        for part in ["libucx/bin", "libucx/lib", "libucx_cu12.libs"] {
            std::fs::create_dir_all(folder.path().join(part)).unwrap();
        }
        let found = ucx_libraries(&folder.path().join("libucx/bin/ucx_perftest")).unwrap();
        let found: Vec<PathBuf> = std::env::split_paths(&found).collect();
        assert_eq!(found[..2], ["libucx/lib", "libucx_cu12.libs"].map(|part| folder.path().join(part)));
    }

    #[test]
    fn a_peer_that_is_not_there_is_left_out_with_the_way_to_install_it() {
        let why = Peer::Ucx.find(Some(Path::new("/no/such"))).unwrap_err();
        assert!(why.contains("/no/such is no file") && why.contains("pip install libucx-cu12"), "{why}");
    }
}
