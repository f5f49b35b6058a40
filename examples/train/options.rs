//! The options: read, checked, and refused on one line.

use crate::data::Digits;
use crate::hosts::{HostList, hosts};
use crate::model::TENSORS;
use crate::plan::Plan;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  train                                   1 server and 2 workers, a few seconds
  train --servers 2 --workers 6           8 processes
  train --workers 4 --seed 7              the same weights, bit for bit, as
  train --workers 4 --seed 7 --single     this one, which uses no engine
  train --json summary.json               the summary for a program";

/// Trains a small neural network on handwritten digits.
/// Parameter servers and workers run in processes of their own,
/// and all weights and gradients go through the tensorwire engine.
#[derive(Clone, Debug, Parser)]
#[command(name = "train", after_help = EXAMPLES, verbatim_doc_comment)]
pub struct Options {
    /// Parameter servers; each owns some of the 6 tensors
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(1..=TENSORS as u64))]
    pub servers: u64,
    /// Workers; each takes a part of every batch
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = number(1..=MAX_WORKERS))]
    pub workers: u64,
    /// Updates of the weights
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = number(1..=MAX_STEPS))]
    pub steps: u64,
    /// Images per step, over all workers
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = number(1..=u64::MAX))]
    pub batch: u64,
    /// CPU cores such as 0,2-3, dealt out to the servers, then to the workers
    #[arg(long, value_name = "LIST", value_parser = cores)]
    pub cores: Option<CoreList>,
    /// Who makes progress: auto, inline, adaptive or dedicated
    #[arg(
        long, value_name = "MODE", default_value = "auto",
        value_parser = ["auto", "inline", "adaptive", "dedicated"], hide_possible_values = true
    )]
    pub poll: String,
    /// What moves the bytes: auto, shm, verbs, tcp or grpc
    #[arg(
        long, value_name = "NAME", default_value = "auto",
        value_parser = ["auto", "shm", "verbs", "tcp", "grpc"], hide_possible_values = true
    )]
    pub fabric: String,
    /// RDMA devices such as mlx5_0,mlx5_1, dealt out as cores are;
    /// a+b are two of one process
    #[arg(long, value_name = "LIST", value_parser = devices, verbatim_doc_comment)]
    pub devices: Option<DeviceList>,
    /// Hosts such as '10.0.0.1=ssh a,10.0.0.2=ssh b', dealt out as cores are;
    /// they share this program's file and the folder of temporary files
    #[arg(long, value_name = "LIST", value_parser = hosts, verbatim_doc_comment)]
    pub hosts: Option<HostList>,
    /// Whether edges have standing requests: on or off
    #[arg(
        long, value_name = "WHETHER", default_value = "on", value_parser = ["on", "off"],
        hide_possible_values = true
    )]
    pub standing: String,
    /// Memory that each process registers, such as 64MiB [default: 16MiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub pool: Option<u64>,
    /// Decides the first weights and the order of the images
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(0..=u64::MAX))]
    pub seed: u64,
    /// Do the same arithmetic in this process alone, without the engine
    #[arg(long)]
    pub single: bool,
    /// Write the summary to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const MAX_WORKERS: u64 = 64;
/// An f32, which holds the learning rate, counts exactly so far.
const MAX_STEPS: u64 = 1 << 24;
const DEFAULT_POOL: u64 = 16 << 20;
// The engine's bounds of `pool_size`.
const SMALLEST_POOL: u64 = 1 << 20;
const LARGEST_POOL: u64 = 16 << 40;

/// A list of CPU cores. (A type of its own: clap takes a `Vec` as an option that may be repeated.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreList(Vec<usize>);

impl CoreList {
    /// The core of the process with this number.
    pub fn of(&self, process: usize) -> usize {
        self.0[process % self.0.len()]
    }
}

/// A list of RDMA devices, as the setting `rdma_device` takes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceList(Vec<String>);

impl DeviceList {
    /// The device of the process with this number.
    pub fn of(&self, process: usize) -> &str {
        &self.0[process % self.0.len()]
    }
}

fn devices(text: &str) -> Result<DeviceList, String> {
    let names: Vec<_> = text.split(',').map(|names| names.replace('+', ",")).collect();
    if names.iter().any(String::is_empty) {
        return Err("names with a comma between two, as mlx5_0,mlx5_1".into());
    }
    Ok(DeviceList(names))
}

impl Options {
    /// The plan that the options describe.
    pub fn plan(&self) -> Plan {
        Plan {
            servers: self.servers as usize,
            workers: self.workers as usize,
            steps: self.steps,
            batch: self.batch as usize,
            seed: self.seed,
        }
    }

    /// Whether edges have standing requests.
    pub fn has_standing_requests(&self) -> bool {
        self.standing == "on"
    }

    /// Bytes that each process registers.
    pub fn pool_bytes(&self) -> u64 {
        self.pool.unwrap_or(DEFAULT_POOL)
    }

    /// Checks the options against each other and against the machine.
    fn check(&self, digits: &Digits, available: &[usize]) -> Result<(), String> {
        let images = digits.training.len() as u64;
        if self.batch > images {
            return Err(format!("--batch {}: there are {images} images to learn from", self.batch));
        }
        if self.batch < self.workers {
            let (batch, workers) = (self.batch, self.workers);
            return Err(format!("--batch {batch}: each of the {workers} workers needs an image at least"));
        }
        let wanted = self.cores.iter().flat_map(|cores| &cores.0);
        if let Some(core) = wanted.into_iter().find(|core| !available.contains(core)) {
            return Err(format!("--cores: this process may not run on core {core}, only on {available:?}"));
        }
        self.json.as_deref().map_or(Ok(()), check_file)
    }
}

/// Checked before the training, not after it.
fn check_file(file: &Path) -> Result<(), String> {
    let folder = match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    if file.is_dir() {
        return Err(format!("--json {}: that is a folder, give a file", file.display()));
    }
    if !folder.is_dir() {
        return Err(format!("--json {}: there is no folder {}", file.display(), folder.display()));
    }
    Ok(())
}

/// Instead of training: a text to print and an exit status.
#[derive(Debug, PartialEq, Eq)]
pub struct Stop {
    pub text: String,
    pub status: u8,
}

/// Reads the command line.
pub fn read(
    args: impl IntoIterator<Item = OsString>,
    digits: &Digits,
    available_cores: &[usize],
) -> Result<Options, Stop> {
    let matches = Options::command().try_get_matches_from(args).map_err(stop)?;
    let options = Options::from_arg_matches(&matches).map_err(stop)?;
    match options.check(digits, available_cores) {
        Ok(()) => Ok(options),
        Err(why) => Err(refusal(&why)),
    }
}

/// The plan of a run without any option.
#[cfg(test)]
pub fn default_plan() -> Plan {
    Options::parse_from(["train"]).plan()
}

fn stop(error: clap::Error) -> Stop {
    if error.kind() == ErrorKind::DisplayHelp {
        return Stop { text: error.render().to_string().trim_end().to_owned(), status: 0 };
    }
    // The first paragraph has the mistake and, after a wrong value, the allowed ones.
    let text = error.render().to_string();
    let mistake: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    refusal(mistake.join(" ").trim_start_matches("error: "))
}

fn refusal(why: &str) -> Stop {
    Stop { text: format!("train: {why} (--help lists the options)"), status: 2 }
}

/// Parses a number of this range.
fn number(allowed: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| allowed.contains(number));
        number.ok_or_else(|| format!("give a whole number from {} to {}", allowed.start(), allowed.end()))
    }
}

/// `0,2-4` is 0, 2, 3, 4.
fn cores(text: &str) -> Result<CoreList, String> {
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<u16>().ok().map(usize::from);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => list.extend(first..=last),
            _ => return Err(format!("`{part}` is not a core or range of cores, such as 0 or 2-3")),
        }
    }
    Ok(CoreList(list))
}

/// `64MiB`, `64M` and `67108864` are the same.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit: Option<u64> = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        _ => None,
    };
    let bytes = text[..digits].parse().ok().zip(unit).and_then(|(n, unit): (u64, u64)| n.checked_mul(unit));
    let bytes = bytes.ok_or_else(|| "give bytes, or a number with KiB, MiB or GiB".to_owned())?;
    match (SMALLEST_POOL..=LARGEST_POOL).contains(&bytes) {
        true => Ok(bytes),
        false => Err("a pool has from 1 MiB to 16 TiB".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Result<Options, Stop> {
        let args = std::iter::once("train").chain(line.split_whitespace()).map(OsString::from);
        read(args, &Digits::load().expect("digits"), &[0, 1, 5])
    }

    fn refused(line: &str) -> String {
        let stop = read_line(line).expect_err("refused");
        assert_eq!((stop.status, stop.text.lines().count()), (2, 1), "{line}: {}", stop.text);
        stop.text
    }

    #[test]
    fn every_option_arrives_where_it_is_used() {
        let line = "--servers 2 --workers 6 --steps 9 --batch 60 --cores 0-1,5 \
                    --poll adaptive --fabric verbs --devices a,b \
                    --standing off --pool 3M --seed 8 --json a.json";
        let options = read_line(line).expect("options");
        assert_eq!(options.plan(), Plan { servers: 2, workers: 6, steps: 9, batch: 60, seed: 8 });
        assert_eq!(options.pool_bytes(), 3 << 20);
        assert_eq!((options.poll.as_str(), options.fabric.as_str()), ("adaptive", "verbs"));
        let devices = options.devices.as_ref().expect("devices");
        assert_eq!([0, 1, 2].map(|process| devices.of(process)), ["a", "b", "a"]);
        assert_eq!(super::devices("a+b,c").expect("a list").of(0), "a,b");
        let cores = options.cores.as_ref().expect("cores");
        assert_eq!([0, 1, 2, 3].map(|process| cores.of(process)), [0, 1, 5, 0]);
        assert!(!options.single && !options.has_standing_requests());
        assert_eq!(options.json, Some(PathBuf::from("a.json")));
        let single = read_line("--single").expect("options");
        assert!(single.single && single.has_standing_requests());
    }

    #[test]
    fn a_wrong_value_is_refused_on_one_line_that_has_option_and_value() {
        for (line, parts) in [
            ("--servers 0", ["--servers", "0"]),
            ("--servers 7", ["--servers", "from 1 to 6"]),
            ("--workers 65", ["--workers", "65"]),
            ("--workers two", ["--workers", "two"]),
            ("--steps 0", ["--steps", "0"]),
            ("--steps -4", ["-4", ""]),
            ("--batch 5000", ["--batch", "1438"]),
            ("--batch 5 --workers 6", ["--batch", "6"]),
            ("--cores 0-", ["--cores", "0-"]),
            ("--cores 1,0-5", ["core 2", "[0, 1, 5]"]),
            ("--cores 99999", ["--cores", "99999"]),
            ("--poll sometimes", ["--poll", "sometimes"]),
            ("--fabric udp", ["--fabric", "udp"]),
            ("--hosts a", ["--hosts", "ADDRESS=COMMAND"]),
            ("--standing yes", ["--standing", "yes"]),
            ("--devices a,,b", ["--devices", "comma"]),
            ("--pool 4KiB", ["--pool", "1 MiB"]),
            ("--pool 99999999999G", ["--pool", "GiB"]),
            ("--pool 3MB", ["--pool", "3MB"]),
            ("--seed x", ["--seed", "x"]),
            ("--json /", ["--json", "folder"]),
            ("--json /no/such/place", ["--json", "/no/such"]),
            ("--json", ["--json", "value"]),
            ("--what", ["--what", "--help"]),
            ("extra", ["extra", "--help"]),
        ] {
            let text = refused(line);
            assert!(parts.iter().all(|part| text.contains(part)), "{line}: {text}");
        }
    }

    #[test]
    fn a_refusal_of_a_wrong_value_lists_the_allowed_ones() {
        for (line, allowed) in [
            ("--poll foo", "[possible values: auto, inline, adaptive, dedicated]"),
            ("--fabric foo", "[possible values: auto, shm, verbs, tcp, grpc]"),
            ("--standing foo", "[possible values: on, off]"),
            ("--servers foo", "a whole number from 1 to 6"),
            ("--workers foo", "a whole number from 1 to 64"),
            ("--steps foo", "a whole number from 1 to 16777216"),
            ("--batch foo", "a whole number from 1 to"),
            ("--seed foo", "a whole number from 0 to"),
            ("--cores foo", "a core or range of cores, such as 0 or 2-3"),
            ("--devices a,", "mlx5_0,mlx5_1"),
            ("--pool foo", "bytes, or a number with KiB, MiB or GiB"),
            ("--pool 1", "from 1 MiB to 16 TiB"),
        ] {
            let text = refused(line);
            assert!(text.contains(allowed), "{line}: {text}");
        }
    }

    #[test]
    fn help_names_every_option_and_is_no_error() {
        let stop = read_line("--help").expect_err("help");
        assert_eq!(stop.status, 0);
        for option in [
            "servers", "workers", "steps", "batch", "cores", "poll", "fabric", "devices", "hosts",
            "standing", "pool", "seed", "single", "json",
        ] {
            assert!(stop.text.contains(&format!("--{option}")), "{option}: {}", stop.text);
        }
        assert!(stop.text.lines().all(|line| line.len() <= 100), "{}", stop.text);
    }

    #[test]
    fn sizes_may_have_a_unit() {
        let same = ["4194304", "4096k", "4 MiB", "4M", "4194304b"].map(size);
        assert!(same.iter().all(|size| *size == Ok(4 << 20)), "{same:?}");
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert!(
            ["", "MiB", "-1", "1.5M", "18446744073709551615k", "1023KiB", "17000G"]
                .into_iter()
                .all(|text| size(text).is_err())
        );
    }
}
