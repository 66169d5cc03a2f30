//! Progress on standard error: a bar where that is a terminal; elsewhere a line now and then, so that a log shows that a long run lives.

use core::time::Duration;
use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shows how far the current phase is.
pub(crate) struct Progress {
    visible: bool,
    phase: String,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

/// Between two lines where there is no terminal. What is done by then has none.
const PAUSE: Duration = Duration::from_secs(10);

impl Progress {
    pub(crate) fn new() -> Self {
        Self { visible: std::io::stderr().is_terminal(), phase: String::new(), bar: None, last_line: Instant::now() }
    }

    /// Shows `done` of `total` in `phase`. A new phase takes the place of the one before.
    pub(crate) fn show(&mut self, phase: &str, done: u64, total: u64) {
        if !self.visible {
            if self.last_line.elapsed() > PAUSE {
                self.last_line = Instant::now();
                eprintln!("{phase}: {done} of {total}");
            }
            return;
        }
        if self.phase != phase {
            self.finish();
            phase.clone_into(&mut self.phase);
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            // The template is fixed text; were it wrong, the default style would do.
            if let Ok(style) = ProgressStyle::with_template("{msg:34} [{bar:30}] {percent:>3} %  {elapsed}") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_message(phase.to_owned());
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Takes the bar off the terminal.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
