//! The files under `tuning/`: the scripts run anywhere and change nothing that they don't say, and
//! the example configuration is one that this version accepts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tensorwire::Config;

fn tuning(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning").join(file)
}

fn bash(arguments: &[&str]) -> Output {
    Command::new("bash").args(arguments).output().expect("bash can be started")
}

fn script(file: &str, arguments: &[&str]) -> Output {
    let path = tuning(file);
    let path = path.to_str().expect("the path is UTF-8");
    bash(&[&[path], arguments].concat())
}

fn both(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn every_script_of_the_project_is_valid_and_executable() {
    use std::os::unix::fs::PermissionsExt;
    for file in ["tuning/check", "tuning/hugepages", "tests/all", "tests/nightly", "tests/fuzz", ".ci/run"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let output = bash(&["-n", path.to_str().expect("the path is UTF-8")]);
        assert!(output.status.success(), "{file}: {}", both(&output));
        let mode = path.metadata().expect("the script exists").permissions().mode();
        assert!(mode & 0o111 == 0o111, "{file} can't be executed: mode {mode:o}");
    }
}

#[test]
fn the_check_gives_a_verdict_on_each_setting_and_ends_well() {
    let output = script("check", &[]);
    let said = both(&output);
    assert!(output.status.success(), "{said}");
    assert!(output.stderr.is_empty(), "{said}");
    for setting in
        ["2 MiB pages", "memlock limit", "cgroup CPU quota", "isolated CPUs", "clock source", "nodes"]
    {
        let line =
            said.lines().find(|l| l.starts_with(setting)).unwrap_or_else(|| panic!("no {setting}: {said}"));
        let verdict = line.split_whitespace().last().unwrap_or_default();
        assert!(["good", "look", "bad", "?"].contains(&verdict), "{line}");
    }
}

#[test]
fn the_check_looks_at_the_memlock_limit_of_the_shell_that_it_runs_in() {
    let path = tuning("check");
    let output = bash(&["-c", "ulimit -l 64 && exec bash \"$0\"", path.to_str().expect("the path is UTF-8")]);
    let said = both(&output);
    let line = said.lines().find(|l| l.starts_with("memlock limit")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("64 KiB"), "{line}");
}

#[test]
fn the_check_refuses_what_is_no_list_of_cpus_and_names_cpus_that_it_may_not_use() {
    for bad in ["x", "1-", "1;2", ""] {
        assert_eq!(script("check", &[bad]).status.code(), Some(2), "{bad:?} was taken for CPUs");
    }
    let output = script("check", &["1023"]);
    assert!(output.status.success());
    assert!(both(&output).contains("CPU 1023 is not one that this process may run on"), "{}", both(&output));
}

#[test]
fn reserving_pages_refuses_bad_arguments_before_it_touches_anything() {
    for bad in
        [&[][..], &["-1"], &["1g"], &["2", "--node"], &["2", "--node", "x"], &["2", "3"], &["99999999999"]]
    {
        let output = script("hugepages", bad);
        assert_eq!(output.status.code(), Some(2), "{bad:?}: {}", both(&output));
    }
    let output = script("hugepages", &["2", "--node", "4095"]);
    assert_eq!(output.status.code(), Some(1), "{}", both(&output));
    assert!(both(&output).contains("node4095"), "{}", both(&output));
}

#[test]
fn the_example_configuration_is_accepted() {
    let config = Config::builder().without_environment().file(tuning("tensorwire.toml")).build();
    let config = config.unwrap_or_else(|e| panic!("tuning/tensorwire.toml: {e}"));
    assert_eq!(config.pool_size, 512 << 20);
    assert!(config.pool_require);
}

/// The keys of the example with their values; `commented` says which kind of line.
fn keys(text: &str, commented: bool) -> Vec<(&str, &str)> {
    let lines = text.lines().filter_map(|line| match commented {
        true => line.strip_prefix("# "),
        false => Some(line),
    });
    lines
        .filter_map(|line| line.split_once(" = "))
        .filter(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        .collect()
}

#[test]
fn the_example_configuration_has_every_key_and_comments_out_only_defaults() {
    let text = std::fs::read_to_string(tuning("tensorwire.toml")).expect("the example can be read");
    let (set, shown) = (keys(&text, false), keys(&text, true));
    let named: BTreeSet<&str> = set.iter().chain(&shown).map(|(key, _)| *key).collect();
    let entries = |key: Option<(&str, &str)>| {
        let builder = Config::builder()
            .without_environment()
            .member("worker", 0)
            .set("cluster", "worker=127.0.0.1:7200");
        let builder = key.iter().fold(builder, |b, (key, value)| b.set(*key, value.trim_matches('"')));
        builder.build().unwrap_or_else(|e| panic!("{key:?}: {e}")).entries()
    };
    let defaults = entries(None);
    let known: BTreeSet<&str> = defaults.iter().map(|(key, _)| *key).collect();
    assert_eq!(named, known, "keys of the example (left) and of the configuration (right)");
    for (key, value) in shown {
        let has_default = defaults.iter().any(|(known, value)| *known == key && value.is_some());
        assert!(
            !has_default || entries(Some((key, value))) == defaults,
            "{value} is not the default of {key}"
        );
    }
}
