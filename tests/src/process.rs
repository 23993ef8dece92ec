//! A test program that starts itself again: a part of a test that must be a process of its own, so that it can be killed
//! or break what it shares with nobody.

use std::env;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Says to a process of a test program which part of which test it is.
const PART: &str = "TEST_PROCESS_PART";
/// Begins what a part says to its test: others write to the same place.
const SAID: &str = "part says: ";
/// What a part may take until it says something.
const LIMIT: Duration = Duration::from_secs(120);

/// This program, started again. It is killed with its owner.
pub struct Process {
    child: Child,
    told: Receiver<String>,
    ask: ChildStdin,
}

impl Process {
    /// Starts this program as `part` of a test, with arguments that lead it to look for [`part`].
    pub fn start(part: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Process {
        let mut command = Command::new(env::current_exe().expect("this program has a path"));
        command.args(arguments).env(PART, part).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let ask = child.stdin.take().expect("it is piped");
        let out = BufReader::new(child.stdout.take().expect("it is piped"));
        let (tell, told) = channel();
        // Ends with the process. What is not for the test is passed on.
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                match line.split_once(SAID) {
                    Some((_, said)) => drop(tell.send(said.to_owned())),
                    None => eprintln!("{line}"),
                }
            }
        });
        Process { child, told, ask }
    }

    /// What it says next.
    pub fn line(&self) -> String {
        self.told.recv_timeout(LIMIT).expect("the process says something before it ends")
    }

    /// Asks it for something that it listens for ([`on_word`]), and waits until that is done.
    pub fn ask(&mut self, word: &str) {
        writeln!(self.ask, "{word}").expect("it listens");
        assert_eq!(self.line(), word);
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it can be asked for")
    }

    /// How it ends, within this time.
    pub fn ends_within(&mut self, limit: Duration) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(begun.elapsed() < limit, "the process did not end within {limit:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The part of a test that this process was started for, if it was.
pub fn part() -> Option<String> {
    env::var(PART).ok()
}

/// Tells the test something.
pub fn say(line: &str) {
    println!("{SAID}{line}");
    stdout().flush().expect("the test listens");
}

/// Does something, on a thread of its own, when the test asks for it by this word, and says so.
pub fn on_word(word: &str, act: impl FnOnce() + Send + 'static) {
    let word = word.to_owned();
    thread::spawn(move || {
        let mut line = String::new();
        stdin().read_line(&mut line).expect("the test speaks");
        // A test that ended before says nothing.
        if line.trim() == word {
            act();
            say(&word);
        }
    });
}
