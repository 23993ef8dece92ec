//! Rotary positions of a prompt that holds pictures: three for each token.
//!
//! Text goes on by one in all three. A picture stands at one time; its rows and columns count from there. What follows a
//! picture goes on behind its longer side, so positions and sequence indices part ways; their difference is the offset.
//!
//! ```text
//! 3 tokens, a picture of 2 x 3 squares, 2 tokens:
//! time    0 1 2 | 3 3 3 3 3 3 | 6 7
//! row     0 1 2 | 3 3 3 4 4 4 | 6 7
//! column  0 1 2 | 3 4 5 3 4 5 | 6 7        offset = 8 - 11 = -3
//! ```
//!
//! Attention, pages, index blocks and the n-gram history count sequence indices; only rotary angles use these.

use crate::{PositionError, Span};

/// Where one token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// Time.
    pub time: i32,
    /// Row in a picture.
    pub row: i32,
    /// Column in a picture.
    pub column: i32,
}

impl Position {
    /// The position of text.
    pub fn text(at: i32) -> Position {
        Position { time: at, row: at, column: at }
    }

    /// Time, row and column.
    pub fn axes(self) -> [i32; 3] {
        [self.time, self.row, self.column]
    }
}

/// Where a walk begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Start {
    /// The sequence index of the first token.
    pub index: usize,
    /// Its rotary position, were it text.
    pub position: i32,
}

/// The positions of neighbouring tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    /// One for each token.
    pub tokens: Vec<Position>,
    /// Where the token behind them begins.
    pub end: Start,
}

impl Positions {
    /// Add this to the sequence index of a token behind all pictures: that is its rotary position.
    pub fn offset(&self) -> i32 {
        self.end.offset()
    }
}

impl Start {
    /// The rotary position less the sequence index.
    pub fn offset(&self) -> i32 {
        // Both were found to fit when the walk was made.
        (i64::from(self.position) - self.index as i64) as i32
    }
}

/// The positions of `tokens` tokens from `start` on. `Start::default()` begins a prompt; [`Positions::end`] goes on with a
/// part that follows.
///
/// `spans` are those of this part, with sequence indices of the whole prompt. A part must not begin inside a span: walk
/// such a prompt whole and use a slice.
pub fn three_axis(start: Start, tokens: usize, spans: &[Span]) -> Result<Positions, PositionError> {
    let end = start.index.saturating_add(tokens);
    // A span moves positions by no more than its tokens, so this bounds all of them.
    let farthest = i64::from(start.position) + i64::try_from(tokens).unwrap_or(i64::MAX / 2);
    if i32::try_from(farthest).is_err() || i32::try_from(end).is_err() || start.position < 0 {
        return Err(PositionError::TooFar { tokens: end });
    }
    let mut walk = Vec::with_capacity(tokens);
    let mut next = start.position;
    let text = |walk: &mut Vec<Position>, next: &mut i32, count: usize| {
        walk.extend((*next..).take(count).map(Position::text));
        *next += count as i32;
    };
    for (index, span) in spans.iter().enumerate() {
        let free = start.index + walk.len();
        let gap = span.first.checked_sub(free).ok_or(PositionError::Overlap {
            span: index,
            first: span.first,
            free,
        })?;
        let behind = span.first.saturating_add(span.rows());
        if behind > end {
            return Err(PositionError::Outside { span: index, end: behind, tokens: end });
        }
        text(&mut walk, &mut next, gap);
        if span.rows() == 0 {
            continue;
        }
        for row in 0..span.height as i32 {
            let columns = 0..span.width as i32;
            walk.extend(columns.map(|column| Position {
                time: next,
                row: next + row,
                column: next + column,
            }));
        }
        next += span.height.max(span.width) as i32;
    }
    let rest = tokens - walk.len();
    text(&mut walk, &mut next, rest);
    Ok(Positions { tokens: walk, end: Start { index: end, position: next } })
}
