//! The progress bar: on stderr, on a terminal only.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a replay is. It is drawn by the caller: no thread of its own that could fail to start.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `requests` requests, hidden unless `wanted` and stderr is a terminal.
    pub(crate) fn new(requests: usize, wanted: bool) -> Self {
        let target = if wanted && std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(requests as u64), target);
        let template = "{elapsed_precise} [{bar:24}] {human_pos}/{human_len} requests  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// A bar for bytes that are read, hidden as above. How many there are is said later.
    pub(crate) fn reading(wanted: bool) -> Self {
        let progress = Self::new(0, wanted);
        if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {bytes} of {total_bytes} read")
        {
            progress.bar.set_style(style.progress_chars("=> "));
        }
        progress
    }

    /// So many bytes of at most `all` have been read.
    pub(crate) fn read(&self, done: u64, all: u64) {
        self.bar.set_length(all);
        self.bar.set_position(done);
    }

    /// One more request is done. `message` is only made where the bar is visible.
    pub(crate) fn advance(&self, done: usize, message: impl FnOnce() -> String) {
        if self.bar.is_hidden() {
            return;
        }
        self.bar.set_position(done as u64);
        // The bar draws ten times a second; texts for each of thousands of requests are waste.
        if done.is_multiple_of(8) {
            self.bar.set_message(message());
        }
    }

    /// Says what goes on besides requests.
    pub(crate) fn note(&self, message: &'static str) {
        self.bar.set_message(message);
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
