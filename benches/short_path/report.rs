//! Medians, and the table of results.

use std::sync::OnceLock;
use std::time::Instant;

/// A line below this many nanoseconds means that the two CPUs are near each other.
const NEAR: f64 = 75.0;
/// A line above this many nanoseconds means that they are far from each other.
const FAR: f64 = 120.0;
/// The two lines around a row differ by this factor at most.
const SAME: f64 = 1.2;

/// The middle value; NaN of none.
pub fn median(values: Vec<f64>) -> f64 {
    quantile(values, 0.5)
}

fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * part) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// Nanoseconds that the reading of the clock adds to a time.
pub fn clock_cost() -> f64 {
    static COST: OnceLock<f64> = OnceLock::new();
    *COST.get_or_init(|| median((0..2001).map(|_| Instant::now().elapsed().as_nanos() as f64).collect()))
}

/// How far apart the two CPUs were while a row ran.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Distance {
    Near,
    Far,
    /// Between the two, or changing.
    Mixed,
}

/// One run of a row.
#[derive(Clone, Copy)]
pub struct Run {
    /// Nanoseconds.
    pub time: f64,
    /// The cache line before and after the row.
    pub lines: [f64; 2],
    /// Times that the scheduler took the CPU from either process.
    pub preemptions: u64,
}

impl Run {
    pub fn distance(&self) -> Distance {
        let [least, most] = [self.lines[0].min(self.lines[1]), self.lines[0].max(self.lines[1])];
        match most < least * SAME {
            true if most < NEAR => Distance::Near,
            true if least > FAR => Distance::Far,
            _ => Distance::Mixed,
        }
    }

    fn line(&self) -> f64 {
        (self.lines[0] + self.lines[1]) / 2.0
    }
}

/// The runs of a row, one for each turn.
pub struct Runs {
    pub name: String,
    /// Bytes of a value, for ratios of rows of the same size.
    pub bytes: u32,
    pub runs: Vec<Option<Run>>,
}

impl Runs {
    fn at(&self, distance: Distance) -> impl Iterator<Item = &Run> {
        self.runs.iter().flatten().filter(move |run| run.distance() == distance)
    }

    fn row(&self, distance: Distance) -> String {
        let times: Vec<f64> = self.at(distance).map(|run| run.time).collect();
        let count = times.len();
        if count == 0 {
            return format!("{:>42}", "-");
        }
        let ratios = self.at(distance).map(|run| run.time / run.line()).collect();
        let line = median(self.at(distance).map(Run::line).collect());
        format!("{} {:>5.0} {} {count:>4}", spread(times, 1), line, spread(ratios, 2))
    }

    /// The ratios of the turns in which the reference ran at the same distance.
    fn over(&self, reference: &Runs, distance: Distance) -> Vec<f64> {
        let pairs = self.runs.iter().zip(&reference.runs);
        let pairs = pairs.filter_map(|(run, reference)| Some((run.as_ref()?, reference.as_ref()?)));
        let pairs = pairs.filter(|pair| pair.0.distance() == distance && pair.1.distance() == distance);
        pairs.map(|(run, reference)| run.time / reference.time).collect()
    }
}

/// The median, and in brackets the range of the middle 80 %.
fn spread(values: Vec<f64>, digits: usize) -> String {
    let [low, middle, high] = [0.1, 0.5, 0.9].map(|part| quantile(values.clone(), part));
    let digits = if middle >= 1000.0 { 0 } else { digits };
    format!("{middle:>7.digits$} {:<13}", format!("({low:.digits$}-{high:.digits$})"))
}

/// Prints all rows, then the ratios over the references of the same size.
pub fn print(rows: &[Runs], references: &[(&str, Vec<&Runs>)]) {
    let columns = "ns                    line x line             turns";
    println!("{:<34} | near: {columns} | far: {columns} | mixed, preempted", "");
    for row in rows {
        let mixed = row.at(Distance::Mixed).count();
        let preempted = row.runs.iter().flatten().filter(|run| run.preemptions > 0).count();
        let [near, far] = [Distance::Near, Distance::Far].map(|distance| row.row(distance));
        println!("{:<34} | {near} | {far} | {mixed:>5} {preempted:>5}", row.name);
    }
    for (name, references) in references {
        println!("\nover {name}");
        for row in rows {
            let same = references.iter().find(|reference| reference.bytes == row.bytes);
            let Some(reference) = same.filter(|reference| reference.name != row.name) else { continue };
            let ratios = [Distance::Near, Distance::Far].map(|distance| row.over(reference, distance));
            let [near, far] = ratios.map(|ratios| match ratios.len() {
                0 => format!("{:>26}", "-"),
                count => format!("{} {count:>4}", spread(ratios, 2)),
            });
            println!("{:<34} | near {near} | far {far}", row.name);
        }
    }
}
