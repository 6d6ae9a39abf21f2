//! The progress bar: on stderr, only if that is a terminal.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shorter operations show no bar.
const SHOWN_AFTER: Duration = Duration::from_millis(500);

/// Progress of a replay. The caller draws it: there is no thread that could fail to start.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

/// Draws on stderr ten times a second if that is a terminal.
fn terminal(wanted: bool) -> ProgressDrawTarget {
    if wanted && std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(10)
    } else {
        ProgressDrawTarget::hidden()
    }
}

impl Progress {
    fn with(template: &str, all: u64, target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(Some(all), target);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// Returns a bar for `all` of `what`, hidden unless `wanted` and stderr is a terminal.
    pub(crate) fn new(what: &str, all: usize, wanted: bool) -> Self {
        let template = "{elapsed_precise} [{bar:24}] {human_pos}/{human_len} ";
        Self::with(&format!("{template}{what}  {{wide_msg}}"), all as u64, terminal(wanted))
    }

    /// Returns a bar for `all` bytes, hidden as in [`Progress::new`].
    pub(crate) fn bytes(what: &str, all: u64, wanted: bool) -> Self {
        Self::with(
            &format!("[{{bar:24}}] {{bytes}} of {{total_bytes}} {what}"),
            all,
            terminal(wanted),
        )
    }

    /// Shows that `done` are complete and what is next. `message` is called only if the bar is
    /// visible.
    pub(crate) fn shows(&self, done: usize, message: impl FnOnce() -> String) {
        if !self.bar.is_hidden() {
            self.bar.set_position(done as u64);
            self.bar.set_message(message());
        }
    }

    /// Returns a function that shows the next step by name; the ones before it are complete.
    pub(crate) fn steps(&self) -> impl FnMut(&str) {
        let mut done = 0;
        move |name| {
            self.shows(done, || name.to_owned());
            done += 1;
        }
    }

    /// Shows that `done` of at most `all` bytes or files have been read.
    pub(crate) fn read(&self, done: u64, all: u64) {
        self.bar.set_length(all);
        self.bar.set_position(done);
    }

    /// Shows a note beside the bar.
    pub(crate) fn note(&self, message: impl Into<std::borrow::Cow<'static, str>>) {
        self.bar.set_message(message);
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Progress of opening a store: a bar, hidden as in [`Progress::new`], shown if it takes long.
#[derive(Debug)]
pub(crate) struct Opening {
    progress: Progress,
    /// Draw target, until the bar is shown.
    target: Option<ProgressDrawTarget>,
}

impl Opening {
    pub(crate) fn new(wanted: bool) -> Self {
        Self::on(terminal(wanted))
    }

    fn on(target: ProgressDrawTarget) -> Self {
        let template = "[{bar:24}] opening the store: {bytes} of {total_bytes} of its journal";
        let progress = Progress::with(template, 0, ProgressDrawTarget::hidden());
        Self { progress, target: Some(target) }
    }

    /// Shows that `done` of at most `all` bytes have been read, `took` after the start.
    pub(crate) fn read(&mut self, done: u64, all: u64, took: Duration) {
        if let Some(target) = self.target.take_if(|_| took >= SHOWN_AFTER) {
            self.progress.bar.set_draw_target(target);
        }
        self.progress.read(done, all);
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.progress.finish();
    }
}

#[cfg(test)]
mod tests;
