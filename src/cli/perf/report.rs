//! What is printed and written.

use super::options::PerfOptions;
use super::stats::Samples;
use crate::cli::CliError;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// The figures of one size.
pub struct Sized {
    pub bytes: usize,
    pub samples: Samples,
    pub references: Vec<Reference>,
}

/// A bare measurement beside ours.
pub struct Reference {
    pub name: &'static str,
    pub bytes: usize,
    pub p50_ns: f64,
    /// Ours over it: the median of the turns, the least and the most.
    pub ratio: f64,
    pub least: f64,
    pub most: f64,
}

/// A report in the making.
pub struct Report {
    head: Value,
    title: String,
    sizes: Vec<Sized>,
    file: Option<(PathBuf, PathBuf, File)>,
}

impl Report {
    /// Opens the file, so that one that can't be written fails before anything is measured.
    pub fn open(options: &PerfOptions, cores: [usize; 2]) -> Result<Self, CliError> {
        let file = match &options.json {
            None => None,
            Some(path) => {
                let mut name = path.clone().into_os_string();
                name.push(".part");
                let part = PathBuf::from(name);
                let file = File::create(&part).map_err(|error| {
                    CliError::Failed(format!("--json {}: can't be written: {error}", path.display()))
                })?;
                Some((path.clone(), part, file))
            }
        };
        let head = json!({
            "test": options.test.name(),
            "fabric": "shm",
            "cores": cores,
            "poll": "inline",
            "depth": options.depth,
            "turns": options.turns,
            "kernel": first_line("/proc/sys/kernel/osrelease"),
            "cpu": cpu_model(),
            "commit": commit(),
            "version": env!("CARGO_PKG_VERSION"),
        });
        let title = format!("{} between two processes through shared memory, one way", options.test.name());
        Ok(Report { head, title, sizes: Vec::new(), file })
    }

    /// Prints the head.
    pub fn begin(&mut self, pages: &str, clock: &str) {
        // What was not got, and why, is for `tensorwire`'s log.
        self.head["pages"] = pages.split(';').next().unwrap_or(pages).into();
        self.head["clock"] = clock.into();
        println!("{}", self.title);
        for key in ["fabric", "pages", "cores", "poll", "depth", "clock", "kernel", "cpu", "commit"] {
            println!("  {key:<8} {}", plain(&self.head[key]));
        }
        println!("{}", Samples::head());
    }

    /// Prints the row of one size.
    pub fn add(&mut self, sized: Sized) {
        println!("{}", sized.samples.row(sized.bytes));
        self.sizes.push(sized);
    }

    /// Prints the references and writes the file.
    pub fn finish(self) -> Result<(), CliError> {
        println!("\nbeside it, in turns in the same run (p50, one way; a copy: whole):");
        println!(
            " {:<10} {:<12} {:<14} {:<14} {:<10} spread over turns",
            "#bytes", "reference", "its[nsec]", "ours[nsec]", "ratio"
        );
        for sized in &self.sizes {
            for reference in &sized.references {
                println!(
                    " {:<10} {:<12} {:<14.1} {:<14.1} {:<10.2} {:.2} to {:.2}",
                    reference.bytes,
                    reference.name,
                    reference.p50_ns,
                    sized.samples.quantile(0.5),
                    reference.ratio,
                    reference.least,
                    reference.most
                );
            }
        }
        self.write()
    }

    fn write(self) -> Result<(), CliError> {
        let mut json = self.head;
        json["results"] = self.sizes.iter().map(|sized| sized.samples.json(sized.bytes)).collect();
        let references = self.sizes.iter().flat_map(|sized| &sized.references);
        json["references"] = references
            .map(|reference| {
                json!({
                    "name": reference.name,
                    "bytes": reference.bytes,
                    "p50_ns": reference.p50_ns,
                    "ratio": reference.ratio,
                    "ratio_min": reference.least,
                    "ratio_max": reference.most,
                })
            })
            .collect();
        let Some((path, part, mut file)) = self.file else { return Ok(()) };
        let written = writeln!(file, "{json:#}").and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|error| CliError::Failed(format!("--json {}: {error}", path.display())))
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn first_line(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().lines().next().unwrap_or("unknown").to_owned()
}

fn cpu_model() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or("unknown", |(_, model)| model).to_owned()
}

/// The commit that the program was built from, where that can be found out.
fn commit() -> String {
    let git = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "--short", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success());
    git.map_or("unknown".into(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
