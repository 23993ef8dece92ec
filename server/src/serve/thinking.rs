//! Reasoning and answer, told apart while the text comes in pieces.
//!
//! ```text
//! <think>\nREASONING\n</think>\n\nCONTENT
//! ```
//! The prompt may have opened the tag already. Neither a tag nor the line ends next to one belong to either text.
//! What a text is cut into changes nothing about what comes out in sum.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Splits one reply.
pub(crate) struct Thinking {
    place: Place,
    /// Text of which it is not decided yet what it is.
    held: String,
    opened: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Nothing but white space or the beginning of a tag has come.
    Start,
    /// Behind the opening tag: line ends belong to it.
    Opened,
    Reasoning,
    /// Behind the closing tag: line ends belong to it.
    Closed,
    Content,
}

/// What a piece of text added.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Split {
    pub(crate) reasoning: String,
    pub(crate) content: String,
}

impl Thinking {
    /// A reply to a prompt that opened the reasoning, or did not.
    pub(crate) fn new(opened: bool) -> Thinking {
        let place = if opened { Place::Opened } else { Place::Start };
        Thinking { place, held: String::new(), opened }
    }

    /// A reply that is content, whatever it says.
    pub(crate) fn none() -> Thinking {
        Thinking { place: Place::Content, held: String::new(), opened: false }
    }

    /// Whether the reply has reasoning, be it empty.
    pub(crate) fn is_opened(&self) -> bool {
        self.opened
    }

    /// Whether the next text is reasoning, as far as one can tell.
    pub(crate) fn is_thinking(&self) -> bool {
        matches!(self.place, Place::Opened | Place::Reasoning)
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str) -> Split {
        let mut split = Split::default();
        self.held.push_str(text);
        while self.step(&mut split) {}
        split
    }

    /// Ends the reply: what was held back is text after all.
    pub(crate) fn finish(&mut self) -> Split {
        let rest = std::mem::take(&mut self.held);
        match self.place {
            Place::Start | Place::Content => Split { content: rest, ..Split::default() },
            Place::Reasoning => Split { reasoning: rest, ..Split::default() },
            // Only line ends are held there.
            Place::Opened | Place::Closed => Split::default(),
        }
    }

    /// Decides about some of the held text; whether the place changed, so that there may be more to decide.
    fn step(&mut self, split: &mut Split) -> bool {
        match self.place {
            Place::Start => {
                let begun = self.held.trim_start();
                if let Some(rest) = begun.strip_prefix(OPEN) {
                    self.opened = true;
                    self.enter(Place::Opened, rest.len())
                } else {
                    !OPEN.starts_with(begun) && self.enter(Place::Content, self.held.len())
                }
            }
            Place::Opened | Place::Closed => {
                let next = if self.place == Place::Opened { Place::Reasoning } else { Place::Content };
                let rest = self.held.trim_start_matches('\n').len();
                self.held.drain(..self.held.len() - rest);
                rest > 0 && self.enter(next, rest)
            }
            Place::Reasoning => match self.held.find(CLOSE) {
                Some(at) => {
                    split.reasoning.push_str(self.held[..at].trim_end_matches('\n'));
                    self.enter(Place::Closed, self.held.len() - at - CLOSE.len())
                }
                None => {
                    let rest = self.held.split_off(undecided(&self.held));
                    split.reasoning.push_str(&std::mem::replace(&mut self.held, rest));
                    false
                }
            },
            Place::Content => {
                split.content.push_str(&self.held);
                self.held.clear();
                false
            }
        }
    }

    /// Goes on in another place with the last `rest` bytes of what is held.
    fn enter(&mut self, place: Place, rest: usize) -> bool {
        self.held.drain(..self.held.len() - rest);
        self.place = place;
        true
    }
}

/// Where the end of `text` begins that may yet turn out to be a closing tag with the line ends before it.
fn undecided(text: &str) -> usize {
    let tag = (1..CLOSE.len()).rev().find(|&length| text.ends_with(&CLOSE[..length])).unwrap_or(0);
    text[..text.len() - tag].trim_end_matches('\n').len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<'a>(opened: bool, pieces: impl IntoIterator<Item = &'a str>) -> Split {
        let mut thinking = Thinking::new(opened);
        let mut all = Split::default();
        let mut add = |split: Split| {
            all.reasoning += &split.reasoning;
            all.content += &split.content;
        };
        pieces.into_iter().for_each(|piece| add(thinking.push(piece)));
        add(thinking.finish());
        all
    }

    fn split(reasoning: &str, content: &str) -> Split {
        Split { reasoning: reasoning.into(), content: content.into() }
    }

    #[test]
    fn reasoning_stands_before_the_closing_tag() {
        assert_eq!(run(true, ["a b\n</think>\n\nc\n"]), split("a b", "c\n"));
        assert_eq!(run(false, ["<think>\na\n</think>\n\nc"]), split("a", "c"));
        assert_eq!(run(true, ["\n</think>\n\nc"]), split("", "c"));
        assert_eq!(run(true, ["never closed\n"]), split("never closed\n", ""));
        assert_eq!(run(true, ["cut in the </thi"]), split("cut in the </thi", ""));
        assert_eq!(run(true, ["a</think>b</think>c"]), split("a", "b</think>c"));
    }

    #[test]
    fn without_an_opening_all_is_content() {
        for text in ["", " ", "<thin", "\n<thing>", "plain\n\ntext", "a <think>b</think>"] {
            assert_eq!(run(false, [text]), split("", text), "{text:?}");
        }
        assert!(!Thinking::new(false).is_opened());
    }

    proptest! {
        #[test]
        fn fed_in_pieces_is_fed_whole(
            opened: bool,
            parts in prop::collection::vec(
                prop::sample::select(vec!["<think>", "</think>", "</", "<", "think>", "\n", " ", "a", "é", "</thin", "k>"]),
                0..12,
            ),
            cuts in prop::collection::vec(0usize..64, 0..8),
        ) {
            let text = parts.concat();
            let whole = run(opened, [text.as_str()]);
            let letters: Vec<&str> = text.split("").collect();
            prop_assert_eq!(&run(opened, letters), &whole);
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|at| text.is_char_boundary(*at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1].max(cut[0])]).collect();
            prop_assert_eq!(&run(opened, pieces), &whole);
            prop_assert!(!whole.reasoning.contains(CLOSE));
        }
    }
}
