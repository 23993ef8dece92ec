//! The text of a reply as it is made: whole characters only, and nothing of a stop text.

use crate::tokenizer::Detokenizer;

/// Turns ids into text that can be shown at once.
pub struct ReplyText {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
}

/// Looks for stop texts in a text that comes in pieces.
struct StopMatcher {
    stop: Vec<String>,
    /// Text that may yet turn out to be the beginning of a stop text.
    held: String,
    stopped: bool,
}

/// What one id added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that can be shown.
    pub text: String,
    /// Whether a stop text is complete: the reply ends before it.
    pub stopped: bool,
}

impl ReplyText {
    /// An empty reply. No stop text is empty.
    pub fn new(detokenizer: Detokenizer, stop: Vec<String>) -> ReplyText {
        ReplyText { detokenizer, matcher: StopMatcher { stop, held: String::new(), stopped: false } }
    }

    /// Takes the next id.
    pub fn push(&mut self, id: u32) -> Piece {
        let text = self.detokenizer.push(id);
        self.matcher.take(&text)
    }

    /// Ends the reply: what was held back is text after all, unless a stop text had ended it before.
    pub fn finish(self) -> String {
        let ReplyText { detokenizer, mut matcher } = self;
        let piece = matcher.take(&detokenizer.finish());
        piece.text + &matcher.held
    }
}

impl StopMatcher {
    fn take(&mut self, text: &str) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        self.held.push_str(text);
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            self.stopped = true;
            return Piece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.stop.iter().map(|stop| beginning(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Piece { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }
}

/// Length of the longest end of `text` with which `stop` begins.
fn beginning(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).skip(1).take_while(|&length| length <= text.len());
    lengths.filter(|&length| text.ends_with(&stop[..length])).last().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stop: &[&str], pieces: &[&str]) -> (String, bool) {
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher { stop, held: String::new(), stopped: false };
        let mut shown = String::new();
        for piece in pieces {
            let piece = matcher.take(piece);
            shown += &piece.text;
            if piece.stopped {
                return (shown, true);
            }
        }
        (shown + &matcher.held, false)
    }

    #[test]
    fn a_stop_text_ends_the_reply_before_it_however_it_is_cut() {
        let text = "one two <end> three";
        for first in 0..text.len() {
            for second in first..text.len() {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(run(&["<end>"], &pieces), ("one two ".into(), true), "{pieces:?}");
                assert_eq!(run(&["never"], &pieces), (text.into(), false), "{pieces:?}");
            }
        }
    }

    #[test]
    fn the_earliest_of_several_stop_texts_counts() {
        assert_eq!(run(&["three", "two"], &["one two", " three"]), ("one ".into(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
    }

    #[test]
    fn what_may_begin_a_stop_text_is_held_back() {
        let mut matcher = StopMatcher { stop: vec!["étoile".into()], held: String::new(), stopped: false };
        assert_eq!(matcher.take("une é"), Piece { text: "une ".into(), stopped: false });
        assert_eq!(matcher.take("t"), Piece { text: String::new(), stopped: false });
        assert_eq!(matcher.take("é"), Piece { text: "ét".into(), stopped: false });
    }
}
