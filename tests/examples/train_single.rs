//! Runs in one process, and properties that all runs share.

use crate::program::Train;
use serde_json::{Value, json};

#[test]
fn a_third_of_the_default_steps_reach_96_percent_and_a_single_run_moves_nothing() {
    let summary = Train::new("--single --steps 300").summary();
    assert!(summary["accuracy"].as_f64().expect("accuracy") >= 0.96, "{summary}");
    assert_eq!((&summary["fabric"], &summary["pages"]), (&json!("none"), &json!("none")));
    for moved in ["tensors_moved", "bytes_moved", "fabric_ops"] {
        assert_eq!(summary[moved], 0, "{moved}");
    }
    assert!(summary["steps_per_second"].as_f64().expect("speed") > 0.0);
}

#[ignore = "takes long: tests/nightly"]
#[test]
fn the_same_seed_gives_the_same_weights_and_another_gives_others() {
    let digest = |seed: u32| {
        let run = Train::new(&format!("--single --steps 15 --workers 2 --seed {seed}"));
        run.summary()["weights_digest"].as_str().expect("digest").to_owned()
    };
    assert_eq!(digest(4), digest(4));
    assert_ne!(digest(4), digest(5));
    assert_eq!(digest(4).len(), 16);
}

#[test]
fn without_a_terminal_progress_is_a_few_plain_lines() {
    let output = Train::new("--single --steps 50").output();
    let lines: Vec<&str> = output.stderr.lines().collect();
    assert!((1..=10).contains(&lines.len()), "{lines:?}");
    assert!(
        lines.iter().all(|line| line.contains("accuracy") && !line.contains(['\x1b', '\r'])),
        "{lines:?}"
    );
    assert!(output.stdout.contains("held-out accuracy"), "{}", output.stdout);
}

#[test]
fn a_wrong_value_is_one_line_and_status_2() {
    for args in ["--steps none", "--workers 0", "--batch 9999", "--cores 900", "--json /no/such/folder/x"] {
        let output = Train::new(args).output();
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert_eq!((output.stderr.lines().count(), output.stdout.as_str()), (1, ""), "{args}");
        let option = args.split(' ').next().expect("option");
        assert!(output.stderr.contains(option), "{args}: {}", output.stderr);
    }
}

#[test]
fn help_goes_to_standard_output_and_is_no_error() {
    let output = Train::new("--help").output();
    assert_eq!((output.status.code(), output.stderr.as_str()), (Some(0), ""));
    assert!(output.stdout.contains("--servers"), "{}", output.stdout);
}

#[test]
fn a_signal_ends_a_single_run_with_status_130() {
    let output = Train::new("--single --steps 16000000").start().after_first_line("INT").end();
    assert_eq!(output.status.code(), Some(130), "{}", output.stderr);
    assert!(output.stderr.lines().last().is_some_and(|line| line.contains("SIGINT")), "{}", output.stderr);
}

#[test]
fn a_json_file_that_exists_is_replaced() {
    let run = Train::new("--single --steps 2");
    std::fs::write(run.json_file(), "x".repeat(10_000)).expect("write");
    let summary: Value = run.summary();
    assert_eq!(summary["steps"], 2);
}
