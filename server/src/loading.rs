//! How loading and converting are shown: a bar on a terminal; anywhere else a line at the start, one every ten seconds,
//! and one at the end.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use runtime::memory::Size;
use runtime::open::Progress;

const TEMPLATE: &str =
    "{bar:32} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta_precise} left";

/// How long nothing is said where there is no terminal.
const SILENCE: Duration = Duration::from_secs(10);

/// The loading, or the conversion, of one model.
pub(crate) struct Loading {
    /// What happens, and what has happened.
    words: [&'static str; 2],
    /// Draws nothing where there is no terminal.
    bar: ProgressBar,
    started: Option<Instant>,
    /// When a line was last given.
    said: Option<Instant>,
}

impl Loading {
    pub(crate) fn on_stderr() -> Loading {
        Loading::on(ProgressDrawTarget::stderr())
    }

    /// The same for a conversion.
    pub(crate) fn of_conversion() -> Loading {
        Loading { words: ["converting", "converted"], ..Loading::on_stderr() }
    }

    fn on(target: ProgressDrawTarget) -> Loading {
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well formed");
        let bar = ProgressBar::with_draw_target(None, target).with_style(style);
        Loading { words: ["reading", "read"], bar, started: None, said: None }
    }

    /// Takes a step of loading in; gives the line that a log should have about it, if any.
    pub(crate) fn line(&mut self, progress: &Progress) -> Option<String> {
        self.line_at(progress, Instant::now())
    }

    fn line_at(&mut self, progress: &Progress, now: Instant) -> Option<String> {
        let Progress::Loading { done, total } = *progress else {
            return Some(progress.to_string());
        };
        let (size, [doing, did]) = (Size(total as usize), self.words);
        let first = self.started.is_none();
        let started = *self.started.get_or_insert(now);
        let took = (now - started).as_secs_f64();
        if first {
            self.bar.reset();
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
        if done == total {
            self.bar.finish_and_clear();
            // No clock tells apart what takes less.
            let speed = Size((total as f64 / took.max(1e-3)) as usize);
            return Some(format!("{did} {size} of weights in {took:.2} s, {speed}/s"));
        }
        let said = self.said.get_or_insert(now);
        if !self.bar.is_hidden() || !(first || now - *said >= SILENCE) {
            return None;
        }
        *said = now;
        if first {
            return Some(format!("{doing} {size} of weights"));
        }
        let speed = done as f64 / took;
        let (have, speed_shown, left) =
            (Size(done as usize), Size(speed as usize), (total - done) as f64 / speed);
        Some(format!("{did} {have} of {size}, {speed_shown}/s, {left:.0} s left"))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn lines(loading: &mut Loading) -> Vec<String> {
        let steps = [1, 5, 9, 10].map(|done| Progress::Loading { done: done * MIB, total: 10 * MIB });
        steps.iter().filter_map(|step| loading.line(step)).collect()
    }

    #[test]
    fn without_a_terminal_there_is_one_line_before_and_one_after() {
        let lines = lines(&mut Loading::on(ProgressDrawTarget::hidden()));
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert_eq!(lines[0], "reading 10.0 MiB of weights");
        assert!(lines[1].starts_with("read 10.0 MiB of weights in 0."), "{lines:?}");
    }

    #[test]
    fn without_a_terminal_there_is_a_line_every_ten_seconds() {
        let (mut loading, start) = (Loading::on(ProgressDrawTarget::hidden()), Instant::now());
        let mut at = |seconds, done| {
            let progress = Progress::Loading { done: done * MIB, total: 100 * MIB };
            loading.line_at(&progress, start + Duration::from_secs(seconds))
        };
        assert!(at(0, 0).is_some());
        assert_eq!(at(9, 30), None);
        assert_eq!(at(10, 40).unwrap(), "read 40.0 MiB of 100 MiB, 4.00 MiB/s, 15 s left");
        assert_eq!(at(19, 60), None);
        assert_eq!(at(20, 80).unwrap(), "read 80.0 MiB of 100 MiB, 4.00 MiB/s, 5 s left");
    }

    #[test]
    fn the_last_line_says_how_long_it_took_and_how_fast_it_was() {
        for target in [ProgressDrawTarget::hidden(), ProgressDrawTarget::term_like(Box::<Screen>::default())]
        {
            let (mut loading, start) = (Loading::on(target), Instant::now());
            let mut at = |millis, done| {
                let progress = Progress::Loading { done: done * MIB, total: 9900 * MIB };
                loading.line_at(&progress, start + Duration::from_millis(millis))
            };
            at(0, 0);
            at(2000, 4000);
            assert_eq!(at(5100, 9900).unwrap(), "read 9.67 GiB of weights in 5.10 s, 1.90 GiB/s");
        }
        let progress = Progress::Loading { done: MIB, total: MIB };
        let at_once = Loading::on(ProgressDrawTarget::hidden()).line(&progress);
        assert_eq!(at_once.unwrap(), "read 1.00 MiB of weights in 0.00 s, 0.98 GiB/s");
    }

    #[test]
    fn a_terminal_gets_a_bar_and_then_one_line() {
        let screen = Screen::default();
        let lines = lines(&mut Loading::on(ProgressDrawTarget::term_like(Box::new(screen.clone()))));
        assert_eq!(lines.len(), 1, "{lines:?}");
        let drawn = screen.0.lock().unwrap();
        for word in ["5.00 MiB of 10.00 MiB", "/s, ", " left"] {
            assert!(drawn.contains(word), "{word:?} is not in {drawn:?}");
        }
        assert!(drawn.ends_with("<clear>"), "the bar stays on the screen: {drawn:?}");
    }

    #[test]
    fn everything_else_is_a_line_as_it_is() {
        let device = Progress::Device("host".to_string());
        assert_eq!(Loading::on_stderr().line(&device), Some("device host".to_string()));
    }

    /// What was written to a terminal, with a mark where a line was cleared.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn add(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, line: &str) -> io::Result<()> {
            self.add(line)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.add(text)
        }

        fn clear_line(&self) -> io::Result<()> {
            self.add("<clear>")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }
}
