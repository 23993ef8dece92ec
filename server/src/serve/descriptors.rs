//! Open files: every connection is one, and the system allows only so many.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::output::note;

/// Open files that are no connections: the listener, pipes, devices, shards of a checkpoint.
const OTHERS: usize = 64;

/// How many connections there may be at once: `wanted`, or fewer if the system allows fewer open files. As many are
/// asked for as this process may have.
pub(crate) fn connections(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    // What it was is in force if it cannot be raised.
    let files = setrlimit(Resource::Nofile, raised).map_or(limit, |()| raised).current;
    let room = room(files);
    if room < wanted {
        note(format_args!(
            "at most {room} connections at once, not {wanted}: the system allows {} open files; raise its hard limit \
             (ulimit -Hn)",
            room + OTHERS
        ));
    }
    wanted.min(room)
}

/// The connections that so many open files have room for; no limit is room for any.
fn room(files: Option<u64>) -> usize {
    let files = files.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX));
    files.saturating_sub(OTHERS).max(1)
}

/// Whether an error says that there are too many open files.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!([Some(200), Some(64), Some(0)].map(room), [136, 1, 1]);
        assert!(room(None) > 1 << 40);
    }

    #[test]
    fn a_shortage_of_files_is_told_from_a_client_that_is_gone() {
        assert!(is_shortage(&rustix::io::Errno::MFILE.into()));
        assert!(!is_shortage(&io::ErrorKind::ConnectionAborted.into()));
    }
}
