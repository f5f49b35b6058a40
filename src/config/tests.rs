//! Each key, each source, each kind of wrong value.

use super::builder::Builder;
use super::table::{KEYS, Key};
use super::*;
use crate::bootstrap::AuthMode;
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
    /// Allowed: the text, and the text that `entries` returns for it.
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
const SWITCH: &[(&str, &str)] = &[("true", "true"), ("false", "false")];
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
        "store",
        &[
            ("tcp://master:29500", "tcp://master:29500"),
            ("tcp://[::1]:1", "tcp://[::1]:1"),
            ("file:///mnt/a b/store", "file:///mnt/a b/store"),
        ],
        &[
            "",
            "tcp://",
            "tcp://master",
            "tcp://master:0",
            "file://",
            "file://store",
            "file:///",
            "http://a:1",
        ],
        NO_STRING,
    ),
    sample("world_size", &[("1", "1"), ("2", "2")], &["", "0", "2049", "-1", "all"], NO_NUMBER),
    sample(
        "bind",
        &[("127.0.0.1:7", "127.0.0.1:7"), ("[::1]:7", "[::1]:7")],
        &["", "localhost:7", "127.0.0.1"],
        NO_STRING,
    ),
    sample(
        "auth",
        &[("auto", "auto"), ("tls", "tls"), ("secret", "secret"), ("uid", "uid"), ("plain", "plain")],
        &["", "none", "Plain"],
        NO_STRING,
    ),
    sample("secret_file", &[("/etc/tw", "/etc/tw")], &["", "a\0b"], NO_STRING),
    sample("tls_ca", &[("ca.pem", "ca.pem")], &["", "a\0b"], NO_STRING),
    sample("tls_certificate", &[("me.pem", "me.pem")], &["", "a\0b"], NO_STRING),
    sample("tls_key", &[("/run/me.key", "/run/me.key")], &["", "a\0b"], NO_STRING),
    sample("allow_non_loopback", SWITCH, &["", "yes", "1", "True"], NO_SWITCH),
    sample(
        "profile",
        &[
            ("low-latency", "low-latency"),
            ("throughput", "throughput"),
            ("shared-host", "shared-host"),
            ("few-cores", "few-cores"),
        ],
        &["", "fast", "low_latency", "Throughput"],
        NO_STRING,
    ),
    sample(
        "join_timeout",
        &[("250ms", "250ms"), ("1m", "1m"), ("24h", "24h"), ("60s", "1m")],
        BAD_SPAN_0,
        NO_SPAN,
    ),
    sample("print_paths", SWITCH, &["", "1", "yes"], NO_SWITCH),
    sample("hung_after", &[("250ms", "250ms"), ("30s", "30s")], BAD_SPAN_0, NO_SPAN),
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
        &[("auto", "auto"), ("shm", "shm"), ("verbs", "verbs"), ("tcp, shm", "shm,tcp"), ("grpc", "grpc")],
        &["", "SHM", "udp", "shm,grpc", "shm,", "auto,shm", "shm,shm"],
        NO_STRING,
    ),
    sample(
        "poll",
        &[("auto", "auto"), ("inline", "inline"), ("adaptive", "adaptive"), ("dedicated", "dedicated")],
        &["", "threads", "Inline"],
        NO_STRING,
    ),
    sample("pollers", &[("1", "1")], BAD_COUNT, NO_NUMBER),
    sample("tcp_streams", &[("1", "1"), ("15", "15")], &["", "0", "16", "-1"], NO_NUMBER),
    sample(
        "tcp_busy_poll",
        &[("0s", "0s"), ("50us", "50us"), ("1s", "1s")],
        &["", "5", "2s", "-1s"],
        NO_SPAN,
    ),
    sample("tcp_user_timeout", &[("1s", "1s"), ("1m", "1m")], &["", "5", "999ms", "2h"], NO_SPAN),
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
    sample("validate", SWITCH, &["", "yes", "1"], NO_SWITCH),
    sample("max_lent_bytes", &[("0", "0"), ("16TiB", "16TiB")], &["", "-1", "17TiB", "half"], NO_STRING),
    sample("borrow_grace", &[("1ms", "1ms"), ("24h", "24h")], &["0s", "25h", "", "5"], NO_STRING),
    sample("bulk_receive", &[("copy", "copy"), ("borrow", "borrow")], &["", "move"], NO_STRING),
    sample(
        "max_requests",
        &[("1", "1"), ("1048575", "1048575")],
        BAD_COUNT,
        &["1048576", "0", "true", "\"\""],
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

/// Settings under which every sample can be tried.
pub(super) fn base() -> Builder {
    let cluster = "worker=127.0.0.1:5000,127.0.0.1:5001;ps=127.0.0.1:4000,127.0.0.1:4001";
    Config::builder().without_environment().set("job", "worker").set("task", "0").set("cluster", cluster)
}

pub(super) fn environment(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

pub(super) fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("temporary file");
    file.write_all(text.as_bytes()).expect("write");
    file
}

/// Builds from a file that has `lines` besides the base settings.
pub(super) fn build_file(lines: &str) -> Result<Config, ConfigError> {
    build_file_with(base(), lines)
}

fn build_file_with(base: Builder, lines: &str) -> Result<Config, ConfigError> {
    let file = file(lines);
    base.file(file.path()).build()
}

/// Adds the settings that a key's good values need: several CPUs need polling threads, a port needs
/// a device, and proofs need their files.
fn needed(key: &str, text: &str, builder: Builder) -> Builder {
    let tls = ["tls_ca", "tls_certificate", "tls_key"];
    match key {
        "auth" if text == "secret" => builder.set("secret_file", "secret"),
        "auth" if text == "tls" => tls.iter().fold(builder, |builder, file| builder.set(*file, "x.pem")),
        _ if tls.contains(&key) => {
            let others = tls.iter().filter(|file| **file != key);
            others.fold(builder, |builder, file| builder.set(*file, "x.pem"))
        }
        "cores" => builder.set("poll", "dedicated"),
        "rdma_device_port" => builder.set("rdma_device", "mlx5_0"),
        "world_size" if text == "1" => builder.set("cluster", "worker=127.0.0.1:1"),
        "world_size" => builder.set("cluster", "worker=127.0.0.1:1,127.0.0.1:2"),
        _ => builder,
    }
}

pub(super) fn entry(config: &Config, key: &str) -> Option<String> {
    config.entries().into_iter().find(|(name, _)| *name == key).and_then(|(_, text)| text)
}

pub(super) fn assert_names(error: &ConfigError, parts: &[&str]) {
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
    for Sample { key, good, bad, bad_toml } in samples() {
        assert!(!good.is_empty() && !bad.is_empty() && !bad_toml.is_empty(), "{key}");
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
    assert_eq!([config.recv_timeout, config.cancel_grace], [60_000, 100].map(Duration::from_millis));
    assert_eq!((config.bind, config.numa_node, &config.cores), (None, None, &None));
}

#[test]
fn every_good_value_is_taken_from_each_source() {
    // The base of the builder would win over file and environment, so it comes from the file here.
    let base_file = "job = 'worker'\ntask = 0\n[cluster]\nworker = ['127.0.0.1:1', '127.0.0.1:2']\nps = \
        ['127.0.0.1:3']\n";
    let base_file = file(base_file);
    for sample in samples() {
        for (text, expected) in sample.good {
            let what = format!("{} = {text}", sample.key);
            let get = |result: Result<Config, _>| {
                let config = result.unwrap_or_else(|error: ConfigError| panic!("{what}: {error}"));
                entry(&config, sample.key)
            };
            let expected = Some(expected.to_string());
            let base = || needed(sample.key, text, base());
            assert_eq!(get(base().set(sample.key, *text).build()), expected, "builder: {what}");

            for variable in Key::named(sample.key).expect("key").variables() {
                let variables = environment(&[(variable.as_str(), *text)]);
                let built = needed(sample.key, text, Config::builder())
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

/// A contradiction: settings on top of the base, and the whole message.
const CONFLICTS: &[(&[(&str, &str)], &str)] = &[
    (
        &[("job", "chief")],
        "job is \"chief\" (the builder): it must be a job of the cluster, which has ps, worker",
    ),
    (
        &[("task", "2")],
        "task is \"2\" (the builder): job worker has 2 tasks in the cluster: it must be 0 to 1",
    ),
    (
        &[("cluster", "worker=h:1"), ("task", "7")],
        "task is \"7\" (the builder): job worker has one task in the cluster: it must be 0",
    ),
    (
        &[("cluster", "worker=h:1,g:1;ps=h:1")],
        "cluster is \"worker=h:1,g:1;ps=h:1\" (the builder): ps/0 and worker/0 have the same address h:1: \
         give each its \
         own",
    ),
    (
        &[("silence_bound", "1s")],
        "silence_bound is \"1s\" (the builder): it must be at least 2s, twice the heartbeat_interval, which \
         is 1s (the \
         default): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("silence_bound", "1999ms")],
        "silence_bound is \"1999ms\" (the builder): it must be at least 2s, twice the heartbeat_interval, \
         which is 1s \
         (the default): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("heartbeat_interval", "3s")],
        "silence_bound is \"5s\" (the default): it must be at least 6s, twice the heartbeat_interval, which \
         is 3s (the \
         builder): raise silence_bound, or lower heartbeat_interval",
    ),
    (
        &[("auth", "plain"), ("bind", "0.0.0.0:1")],
        "bind is \"0.0.0.0:1\" (the builder): this process would listen on 0.0.0.0, beyond the loopback \
         interface, \
         and auth is plain: use a loopback address, or set secret_file, or set allow_non_loopback to true",
    ),
    (
        &[("auth", "uid"), ("cluster", "worker=10.0.0.1:1")],
        "cluster is \"worker=10.0.0.1:1\" (the builder): this process would listen on 10.0.0.1, beyond the \
         loopback \
         interface, and auth is uid: use a loopback address, or set secret_file, or set allow_non_loopback \
         to true",
    ),
    (
        &[("cluster", "ps=127.0.0.1:1;worker=10.0.0.1:1"), ("allow_non_loopback", "true")],
        "auth is \"auto\" (the default): worker/0 is at 10.0.0.1:1, beyond the loopback interface, and \
         nothing proves who the members are: set secret_file (`tensorwire auth secret FILE` makes one), or \
         tls_ca, tls_certificate and tls_key, on every member. Or set auth to plain if every process that \
         reaches the ports of members is trusted",
    ),
    (
        &[("tls_ca", "ca.pem"), ("tls_key", "key.pem")],
        "tls_ca is \"ca.pem\" (the builder): auth = tls needs tls_ca, tls_certificate and tls_key, and \
         tls_certificate is not set",
    ),
    (
        &[("auth", "tls")],
        "auth is \"tls\" (the builder): auth = tls needs tls_ca, tls_certificate and tls_key, and tls_ca is \
         not set",
    ),
    (
        &[("auth", "secret")],
        "auth is \"secret\" (the builder): it needs secret_file, and that is not set: `tensorwire auth \
         secret FILE` makes one",
    ),
    (
        &[("auth", "plain"), ("secret_file", "s")],
        "secret_file is \"s\" (the builder): auth is plain, which has no use for it: leave it out, or change \
         auth",
    ),
    (
        &[("secret_file", "s"), ("tls_ca", "a"), ("tls_certificate", "b"), ("tls_key", "c")],
        "secret_file is \"s\" (the builder): auth is tls, which has no use for it: leave it out, or change \
         auth",
    ),
    (
        &[("pool_require", "true")],
        "pool_require is \"true\" (the builder): pool_pages is auto, which names no pages: set pool_pages \
         to 1g, 2m, \
         transparent or plain",
    ),
    (
        &[("cores", "0,1")],
        "cores is \"0,1\" (the builder): the inline and auto modes pin one thread: name one CPU, or set \
         poll to adaptive or dedicated",
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
        "wait is \"spin\" (the builder): waiting calls sleep in the adaptive mode: set wait to auto, or \
         poll to inline or dedicated",
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
fn a_fabric_that_is_not_there_is_refused_by_name() {
    // No setting names the fabric of the tests.
    for name in ["udp", "sim"] {
        let error = base().set("fabric", name).build().expect_err("refused").to_string();
        let allowed = "auto, or shm, verbs, tcp or several of them: shm,tcp; or grpc";
        assert_eq!(error, format!("fabric is {name:?} (the builder): it must be {allowed}"));
    }
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
    let secret = || base().set("secret_file", "s");
    assert!(secret().set("cluster", "worker=10.0.0.1:1").build().is_ok(), "members prove who they are");
    assert_eq!(secret().build().unwrap().auth_mode(), AuthMode::Secret);
    let base = || base().auth(AuthMode::Plain);
    let leave = || base().allow_non_loopback(true);
    assert!(leave().set("bind", "0.0.0.0:1").build().is_ok());
    assert!(leave().set("cluster", "worker=10.0.0.1:1").build().is_ok());
    assert!(base().set("cluster", "worker=127.0.0.1:1,10.0.0.1:1").build().is_ok(), "only a peer is there");
    assert!(base().set("cluster", "worker=10.0.0.1:1").set("bind", "127.0.0.1:1").build().is_ok());
    assert!(base().pool_require(true).set("pool_pages", "2m").build().is_ok());
}

#[test]
fn the_reference_lists_every_key_with_its_variables_default_and_range() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (page, text) = (reference(), listing());
    let (sections, entries) = (page.matches("\n### `").count(), text.matches("\n\n  ").count());
    assert_eq!((sections, entries), (KEYS.len(), KEYS.len()), "each key is in a group, once");
    for key in KEYS {
        let section = section(&page, key.name);
        for part in key.variables().chain([key.allowed.into(), key.default.unwrap_or("").into()]) {
            assert!(words(section).contains(&words(&part)), "{part:?} is not in: {section}");
        }
    }
    assert!(page.contains("\n| Window of a standing request | 256 steps | "), "{page}");
    for line in page.lines().filter(|line| !line.starts_with('|')).chain(text.lines()) {
        assert!(line.len() <= 110, "{line}");
    }
}

/// What the reference says of one key.
pub(super) fn section<'a>(page: &'a str, key: &str) -> &'a str {
    let from = page.find(&format!("\n### `{key}`\n")).unwrap_or_else(|| panic!("{key} is not in: {page}"));
    let section = &page[from + 1..];
    &section[..section.find("\n##").unwrap_or(section.len())]
}
