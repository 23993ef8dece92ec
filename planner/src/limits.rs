//! Every capacity that is fixed at start, and the checks that relate them.

use crate::ids::ClassId;
use std::fmt;

/// Positions of one KV page, and the grid on which a prompt may be cut.
pub const PAGE: u32 = 64;

/// Rows of the widest captured round.
pub const GRAPH_ROWS: u32 = 64;

/// Rounds that may be booked and not yet settled: one runs while the next is staged behind it.
pub const DEPTH: usize = 2;

/// Pages that `positions` positions need.
pub const fn pages_for(positions: u32) -> u32 {
    positions.div_ceil(PAGE)
}

/// The capacities of a planner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Positions that one request may use, prompt and reply together.
    pub context: u32,
    /// Rows of the longest prompt piece: a multiple of 64, short enough that another lane's wait stays small.
    pub piece_rows: u32,
    /// Rows of the widest decode round, at most 64.
    pub round_rows: u32,
    /// Decode rounds between two prompt pieces while a lane could decode.
    pub decode_share: u32,
    /// Requests that may wait.
    pub queue: u32,
    /// Every how many graph rounds one runs eager to be compared; 0 is never.
    pub audit: u32,
    /// Whether rounds may be replayed at all.
    pub graphs: bool,
    /// Pages in the pool of each cache class: class 0, class 1, and so on.
    pub pages: Vec<u32>,
}

/// A run of lane slots that share one cache class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slab {
    /// The cache class of its lanes.
    pub class: ClassId,
    /// How many lanes it seats.
    pub slots: u16,
}

impl Limits {
    /// Says which setting cannot work, and with which number.
    pub fn check(&self) -> Result<(), LimitError> {
        let counts = [
            ("context", self.context),
            ("piece_rows", self.piece_rows),
            ("round_rows", self.round_rows),
            ("decode_share", self.decode_share),
            ("queue", self.queue),
        ];
        if let Some((setting, _)) = counts.into_iter().find(|(_, value)| *value == 0) {
            return Err(LimitError::Zero { setting });
        }
        if !self.piece_rows.is_multiple_of(PAGE) {
            return Err(LimitError::PieceRows { rows: self.piece_rows });
        }
        if self.round_rows > GRAPH_ROWS {
            return Err(LimitError::RoundRows { rows: self.round_rows });
        }
        if self.pages.is_empty() || self.pages.len() > 256 {
            return Err(LimitError::Classes { classes: self.pages.len() });
        }
        match self.pages.iter().position(|pages| *pages == 0) {
            Some(class) => Err(LimitError::NoPages { class: ClassId(class as u8) }),
            None => Ok(()),
        }
    }

    /// Says why `slab` cannot be the slab after `slabs` others.
    pub fn check_slab(&self, slab: Slab, slabs: usize) -> Result<(), LimitError> {
        if slab.class.0 as usize >= self.pages.len() {
            return Err(LimitError::SlabClass { slab: slabs, class: slab.class, classes: self.pages.len() });
        }
        if slab.slots == 0 {
            return Err(LimitError::SlabEmpty { slab: slabs });
        }
        if slabs > u16::MAX as usize {
            return Err(LimitError::Slabs { slabs });
        }
        Ok(())
    }
}

/// A setting that cannot work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitError {
    /// A capacity of nothing.
    Zero {
        /// Its name.
        setting: &'static str,
    },
    /// Prompt pieces off the page grid.
    PieceRows {
        /// The rows asked for.
        rows: u32,
    },
    /// Decode rounds wider than any graph.
    RoundRows {
        /// The rows asked for.
        rows: u32,
    },
    /// No cache class, or more than can be numbered.
    Classes {
        /// How many there are.
        classes: usize,
    },
    /// A cache class without a page.
    NoPages {
        /// Which.
        class: ClassId,
    },
    /// No slab at all.
    NoSlabs,
    /// More slabs than can be numbered.
    Slabs {
        /// How many there already are.
        slabs: usize,
    },
    /// A slab without a slot.
    SlabEmpty {
        /// Which slab.
        slab: usize,
    },
    /// A slab of a cache class that has no pool.
    SlabClass {
        /// Which slab.
        slab: usize,
        /// Its class.
        class: ClassId,
        /// How many classes there are.
        classes: usize,
    },
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { setting } => write!(f, "`{setting}` is 0; set it to at least 1"),
            Self::PieceRows { rows } => {
                write!(f, "`piece_rows` is {rows}; prompt pieces must be a multiple of {PAGE}")
            }
            Self::RoundRows { rows } => {
                write!(f, "`round_rows` is {rows}; a captured round has at most {GRAPH_ROWS} rows")
            }
            Self::Classes { classes } => {
                write!(f, "`pages` names {classes} cache classes; there must be 1 to 256")
            }
            Self::NoPages { class } => write!(f, "`pages` of {class} is 0; give its pool at least 1 page"),
            Self::NoSlabs => write!(f, "there are 0 slabs; give at least one, so that a lane has a slot"),
            Self::Slabs { slabs } => write!(f, "there are {slabs} slabs already; no more can be numbered"),
            Self::SlabEmpty { slab } => write!(f, "`slots` of slab {slab} is 0; set it to at least 1"),
            Self::SlabClass { slab, class, classes } => {
                write!(f, "slab {slab} is of {class}; `pages` names {classes} classes, counted from 0")
            }
        }
    }
}

impl std::error::Error for LimitError {}
