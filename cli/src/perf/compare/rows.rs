//! From single runs to rows: the medians at each distance, and ratios of runs in one turn.

use crate::perf::recorder::median;
use clap::ValueEnum;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// A cache line faster than this is near, in nanoseconds.
pub const NEAR_NS: f64 = 75.0;
/// A cache line slower than this is far, in nanoseconds.
pub const FAR_NS: f64 = 120.0;

/// The name of our own runs.
pub const OURS: &str = "tensorwire";
/// The name of our runs whose receives borrow.
pub const BORROWED: &str = "tensorwire-borrow";
/// The name of our runs over gRPC calls.
pub const CALLS: &str = "tensorwire-grpc";

/// A kind of figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// One way, in nanoseconds
    Latency,
    /// In one direction, in 10^9 bytes a second
    Bandwidth,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Measure::Latency => "latency",
            Measure::Bandwidth => "bandwidth",
        })
    }
}

/// How far apart the two cores were, by the cache line before and after a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// Less than [`NEAR_NS`] before and after.
    Near,
    /// Neither near nor far, or it changed during the run.
    Between,
    /// More than [`FAR_NS`] before and after.
    Far,
}

impl Distance {
    /// By the times of the cache line before and after a run, in nanoseconds.
    pub fn of(line_ns: [f64; 2]) -> Self {
        match line_ns {
            [before, after] if before < NEAR_NS && after < NEAR_NS => Distance::Near,
            [before, after] if before > FAR_NS && after > FAR_NS => Distance::Far,
            _ => Distance::Between,
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distance::Near => "near",
            Distance::Between => "between",
            Distance::Far => "far",
        })
    }
}

/// One figure of one turn. Field names are keys of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TurnFigure {
    pub measure: Measure,
    /// `shm`, `tcp` or `verbs`: figures are compared within one.
    pub fabric: &'static str,
    pub name: String,
    pub bytes: usize,
    pub turn: u32,
    /// Nanoseconds, or 10^9 bytes a second.
    pub value: f64,
    /// The cache line before and after the run, in nanoseconds.
    pub line_ns: [f64; 2],
}

impl TurnFigure {
    fn distance(&self) -> Distance {
        Distance::of(self.line_ns)
    }
}

/// All figures of one program or reference for one size and distance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RatioRow {
    pub measure: Measure,
    pub fabric: &'static str,
    pub bytes: usize,
    pub distance: Distance,
    pub name: String,
    pub turns: usize,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// The median of the cache line around its runs, in nanoseconds.
    pub line_ns: f64,
    /// Ours over it. `None` for ours, and without a turn in which both had this distance.
    pub ratio: Option<SpreadRatio>,
}

/// Ratios of turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SpreadRatio {
    /// Turns in which both had the same distance.
    pub turns: usize,
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// Median, smallest and largest.
fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Some((median(values)?, min, max))
}

/// The rows of these figures: by measure, size and distance, then as they came.
pub fn rows(figures: &[TurnFigure]) -> Vec<RatioRow> {
    let mut groups: BTreeMap<_, Vec<&TurnFigure>> = BTreeMap::new();
    for figure in figures {
        let came =
            figures.iter().position(|first| (first.fabric, &first.name) == (figure.fabric, &figure.name));
        let key = (figure.measure, figure.bytes, figure.distance(), came);
        groups.entry(key).or_default().push(figure);
    }
    groups.into_values().filter_map(|group| row(&group, figures)).collect()
}

fn row(group: &[&TurnFigure], all: &[TurnFigure]) -> Option<RatioRow> {
    let first = group.first()?;
    let values: Vec<f64> = group.iter().map(|figure| figure.value).collect();
    let lines: Vec<f64> = group.iter().flat_map(|figure| figure.line_ns).collect();
    let ratios: Vec<f64> =
        group.iter().filter_map(|theirs| Some(ours_beside(theirs, all)?.value / theirs.value)).collect();
    let ratio = (first.name != OURS).then(|| spread(&ratios)).flatten();
    let (middle, min, max) = spread(&values)?;
    Some(RatioRow {
        measure: first.measure,
        fabric: first.fabric,
        bytes: first.bytes,
        distance: first.distance(),
        name: first.name.clone(),
        turns: values.len(),
        median: middle,
        min,
        max,
        line_ns: median(&lines)?,
        ratio: ratio.map(|(median, min, max)| SpreadRatio { turns: ratios.len(), median, min, max }),
    })
}

/// Our figure of the same turn, if the cores were as far apart.
fn ours_beside<'a>(theirs: &TurnFigure, all: &'a [TurnFigure]) -> Option<&'a TurnFigure> {
    all.iter().find(|ours| {
        ours.name == OURS
            && (ours.measure, ours.fabric, ours.bytes, ours.turn)
                == (theirs.measure, theirs.fabric, theirs.bytes, theirs.turn)
            && ours.distance() == theirs.distance()
    })
}

/// The rows as text.
pub fn table(rows: &[RatioRow]) -> String {
    let mut text = String::new();
    for measure in [Measure::Latency, Measure::Bandwidth] {
        let mut rows = rows.iter().filter(|row| row.measure == measure).peekable();
        if rows.peek().is_none() {
            continue;
        }
        let (title, unit) = match measure {
            Measure::Latency => ("latency, one way; a ratio below 1: tensorwire is faster", "usec"),
            Measure::Bandwidth => ("bandwidth, one direction; a ratio above 1: tensorwire is faster", "GB/s"),
        };
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "{}\n {title}\n {:<10} {:<9} {:<7} {:<18} {:<6} {:<13} {:<22} {:<12} {:<7} spread (turns)",
            "-".repeat(132),
            "#bytes",
            "distance",
            "fabric",
            "what",
            "turns",
            format!("median[{unit}]"),
            "spread",
            "line[nsec]",
            "ratio"
        );
        rows.for_each(|row| text.push_str(&line(row)));
    }
    text + &"-".repeat(132) + "\n"
}

fn line(row: &RatioRow) -> String {
    let figure = |value: f64| match row.measure {
        Measure::Latency => format!("{:.4}", value / 1e3),
        Measure::Bandwidth => format!("{value:.3}"),
    };
    let (ratio, ratios) = match &row.ratio {
        Some(ratio) => (
            format!("{:.3}", ratio.median),
            format!("{:.3} to {:.3} ({})", ratio.min, ratio.max, ratio.turns),
        ),
        None => Default::default(),
    };
    let spread = format!("{} to {}", figure(row.min), figure(row.max));
    let text = format!(
        " {:<10} {:<9} {:<7} {:<18} {:<6} {:<13} {spread:<22} {:<12.1} {ratio:<7} {ratios}",
        row.bytes,
        row.distance.to_string(),
        row.fabric,
        row.name,
        row.turns,
        figure(row.median),
        row.line_ns
    );
    text.trim_end().to_owned() + "\n"
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn figure(name: &str, bytes: usize, turn: u32, value: f64, line_ns: [f64; 2]) -> TurnFigure {
        let (measure, fabric, name) = (Measure::Latency, "shm", name.to_owned());
        TurnFigure { measure, fabric, name, bytes, turn, value, line_ns }
    }

    const NEAR: [f64; 2] = [40.0, 50.0];
    const FAR: [f64; 2] = [150.0, 170.0];

    #[test]
    fn the_line_around_a_run_decides_on_its_distance() {
        assert_eq!(Distance::of([30.0, 74.9]), Distance::Near);
        assert_eq!(Distance::of([121.0, 200.0]), Distance::Far);
        for between in [[30.0, 150.0], [150.0, 30.0], [75.0, 75.0], [120.0, 120.0], [f64::NAN, 30.0]] {
            assert_eq!(Distance::of(between), Distance::Between, "{between:?}");
        }
    }

    #[test]
    fn ratios_are_those_of_turns_in_which_both_had_the_same_distance() {
        let figures = [
            figure(OURS, 8, 1, 130.0, NEAR),
            figure("ucx", 8, 1, 100.0, NEAR),
            figure(OURS, 8, 2, 150.0, NEAR),
            figure("ucx", 8, 2, 300.0, FAR),
            figure(OURS, 8, 3, 126.0, NEAR),
            figure("ucx", 8, 3, 90.0, NEAR),
        ];
        let rows = rows(&figures);
        let said: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.distance, row.turns)).collect();
        assert_eq!(said, [(OURS, Distance::Near, 3), ("ucx", Distance::Near, 2), ("ucx", Distance::Far, 1)]);
        assert_eq!((rows[0].median, rows[0].min, rows[0].max, rows[0].ratio), (130.0, 126.0, 150.0, None));
        let ratio = rows[1].ratio.unwrap();
        assert_eq!((ratio.turns, ratio.median, ratio.min, ratio.max), (2, 1.35, 1.3, 1.4));
        assert_eq!(rows[2].ratio, None, "ours was near in the turn in which it was far");
        assert_eq!(rows[2].line_ns, 160.0);
    }

    #[test]
    fn measures_fabrics_and_sizes_are_not_mixed() {
        let mut figures = vec![
            figure(OURS, 8, 1, 130.0, NEAR),
            figure("ucx", 4096, 1, 400.0, NEAR),
            TurnFigure { measure: Measure::Bandwidth, ..figure("ucx", 8, 1, 1.0, NEAR) },
            TurnFigure { fabric: "verbs", ..figure("perftest", 8, 1, 1.0, NEAR) },
        ];
        assert!(rows(&figures).iter().all(|row| row.ratio.is_none()));
        figures.push(TurnFigure { fabric: "verbs", ..figure(OURS, 8, 1, 2.0, NEAR) });
        let rows = rows(&figures);
        let compared: Vec<_> =
            rows.iter().filter_map(|row| Some((row.name.as_str(), row.ratio?.median))).collect();
        assert_eq!(compared, [("perftest", 2.0)]);
    }

    #[test]
    fn the_table_has_a_part_for_each_measure_with_figures() {
        let figures = [figure(OURS, 8, 1, 130.0, NEAR), figure("ucx-posix", 8, 1, 100.0, NEAR)];
        let text = table(&rows(&figures));
        assert!(text.contains("latency") && !text.contains("bandwidth"), "{text}");
        let row = text.lines().find(|line| line.contains("ucx-posix")).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        let expected =
            ["8", "near", "shm", "ucx-posix", "1", "0.1000", "0.1000", "to", "0.1000", "45.0", "1.300"];
        assert_eq!(words[..11], expected, "{row}");
        assert!(row.ends_with("1.300 to 1.300 (1)"), "{row}");
    }
}
