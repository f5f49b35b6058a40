//! The report: a header, perftest's table, the references, and the same as JSON.

use super::bandwidth::Bandwidth;
use super::cores::siblings;
use super::machine;
use super::measure::{Comparison, SizeResult};
use super::options::Figure;
use super::plan::{Part, Plan};
use super::recorder::Summary;
use super::workload::Facts;
use crate::error::CliError;
use crate::reference::stopwatch::Stopwatch;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The whole report. Field names are the keys of the JSON.
#[derive(Debug, Serialize)]
pub struct PerfReport {
    test: &'static str,
    #[serde(skip)]
    figure: Figure,
    fabric: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fabric_reason: Option<String>,
    device: Option<String>,
    pages: String,
    cores: [usize; 2],
    /// Both are threads of one physical core.
    cores_are_siblings: bool,
    /// Whether each process was pinned to its core.
    pinned: bool,
    poll_mode: String,
    inline_bytes: u64,
    depth: u64,
    idle_links: u32,
    busy_loops: u32,
    mtu: Option<u64>,
    mode: String,
    turns: u32,
    clock: String,
    kernel: String,
    cpu: String,
    commit: String,
    version: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    results: Vec<Row>,
    #[serde(rename = "results", skip_serializing_if = "Vec::is_empty")]
    bandwidths: Vec<Bandwidth>,
    references: Vec<Reference>,
}

/// One size.
#[derive(Debug, Serialize)]
struct Row {
    bytes: usize,
    iterations: u64,
    min_ns: f64,
    p50_ns: f64,
    p90_ns: f64,
    p99_ns: f64,
    p999_ns: f64,
    p9999_ns: f64,
    max_ns: f64,
    mean_ns: f64,
    stdev_ns: f64,
}

/// One size beside one reference.
#[derive(Debug, Serialize)]
struct Reference {
    name: &'static str,
    bytes: usize,
    p50_ns: f64,
    ours_p50_ns: f64,
    ratio: f64,
    ratio_min: f64,
    ratio_max: f64,
}

impl PerfReport {
    /// A report without results. The other process runs on the core `responder`.
    pub fn new(plan: &Plan, facts: Facts, clock: &Stopwatch, responder: usize) -> Self {
        PerfReport {
            test: plan.args.test.name(),
            figure: plan.args.test.figure(),
            fabric: facts.fabric,
            fabric_reason: facts.fabric_reason,
            device: facts.device,
            pages: facts.pages,
            cores: [plan.cores.initiator, responder],
            cores_are_siblings: plan.part == Part::Local && plan.cores.share_a_core(siblings),
            pinned: !plan.args.run.unpinned,
            poll_mode: facts.poll_mode,
            inline_bytes: facts.inline_bytes,
            depth: facts.depth,
            idle_links: plan.args.test.idle_links(),
            busy_loops: plan.args.test.busy_loops(),
            mtu: facts.mtu,
            mode: plan.mode(),
            turns: plan.args.run.turns,
            clock: clock.to_string(),
            kernel: machine::kernel(),
            cpu: machine::cpu(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            commit: machine::commit(),
            version: env!("CARGO_PKG_VERSION"),
            results: Vec::new(),
            bandwidths: Vec::new(),
            references: Vec::new(),
        }
    }

    /// Adds the results of one size.
    pub fn add(&mut self, result: &SizeResult) {
        let Summary { count, min_ns, p50_ns, p90_ns, p99_ns, p999_ns, p9999_ns, max_ns, mean_ns, stdev_ns } =
            result.summary;
        let (bytes, iterations) = (result.bytes, count);
        if self.figure == Figure::Bandwidth {
            self.bandwidths.push(Bandwidth::of(bytes, &result.turns));
        }
        let row = Row {
            bytes,
            iterations,
            min_ns,
            p50_ns,
            p90_ns,
            p99_ns,
            p999_ns,
            p9999_ns,
            max_ns,
            mean_ns,
            stdev_ns,
        };
        if self.figure != Figure::Bandwidth {
            self.results.push(row);
        }
        self.references.extend(result.references.iter().map(|comparison| {
            let &Comparison { name, bytes, ours_p50_ns, p50_ns, ratio, ratio_min, ratio_max } = comparison;
            Reference { name, bytes, p50_ns, ours_p50_ns, ratio, ratio_min, ratio_max }
        }));
    }

    /// The lines above the table, and the table's head.
    pub fn header(&self) -> String {
        let [measures, answers] = self.cores;
        let note = match (self.pinned, self.cores_are_siblings) {
            (false, _) => return self.header_with("any: neither process is pinned".into()),
            (true, true) => "; threads of ONE physical core: not comparable with two",
            (true, false) => "",
        };
        self.header_with(format!("{measures} (measures), {answers} (answers){note}"))
    }

    fn fabric_with_reason(&self) -> String {
        match &self.fabric_reason {
            Some(why) => format!("{} ({why})", self.fabric),
            None => self.fabric.clone(),
        }
    }

    fn header_with(&self, cores: String) -> String {
        let none = || "none".to_owned();
        let rule = "-".repeat(132);
        let figure = match self.figure {
            Figure::OneWay => "latency, one way (half of the round trip)",
            Figure::RoundTrip => "latency, the whole round trip",
            Figure::Bandwidth => "bandwidth, one direction",
        };
        let mut text = format!("{rule}\n {} {figure}\n", self.test);
        for (name, value) in [
            ("fabric", self.fabric_with_reason()),
            ("device", self.device.clone().unwrap_or_else(none)),
            ("pages", self.pages.clone()),
            ("cores", cores),
            ("poll mode", self.poll_mode.clone()),
            ("inline size", format!("{} bytes", self.inline_bytes)),
            ("depth", self.depth.to_string()),
            ("idle links", self.idle_links.to_string()),
            ("busy loops", self.busy_loops.to_string()),
            ("mtu", self.mtu.map_or_else(none, |mtu| mtu.to_string())),
            ("length", self.mode.clone()),
            ("clock", self.clock.clone()),
            ("kernel", self.kernel.clone()),
            ("cpu", self.cpu.clone()),
            ("commit", format!("{} (tensorwire {})", self.commit, self.version)),
        ] {
            // Writing to a String does not fail.
            let _ = writeln!(text, " {name:<12}: {value}");
        }
        if self.figure == Figure::Bandwidth {
            return text + &rule + "\n" + &Bandwidth::head();
        }
        let _ = writeln!(
            text,
            "{rule}\n {:<10} {:<12} {:<13} {:<13} {:<16} {:<13} {:<15} {:<21} {:<22}",
            "#bytes",
            "#iterations",
            "t_min[usec]",
            "t_max[usec]",
            "t_typical[usec]",
            "t_avg[usec]",
            "t_stdev[usec]",
            "99% percentile[usec]",
            "99.9% percentile[usec]"
        );
        text
    }

    /// The table's newest row.
    pub fn newest_row(&self) -> String {
        if let Some(bandwidth) = self.bandwidths.last() {
            return bandwidth.row();
        }
        let Some(row) = self.results.last() else { return String::new() };
        let [min, max, typical, mean, stdev, p99, p999] =
            [row.min_ns, row.max_ns, row.p50_ns, row.mean_ns, row.stdev_ns, row.p99_ns, row.p999_ns]
                .map(|nanos| format!("{:.3}", nanos / 1e3));
        format!(
            " {:<10} {:<12} {min:<13} {max:<13} {typical:<16} {mean:<13} {stdev:<15} {p99:<21} {p999:<22}\n",
            row.bytes, row.iterations
        )
    }

    /// The table of the references, with both absolute figures.
    pub fn reference_table(&self) -> String {
        let rule = "-".repeat(132);
        if self.references.is_empty() {
            return rule + "\n";
        }
        let mut text = format!(
            "{rule}\n beside it in turns, medians of {} turns\n {:<12} {:<10} {:<14} {:<18} {:<8} {}\n",
            self.turns, "reference", "#bytes", "ours[usec]", "reference[usec]", "ratio", "over the turns"
        );
        for reference in &self.references {
            let _ = writeln!(
                text,
                " {:<12} {:<10} {:<14.4} {:<18.4} {:<8.3} {:.3} to {:.3}",
                reference.name,
                reference.bytes,
                reference.ours_p50_ns / 1e3,
                reference.p50_ns / 1e3,
                reference.ratio,
                reference.ratio_min,
                reference.ratio_max
            );
        }
        text + &rule + "\n"
    }

    /// Indented JSON text, for `--json`.
    pub fn to_json(&self) -> Result<String, CliError> {
        let text = serde_json::to_string_pretty(self);
        Ok(text.map_err(|error| CliError::failed("making the JSON report", error))? + "\n")
    }
}

/// A file that is written as a whole or not at all. A device or a pipe is written to, and a
/// symbolic link leads to the file.
#[derive(Debug)]
pub struct ReportFile {
    path: PathBuf,
    /// Where the text is written first; `None` for what is not replaced.
    temporary: Option<PathBuf>,
}

impl ReportFile {
    /// Checks that the file can be written, and leaves nothing behind. The error names the option.
    pub fn probe(option: &str, path: &Path) -> Result<Self, CliError> {
        let refused = |why: String| {
            Err(CliError::Usage(format!("{option}: {} can't be written: {why}", path.display())))
        };
        let path = match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => return refused("it is a directory".into()),
            Ok(found) if !found.is_file() => {
                return match rustix::fs::access(path, rustix::fs::Access::WRITE_OK) {
                    Ok(()) => Ok(ReportFile { path: path.to_owned(), temporary: None }),
                    Err(error) => refused(error.to_string()),
                };
            }
            Ok(_) => path.canonicalize().unwrap_or_else(|_| path.to_owned()),
            Err(_) if path.is_symlink() => return refused("it is a symbolic link to no file".into()),
            Err(_) => path.to_owned(),
        };
        let Some(name) = path.file_name() else { return refused("it names no file".into()) };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let temporary = path.with_file_name(hidden);
        let tried = std::fs::File::create_new(&temporary).and_then(|_| std::fs::remove_file(&temporary));
        match tried {
            Ok(()) => Ok(ReportFile { path, temporary: Some(temporary) }),
            Err(error) => refused(error.to_string()),
        }
    }

    /// Writes the text, beside a file that it then replaces.
    pub fn write(&self, text: &str) -> Result<(), CliError> {
        let written = match &self.temporary {
            None => std::fs::write(&self.path, text),
            Some(temporary) => std::fs::write(temporary, text)
                .and_then(|()| std::fs::rename(temporary, &self.path))
                // Fails if it does not exist.
                .inspect_err(|_| drop(std::fs::remove_file(temporary))),
        };
        written.map_err(|error| CliError::failed(format!("writing {}", self.path.display()), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::options::{PerfArgs, RunOptions, Test};
    use rustix::fs::{FileType, Mode};
    use std::collections::BTreeSet;

    fn report() -> PerfReport {
        let run = RunOptions { local: true, turns: 5, ..RunOptions::default() };
        let args = PerfArgs { test: Test::CacheLine, run };
        let plan = Plan::check(args, &BTreeSet::new(), &[0, 1]).unwrap();
        let facts = Facts {
            fabric: "shm".into(),
            fabric_reason: Some("same host: shared memory".into()),
            device: None,
            pages: "2 MiB".into(),
            poll_mode: "inline".into(),
            inline_bytes: 40,
            depth: 64,
            mtu: None,
        };
        let mut report = PerfReport::new(&plan, facts, &Stopwatch::new(), plan.cores.responder);
        let mut recorder = crate::perf::recorder::Recorder::new();
        [100, 300, 500].iter().for_each(|&nanos| recorder.record(nanos));
        report.add(&SizeResult {
            bytes: 8,
            summary: recorder.summary(0.5),
            turns: Vec::new(),
            references: vec![Comparison::new("cache_line", 8, &[150.0], &[120.0])],
        });
        report
    }

    #[test]
    fn the_json_has_the_keys_that_readers_rely_on() {
        let json: serde_json::Value = serde_json::from_str(&report().to_json().unwrap()).unwrap();
        for key in
            ["pages", "cores", "poll_mode", "inline_bytes", "depth", "kernel", "cpu", "commit", "turns"]
        {
            assert!(!json[key].is_null(), "{key}");
        }
        assert_eq!((&json["test"], &json["fabric"]), (&"cache_line".into(), &"shm".into()));
        assert_eq!(json["fabric_reason"], "same host: shared memory");
        let result = &json["results"][0];
        for (key, value) in [
            ("bytes", 8.0),
            ("iterations", 3.0),
            ("min_ns", 50.0),
            ("p50_ns", 150.0),
            ("p90_ns", 250.0),
            ("p99_ns", 250.0),
            ("p999_ns", 250.0),
            ("max_ns", 250.0),
            ("mean_ns", 150.0),
            ("stdev_ns", 100.0),
        ] {
            assert_eq!(result[key].as_f64(), Some(value), "{key}");
        }
        let reference = &json["references"][0];
        assert_eq!((&reference["name"], &reference["bytes"]), (&"cache_line".into(), &8.into()));
        assert_eq!((reference["p50_ns"].as_f64(), reference["ratio"].as_f64()), (Some(120.0), Some(1.25)));
    }

    #[test]
    fn the_tables_have_perftests_columns_and_both_absolute_figures() {
        let report = report();
        let head = report.header();
        let columns: Vec<&str> = head.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(columns[..5], ["#bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]"]);
        let row = report.newest_row();
        let row: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(row, ["8", "3", "0.050", "0.250", "0.150", "0.150", "0.100", "0.250", "0.250"]);
        let table = report.reference_table();
        assert!(table.contains("0.1500") && table.contains("0.1200") && table.contains("1.250"), "{table}");
    }

    #[test]
    fn a_path_that_cant_be_written_is_refused_and_one_that_can_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let file = ReportFile::probe("--json", &path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the probe left something");
        file.write("{}").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        for wrong in [folder.path().to_owned(), folder.path().join("no/such.json"), PathBuf::from("/")] {
            let error = ReportFile::probe("--json", &wrong).unwrap_err();
            assert!(matches!(&error, CliError::Usage(why) if why.contains("can't be written")), "{error}");
        }
    }

    #[test]
    fn a_link_leads_to_its_file_and_a_pipe_is_written_to() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let [target, link, pipe] = ["target", "link", "pipe"].map(|name| folder.path().join(name));
        std::fs::write(&target, "an earlier report, and a longer one").unwrap();
        symlink(&target, &link).unwrap();
        ReportFile::probe("--json", &link).unwrap().write("{}").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "{}");
        std::fs::remove_file(&target).unwrap();
        let error = ReportFile::probe("--json", &link).unwrap_err().to_string();
        assert!(error.contains("a symbolic link to no file"), "{error}");

        let made = rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RWXU, 0);
        made.expect("a pipe needs no privilege");
        let file = ReportFile::probe("--json", &pipe).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::read_to_string(pipe)
        });
        file.write("{}").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), "{}");
        assert!(std::fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
