//! What a command prints: results to stdout, notes to stderr, and no panic when a pipe is closed.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use crate::failure::Failure;

/// Stdout, or whatever stands for it, until its reader goes away.
///
/// A reader that has read enough (`| head`) is no failure: what follows is dropped, and
/// [`Output::is_closed`] lets the caller stop working for nobody.
pub(crate) struct Output<W: Write> {
    inner: W,
    ended: Option<io::Error>,
}

impl Output<io::Stdout> {
    pub(crate) fn stdout() -> Output<io::Stdout> {
        Output::new(io::stdout())
    }
}

impl<W: Write> Output<W> {
    fn new(inner: W) -> Output<W> {
        Output { inner, ended: None }
    }

    /// Prints `text` at once. An error is kept for [`Output::finish`].
    pub(crate) fn print(&mut self, text: &str) {
        if self.ended.is_none() {
            let written = self.inner.write_all(text.as_bytes()).and_then(|()| self.inner.flush());
            self.ended = written.err();
        }
    }

    /// Whether printing has no effect any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.ended.is_some()
    }

    /// The failure of the first print that failed for another reason than a closed pipe.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self.ended {
            Some(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Failure::Input(format!("cannot write to stdout: {error}; check where it leads")))
            }
            _ => Ok(()),
        }
    }
}

/// Prints one line to stderr; nobody may be listening.
pub(crate) fn note(line: impl fmt::Display) {
    // Nothing is left to tell of a failure to tell.
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Full(ErrorKind);

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_ends_quietly_and_a_full_disk_does_not() {
        for (kind, quiet) in [(ErrorKind::BrokenPipe, true), (ErrorKind::StorageFull, false)] {
            let mut out = Output::new(Full(kind));
            assert!(!out.is_closed());
            out.print("a");
            assert!(out.is_closed());
            assert_eq!(out.finish().is_ok(), quiet);
        }
        let mut out = Output::new(Vec::new());
        out.print("a");
        out.print("b");
        assert_eq!(out.inner, b"ab");
        assert!(out.finish().is_ok());
    }
}
