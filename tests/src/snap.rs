//! Compares a text with the one stored beside its suite; `UPDATE=1` stores it instead.

use crate::fixture::repository;

/// Asserts that `text` equals `tests/SUITE/snap/NAME.txt`.
///
/// # Panics
///
/// On the first line that differs, and where there is no stored text.
pub fn check(suite: &str, name: &str, text: &str) {
    let path = repository("tests").join(suite).join("snap").join(format!("{name}.txt"));
    if std::env::var_os("UPDATE").is_some_and(|value| value == "1") {
        let folder = path.parent().expect("a snapshot lies in a folder");
        std::fs::create_dir_all(folder).expect("the folder of snapshots can be made");
        std::fs::write(&path, text).expect("a snapshot can be written");
        return;
    }
    let accept = format!("if the change is meant: UPDATE=1 cargo test --release -p tests --test {suite}");
    let stored = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("no snapshot {}: {error}\n{accept}", path.display()));
    if let Some((line, was, is)) = first_difference(&stored, text) {
        panic!("{}:{line}\n  was: {was}\n   is: {is}\n{accept}\n\nthe whole text:\n{text}", path.display());
    }
}

/// The first line that differs, counted from 1, in both texts.
fn first_difference<'a>(was: &'a str, is: &'a str) -> Option<(usize, &'a str, &'a str)> {
    if was == is {
        return None;
    }
    let (mut left, mut right) = (was.lines(), is.lines());
    for line in 1.. {
        match (left.next(), right.next()) {
            (None, None) => return Some((line, "(other line ends)", "(other line ends)")),
            (a, b) if a != b => return Some((line, a.unwrap_or("(end)"), b.unwrap_or("(end)"))),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn the_first_line_that_differs_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some((2, "b", "c")));
        assert_eq!(first_difference("a\n", "a\nc\n"), Some((2, "(end)", "c")));
        assert_eq!(first_difference("a\nb\n", "a\nb"), Some((3, "(other line ends)", "(other line ends)")));
    }
}
