//! Each key, each source, each kind of wrong value.

use super::builder::Builder;
use super::table::{KEYS, Key};
use super::*;
use crate::engine::PollMode;
use crate::memory::PagePolicy;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write as _;
use std::time::Duration;
use tempfile::NamedTempFile;

/// What to try on one key. The `base` settings hold while it is tried.
pub(super) struct Sample {
    key: &'static str,
    /// Allowed: the text, and what `entries` says of it.
    good: &'static [(&'static str, &'static str)],
    /// Not allowed, as text of the environment or of the builder.
    bad: &'static [&'static str],
    /// Not allowed in a file.
    bad_toml: &'static [&'static str],
}

pub(super) const fn sample(
    key: &'static str,
    good: &'static [(&'static str, &'static str)],
    bad: &'static [&'static str],
    bad_toml: &'static [&'static str],
) -> Sample {
    Sample { key, good, bad, bad_toml }
}

pub(super) const NO_STRING: &[&str] = &["true", "1.5", "[]", "{}", "\"\""];
const NO_SWITCH: &[&str] = &["1", "\"true\"", "[]", "1979-05-27"];
pub(super) const NO_NUMBER: &[&str] = &["true", "1.5", "[1]", "-1", "0x10", "\"\"", "99999999999999999999"];
const NO_SPAN: &[&str] = &["5", "5.0", "true", "[\"5s\"]"];
const BAD_SPAN: &[&str] = &["", "5", "s", "5 s", "1.5s", "-1s", "5S", "5d", "25h", "18446744073709551615h"];
const BAD_SPAN_0: &[&str] =
    &["", "5", "s", "5 s", "1.5s", "-1s", "0s", "999us", "25h", "18446744073709551616ns"];
const BAD_COUNT: &[&str] = &["", "0", "-1", "+1", " 1", "1 ", "1e3", "1.0", "0x10", "many", "4294967296"];

const SAMPLES: &[Sample] = &[
    sample("job", &[("ps", "ps")], &["", "a b", "-a", "a/b", "w\u{f6}rk", "a;b"], NO_STRING),
    sample("task", &[("1", "1"), ("01", "1")], &["", "-1", "+1", "one", "4294967296"], NO_NUMBER),
    sample(
        "cluster",
        &[
            ("worker=localhost:1,[::1]:2", "worker=localhost:1,[::1]:2"),
            (
                "worker=127.0.0.1:1, 127.0.0.1:2 ; ps=127.0.0.1:3",
                "ps=127.0.0.1:3;worker=127.0.0.1:1,127.0.0.1:2",
            ),
        ],
        &[
            "",
            "worker",
            "worker=",
            "worker=a:1,",
            "worker=a:1;",
            "worker=a",
            "worker=a:0",
            "w w=a:1",
            "a=h:1;a=h:2",
        ],
        &[
            "[]",
            "{}",
            "{ worker = \"a:1\" }",
            "{ worker = [1] }",
            "{ worker = [\"a:1,b:2\"] }",
            "{ \"a=b\" = [\"a:1\"] }",
        ],
    ),
    sample(
        "bind",
        &[("127.0.0.1:7", "127.0.0.1:7"), ("[::1]:7", "[::1]:7")],
        &["", "localhost:7", "127.0.0.1"],
        NO_STRING,
    ),
    sample(
        "allow_non_loopback",
        &[("true", "true"), ("false", "false")],
        &["", "yes", "1", "True"],
        NO_SWITCH,
    ),
    sample(
        "join_timeout",
        &[("250ms", "250ms"), ("1m", "1m"), ("24h", "24h"), ("60s", "1m")],
        BAD_SPAN_0,
        NO_SPAN,
    ),
    sample("heartbeat_interval", &[("1ms", "1ms"), ("1500us", "1500us")], BAD_SPAN_0, NO_SPAN),
    sample("silence_bound", &[("2s", "2s"), ("24h", "24h")], BAD_SPAN_0, NO_SPAN),
    sample(
        "pool_size",
        &[
            ("1MiB", "1MiB"),
            ("64MiB", "64MiB"),
            ("1GiB", "1GiB"),
            ("16TiB", "16TiB"),
            ("1048577", "1028KiB"),
            ("2048KiB", "2MiB"),
        ],
        &["", "0", "1048575", "1MB", "1 MiB", "1.5GiB", "-1MiB", "17TiB", "MiB", "18446744073709551615TiB"],
        &["true", "1.5", "[]", "-1", "1000", "\"1mib\""],
    ),
    sample(
        "pool_pages",
        &[("auto", "auto"), ("1g", "1g"), ("2m", "2m"), ("transparent", "transparent"), ("plain", "plain")],
        &["", "4k", "2M"],
        NO_STRING,
    ),
    sample("pool_require", &[("false", "false")], &["", "yes"], NO_SWITCH),
    sample(
        "pool_lock",
        &[("best_effort", "best_effort"), ("require", "require"), ("no", "no")],
        &["", "yes", "best-effort"],
        NO_STRING,
    ),
    sample("numa_node", &[("0", "0"), ("1023", "1023")], &["", "-1", "1024", "a"], NO_NUMBER),
    sample(
        "fabric",
        &[("auto", "auto"), ("shm", "shm"), ("verbs", "verbs")],
        &["", "SHM", "tcp", "grpc"],
        NO_STRING,
    ),
    sample(
        "poll",
        &[("auto", "auto"), ("inline", "inline"), ("adaptive", "adaptive"), ("dedicated", "dedicated")],
        &["", "threads", "Inline"],
        NO_STRING,
    ),
    sample("pollers", &[("1", "1")], BAD_COUNT, NO_NUMBER),
    sample("spin_budget", &[("0s", "0s"), ("50us", "50us"), ("1s", "1s")], &["", "5", "2s", "-1s"], NO_SPAN),
    sample("wait", &[("auto", "auto"), ("spin", "spin"), ("yield", "yield")], &["", "sleep"], NO_STRING),
    sample(
        "cores",
        &[("0,2-3", "0,2,3"), ("5", "5"), ("3, 1", "3,1"), ("1023", "1023")],
        &["", ",", "1,", "-1", "1-", "3-2", "1,1", "0-2,2", "1024", "0-99999999999", "a"],
        &["true", "[true]", "[\"1\"]", "[1, 1]", "[-1]", "[]", "1024"],
    ),
    sample(
        "queue_depth",
        &[("16", "16"), ("65536", "65536")],
        &["", "8", "17", "300", "131072", "x"],
        NO_NUMBER,
    ),
    sample("small_tensor_bytes", &[("0", "0"), ("160", "160")], &["", "161", "-1", "1KiB"], NO_NUMBER),
    sample("validate", &[("true", "true"), ("false", "false")], &["", "yes", "1"], NO_SWITCH),
    sample("max_lent_bytes", &[("0", "0"), ("16TiB", "16TiB")], &["", "-1", "17TiB", "half"], NO_STRING),
    sample("borrow_grace", &[("1ms", "1ms"), ("24h", "24h")], &["0s", "25h", "", "5"], NO_STRING),
    sample("bulk_receive", &[("copy", "copy"), ("borrow", "borrow")], &["", "move"], NO_STRING),
    sample(
        "max_requests",
        &[("1", "1"), ("1048575", "1048575")],
        BAD_COUNT,
        &["1048576", "0", "true", "\"\""],
    ),
    sample("max_routes", &[("1", "1"), ("1048576", "1048576")], BAD_COUNT, &["1048577", "0", "true", "\"\""]),
    sample(
        "max_deferred",
        &[("1", "1"), ("1048576", "1048576")],
        BAD_COUNT,
        &["1048577", "0", "true", "\"\""],
    ),
    sample(
        "max_outstanding_sends",
        &[("1", "1"), ("16777216", "16777216")],
        BAD_COUNT,
        &["16777217", "0", "1.5"],
    ),
    sample("recv_timeout", &[("5s", "5s"), ("90s", "90s")], BAD_SPAN_0, NO_SPAN),
    sample("cancel_grace", &[("0s", "0s"), ("0ms", "0s"), ("10ns", "10ns")], BAD_SPAN, NO_SPAN),
    sample("stop_timeout", &[("0s", "0s"), ("1h", "1h")], BAD_SPAN, NO_SPAN),
    sample(
        "peer_loss",
        &[("fail_calls", "fail_calls"), ("fail_all", "fail_all")],
        &["", "ignore"],
        NO_STRING,
    ),
];

fn samples() -> impl Iterator<Item = &'static Sample> {
    SAMPLES.iter().chain(rdma_tests::SAMPLES)
}

/// Settings with which every sample can be tried.
fn base() -> Builder {
    let cluster = "worker=127.0.0.1:5000,127.0.0.1:5001;ps=127.0.0.1:4000,127.0.0.1:4001";
    Config::builder().without_environment().set("job", "worker").set("task", "0").set("cluster", cluster)
}

pub(super) fn environment(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("temporary file");
    file.write_all(text.as_bytes()).expect("write");
    file
}

/// Builds from a file that has `lines` besides the base settings.
fn build_file(lines: &str) -> Result<Config, ConfigError> {
    build_file_with(base(), lines)
}

fn build_file_with(base: Builder, lines: &str) -> Result<Config, ConfigError> {
    let file = file(lines);
    base.file(file.path()).build()
}

/// What a key's good values need besides the base settings: several CPUs are for modes with polling threads, and a
/// port is one of a device.
fn needed(key: &str, builder: Builder) -> Builder {
    match key {
        "cores" => builder.set("poll", "dedicated"),
        "rdma_device_port" => builder.set("rdma_device", "mlx5_0"),
        _ => builder,
    }
}

fn entry(config: &Config, key: &str) -> Option<String> {
    config.entries().into_iter().find(|(name, _)| *name == key).and_then(|(_, text)| text)
}

fn assert_names(error: &ConfigError, parts: &[&str]) {
    let message = error.to_string();
    assert!(!message.contains('\n'), "one line: {message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn every_key_has_samples_and_every_sample_a_key() {
    let keys: BTreeSet<_> = KEYS.iter().map(|key| key.name).collect();
    let sampled: BTreeSet<_> = samples().map(|sample| sample.key).collect();
    assert_eq!(keys, sampled);
    assert_eq!((KEYS.len(), samples().count()), (keys.len(), sampled.len()), "no name twice");
    for sample in samples() {
        assert!(
            !sample.good.is_empty() && !sample.bad.is_empty() && !sample.bad_toml.is_empty(),
            "{}",
            sample.key
        );
    }
}

#[test]
fn every_default_is_what_the_table_says() {
    let config = base().build().expect("base");
    for key in KEYS {
        let Some(default) = key.default else { continue };
        assert_eq!((key.check)(default), Ok(()), "{}", key.name);
        let set = base().set(key.name, default).build().expect(key.name);
        assert_eq!(entry(&config, key.name), entry(&set, key.name), "{}", key.name);
    }
    assert_eq!(config.pool_size, 256 << 20);
    assert_eq!(config.recv_timeout, Duration::from_secs(60));
    assert_eq!(config.cancel_grace, Duration::from_millis(100));
    assert_eq!((config.bind, config.numa_node, &config.cores), (None, None, &None));
}

#[test]
fn every_good_value_is_taken_from_each_source() {
    // The base of the builder would win over file and environment, so it comes from the file here.
    let base_file = "job = 'worker'\ntask = 0\n[cluster]\nworker = ['127.0.0.1:1', '127.0.0.1:2']\nps = ['127.0.0.1:3']\n";
    let base_file = file(base_file);
    for sample in samples() {
        for (text, expected) in sample.good {
            let what = format!("{} = {text}", sample.key);
            let get = |result: Result<Config, _>| {
                let config = result.unwrap_or_else(|error: ConfigError| panic!("{what}: {error}"));
                entry(&config, sample.key)
            };
            let expected = Some(expected.to_string());
            let base = || needed(sample.key, base());
            assert_eq!(get(base().set(sample.key, *text).build()), expected, "builder: {what}");

            for variable in Key::named(sample.key).expect("key").variables() {
                let variables = environment(&[(variable.as_str(), *text)]);
                let built = needed(sample.key, Config::builder())
                    .file(base_file.path())
                    .environment(variables)
                    .build();
                assert_eq!(get(built), expected, "environment: {variable}: {what}");
            }

            if ["job", "task", "cluster"].contains(&sample.key) {
                continue; // in the file they are part of the base
            }
            let toml = if ["true", "false"].contains(text) { text.to_string() } else { format!("'{text}'") };
            let from_file = |value: &str| get(build_file_with(base(), &format!("{} = {value}", sample.key)));
            assert_eq!(from_file(&toml), expected, "file: {what}");
            if text.bytes().all(|byte| byte.is_ascii_digit()) {
                assert_eq!(from_file(text), expected, "number: {what}");
            }
        }
    }
}

#[test]
fn every_bad_value_is_refused_with_its_origin_and_what_is_allowed() {
    for sample in samples() {
        let key = Key::named(sample.key).expect("key");
        for text in sample.bad {
            let error = base().set(key.name, *text).build().expect_err(&format!("{} = {text:?}", key.name));
            assert_names(&error, &[key.name, &format!("{text:?}"), "(the builder): "]);

            for variable in key.variables() {
                let variables = environment(&[(variable.as_str(), *text)]);
                let error = base().environment(variables).build().expect_err(&format!("{variable}={text:?}"));
                assert_names(
                    &error,
                    &[key.name, &format!("{text:?}"), &format!("(environment variable {variable}): ")],
                );
            }
        }
        for toml in sample.bad_toml {
            let what = format!("{} = {toml}", key.name);
            let error = build_file(&format!("# a comment\n{what}\n")).expect_err(&what);
            assert_names(&error, &[key.name, " line 2): "]);
        }
    }
}

#[test]
fn what_is_allowed_for_a_choice_names_every_choice() {
    for key in KEYS.iter().filter(|key| key.kind == "choice") {
        let words: BTreeSet<_> = key.allowed.split([',', ' ']).filter(|w| !["", "or"].contains(w)).collect();
        let sample = samples().find(|sample| sample.key == key.name).expect("sample");
        assert_eq!(words, sample.good.iter().map(|(text, _)| *text).collect(), "{}", key.name);
        for word in words {
            assert_eq!((key.check)(word), Ok(()), "{}: {word}", key.name);
        }
    }
}

#[test]
fn a_typed_setter_writes_what_the_reader_takes_back() {
    let config = base()
        .pool_size(3 << 20)
        .recv_timeout(Duration::from_micros(1500))
        .poll(PollMode::Dedicated)
        .wait(None)
        .cores(vec![4, 2])
        .bind("127.0.0.1:9".parse().expect("address"))
        .pool_pages(PagePolicy::TwoMiB)
        .pool_require(true)
        .rdma_qps_per_peer(3)
        .cluster("worker=localhost:1".parse().expect("a cluster"))
        .build()
        .expect("config");
    assert_eq!((config.pool_size, config.rdma_qps_per_peer, config.pool_require), (3 << 20, 3, true));
    assert_eq!(config.recv_timeout, Duration::from_micros(1500));
    assert_eq!(config.cores.as_deref(), Some(&[4, 2][..]));
    assert_eq!(config.pool_pages, PagePolicy::TwoMiB);
    assert_eq!(
        (config.task_id().to_string(), config.cluster.to_string()),
        ("worker/0".into(), "worker=localhost:1".into())
    );

    let error = base().recv_timeout(Duration::MAX).build().expect_err("too long");
    assert_names(&error, &["recv_timeout is \"18446744073709551615s\" (the builder): it must be 1ms to 24h"]);
}

#[test]
fn the_builder_wins_over_the_environment_over_the_file_over_the_default() {
    let file = file("rdma_qps_per_peer = 2\nqueue_depth = 32\nmax_routes = 7\n");
    let variables =
        || environment(&[("TENSORWIRE_RDMA_QPS_PER_PEER", "3"), ("TENSORWIRE_QUEUE_DEPTH", "64")]);
    let config =
        base().rdma_qps_per_peer(4).environment(variables()).file(file.path()).build().expect("config");
    assert_eq!(
        (config.rdma_qps_per_peer, config.queue_depth, config.max_routes, config.max_requests),
        (4, 64, 7, 4096)
    );
    let config = base().rdma_qps_per_peer(4).rdma_qps_per_peer(5).build().expect("config");
    assert_eq!(config.rdma_qps_per_peer, 5, "the last call wins");
}

#[test]
fn a_wrong_value_is_refused_even_where_a_stronger_source_overrides_it() {
    let variables = environment(&[("TENSORWIRE_RDMA_QPS_PER_PEER", "many")]);
    let error = base().environment(variables).rdma_qps_per_peer(2).build().expect_err("refused");
    assert_eq!(
        error.to_string(),
        "rdma_qps_per_peer is \"many\" (environment variable TENSORWIRE_RDMA_QPS_PER_PEER): it must be 1 to 16"
    );
}

#[test]
fn an_unknown_key_is_named_with_the_nearest_one() {
    let error = build_file("rdma_qps_per_peer = 1\n\nqueue_dept = 64").expect_err("refused");
    assert_names(&error, &["unknown key \"queue_dept\" (file ", " line 3): did you mean queue_depth?"]);
    let error = build_file("[pool]\nsize = 1").expect_err("refused");
    assert_names(&error, &["unknown key \"pool.size\""]);
    let error = base().set("zzzzzzzzzz", "1").build().expect_err("refused");
    assert_names(&error, &["unknown key \"zzzzzzzzzz\" (the builder): the keys are job, task, cluster, "]);
}

#[test]
fn a_variable_of_no_key_is_named_with_the_nearest_one() {
    let with =
        |name: &str| base().environment(environment(&[(name, "64MiB"), ("PATH", "/")])).build().map(drop);
    let error = with("TENSORWIRE_POOL_SIZ").expect_err("a slip");
    let told = "unknown key \"TENSORWIRE_POOL_SIZ\" (environment variable TENSORWIRE_POOL_SIZ): did you mean \
                TENSORWIRE_POOL_SIZE?";
    assert_eq!(error.to_string(), told);
    let error = with("TENSORWIRE_RENDEZVOUS_BACKEND").expect_err("nothing like it");
    assert_names(&error, &["TENSORWIRE_RENDEZVOUS_BACKEND", "unset it"]);
    let error = with("TENSORWIRE_pool_size").expect_err("another case is another variable");
    assert_names(&error, &["did you mean TENSORWIRE_POOL_SIZE?"]);
    for fine in
        ["TENSORWIRE_POOL_SIZE", "TENSORWIRE_TEST_SEED", "TENSORWIRE_BUILD_COMMIT", "TENSORWIRES", "RUST_LOG"]
    {
        with(fine).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_required_key_that_nobody_set_is_named() {
    let error = Config::builder().environment(environment(&[("HOME", "/")])).build().expect_err("refused");
    assert_eq!(
        error.to_string(),
        "job is not set: call member(JOB, TASK) on the builder, set the environment variable TENSORWIRE_JOB, or add \
         `job = ...` to a file and name it with file(PATH)"
    );
    let file = file("job = 'ps'");
    let builder = Config::builder().without_environment().file(file.path());
    let error = builder.clone().build().expect_err("refused");
    assert_names(&error, &["task is not set: ", "remove without_environment() and set", "TENSORWIRE_TASK"]);
    assert_names(&error, &[&format!("or add `task = ...` to {}", file.path().display())]);
    let error = builder.member("ps", 0).build().expect_err("refused");
    assert_names(&error, &["cluster is not set: call set(\"cluster\", \"JOB=HOST:PORT,...\")"]);
}

#[test]
fn the_environment_of_the_process_is_read_unless_the_builder_says_no() {
    const CHILD: &str = "TENSORWIRE_TEST_ENVIRONMENT_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let builder = Config::builder().member("w", 0).set("cluster", "w=127.0.0.1:1");
        assert_eq!(builder.clone().build().expect("config").pool_size, 32 << 20);
        assert_eq!(builder.without_environment().build().expect("config").pool_size, 256 << 20);
        return;
    }
    let name = "config::tests::the_environment_of_the_process_is_read_unless_the_builder_says_no";
    let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", name]).env(CHILD, "1").env("TENSORWIRE_POOL_SIZE", "32MiB");
    let output = child.output().expect("the child runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_file_that_cannot_be_read_or_is_no_toml_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let error = Config::builder().file(folder.path().join("none.toml")).build().expect_err("refused");
    assert_names(&error, &["configuration file ", "none.toml can't be read: No such file"]);
    let error = build_file("pollers = 1\npollers = 2\n").expect_err("refused");
    assert_names(&error, &[" line 2, \"pollers = 2\": not valid TOML: duplicate key"]);
    let error = build_file("pollers = 1\nqueue_depth =\n").expect_err("refused");
    assert_names(&error, &[" line 2, \"queue_depth =\": not valid TOML: "]);
    let error = build_file("pool_size = 64MiB\n").expect_err("refused");
    assert_names(&error, &[" line 1, \"pool_size = 64MiB\": not valid TOML: "]);
}

#[test]
fn a_path_that_is_no_regular_file_is_refused_without_reading_it() {
    let folder = tempfile::tempdir().expect("folder");
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .expect("a pipe");
    for (path, kind) in
        [(folder.path(), "a directory"), (&pipe, "a pipe"), ("/dev/zero".as_ref(), "a device")]
    {
        let error = base().file(path).build().expect_err("refused");
        let why = format!(
            "configuration file {} can't be read: it is {kind}, and must be a regular file",
            path.display()
        );
        assert_eq!(error.to_string(), why);
    }
}

#[test]
fn a_wrong_entry_of_a_table_is_named_with_its_own_line() {
    let refused = |entries: &str| {
        let file = file(&format!("job = 'ps'\ntask = 0\n[cluster]\n{entries}\n"));
        let error = Config::builder().without_environment().file(file.path()).build().expect_err(entries);
        error.to_string().replace(&file.path().display().to_string(), "FILE")
    };
    assert_eq!(
        refused("worker = ['h:1']\nps = [\n'h:2',\n'h:99999']"),
        "cluster is \"'h:99999'\" (file FILE line 7): job ps: address \"h:99999\" has a port that is not a number from 1 \
         to 65535: it must be HOST:PORT, 1.2.3.4:PORT or [IPV6]:PORT, the port 1 to 65535"
    );
    assert_eq!(
        refused("worker = ['h:1']\nps = 'h:2'"),
        "cluster is \"'h:2'\" (file FILE line 5): job ps: its tasks must be an array, each a string \"HOST:PORT\""
    );
    assert_eq!(
        refused("ps = [4000]"),
        "cluster is \"4000\" (file FILE line 4): job ps: a task must be a string, \"HOST:PORT\""
    );
    assert_eq!(
        refused("ps = ['h:1']\n'a b' = ['h:2']"),
        "cluster is \"'a b'\" (file FILE line 5): job \"a b\" must be 1 to 64 letters, digits, '_' and '-', a letter or \
         digit first"
    );
    let error = build_file("[pool]\nsize = '64MiB'\n").expect_err("refused");
    assert_names(&error, &["unknown key \"pool.size\" (file ", " line 1): did you mean pool_size?"]);
}

#[test]
fn a_duration_without_a_unit_is_named_as_such() {
    let why = "a duration needs a unit: 5s, 5ms, 5us, 5m or 5h";
    let error = base().set("recv_timeout", "5").build().expect_err("refused");
    assert_eq!(error.to_string(), format!("recv_timeout is \"5\" (the builder): {why}"));
    for line in ["recv_timeout = 5", "recv_timeout = '5'"] {
        assert_names(&build_file(line).expect_err("refused"), &["recv_timeout is \"5\" (file ", why]);
    }
    assert_names(&base().set("stop_timeout", "0").build().expect_err("refused"), &["needs a unit: 0s"]);
}

#[test]
fn a_file_may_spell_lists_and_numbers_as_toml_does() {
    let text = "job = 'ps'\ntask = 1\npoll = 'adaptive'\ncores = [0, 2]\nqueue_depth = 65_536\npool_size = 2097152\n\
                [cluster]\nps = ['127.0.0.1:1', '[::1]:2']\nworker = ['localhost:3']\n";
    let config = Config::builder().without_environment().file(file(text).path()).build().expect("config");
    assert_eq!(entry(&config, "cluster").as_deref(), Some("ps=127.0.0.1:1,[::1]:2;worker=localhost:3"));
    assert_eq!((config.cores.as_deref(), config.queue_depth), (Some(&[0, 2][..]), 65_536));
    assert_eq!((config.pool_size, config.task), (2 << 20, 1));
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf_8_is_refused() {
    use std::os::unix::ffi::OsStringExt as _;
    let variables = [("TENSORWIRE_JOB".into(), OsString::from_vec(vec![b'a', 0xff]))];
    let error = base().environment(variables).build().expect_err("refused");
    assert_names(&error, &["job is ", "(environment variable TENSORWIRE_JOB): it is not UTF-8"]);
}

/// A contradiction: settings on top of the base, and the whole message.
const CONFLICTS: &[(&[(&str, &str)], &str)] = &[
    (
        &[("job", "chief")],
        "job is \"chief\" (the builder): it must be a job of the cluster, which has ps, worker",
    ),
    (
        &[("task", "2")],
        "task is \"2\" (the builder): job worker has 2 task(s) in the cluster: it must be 0 to 1",
    ),
    (
        &[("cluster", "worker=h:1,g:1;ps=h:1")],
        "cluster is \"worker=h:1,g:1;ps=h:1\" (the builder): ps/0 and worker/0 have the same address h:1: give each its \
         own",
    ),
    (
        &[("silence_bound", "1s")],
        "silence_bound is \"1s\" (the builder): it must be at least 2s, twice the heartbeat_interval, which is 1s (the \
         default): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("silence_bound", "1999ms")],
        "silence_bound is \"1999ms\" (the builder): it must be at least 2s, twice the heartbeat_interval, which is 1s \
         (the default): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("heartbeat_interval", "3s")],
        "silence_bound is \"5s\" (the default): it must be at least 6s, twice the heartbeat_interval, which is 3s (the \
         builder): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("bind", "0.0.0.0:1")],
        "bind is \"0.0.0.0:1\" (the builder): this process would listen on 0.0.0.0, beyond the loopback interface, \
         and members are not authenticated: use a loopback address, or set allow_non_loopback to true",
    ),
    (
        &[("cluster", "worker=10.0.0.1:1")],
        "cluster is \"worker=10.0.0.1:1\" (the builder): this process would listen on 10.0.0.1, beyond the loopback \
         interface, and members are not authenticated: use a loopback address, or set allow_non_loopback to true",
    ),
    (
        &[("pool_require", "true")],
        "pool_require is \"true\" (the builder): pool_pages is auto, which names no pages: set pool_pages to 1g, 2m, \
         transparent or plain",
    ),
    (
        &[("cores", "0,1")],
        "cores is \"0,1\" (the builder): the inline and auto modes pin one thread: name one CPU, or set poll to \
         adaptive or dedicated",
    ),
    (
        &[("poll", "dedicated"), ("pollers", "3"), ("cores", "0,1")],
        "cores is \"0,1\" (the builder): it names 2 CPUs for 3 pollers: name as many, or leave pollers out",
    ),
    (
        &[("pollers", "2")],
        "pollers is \"2\" (the builder): the inline and auto modes have one poller: set poll to adaptive or \
         dedicated, or pollers to 1",
    ),
    (
        &[("poll", "adaptive"), ("wait", "spin")],
        "wait is \"spin\" (the builder): waiting calls sleep in the adaptive mode: set wait to auto, or poll to \
         inline or dedicated",
    ),
    (
        &[("rdma_device_port", "2")],
        "rdma_device_port is \"2\" (the builder): a port is one of a device: name that too, with rdma_device \
         (RDMA_DEVICE), or leave the port out",
    ),
];

#[test]
fn there_are_as_many_pollers_as_are_said_or_as_cpus_for_them() {
    let count = |settings: &[(&str, &str)]| {
        let builder = settings.iter().fold(base(), |builder, (key, text)| builder.set(*key, *text));
        builder.build().expect("config").poller_count()
    };
    assert_eq!(count(&[]), 1);
    assert_eq!(count(&[("cores", "3")]), 1);
    assert_eq!(count(&[("poll", "dedicated"), ("cores", "1,3")]), 2);
    assert_eq!(count(&[("poll", "adaptive"), ("pollers", "3")]), 3);
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    for (settings, message) in CONFLICTS {
        let builder = settings.iter().fold(base(), |builder, (key, text)| builder.set(*key, *text));
        assert_eq!(builder.build().expect_err(message).to_string(), *message);
    }
}

#[test]
fn listening_beyond_loopback_needs_leave_and_only_for_oneself() {
    let leave = || base().allow_non_loopback(true);
    assert!(leave().set("bind", "0.0.0.0:1").build().is_ok());
    assert!(leave().set("cluster", "worker=10.0.0.1:1").build().is_ok());
    assert!(base().set("cluster", "worker=127.0.0.1:1,10.0.0.1:1").build().is_ok(), "only a peer is there");
    assert!(base().set("cluster", "worker=10.0.0.1:1").set("bind", "127.0.0.1:1").build().is_ok());
    assert!(base().pool_require(true).set("pool_pages", "2m").build().is_ok());
}

#[test]
fn the_reference_lists_every_key_with_its_variable_default_and_range() {
    let reference = reference();
    assert_eq!(reference.lines().count(), KEYS.len() + 2);
    for (key, line) in KEYS.iter().zip(reference.lines().skip(2)) {
        assert_eq!(line.matches('|').count(), 7, "{line}");
        let variables = key.variables().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        assert!(line.starts_with(&format!("| `{}` | {variables} |", key.name)), "{line}");
        assert!(line.contains(key.allowed) && line.contains(key.default.unwrap_or("")), "{line}");
    }
    let row =
        "| `queue_depth` | `TENSORWIRE_QUEUE_DEPTH` | number | `256` | a power of two from 16 to 65536 | ";
    assert!(reference.contains(row), "{reference}");
}
