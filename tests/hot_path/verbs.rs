//! Proof of the hot path of the verbs fabric, on the scripted libibverbs. In steady state our code
//! allocates, frees and enters the kernel nowhere between a call of a port and the library. The
//! library's own calls are not counted; a NIC's driver writes to the device's registers. Locks
//! cannot be seen at run time: `tests/repo/layers/locks.rs` lists the files that may hold one.
//!
//! One thread owns both ends. It counts in a process of its own, because the filter of system calls
//! cannot be removed.

use crate::driver::{Fake, ONE_NIC};
use crate::threads::{self, Activity, Start};
use crate::turns::Turns;
use crate::{alone_on_the_cpus, driver, trap};
use std::process::Command;
use tensorwire::internals::fabric::verbs::VerbsOptions;
use tensorwire::internals::fabric::verbs::device::{DeviceSetting, DeviceSettings};

const ROLE: &str = "VERBS_HOT_PATH";
const CALLER: &str = "caller";
const WARM_UP: u32 = 300;
const COUNTED: u32 = 3000;

/// A device, its options, and the bytes of a large tensor.
struct Scenario {
    name: &'static str,
    device: &'static str,
    port: &'static str,
    qps_per_peer: u8,
    /// Devices, and so rails of the link.
    rails: usize,
    bytes: usize,
    /// Whether the ports are armed after each turn.
    arms: bool,
}

const PLAIN: Scenario =
    Scenario { name: "plain", device: "", port: "", qps_per_peer: 1, rails: 1, bytes: 4 << 10, arms: false };

const SCENARIOS: &[Scenario] = &[
    PLAIN,
    Scenario { name: "armed", arms: true, ..PLAIN },
    Scenario { name: "without_inline", device: "max_inline=0", ..PLAIN },
    Scenario { name: "in_thread_domains", device: "thread_domains=1", ..PLAIN },
    Scenario { name: "split", port: "max_msg_sz=4096", bytes: 16 << 10, ..PLAIN },
    Scenario { name: "striped", qps_per_peer: 4, bytes: 512 << 10, ..PLAIN },
    Scenario { name: "over_two_rails", rails: 2, bytes: 512 << 10, ..PLAIN },
];

/// A scenario that is ready to run.
struct Stage {
    scenario: &'static Scenario,
    fake: Fake,
    turns: Turns,
}

impl Stage {
    fn new(scenario: &'static Scenario) -> Self {
        let script = ONE_NIC
            .replace("name=fake_0", &format!("name=fake_0 {}", scenario.device))
            .replace("\nport", &format!("\nport {}", scenario.port));
        let devices: Vec<String> = (0..scenario.rails).map(|at| format!("fake_{at}")).collect();
        let scripts: Vec<String> = devices.iter().map(|name| script.replace("fake_0", name)).collect();
        let fake = Fake::new(&scripts.join("\n"));
        fake.watch(threads::gone_elsewhere, threads::came_back);
        let qps_per_peer = scenario.qps_per_peer;
        let device = DeviceSetting::asked("rdma_device", devices.join(","), "a test");
        let device_settings = DeviceSettings { device: Some(device), ..DeviceSettings::default() };
        let options =
            VerbsOptions { device_settings, qps_per_peer, min_rnr_timer: 28, ..VerbsOptions::default() };
        let turns = Turns::new(&fake, options, scenario.bytes);
        Stage { scenario, fake, turns }
    }

    fn turn(&mut self) {
        self.turns.turn();
        if self.scenario.arms {
            self.turns.arm();
        }
    }

    /// The counts of the calling thread in `turns` turns, and how often it was in the library.
    fn count(&mut self) -> (Activity, u64) {
        (0..WARM_UP).for_each(|_| self.turn());
        let calls = threads::times_elsewhere();
        let activity = alone(|| (0..COUNTED).for_each(|_| self.turn()));
        (activity, threads::times_elsewhere() - calls)
    }

    fn end(self) {
        drop(self.turns);
        self.fake.assert_clean();
    }
}

/// Counts the heap and system calls of the calling thread during `work`.
fn alone(work: impl FnOnce()) -> Activity {
    let start = Start::now();
    work();
    let end = Start::now();
    start.until(&end).into_iter().find(|activity| activity.name == CALLER).expect("this thread is known")
}

/// The control: a system call and an allocation of ours are counted, those of the library are not.
fn prove_the_counters(plain: &mut Stage, has_trap: bool) {
    let deliberate = || {
        // SAFETY: it asks for a number.
        unsafe { libc::syscall(libc::SYS_getppid) };
        drop(std::hint::black_box(Box::new(1)));
    };
    let calls = u64::from(has_trap);
    let ours = alone(deliberate);
    assert_eq!((ours.allocations, ours.frees, ours.calls), (1, 1, calls), "{ours:?}");
    let theirs = alone(|| {
        threads::gone_elsewhere();
        deliberate();
        threads::came_back();
    });
    assert_eq!((theirs.allocations, theirs.frees, theirs.calls), (0, 0, 0), "{theirs:?}");
    // In the middle of the measurement, too.
    (0..WARM_UP).for_each(|_| plain.turn());
    let between = alone(|| {
        (0..10).for_each(|_| {
            plain.turn();
            deliberate();
        });
    });
    assert_eq!((between.allocations, between.frees, between.calls), (10, 10, 10 * calls), "{between:?}");
}

fn measure() {
    // Before the filter is installed: making links needs threads.
    let mut stages: Vec<Stage> = SCENARIOS.iter().map(Stage::new).collect();
    let trapped = trap::install().and_then(|()| trap::tighten(&threads::ids_of(&[CALLER])));
    if let Err(why) = &trapped {
        println!("skipped: system calls can't be counted here: {why}");
    }
    prove_the_counters(&mut stages[0], trapped.is_ok());
    for stage in &mut stages {
        let (Activity { allocations, frees, calls, last_call, .. }, entered) = stage.count();
        println!(
            "{}: {COUNTED} turns entered the library {entered} times; {allocations} allocations, {frees} \
                frees, {calls} system \
             calls (last {last_call})",
            stage.scenario.name
        );
        assert!(entered > u64::from(COUNTED) * 10, "so little can't be what was asked for");
        assert_eq!((allocations, frees, calls), (0, 0, 0), "{}", stage.scenario.name);
    }
    stages.into_iter().for_each(Stage::end);
}

#[test]
fn between_a_port_and_the_library_there_is_no_heap_and_no_kernel() {
    if let Some(why) = driver::skipped() {
        println!("skipped: {why}");
        return;
    }
    if std::env::var(ROLE).is_ok() {
        let done = std::thread::Builder::new().name(CALLER.into()).spawn(|| {
            let done = std::panic::catch_unwind(measure);
            // Exits directly: the end of a thread blocks the filter's signal.
            std::process::exit(i32::from(done.is_err()));
        });
        let _ = done.expect("a thread").join();
    }
    let _alone = alone_on_the_cpus();
    // Compiled before the filter, under which no compiler runs.
    drop(Fake::new(ONE_NIC));
    let output = Command::new(std::env::current_exe().expect("own path"))
        .args([
            "verbs::between_a_port_and_the_library_there_is_no_heap_and_no_kernel",
            "--exact",
            "--nocapture",
        ])
        .env(ROLE, "measures")
        .output()
        .expect("a process");
    let said = String::from_utf8_lossy(&output.stdout);
    let told: Vec<_> =
        said.lines().filter(|line| line.contains(" turns ") || line.starts_with("skipped")).collect();
    told.iter().for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let counted = told.iter().filter(|line| line.contains(" turns ")).count();
    assert_eq!(counted, SCENARIOS.len(), "{said}");
}
