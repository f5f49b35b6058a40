//! The turns: the test and its references one after the other, again and again, within a minute.

use super::cache_line::CacheLine;
use super::channel_message::ChannelMessage;
use super::channel_message::Subject;
use super::control_channel::ControlChannel;
use super::layout::{RING_PAYLOAD, RING_SLOTS, Set};
use super::options::Figure;
use super::peer_watch::PeerWatch;
use super::plan::{Length, Plan};
use super::recorder::{Recorder, Summary, median};
use super::ring_64::Ring64;
use super::workload::{Initiator, KeepAlive, Responder};
use crate::error::CliError;
use crate::reference::memcpy::Memcpy;
use crate::reference::stopwatch::Stopwatch;
use crate::reference::word_mapping::WordMapping;
use std::sync::Arc;

/// Smallest payload that is compared with a plain copy, in bytes.
const COPY_FROM: usize = 4096;

/// All measured times for one payload.
#[derive(Clone, Debug)]
pub struct SizeResult {
    /// The payload.
    pub bytes: usize,
    /// The times over all turns: one way, or of whole operations.
    pub summary: Summary,
    /// The length of each turn.
    pub turns: Vec<Elapsed>,
    /// The ratio to each reference that ran in turns with the test.
    pub references: Vec<Comparison>,
}

/// The test beside one reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The name of the reference.
    pub name: &'static str,
    /// The payload of the test.
    pub bytes: usize,
    /// The median of the medians of the test's turns.
    pub ours_p50_ns: f64,
    /// The same of the reference.
    pub p50_ns: f64,
    /// The test's figure divided by the reference's.
    pub ratio: f64,
    /// The smallest ratio of one turn.
    pub ratio_min: f64,
    /// The largest ratio of one turn.
    pub ratio_max: f64,
}

impl Comparison {
    /// Compares the medians of the turns, which come in pairs.
    pub fn new(name: &'static str, bytes: usize, ours: &[f64], reference: &[f64]) -> Self {
        let ratios = ours.iter().zip(reference).map(|(ours, reference)| ours / reference);
        let (ours_p50_ns, p50_ns) = (median(ours).unwrap_or_default(), median(reference).unwrap_or_default());
        Comparison {
            name,
            bytes,
            ours_p50_ns,
            p50_ns,
            ratio: ours_p50_ns / p50_ns,
            ratio_min: ratios.clone().fold(f64::INFINITY, f64::min),
            ratio_max: ratios.fold(0.0, f64::max),
        }
    }
}

/// The time of a number of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Elapsed {
    /// Operations.
    pub count: u64,
    /// Nanoseconds of all operations, which may overlap.
    pub nanos: u64,
}

impl Elapsed {
    /// Nanoseconds per operation.
    pub fn each(&self) -> f64 {
        self.nanos as f64 / self.count.max(1) as f64
    }
}

/// The measuring side of a run.
pub struct Measurement<'a> {
    plan: &'a Plan,
    clock: Stopwatch,
    watch: PeerWatch,
    test: Box<dyn Initiator>,
    baseline: Option<(&'static str, Box<dyn Initiator>)>,
    references: Option<SharedReferences>,
}

/// The references in memory that both processes share.
struct SharedReferences {
    cache_line: CacheLine,
    ring: Ring64,
}

/// All turns of one subject at one size.
struct Series {
    name: &'static str,
    /// 0.5 if round trips are recorded and one-way times are shown, otherwise 1.
    scale: f64,
    all: Recorder,
    medians: Vec<f64>,
}

impl Series {
    fn new(name: &'static str, scale: f64) -> Self {
        Series { name, scale, all: Recorder::new(), medians: Vec::new() }
    }

    fn add(&mut self, turn: &Recorder) {
        self.medians.push(turn.quantile(0.5) * self.scale);
        self.all.merge(turn);
    }
}

impl<'a> Measurement<'a> {
    /// A run of the plan with this workload and its baseline. References in shared memory run in
    /// turns with them, where both processes have the mapping.
    pub fn new(
        plan: &'a Plan,
        clock: Stopwatch,
        watch: PeerWatch,
        mapping: Option<&Arc<WordMapping>>,
        test: Box<dyn Initiator>,
        baseline: Option<(&'static str, Box<dyn Initiator>)>,
    ) -> Self {
        let references = mapping.filter(|_| plan.has_references()).map(|mapping| SharedReferences {
            cache_line: CacheLine::new(mapping, Set::Reference),
            ring: Ring64::initiator(mapping, Set::Reference, RING_SLOTS),
        });
        Measurement { plan, clock, watch, test, baseline, references }
    }

    /// Measures one size.
    pub fn size(&mut self, bytes: usize, channel: &mut ControlChannel) -> Result<SizeResult, CliError> {
        let figure = self.plan.args.test.figure();
        let (bandwidth, shared) = (figure == Figure::Bandwidth, self.references.is_some());
        let scale = if figure == Figure::OneWay { 0.5 } else { 1.0 };
        let mut ours = Series::new("", scale);
        let mut baseline = self.baseline.as_ref().map(|(name, _)| Series::new(name, scale));
        let mut line = (shared && !bandwidth).then(|| Series::new("cache_line", 0.5));
        let mut ring = (shared && !bandwidth && bytes <= RING_PAYLOAD).then(|| Series::new("ring_64", 0.5));
        // A borrowed tensor is not copied.
        let copies = shared && bytes >= COPY_FROM && !self.plan.args.test.borrows();
        let least = self.plan.smallest(bytes);
        let mut smallest = least.map(|_| Series::new("smallest", scale));
        let mut copy = copies.then(|| Series::new("memcpy", 1.0));
        let mut memory = Memcpy::new(if copy.is_some() { bytes } else { 0 })?;
        let (mut turn, mut turns) = (Recorder::new(), Vec::new());
        for _ in 0..self.plan.args.run.turns {
            let took = self.turn(Subject::Test, bytes, channel, &mut turn)?;
            ours.add(&turn);
            turns.push(took);
            for (subject, series) in [
                (Subject::Baseline, &mut baseline),
                (Subject::CacheLine, &mut line),
                (Subject::Ring64, &mut ring),
            ] {
                if let Some(series) = series {
                    self.turn(subject, bytes, channel, &mut turn)?;
                    series.add(&turn);
                }
            }
            if let (Some(least), Some(smallest)) = (least, &mut smallest) {
                self.turn(Subject::Test, least, channel, &mut turn)?;
                smallest.add(&turn);
            }
            if let Some(copy) = &mut copy {
                self.copies(bytes, &mut memory, &mut turn)?;
                copy.add(&turn);
            }
        }
        let each: Vec<f64> = turns.iter().map(Elapsed::each).collect();
        let medians = if bandwidth { &each } else { &ours.medians };
        let references = [baseline, smallest, line, ring, copy]
            .into_iter()
            .flatten()
            .map(|series| Comparison::new(series.name, bytes, medians, &series.medians))
            .collect();
        Ok(SizeResult { bytes, summary: ours.all.summary(ours.scale), turns, references })
    }

    /// One turn of a subject. The other process answers.
    fn turn(
        &mut self,
        subject: Subject,
        bytes: usize,
        channel: &mut ControlChannel,
        recorder: &mut Recorder,
    ) -> Result<Elapsed, CliError> {
        recorder.clear();
        channel.send(&ChannelMessage::Turn { subject, bytes })?;
        let (length, warmup) = (self.plan.length(bytes), self.plan.warmup(bytes));
        let (clock, watch) = (&self.clock, &self.watch);
        let workload: &mut dyn Initiator = match (subject, &mut self.references) {
            (Subject::CacheLine, Some(references)) => &mut references.cache_line,
            (Subject::Ring64, Some(references)) => &mut references.ring,
            (Subject::Baseline, _) => match &mut self.baseline {
                Some((_, baseline)) => &mut **baseline,
                None => &mut *self.test,
            },
            _ => &mut *self.test,
        };
        workload.prepare(bytes, channel)?;
        channel.expect(&ChannelMessage::Ready)?;
        let batch = |count, recorder: &mut Recorder| {
            channel.send(&ChannelMessage::Rounds(count))?;
            channel.expect(&ChannelMessage::Ready)?;
            let nanos = workload.rounds(count, clock, watch, recorder).map_err(|abort| {
                CliError::failed(format!("measuring {subject:?} with {bytes} bytes"), abort)
            })?;
            channel.expect(&ChannelMessage::Done)?;
            Ok(nanos)
        };
        warm_and_measure(length, warmup, recorder, batch)
    }

    /// One turn of plain copies, which need no other process.
    fn copies(&self, bytes: usize, memory: &mut Memcpy, recorder: &mut Recorder) -> Result<(), CliError> {
        let (length, warmup) = (self.plan.length(bytes), self.plan.warmup(bytes));
        let clock = &self.clock;
        let batch = |count, recorder: &mut Recorder| {
            let began = clock.now();
            for _ in 0..count {
                let start = clock.now();
                memory.copy(bytes);
                recorder.record(clock.nanos(start, clock.now()));
            }
            Ok(clock.nanos(began, clock.now()))
        };
        warm_and_measure(length, warmup, recorder, batch).map(drop)
    }
}

/// Runs `batch` for `warmup` operations, and then for the length of a turn. A turn with a duration
/// runs batches of half the remaining time, so that a bad estimate costs little.
fn warm_and_measure(
    length: Length,
    warmup: u64,
    recorder: &mut Recorder,
    mut batch: impl FnMut(u64, &mut Recorder) -> Result<u64, CliError>,
) -> Result<Elapsed, CliError> {
    let mut pace = Elapsed::default();
    if warmup > 0 {
        pace = Elapsed { count: warmup, nanos: batch(warmup, recorder)? };
    }
    recorder.clear();
    let duration = match length {
        Length::Iterations(count) => return Ok(Elapsed { count, nanos: batch(count, recorder)? }),
        Length::Duration(duration) => duration.as_nanos() as u64,
    };
    let mut took = Elapsed::default();
    while took.nanos < duration {
        let left = (duration - took.nanos) as f64 / 2.0;
        let count = if pace.count == 0 { 1 } else { (left / pace.each().max(1.0)) as u64 }.max(1);
        let nanos = batch(count, recorder)?;
        pace = Elapsed { count, nanos };
        took = Elapsed { count: took.count + count, nanos: took.nanos + nanos };
    }
    Ok(took)
}

/// The responder: answers turn after turn, of at most `max_bytes`, until it is told to quit.
pub fn answer(
    channel: &mut ControlChannel,
    max_bytes: usize,
    mapping: Option<&Arc<WordMapping>>,
    mut test: Box<dyn Responder>,
    mut baseline: Option<Box<dyn Responder>>,
) -> Result<(), CliError> {
    let watch = channel.watch()?;
    let mut references = mapping.map(|mapping| {
        (CacheLine::new(mapping, Set::Reference), Ring64::responder(mapping, Set::Reference, RING_SLOTS))
    });
    let mut turn = (Subject::Test, 0);
    loop {
        while !channel.is_ready() {
            let baseline = baseline.iter_mut().map(|baseline| baseline.keep_alive());
            let all: Result<Vec<_>, _> = baseline.chain([test.keep_alive()]).collect();
            let all = all.map_err(|abort| CliError::failed("between turns", abort))?;
            if all.iter().all(|next| *next == KeepAlive::Sleep) {
                channel.wait();
            }
        }
        let message = channel.receive()?;
        if let ChannelMessage::Turn { subject, bytes } = message {
            if !(1..=max_bytes).contains(&bytes) {
                let why = format!("a turn of {bytes} bytes came, in a run of 1 to {max_bytes}");
                return Err(CliError::Failed(why));
            }
            turn = (subject, bytes);
        }
        let (subject, bytes) = turn;
        let workload: &mut dyn Responder = match (subject, &mut references) {
            (Subject::CacheLine, Some((line, _))) => line,
            (Subject::Ring64, Some((_, ring))) => ring,
            (Subject::Baseline, _) => baseline.as_deref_mut().unwrap_or(&mut *test),
            _ => &mut *test,
        };
        match message {
            ChannelMessage::Quit => return Ok(()),
            ChannelMessage::Turn { .. } => {
                workload.prepare(bytes, channel)?;
                channel.send(&ChannelMessage::Ready)?;
            }
            ChannelMessage::Rounds(count) => {
                channel.send(&ChannelMessage::Ready)?;
                workload.answers(count, &watch).map_err(|abort| {
                    CliError::failed(format!("answering {subject:?} with {bytes} bytes"), abort)
                })?;
                channel.send(&ChannelMessage::Done)?;
            }
            other => return Err(CliError::Failed(format!("{other:?} came instead of a turn"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::control_channel::CHANNEL_TIMEOUT;
    use super::super::peer_watch::Abort;
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// A responder that nothing may reach.
    struct Unreached;

    impl Responder for Unreached {
        fn prepare(&mut self, bytes: usize, _: &mut ControlChannel) -> Result<(), CliError> {
            panic!("it prepares {bytes} bytes");
        }

        fn answer(&mut self, _: &PeerWatch) -> Result<(), Abort> {
            panic!("it answers");
        }

        fn keep_alive(&mut self) -> Result<KeepAlive, Abort> {
            Ok(KeepAlive::Sleep)
        }
    }

    #[test]
    fn a_turn_of_another_size_than_the_run_has_is_refused() {
        for bytes in [0, 65, usize::MAX] {
            let (left, right) = UnixStream::pair().unwrap();
            let [mut left, mut right] =
                [left, right].map(|end| ControlChannel::new(end, CHANNEL_TIMEOUT).unwrap());
            left.send(&ChannelMessage::Turn { subject: Subject::Test, bytes }).unwrap();
            let error = answer(&mut right, 64, None, Box::new(Unreached), None).unwrap_err().to_string();
            assert!(error.contains(&format!("a turn of {bytes} bytes came, in a run of 1 to 64")), "{error}");
        }
    }

    /// Measures operations of this length. Returns the elapsed time, the number of samples, and the
    /// number of operations.
    fn measure(length: Length, warmup: u64, each: Duration) -> (Elapsed, u64, u64) {
        let (mut recorder, mut done) = (Recorder::new(), 0);
        let nanos = each.as_nanos() as u64;
        let batch = |count, recorder: &mut Recorder| {
            (0..count).for_each(|_| recorder.record(nanos));
            done += count;
            Ok(count * nanos)
        };
        let took = warm_and_measure(length, warmup, &mut recorder, batch).unwrap();
        (took, recorder.summary(1.0).count, done)
    }

    #[test]
    fn every_iteration_after_the_warm_up_is_a_sample() {
        let (took, samples, done) = measure(Length::Iterations(30), 12, Duration::from_nanos(5));
        assert_eq!((took, samples, done), (Elapsed { count: 30, nanos: 150 }, 30, 42));
    }

    #[test]
    fn a_duration_keeps_every_sample_and_takes_one_at_least() {
        let each = Duration::from_millis(2);
        let (took, samples, done) = measure(Length::Duration(Duration::from_millis(1)), 0, each);
        assert_eq!((took.count, samples, done), (1, 1, 1));
        let (took, samples, done) = measure(Length::Duration(Duration::from_millis(20)), 3, each);
        assert_eq!((took.count, samples, done), (10, 10, 13), "operations of 2 ms in 20 ms");
    }

    #[test]
    fn a_ratio_divides_the_medians_and_shows_each_turns_own() {
        let comparison = Comparison::new("x", 8, &[130.0, 150.0, 260.0], &[100.0, 100.0, 200.0]);
        assert_eq!((comparison.ours_p50_ns, comparison.p50_ns, comparison.ratio), (150.0, 100.0, 1.5));
        assert_eq!((comparison.ratio_min, comparison.ratio_max), (1.3, 1.5));
    }
}
