//! Comparisons whose runs of ours fail. A script stands in for this program.

use super::*;

const ALL: [Peer; 3] = [Peer::UcxPosix, Peer::UcxTcp, Peer::Perftest];

/// A program of the tests in `cli/tests`.
fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/peers").join(name)
}

/// What is left of a comparison of latencies: its result, and the report.
fn compared(sizes: &[usize]) -> (Result<(), CliError>, CompareReport) {
    let options = CompareOptions {
        measures: vec![Measure::Latency],
        peers: ALL.to_vec(),
        ucx: None,
        iceoryx2: None,
        timeout: 60,
        profile: None,
        ib_dev: None,
        gid_index: None,
        svg: None,
    };
    let run = RunOptions { sizes: Some(sizes.to_vec()), turns: 1, ..RunOptions::default() };
    let mut comparison = CompareRun {
        options: &options,
        run: &run,
        cores: Cores { initiator: 0, responder: 1 },
        program: program("ours_on_shm_alone"),
        tied_by: None,
        found: ALL.map(|peer| (peer, Ok(program("ucx_perftest")))).to_vec(),
        folder: scratch().expect("a folder"),
        failed: Vec::new(),
        figures: Vec::new(),
    };
    let measured = comparison.measure();
    (measured, comparison.report())
}

#[test]
fn a_fabric_on_which_ours_fails_is_left_out_with_the_reason() {
    let (measured, report) = compared(&[8, 16]);
    measured.expect("shared memory works");
    let table = report.table();
    for (peer, fabric) in [("ucx-tcp", "tcp"), ("perftest", "verbs")] {
        let why = format!(" {peer} is left out: tensorwire failed over {fabric}: ");
        let line = table.lines().find(|line| line.starts_with(&why)).unwrap_or_else(|| panic!("{table}"));
        assert!(line.contains("several RDMA devices are active"), "{line}");
    }
    let figures_of = |size: &str| {
        let rows = table.lines().filter(|line| line.split_whitespace().next() == Some(size));
        rows.filter(|row| row.contains(" ucx-posix ")).count()
    };
    assert_eq!((figures_of("8"), figures_of("16")), (1, 1), "the other sizes go on: {table}");
}

#[test]
fn figures_before_a_failure_on_shared_memory_are_kept() {
    let (measured, report) = compared(&[8, 64, 128]);
    let error = measured.expect_err("64 bytes fail").to_string();
    assert!(error.contains("out of memory"), "{error}");
    let table = report.table();
    assert!(table.contains(" ucx-posix ") && !table.contains("\n 128 "), "{table}");
}
