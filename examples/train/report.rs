//! The summary of a run, for a person and for a program.

use crate::error::Result;
use crate::exchange::Traffic;
use crate::plan::Plan;
use crate::worker::Outcome;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// The results of a run.
#[derive(Debug)]
pub struct Report {
    plan: Plan,
    outcome: Outcome,
    comm_share: f64,
    /// `None` of a run in one process.
    traffic: Option<Traffic>,
}

impl Report {
    /// The summary of a run in one process.
    pub fn single(plan: Plan, outcome: Outcome) -> Report {
        Report { plan, outcome, comm_share: 0.0, traffic: None }
    }

    /// The summary of a run in several processes: the outcome of each worker, the traffic of each
    /// process.
    ///
    /// # Errors
    /// If the workers ended with different weights.
    pub fn distributed(plan: Plan, outcomes: &[Outcome], traffic: &[Traffic]) -> Result<Report> {
        let first = *outcomes.first().ok_or("no worker told what became of it")?;
        if let Some(worker) = outcomes.iter().position(|outcome| outcome.digest != first.digest) {
            let (digest, other) = (first.digest, outcomes[worker].digest);
            return Err(format!(
                "worker {worker} ended with weights of digest {other:016x}, worker 0 with {digest:016x}"
            )
            .into());
        }
        let share = |outcome: &Outcome| outcome.comm_seconds / outcome.seconds.max(f64::MIN_POSITIVE);
        let comm_share = outcomes.iter().map(share).sum::<f64>() / outcomes.len() as f64;
        Ok(Report { plan, outcome: first, comm_share, traffic: Some(total(traffic)) })
    }

    /// Checks that the counted tensors and bytes are those of the plan.
    ///
    /// # Errors
    /// If they differ, with both figures.
    pub fn check_traffic(&self) -> Result<()> {
        let Some(traffic) = &self.traffic else { return Ok(()) };
        let counted = (traffic.tensors_received, traffic.bytes_received);
        let planned = (self.plan.tensors_moved(), self.plan.bytes_moved());
        if counted == planned {
            return Ok(());
        }
        let ((tensors, bytes), (tensors_due, bytes_due)) = (counted, planned);
        Err(format!("{tensors} tensors, {bytes} bytes were moved instead of {tensors_due}, {bytes_due}")
            .into())
    }

    /// The summary for a program. Fields that only a transport has are `none`, 0 or null without
    /// one.
    pub fn json(&self) -> Value {
        let none = Traffic { fabric: "none".into(), pages: "none".into(), ..Traffic::default() };
        let traffic = self.traffic.as_ref().unwrap_or(&none);
        json!({
            "accuracy": self.accuracy(),
            "loss": self.outcome.loss,
            "steps_per_second": self.steps_per_second(),
            "seconds": self.outcome.seconds,
            "comm_share": self.comm_share,
            "weights_digest": format!("{:016x}", self.outcome.digest),
            "fabric": traffic.fabric,
            "pages": traffic.pages,
            "tensors_moved": traffic.tensors_received,
            "bytes_moved": traffic.bytes_received,
            "fabric_ops": traffic.fabric_ops,
            "receive_p50_ns": traffic.receives.quantile_ns(0.5),
            "receive_p99_ns": traffic.receives.quantile_ns(0.99),
            "steps": self.plan.steps,
            "servers": self.plan.servers,
            "workers": self.plan.workers,
            "batch": self.plan.batch,
            "seed": self.plan.seed,
        })
    }

    /// Writes [`Report::json`] to a file.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn write_json(&self, file: &Path) -> Result<()> {
        let text = format!("{:#}\n", self.json());
        std::fs::write(file, text).map_err(|e| format!("--json {}: {e}", file.display()).into())
    }

    fn accuracy(&self) -> f64 {
        self.outcome.right as f64 / self.outcome.held_out as f64
    }

    fn steps_per_second(&self) -> f64 {
        self.plan.steps as f64 / self.outcome.seconds.max(f64::MIN_POSITIVE)
    }
}

/// Counts are added up; fabrics and pages are listed, each once.
fn total(traffic: &[Traffic]) -> Traffic {
    let mut total = Traffic::default();
    for part in traffic {
        total.tensors_received += part.tensors_received;
        total.bytes_received += part.bytes_received;
        total.fabric_ops += part.fabric_ops;
        total.receives.add(&part.receives);
    }
    total.fabric = listed(traffic.iter().map(|part| &part.fabric));
    total.pages = listed(traffic.iter().map(|part| &part.pages));
    total
}

fn listed<'a>(words: impl Iterator<Item = &'a String>) -> String {
    let distinct: BTreeSet<&str> = words.map(String::as_str).collect();
    distinct.into_iter().collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { right, held_out, loss, seconds, digest, .. } = self.outcome;
        writeln!(f, "held-out accuracy   {:.2} % ({right} of {held_out} images)", self.accuracy() * 100.0)?;
        writeln!(f, "training loss       {loss:.4}")?;
        writeln!(f, "weights digest      {digest:016x}")?;
        let (speed, steps) = (self.steps_per_second(), self.plan.steps);
        write!(f, "speed               {speed:.0} steps/s ({steps} steps in {seconds:.2} s")?;
        let Some(traffic) = &self.traffic else {
            return write!(f, ")\ntensors moved       none: one process, no engine");
        };
        writeln!(f, ", {:.0} % of the time in communication)", self.comm_share * 100.0)?;
        writeln!(f, "tensors moved       {} counted", traffic.tensors_received)?;
        writeln!(f, "  expected          {}", self.plan.tensors_formula())?;
        writeln!(f, "bytes moved         {} counted", traffic.bytes_received)?;
        writeln!(f, "  expected          {}", self.plan.bytes_formula())?;
        let at = |share| micros(traffic.receives.quantile_ns(share));
        writeln!(
            f,
            "a receive           p50 {}, p99 {}, the wait for its sender included",
            at(0.5),
            at(0.99)
        )?;
        writeln!(f, "fabric              {}, {} operations", traffic.fabric, traffic.fabric_ops)?;
        write!(f, "pages               {}", traffic.pages)
    }
}

fn micros(ns: Option<u64>) -> String {
    ns.map_or("-".into(), |ns| format!("{:.1} us", ns as f64 / 1000.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn plan() -> Plan {
        Plan { servers: 1, workers: 1, steps: 2, batch: 8, seed: 1 }
    }

    fn outcome() -> Outcome {
        Outcome { digest: 0xabc, right: 9, held_out: 10, loss: 0.5, seconds: 0.5, comm_seconds: 0.25 }
    }

    fn traffic(tensors_received: u64, fabric: &str) -> Traffic {
        let mut traffic = Traffic { tensors_received, fabric: fabric.into(), ..Traffic::default() };
        traffic.bytes_received = tensors_received / 6 * 68904;
        traffic.fabric_ops = 100;
        traffic.receives.record(Duration::from_micros(20));
        traffic
    }

    #[test]
    fn the_json_has_every_documented_key() {
        let report = Report::distributed(plan(), &[outcome()], &[traffic(12, "shm"), traffic(18, "shm")]);
        let json = report.expect("report").json();
        for key in [
            "accuracy",
            "steps_per_second",
            "weights_digest",
            "fabric",
            "pages",
            "tensors_moved",
            "bytes_moved",
            "fabric_ops",
            "steps",
            "workers",
            "servers",
            "batch",
            "seed",
            "loss",
            "comm_share",
            "receive_p50_ns",
            "receive_p99_ns",
        ] {
            assert!(!json[key].is_null(), "{key}: {json}");
        }
        assert_eq!((&json["fabric"], &json["tensors_moved"]), (&json!("shm"), &json!(30)));
        assert_eq!((&json["fabric_ops"], &json["comm_share"]), (&json!(200), &json!(0.5)));
        assert_eq!(json["weights_digest"], "0000000000000abc");
    }

    #[test]
    fn a_single_run_moves_nothing() {
        let json = Report::single(plan(), outcome()).json();
        assert_eq!((&json["fabric"], &json["pages"]), (&json!("none"), &json!("none")));
        assert_eq!((&json["tensors_moved"], &json["bytes_moved"]), (&json!(0), &json!(0)));
        assert_eq!(json["steps_per_second"], 4.0);
    }

    #[test]
    fn counts_that_differ_from_the_formula_are_an_error_with_both() {
        let report = |tensors| Report::distributed(plan(), &[outcome()], &[traffic(tensors, "shm")]);
        report(30).expect("report").check_traffic().expect("5 x 6 tensors");
        let error = report(24).expect("report").check_traffic().expect_err("too few").to_string();
        assert!(error.contains("24 tensors") && error.contains("30,"), "{error}");
    }

    #[test]
    fn workers_that_end_with_different_weights_are_an_error_that_names_one() {
        let other = Outcome { digest: 5, ..outcome() };
        let error = Report::distributed(plan(), &[outcome(), other], &[]).expect_err("different");
        assert!(error.to_string().contains("worker 1"), "{error}");
    }

    #[test]
    fn the_text_has_the_formula_beside_the_count() {
        let report = Report::distributed(plan(), &[outcome()], &[traffic(30, "shm"), traffic(0, "tcp")]);
        let text = report.expect("report").to_string();
        for part in
            ["90.00 % (9 of 10", "30 counted", "layers x 2 tensors = 30", "p50 20.", "shm, tcp", "4 steps/s"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
