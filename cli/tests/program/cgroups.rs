//! Limits of real cgroups. Root makes them; others skip the tests.

use crate::perf::two_cores;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, io};

/// A cgroup of its own for a test, with one limit. Dropping it removes it.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `files`: the file of the limit in versions 1 and 2. Prints why there is none.
    fn new(controller: &str, files: [&str; 2], limit: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("tensorwire-{controller}-{}", std::process::id());
        for (folder, file) in [root.join(controller), root.into()].into_iter().zip(files) {
            match Self::try_new(folder.join(&name), file, limit) {
                Ok(made) => return Some(made),
                Err(error) => println!("{}: {error}", folder.display()),
            }
        }
        println!("skipped: no cgroup with a limit of {controller} can be made here");
        None
    }

    fn try_new(folder: PathBuf, file: &str, limit: &str) -> io::Result<Self> {
        fs::create_dir(&folder)?;
        let made = Cgroup(folder);
        // Without it the controller is not there. Outside of cgroups, a file would be made.
        fs::metadata(made.0.join(file))?;
        fs::write(made.0.join(file), limit)?;
        Ok(made)
    }

    /// The program in this cgroup.
    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let line = format!(
            "echo $$ >{}/cgroup.procs && exec {} \"$@\"",
            self.0.display(),
            env!("CARGO_BIN_EXE_tensorwire")
        );
        let mut command = Command::new("sh");
        command.args(["-c", &line, "sh"]).args(arguments).envs(variables.iter().copied());
        command.output().expect("sh starts")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // It is empty: its processes have ended.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Asserts that the program has failed, and that its error has these parts.
fn fails_with(output: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    for part in parts {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_pool_beyond_the_memory_of_the_cgroup_is_refused_before_the_kernel_kills() {
    let files = ["memory.limit_in_bytes", "memory.max"];
    let Some(cgroup) = Cgroup::new("memory", files, "67108864") else { return };
    let limit = format!("of cgroup {}", cgroup.0.display());
    let says = ["memory of the cgroup: ", "limit 64 MiB (memory.", &limit, "lower pool_size"];
    let large = [("TENSORWIRE_POOL_SIZE", "256MiB"), ("TENSORWIRE_POOL_PAGES", "plain")];
    fails_with(&cgroup.run(&["launch", "-n", "1", "--plan"], &large), &says);
    // A node is started, too.
    if two_cores() {
        let perf = ["perf", "rendezvous_lat", "--local", "--pool", "256MiB", "-n", "1"];
        fails_with(&cgroup.run(&perf, &[]), &says);
    }
    // One process of 40 MiB fits, and two do not.
    let small = [("TENSORWIRE_POOL_SIZE", "40MiB"), ("TENSORWIRE_POOL_PAGES", "plain")];
    let output = cgroup.run(&["launch", "-n", "1", "--plan"], &small);
    assert!(output.status.success(), "{output:?}");
    let says = ["memory of the cgroup: ", "(2 processes, each pool_size", "limit 64 MiB"];
    fails_with(&cgroup.run(&["launch", "-n", "2", "--plan"], &small), &says);
}

#[test]
fn threads_beyond_those_of_the_cgroup_are_refused_before_any_is_made() {
    let Some(cgroup) = Cgroup::new("pids", ["pids.max"; 2], "30") else { return };
    let limit = format!("limit 30 (pids.max of cgroup {})", cgroup.0.display());
    let many = [("TENSORWIRE_POLL", "dedicated"), ("TENSORWIRE_POLLERS", "64")];
    fails_with(&cgroup.run(&["launch", "-n", "1", "--plan"], &many), &["threads: ", &limit, "raise it"]);
    let few = [("TENSORWIRE_POOL_SIZE", "1MiB")];
    // One process fits, and three may lack threads: joins take fewer at a time.
    for (processes, lacks) in [("1", false), ("3", true)] {
        let output = cgroup.run(&["launch", "-n", processes, "--plan"], &few);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        let line = said.lines().find(|line| line.starts_with("all processes may need more"));
        assert_eq!(line.is_some(), lacks, "{said}");
        assert!(!lacks || said.contains("(3 processes, each ") && said.contains(&limit), "{said}");
    }
}
