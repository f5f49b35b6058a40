//! The short examples: hello, ring and recovery.

use crate::program::{example, tensorwire};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Lines of a short example at most.
const MAX_LINES: usize = 60;

/// The lines that the example prints, which must succeed. The processes of one example print in
/// any order.
fn lines_of(name: &str, args: &[&str]) -> Vec<String> {
    let mut command = Command::new(example(name));
    lines(command.args(args))
}

/// The lines that a command prints, which must succeed.
pub fn lines(command: &mut Command) -> Vec<String> {
    output(command).0
}

/// As [`lines`], with the lines on standard error.
pub fn output(command: &mut Command) -> (Vec<String>, Vec<String>) {
    // A node reads these variables, and the shell that runs the tests may have set some.
    const READ: [&str; 9] = [
        "TENSORWIRE_",
        "RDMA_",
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "OMPI_COMM_",
        "PMI_",
        "SLURM_",
        "TORCHELASTIC_",
    ];
    for (variable, _) in std::env::vars_os() {
        if READ.iter().any(|prefix| variable.to_string_lossy().starts_with(prefix)) {
            command.env_remove(variable);
        }
    }
    let output = command.output().expect("it starts");
    let [lines, errors] = [output.stdout, output.stderr]
        .map(|text| String::from_utf8(text).expect("text").lines().map(str::to_owned).collect::<Vec<_>>());
    assert!(output.status.success(), "{command:?}: {}: {errors:?}", output.status);
    (lines, errors)
}

/// Each process tells of each other one once.
#[test]
fn the_launcher_shows_the_fabric_to_each_peer_and_why() {
    let why = [("auto", "shm (", "same host"), ("tcp", "tcp (", "fabric = tcp")];
    for (fabric, by, because) in why {
        let mut command = Command::new(tensorwire());
        command.args(["launch", "-n", "3", "--paths", "--", "env"]);
        let (_, told) = output(command.arg(format!("TENSORWIRE_FABRIC={fabric}")).arg(example("ring")));
        println!("{told:#?}");
        let pairs = (0..3).flat_map(|me| (0..3).map(move |peer| (me, peer))).filter(|(me, peer)| me != peer);
        for (me, peer) in pairs {
            let begin = format!("[worker:{me}] worker/{me}: ");
            let is_of =
                |line: &&String| line.starts_with(&begin) && line.contains(&format!("worker/{peer} "));
            let of: Vec<&String> = told.iter().filter(is_of).collect();
            assert!(matches!(of[..], [line] if line.contains(&format!("connected by {by}"))), "{told:?}");
            assert!(of[0].contains(because), "{of:?}");
        }
        assert_eq!(told.len(), 6);
    }
}

#[test]
fn a_ring_runs_under_the_launcher_without_arguments() {
    let mut command = Command::new(tensorwire());
    let lines = lines(command.args(["launch", "-n", "4", "--"]).arg(example("ring")));
    let lines: BTreeSet<String> = lines.into_iter().collect();
    let expected = (0..4).map(|rank| format!("[worker:{rank}] rank {rank} of 4: the sum is 10"));
    assert_eq!(lines, expected.collect());
}

#[test]
fn hello_moves_a_tensor_there_and_an_answer_back() {
    let expected = ["task 1 received [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]", "task 0 received the sum 21"];
    assert_eq!(lines_of("hello", &[]), expected);
}

#[test]
fn each_rank_of_a_ring_learns_the_sum() {
    for ranks in [2, 4] {
        let lines: BTreeSet<String> = lines_of("ring", &[&ranks.to_string()]).into_iter().collect();
        let sum = ranks * (ranks + 1) / 2;
        let expected = (0..ranks).map(|rank| format!("rank {rank} of {ranks}: the sum is {sum}"));
        assert_eq!(lines, expected.collect());
    }
}

#[test]
fn a_ring_of_something_else_than_a_number_is_refused() {
    let output = Command::new(example("ring")).arg("many").output().expect("the example starts");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn training_goes_on_after_a_worker_died() {
    let lines = lines_of("recovery", &[]);
    let (deaths, steps): (Vec<&String>, Vec<&String>) = lines.iter().partition(|line| line.contains("died"));
    assert_eq!(steps, [1, 2, 3, 4, 5].map(|n| format!("step {n}: the gradient is {n}0")).each_ref());
    assert_eq!(deaths, ["step 3: task/1 died, starting it"]);
}

#[test]
fn an_example_of_one_thing_is_short_and_uses_no_internals() {
    for name in ["hello", "ring", "recovery"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name).with_extension("rs");
        let text = std::fs::read_to_string(path).expect("the example");
        assert!(text.lines().count() <= MAX_LINES, "{name} has {} lines", text.lines().count());
        assert!(!text.contains("internals"), "{name}");
    }
}
