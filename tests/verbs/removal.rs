//! A device that is removed: its descriptors stay ready for ever, and nothing that was posted
//! completes. The test runs in a process of its own, so that the CPU time is that of its threads
//! alone.
#![allow(unsafe_code)] // `getrusage`

use crate::driver::Fake;
use crate::harness::Got;
use crate::needs_fake;
use crate::setup::*;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tensorwire::internals::fabric::{LinkFailure, Port, Sleep, Sleeper};

const ROLE: &str = "REMOVAL_ROLE";
/// The time over which CPU time is measured.
const WINDOW: Duration = Duration::from_secs(1);
/// Twenty wake-ups a second stay below this CPU time; a busy loop does not.
const LITTLE: Duration = Duration::from_millis(10);
/// Timeout of the child: it measures for two seconds, and a port disconnects for one.
const LONGEST: Duration = Duration::from_secs(30);

/// Runs one test of this program in a process of its own. Returns its output.
fn alone(test: &str, role: &str) -> String {
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args([test, "--exact", "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("a process");
    let start = Instant::now();
    let in_time = loop {
        if child.try_wait().expect("a child").is_some() {
            break true;
        }
        if start.elapsed() > LONGEST {
            child.kill().expect("a child");
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let output = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(in_time, "the process hangs:\n{said}");
    assert!(output.status.success(), "the process failed:\n{said}");
    said
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `usage` is a valid place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut spent) }, 0);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

fn cpu_time_of_a_window() -> Duration {
    let before = cpu_time();
    std::thread::sleep(WINDOW);
    cpu_time() - before
}

/// Polls until every link is down. Returns the reasons.
fn all_down(end: &mut Verbs, links: usize) -> Vec<LinkFailure> {
    let (start, mut down) = (Instant::now(), Vec::new());
    while down.len() < links {
        assert!(start.elapsed() < Duration::from_secs(5), "only {down:?} after {:?}", start.elapsed());
        end.poll();
        for (_, got) in end.arrivals.drain(..) {
            if let Got::Down(why) = got {
                down.push(why);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    down
}

/// Runs when the test fails too: the threads must end before they are joined.
struct EndsWithThis<'a>(&'a AtomicBool);

impl Drop for EndsWithThis<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn pull_out(how: &str) {
    let fake = Fake::new(TWO_NICS);
    let (mut a, mut b) = two(&fake, 16);
    another(&mut a, &mut b, &link(16));
    let sleeper = a.port.sleeper();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ended = EndsWithThis(&is_over);
        for who in [Sleep::Waiter, Sleep::Background] {
            let (sleeper, is_over) = (&sleeper, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    sleeper.sleep(who, sleeper.seen(), Duration::from_millis(100));
                }
            });
        }
        let healthy = cpu_time_of_a_window();
        fake.run(&format!("remove device=fake_0 {how}"));
        for why in all_down(&mut a, 2) {
            let is_device = matches!(&why, LinkFailure::Device { device, .. } if device == "fake_0");
            assert!(is_device && why.to_string().contains("the device failed or was removed"), "{why:?}");
        }
        let gone = cpu_time_of_a_window();
        println!("CPU time in {WINDOW:?}: {healthy:?} before, {gone:?} after the device was removed");
        assert!(gone < 5 * healthy.max(LITTLE), "threads spin: {gone:?}, and {healthy:?} before");
        let start = Instant::now();
        drop(a);
        println!("the port ended within {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
    drop((sleeper, b));
    fake.assert_no_misuse();
}

fn in_a_process(test: &str, how: &str) {
    needs_fake!();
    if std::env::var(ROLE).is_ok() {
        return pull_out(how);
    }
    let said = alone(test, how);
    let told: Vec<_> =
        said.lines().filter(|line| line.contains("CPU time") || line.contains("ended")).collect();
    assert_eq!(told.len(), 2, "{said}");
    told.iter().for_each(|line| println!("{line}"));
}

#[test]
fn a_device_that_is_gone_and_says_so_costs_nothing_and_ends_in_time() {
    in_a_process("removal::a_device_that_is_gone_and_says_so_costs_nothing_and_ends_in_time", "");
}

#[test]
fn a_device_that_is_gone_and_only_hangs_up_costs_nothing_and_ends_in_time() {
    in_a_process(
        "removal::a_device_that_is_gone_and_only_hangs_up_costs_nothing_and_ends_in_time",
        "silently=1",
    );
}
