//! What is shown of the lanes: a line for each thing that happens, and on a terminal, below them, the text of
//! each lane as it is made.

use std::io::Stdout;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// Characters of a lane's text that are shown while it is made.
const SHOWN: usize = 60;

pub(super) struct View<'a> {
    out: &'a mut Output<Stdout>,
    /// Draws nothing where there is no terminal.
    lanes: MultiProgress,
}

/// The place of one lane on the terminal.
pub(super) struct Lane(ProgressBar);

impl View<'_> {
    pub(super) fn new(out: &mut Output<Stdout>) -> View<'_> {
        View { out, lanes: MultiProgress::with_draw_target(ProgressDrawTarget::stdout()) }
    }

    /// Prints a line above the lanes.
    pub(super) fn line(&mut self, line: &str) {
        let out = &mut *self.out;
        self.lanes.suspend(|| out.print(&format!("{line}\n")));
    }

    pub(super) fn lane(&self, name: &'static str) -> Lane {
        let style = ProgressStyle::with_template("      {prefix:<8} …       {wide_msg}");
        let bar = self.lanes.add(ProgressBar::no_length());
        Lane(bar.with_style(style.expect("the template is well formed")).with_prefix(name))
    }
}

impl Lane {
    /// Shows the end of the text so far.
    pub(super) fn show(&self, text: &str) {
        let start = text.char_indices().rev().nth(SHOWN).map_or(0, |(at, _)| at);
        self.0.set_message(one_line(&text[start..]));
    }

    pub(super) fn end(self) {
        self.0.finish_and_clear();
    }
}

pub(super) fn one_line(text: &str) -> String {
    text.trim_end().replace('\n', "⏎")
}
