//! The sources of settings: their order, and errors of each.

use super::tests::{assert_names, base, build_file, entry, environment, file};
use super::*;
use std::ffi::OsString;

#[test]
fn the_builder_wins_over_the_environment_over_the_file_over_the_default() {
    let file = file("rdma_qps_per_peer = 2\nqueue_depth = 32\nmax_requests = 7\n");
    let variables =
        || environment(&[("TENSORWIRE_RDMA_QPS_PER_PEER", "3"), ("TENSORWIRE_QUEUE_DEPTH", "64")]);
    let config =
        base().rdma_qps_per_peer(4).environment(variables()).file(file.path()).build().expect("config");
    assert_eq!(
        (config.rdma_qps_per_peer, config.queue_depth, config.max_requests, config.max_outstanding_sends),
        (4, 64, 7, 1 << 20)
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
        "rdma_qps_per_peer is \"many\" (environment variable TENSORWIRE_RDMA_QPS_PER_PEER): it must be 1 to \
         16"
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
        "job is not set: call member(JOB, TASK) on the builder, set the environment variable \
         TENSORWIRE_JOB, or add \
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
    let name = "config::source_tests::the_environment_of_the_process_is_read_unless_the_builder_says_no";
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
    assert!(std::error::Error::source(&error).is_none(), "a chain of errors would print it twice");
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
        "cluster is \"'h:99999'\" (file FILE line 7): job ps: address \"h:99999\" has a port that is not a \
         number from 1 \
         to 65535: it must be HOST:PORT, 1.2.3.4:PORT or [IPV6]:PORT, the port 1 to 65535"
    );
    assert_eq!(
        refused("worker = ['h:1']\nps = 'h:2'"),
        "cluster is \"'h:2'\" (file FILE line 5): job ps: its tasks must be an array, each a string \
         \"HOST:PORT\""
    );
    assert_eq!(
        refused("ps = [4000]"),
        "cluster is \"4000\" (file FILE line 4): job ps: a task must be a string, \"HOST:PORT\""
    );
    assert_eq!(
        refused("ps = ['h:1']\n'a b' = ['h:2']"),
        "cluster is \"'a b'\" (file FILE line 5): job \"a b\" must be 1 to 64 letters, digits, '_' and '-', \
         a letter or \
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
    let text = "job = 'ps'\ntask = 1\npoll = 'adaptive'\ncores = [0, 2]\nqueue_depth = 65_536\npool_size = \
        2097152\n\
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
