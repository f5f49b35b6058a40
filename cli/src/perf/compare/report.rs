//! The report of a comparison: text, JSON and a picture.

use super::rows::{self, Distance, FAR_NS, Measure, NEAR_NS, RatioRow, TurnFigure};
use super::svg::{self, Chart, Curve};
use crate::error::CliError;
use crate::perf::cores::{Cores, siblings};
use crate::perf::machine;
use serde::Serialize;
use std::fmt::Write;

/// A peer in the report. Field names are keys of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerOutcome {
    pub name: &'static str,
    pub program: Option<String>,
    /// Why it has no figures, or none from some turn on.
    pub left_out: Option<String>,
}

/// The whole report. Field names are keys of the JSON, which `docs/reference/compare-report.md`
/// describes.
#[derive(Clone, Debug, Serialize)]
pub struct CompareReport {
    commit: String,
    version: &'static str,
    kernel: String,
    cpu: String,
    /// Of the process that measures, and of the one that answers.
    cores: [usize; 2],
    cores_are_siblings: bool,
    profile: Option<String>,
    turns: u32,
    near_below_ns: f64,
    far_above_ns: f64,
    peers: Vec<PeerOutcome>,
    rows: Vec<RatioRow>,
    figures: Vec<TurnFigure>,
}

impl CompareReport {
    /// The report of these figures, on this machine.
    pub fn new(
        cores: Cores,
        turns: u32,
        profile: Option<String>,
        peers: Vec<PeerOutcome>,
        figures: &[TurnFigure],
    ) -> Self {
        CompareReport {
            commit: machine::commit(),
            version: env!("CARGO_PKG_VERSION"),
            kernel: machine::kernel(),
            cpu: machine::cpu(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: [cores.initiator, cores.responder],
            cores_are_siblings: cores.share_a_core(siblings),
            profile,
            turns,
            near_below_ns: NEAR_NS,
            far_above_ns: FAR_NS,
            peers,
            rows: rows::rows(figures),
            figures: figures.to_vec(),
        }
    }

    /// The lines above the table.
    pub fn header(&self) -> String {
        let [first, second] = self.cores;
        let threads = if self.cores_are_siblings { "; threads of ONE physical core" } else { "" };
        let mut lines = vec![
            ("cores", format!("{first} (measures), {second} (answers){threads}")),
            ("turns", self.turns.to_string()),
            ("distance", format!("near: cache line below {NEAR_NS} ns, far: above {FAR_NS} ns")),
            ("profile", self.profile.clone().unwrap_or_else(|| "none".into())),
            ("kernel", self.kernel.clone()),
            ("cpu", self.cpu.clone()),
            ("commit", format!("{} (tensorwire {})", self.commit, self.version)),
        ];
        lines.extend(self.peers.iter().map(|peer| {
            let left_out = peer.left_out.as_ref().map(|why| format!("left out: {why}"));
            (peer.name, left_out.or(peer.program.clone()).unwrap_or_default())
        }));
        let mut text = String::new();
        for (name, value) in lines {
            let _ = writeln!(text, " {name:<12}: {value}"); // writing to a String does not fail
        }
        text
    }

    /// The rows, and the peers that were left out.
    pub fn table(&self) -> String {
        let left_out = self.peers.iter().filter_map(|peer| Some((peer.name, peer.left_out.as_ref()?)));
        let notes: String = left_out.map(|(name, why)| format!(" {name} is left out: {why}\n")).collect();
        rows::table(&self.rows) + &notes
    }

    /// Indented JSON text, for `--json`.
    pub fn to_json(&self) -> Result<String, CliError> {
        let text = serde_json::to_string_pretty(self);
        Ok(text.map_err(|error| CliError::failed("making the JSON report", error))? + "\n")
    }

    /// A picture of all sizes of all names. Each is drawn at the distance with most of its turns.
    pub fn to_svg(&self) -> String {
        let mut names: Vec<(&str, &str)> = Vec::new();
        for row in &self.rows {
            if !names.contains(&(row.fabric, &row.name)) {
                names.push((row.fabric, &row.name));
            }
        }
        let chart = |title: &str, measure, unit, scale| {
            let rows: Vec<_> = self.rows.iter().filter(|row| row.measure == measure).collect();
            Chart { title: title.into(), unit, curves: curves(&most_frequent(&rows), &names, scale) }
        };
        let charts = [
            chart("Latency, one way", Measure::Latency, "us", 1e-3),
            chart("Bandwidth, one direction", Measure::Bandwidth, "GB/s", 1.0),
        ];
        let drawn: Vec<Chart> = charts.into_iter().filter(|chart| !chart.curves.is_empty()).collect();
        let turns = format!("medians of the turns at the distance with most of {}", self.turns);
        let footer = format!("{}, {turns}, commit {}", self.cpu, self.commit);
        svg::svg(&drawn, &footer)
    }
}

/// For each name and size the row with most turns. Of two with as many, the nearer one.
fn most_frequent<'a>(rows: &[&'a RatioRow]) -> Vec<&'a RatioRow> {
    let rival = |row: &RatioRow, other: &RatioRow| {
        (other.fabric, &other.name, other.bytes) == (row.fabric, &row.name, row.bytes)
            && (other.turns > row.turns || other.turns == row.turns && other.distance < row.distance)
    };
    rows.iter().copied().filter(|row| !rows.iter().any(|other| rival(row, other))).collect()
}

/// One curve for each name and distance, near ones first. The place of a name is its colour.
fn curves(rows: &[&RatioRow], names: &[(&str, &str)], scale: f64) -> Vec<Curve> {
    let mut curves = Vec::new();
    for (distance, dashes) in [(Distance::Near, ""), (Distance::Between, "1 3"), (Distance::Far, "5 4")] {
        for (colour, &(fabric, name)) in names.iter().enumerate() {
            let is_of_curve =
                |row: &&&RatioRow| (row.fabric, row.name.as_str(), row.distance) == (fabric, name, distance);
            let of_curve = rows.iter().filter(is_of_curve);
            let points: Vec<_> = of_curve.map(|row| (row.bytes as f64, row.median * scale)).collect();
            let suffix = if fabric == "shm" { String::new() } else { format!(" ({fabric})") };
            let label = format!("{name}{suffix}, {distance}");
            if !points.is_empty() {
                curves.push(Curve { label, colour, dashes, points });
            }
        }
    }
    curves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::compare::rows::OURS;
    use crate::perf::compare::rows::tests::figure;

    fn report() -> CompareReport {
        let (near, far) = ([40.0, 50.0], [150.0, 160.0]);
        let figures = [
            figure(OURS, 8, 1, 130.0, near),
            figure("ucx", 8, 1, 100.0, near),
            figure(OURS, 4096, 1, 380.0, near),
            figure("ucx", 4096, 1, 1900.0, far),
        ];
        let left_out = Some("not installed".into());
        let peers = vec![PeerOutcome { name: "iceoryx2", program: None, left_out }];
        CompareReport::new(Cores { initiator: 0, responder: 1 }, 1, None, peers, &figures)
    }

    #[test]
    fn the_json_has_the_keys_that_the_reference_describes() {
        let json: serde_json::Value = serde_json::from_str(&report().to_json().unwrap()).unwrap();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/compare-report.md");
        let page = std::fs::read_to_string(page).unwrap();
        let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let row = &json["rows"][1];
        let all =
            [keys(&json), keys(&json["peers"][0]), keys(row), keys(&row["ratio"]), keys(&json["figures"][0])];
        for key in all.concat() {
            assert!(page.contains(&format!("`{key}`")), "{key} is not described");
        }
        assert_eq!((&row["name"], row["ratio"]["median"].as_f64()), (&"ucx".into(), Some(1.3)));
        assert_eq!((&row["distance"], &row["measure"]), (&"near".into(), &"latency".into()));
    }

    #[test]
    fn the_text_names_what_is_left_out() {
        let report = report();
        assert!(report.header().contains("iceoryx2    : left out: not installed"), "{}", report.header());
        assert!(report.table().ends_with(" iceoryx2 is left out: not installed\n"), "{}", report.table());
    }

    #[test]
    fn the_picture_has_a_curve_for_each_name_and_distance() {
        let text = report().to_svg();
        for label in ["tensorwire, near", "ucx, near", "ucx, far", "Latency, one way (us)"] {
            assert!(text.contains(label), "no {label}: {text}");
        }
        assert!(!text.contains("Bandwidth"), "a chart without figures is not drawn");
    }

    #[test]
    fn the_picture_has_every_size_at_the_distance_with_most_of_its_turns() {
        let (near, between, far) = ([40.0; 2], [100.0; 2], [150.0; 2]);
        let figures = [
            figure(OURS, 8, 1, 130.0, near),
            figure(OURS, 8, 2, 135.0, between),
            figure(OURS, 8, 3, 140.0, between),
            figure(OURS, 4096, 1, 380.0, near),
            figure(OURS, 4096, 2, 900.0, far),
        ];
        let rows = rows::rows(&figures);
        let drawn = most_frequent(&rows.iter().collect::<Vec<_>>());
        let said: Vec<_> = drawn.iter().map(|row| (row.bytes, row.distance, row.turns)).collect();
        assert_eq!(said, [(8, Distance::Between, 2), (4096, Distance::Near, 1)]);
        let cores = Cores { initiator: 0, responder: 1 };
        let text = CompareReport::new(cores, 3, None, Vec::new(), &figures).to_svg();
        assert!(text.contains("tensorwire, between") && text.contains("\"1 3\""), "{text}");
    }
}
