//! The turns: the test and its references one after the other, again and again, within the same minute.

use super::channel::{Channel, Message};
use super::options::{Length, Plan};
use super::recorder::{Recorder, Summary, median};
use super::workload::{Halt, Initiator, Responder, Subject, Watch};
use crate::cli::CliError;
use crate::cli::reference::{CacheLine, Clock, Memcpy, RING_PAYLOAD, RING_SLOTS, Ring64, Shared};
use std::sync::Arc;

/// Payload from which a plain copy is a reference, in bytes.
const COPY_FROM: usize = 4096;

/// What one size came to.
#[derive(Clone, Debug)]
pub struct SizeResult {
    /// The payload.
    pub bytes: usize,
    /// One-way times over all turns.
    pub summary: Summary,
    /// What was measured beside it.
    pub references: Vec<Comparison>,
}

/// The test beside one reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The reference.
    pub name: &'static str,
    /// The payload of the test.
    pub bytes: usize,
    /// The test's median time: the median of its turns' medians.
    pub ours_p50_ns: f64,
    /// The reference's, likewise.
    pub p50_ns: f64,
    /// The test's over the reference's.
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

/// The measuring side of a run.
pub struct Run<'a> {
    plan: &'a Plan,
    clock: Clock,
    shared: Arc<Shared>,
    watch: Watch,
    test: Box<dyn Initiator>,
    alone: Option<Box<dyn Initiator>>,
    cache_line: CacheLine,
    ring: Ring64,
    /// Round trips of the whole run so far, with all subjects.
    rounds: u64,
}

/// All turns of one subject at one size.
struct Series {
    name: &'static str,
    /// One half where round trips are recorded.
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

impl<'a> Run<'a> {
    /// A run of the plan with this workload, and the same without idle links if it has some.
    pub fn new(
        plan: &'a Plan,
        clock: Clock,
        shared: &Arc<Shared>,
        test: Box<dyn Initiator>,
        alone: Option<Box<dyn Initiator>>,
    ) -> Self {
        Run {
            plan,
            clock,
            shared: Arc::clone(shared),
            watch: Watch::new(Arc::clone(shared)),
            test,
            alone,
            cache_line: CacheLine::new(shared, Subject::CacheLine),
            ring: Ring64::initiator(shared, Subject::Ring64, RING_SLOTS),
            rounds: 0,
        }
    }

    /// Measures one size.
    pub fn size(&mut self, bytes: usize, channel: &mut Channel) -> Result<SizeResult, CliError> {
        let mut ours = Series::new("", 0.5);
        let mut line = Series::new("cache_line", 0.5);
        let mut alone = self.alone.is_some().then(|| Series::new("alone", 0.5));
        let mut ring = (bytes <= RING_PAYLOAD).then(|| Series::new("ring_64", 0.5));
        let mut copy = (bytes >= COPY_FROM).then(|| Series::new("memcpy", 1.0));
        let mut memory = Memcpy::new(if copy.is_some() { bytes } else { 0 })?;
        let mut turn = Recorder::new();
        for _ in 0..self.plan.turns {
            self.turn(Subject::Test, bytes, channel, &mut turn)?;
            ours.add(&turn);
            if let Some(alone) = &mut alone {
                self.turn(Subject::Alone, bytes, channel, &mut turn)?;
                alone.add(&turn);
            }
            self.turn(Subject::CacheLine, bytes, channel, &mut turn)?;
            line.add(&turn);
            if let Some(ring) = &mut ring {
                self.turn(Subject::Ring64, bytes, channel, &mut turn)?;
                ring.add(&turn);
            }
            if let Some(copy) = &mut copy {
                turn.clear();
                self.copies(bytes, &mut memory, &mut turn)?;
                copy.add(&turn);
            }
        }
        let references = [alone, Some(line), ring, copy]
            .into_iter()
            .flatten()
            .map(|series| Comparison::new(series.name, bytes, &ours.medians, &series.medians))
            .collect();
        Ok(SizeResult { bytes, summary: ours.all.summary(ours.scale), references })
    }

    /// One turn of a subject that the other process answers.
    fn turn(
        &mut self,
        subject: Subject,
        bytes: usize,
        channel: &mut Channel,
        recorder: &mut Recorder,
    ) -> Result<(), CliError> {
        recorder.clear();
        channel.send(&Message::Turn { subject, bytes })?;
        self.subject(subject).prepare(bytes, channel)?;
        channel.expect(&Message::Ready)?;
        let (length, warmup) = (self.plan.length(bytes), self.plan.warmup(bytes));
        let (clock, watch, before) = (self.clock.clone(), self.watch.clone(), self.rounds);
        let workload = self.subject(subject);
        let failed = |halt| CliError::failed(format!("measuring {subject:?} with {bytes} bytes"), halt);
        let rounds = warm_and_sample(&clock, length, warmup, recorder, workload, &watch).map_err(failed)? + 1;
        // The closing round tells the other side to stop. It is never a sample, so none is dropped.
        self.shared.announce_end(before + rounds);
        let workload = self.subject(subject);
        workload.produce(&watch).and_then(|()| workload.round_trip(&watch)).map_err(failed)?;
        self.rounds += rounds;
        channel.expect(&Message::Done { rounds })?;
        Ok(())
    }

    /// One turn of the reference that needs no other process.
    fn copies(&self, bytes: usize, memory: &mut Memcpy, recorder: &mut Recorder) -> Result<(), CliError> {
        let mut copies = Copies { memory, bytes };
        let (length, warmup) = (self.plan.length(bytes), self.plan.warmup(bytes));
        let copied = warm_and_sample(&self.clock, length, warmup, recorder, &mut copies, &self.watch);
        copied.map(drop).map_err(|halt| CliError::failed("the memcpy reference", halt))
    }

    fn subject(&mut self, subject: Subject) -> &mut dyn Initiator {
        match subject {
            Subject::Test => &mut *self.test,
            Subject::Alone => self.alone.as_deref_mut().unwrap_or(&mut *self.test),
            Subject::CacheLine => &mut self.cache_line,
            Subject::Ring64 => &mut self.ring,
        }
    }
}

/// What is timed again and again.
trait Repeat {
    /// What comes before each time and is not measured.
    fn before(&mut self, watch: &Watch) -> Result<(), Halt>;
    /// What is measured.
    fn once(&mut self, watch: &Watch) -> Result<(), Halt>;
}

impl Repeat for dyn Initiator + '_ {
    fn before(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.produce(watch)
    }

    fn once(&mut self, watch: &Watch) -> Result<(), Halt> {
        self.round_trip(watch)
    }
}

/// Copies of so many bytes.
struct Copies<'a> {
    memory: &'a mut Memcpy,
    bytes: usize,
}

impl Repeat for Copies<'_> {
    fn before(&mut self, _watch: &Watch) -> Result<(), Halt> {
        Ok(())
    }

    fn once(&mut self, _watch: &Watch) -> Result<(), Halt> {
        self.memory.copy(self.bytes);
        Ok(())
    }
}

/// Does something `warmup` times, and then for the length of a turn with the time of each taken. Says how many times
/// it was done.
fn warm_and_sample(
    clock: &Clock,
    length: Length,
    warmup: u64,
    recorder: &mut Recorder,
    what: &mut (impl Repeat + ?Sized),
    watch: &Watch,
) -> Result<u64, Halt> {
    for _ in 0..warmup {
        what.before(watch)?;
        what.once(watch)?;
    }
    let (count, until) = match length {
        Length::Iterations(count) => (count, u64::MAX),
        Length::Duration(duration) => (u64::MAX, duration.as_nanos() as u64),
    };
    let began = clock.now();
    let mut done = 0;
    while done < count {
        what.before(watch)?;
        let start = clock.now();
        what.once(watch)?;
        let end = clock.now();
        recorder.record(clock.nanos(start, end));
        done += 1;
        if clock.nanos(began, end) >= until {
            break;
        }
    }
    Ok(warmup + done)
}

/// The answering side: does turn after turn until it is told to quit.
pub fn answer(
    channel: &mut Channel,
    shared: &Arc<Shared>,
    mut test: Box<dyn Responder>,
    mut alone: Option<Box<dyn Responder>>,
) -> Result<(), CliError> {
    let watch = Watch::new(Arc::clone(shared));
    let mut cache_line = CacheLine::new(shared, Subject::CacheLine);
    let mut ring = Ring64::responder(shared, Subject::Ring64, RING_SLOTS);
    let mut total = 0;
    loop {
        while !channel.is_ready() {
            test.linger().map_err(|halt| CliError::failed("between turns", halt))?;
        }
        let (subject, bytes) = match channel.receive()? {
            Message::Quit => return Ok(()),
            Message::Turn { subject, bytes } => (subject, bytes),
            other => return Err(CliError::Failed(format!("{other:?} came instead of a turn"))),
        };
        let workload: &mut dyn Responder = match subject {
            Subject::Test => &mut *test,
            Subject::Alone => alone.as_deref_mut().unwrap_or(&mut *test),
            Subject::CacheLine => &mut cache_line,
            Subject::Ring64 => &mut ring,
        };
        workload.prepare(bytes, channel)?;
        channel.send(&Message::Ready)?;
        let before = total;
        loop {
            workload.answer(&watch).map_err(|halt| {
                CliError::failed(format!("answering {subject:?} with {bytes} bytes"), halt)
            })?;
            total += 1;
            if shared.ends_after(total) {
                break;
            }
        }
        channel.send(&Message::Done { rounds: total - before })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Something that takes so long, with a count of how often its source was written.
    struct Nap(Duration, u64);

    impl Repeat for Nap {
        fn before(&mut self, _watch: &Watch) -> Result<(), Halt> {
            self.1 += 1;
            Ok(())
        }

        fn once(&mut self, _watch: &Watch) -> Result<(), Halt> {
            std::thread::sleep(self.0);
            Ok(())
        }
    }

    /// Rounds, samples and sources written.
    fn sample(length: Length, warmup: u64, each: Duration) -> (u64, u64, u64) {
        let watch = Watch::new(Arc::new(Shared::create(0).unwrap().0));
        let (mut recorder, mut nap) = (Recorder::new(), Nap(each, 0));
        let rounds = warm_and_sample(&Clock::new(), length, warmup, &mut recorder, &mut nap, &watch).unwrap();
        (rounds, recorder.summary(1.0).count, nap.1)
    }

    #[test]
    fn every_iteration_after_the_warm_up_is_a_sample() {
        assert_eq!(sample(Length::Iterations(30), 12, Duration::ZERO), (42, 30, 42));
    }

    #[test]
    fn a_duration_keeps_every_sample_and_takes_one_at_least() {
        let nap = Duration::from_millis(2);
        assert_eq!(sample(Length::Duration(Duration::from_millis(1)), 0, nap), (1, 1, 1));
        let (rounds, samples, _) = sample(Length::Duration(Duration::from_millis(20)), 3, nap);
        assert!(rounds == samples + 3 && (1..=10).contains(&samples), "{samples} naps of 2 ms in 20 ms");
    }

    #[test]
    fn a_ratio_divides_the_medians_and_shows_each_turns_own() {
        let comparison = Comparison::new("x", 8, &[130.0, 150.0, 260.0], &[100.0, 100.0, 200.0]);
        assert_eq!((comparison.ours_p50_ns, comparison.p50_ns, comparison.ratio), (150.0, 100.0, 1.5));
        assert_eq!((comparison.ratio_min, comparison.ratio_max), (1.3, 1.5));
    }
}
