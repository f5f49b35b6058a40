//! The display of the progress on standard error: a bar on a terminal, a few plain lines elsewhere.

use crate::plan::Plan;
use crate::worker::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};

/// Plain lines of a run after the first.
const LINES: u64 = 5;

/// The display.
#[derive(Debug)]
pub enum Display {
    /// For a terminal.
    Bar(ProgressBar),
    /// For a file or a pipe.
    Lines {
        /// All steps.
        steps: u64,
        /// The step at which the next line is due.
        due: u64,
    },
}

impl Display {
    /// A bar if standard error is a terminal.
    pub fn new(plan: &Plan) -> Display {
        if !std::io::stderr().is_terminal() {
            return Display::Lines { steps: plan.steps, due: 0 };
        }
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} steps, {per_sec}, {msg}");
        let bar = ProgressBar::with_draw_target(Some(plan.steps), ProgressDrawTarget::stderr());
        Display::Bar(bar.with_style(style.expect("the template is right")))
    }

    /// Shows the progress.
    pub fn update(&mut self, progress: Progress) {
        match self {
            Display::Bar(bar) => {
                bar.set_message(news(&progress));
                bar.set_position(progress.step);
            }
            Display::Lines { steps, due } => {
                if let Some(line) = line(*steps, due, &progress) {
                    // A reader that has closed standard error does not stop the run.
                    let _ = std::io::stderr().write_all(line.as_bytes());
                }
            }
        }
    }

    /// Ends the display, with the cursor on a new line.
    pub fn end(self) {
        if let Display::Bar(bar) = self {
            bar.abandon();
        }
    }
}

/// The line for this progress, if one is due, and the step of the next line.
fn line(steps: u64, due: &mut u64, progress: &Progress) -> Option<String> {
    if progress.step < *due {
        return None;
    }
    *due = ((progress.step * LINES / steps + 1) * steps).div_ceil(LINES);
    Some(format!("step {} of {steps}: {}\n", progress.step, news(progress)))
}

fn news(progress: &Progress) -> String {
    format!(
        "loss {:.4}, accuracy {:.1} %, {:.0} % of the time in communication",
        progress.loss,
        progress.accuracy * 100.0,
        progress.comm_share * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_news_has_loss_accuracy_and_share_of_communication() {
        let progress = Progress { step: 5, loss: 0.25, accuracy: 0.9721, comm_share: 0.333 };
        assert_eq!(news(&progress), "loss 0.2500, accuracy 97.2 %, 33 % of the time in communication");
    }

    #[test]
    fn without_a_terminal_there_are_only_a_few_lines_the_last_at_the_end() {
        let mut due = 0;
        let news = |step| Progress { step, loss: 1.0, accuracy: 0.5, comm_share: 0.0 };
        let lines: Vec<String> =
            (1..=50).filter_map(|report| line(600, &mut due, &news(report * 12))).collect();
        assert_eq!(lines.len() as u64, LINES + 1);
        assert!(lines[0].starts_with("step 12 of 600: loss 1.0000"), "{lines:?}");
        assert!(lines[5].starts_with("step 600 of 600"), "{lines:?}");
    }
}
