//! A round as plain data, and the check that it is well formed.

use crate::ids::{ClassId, LaneId, PageId, RequestId, SlotId};
use crate::limits::{GRAPH_ROWS, PAGE, pages_for};
use smallvec::SmallVec;
use std::fmt;

/// One forward step: which rows run on which slots, and what must be staged for them.
///
/// Positions are upper bounds: the host grants them, the device holds the true lengths.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Round {
    /// Its number, counted from 1.
    pub number: u64,
    /// A prompt pass or a decode round.
    pub kind: Kind,
    /// May a graph run it, and if not, why not?
    pub verdict: Verdict,
    /// The lanes with rows, by slot.
    pub lanes: SmallVec<[LaneRows; 16]>,
    /// Rows of each slab, by slab: the part of the round key that the lanes decide.
    pub groups: SmallVec<[Group; 4]>,
    /// Page table entries to stage before the round, by slot and index.
    pub edits: SmallVec<[PageEdit; 8]>,
    /// Requests that get their lane with this round; their slots are zeroed before use.
    pub admits: SmallVec<[Admit; 1]>,
}

/// The two kinds of rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A piece of one lane's prompt.
    Prompt {
        /// Its first position, a multiple of 64.
        start: u32,
        /// Whether it ends the prompt, so that its last row makes the first token.
        last: bool,
    },
    /// One row, or a window of rows, of each lane.
    Decode,
}

/// How a round may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// A graph may run it.
    Graph,
    /// It runs launch by launch.
    Eager(EagerReason),
}

/// Why a round is eager. Where several reasons hold, the first of this list is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EagerReason {
    /// It is a prompt pass.
    PromptPass,
    /// A lane's prompt held picture or video rows.
    ImageBearing,
    /// A lane uses a pocket.
    Pocketed,
    /// Graphs are switched off.
    GraphsOff,
    /// Its turn to be compared with its graph has come.
    Audit,
}

/// The rows of one lane in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaneRows {
    /// The lane.
    pub lane: LaneId,
    /// Its seat.
    pub slot: SlotId,
    /// Its positions before the round, at most.
    pub before: u32,
    /// Its positions after the round, at most.
    pub after: u32,
}

/// One row of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Its lane.
    pub lane: LaneId,
    /// The lane's seat.
    pub slot: SlotId,
    /// Its place among the lane's rows of this round, counted from 0.
    pub place: u32,
}

/// The rows of one slab in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// The slab.
    pub slab: u16,
    /// How many rows sit in it.
    pub rows: u32,
}

/// One page table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageEdit {
    /// Whose table.
    pub slot: SlotId,
    /// Which entry: the page of positions `64 * index` and on.
    pub index: u32,
    /// The pool that the page is of.
    pub class: ClassId,
    /// The page.
    pub page: PageId,
}

/// A request that gets its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Admit {
    /// The request: the head of the queue.
    pub request: RequestId,
    /// Its lane.
    pub lane: LaneId,
    /// The lane's seat.
    pub slot: SlotId,
}

impl LaneRows {
    /// How many rows.
    pub fn rows(&self) -> u32 {
        self.after - self.before
    }

    /// Pages that the lane holds at least when the round runs.
    pub fn pages(&self) -> u32 {
        pages_for(self.after)
    }
}

impl Round {
    /// How many rows.
    pub fn row_count(&self) -> u32 {
        self.lanes.iter().map(LaneRows::rows).sum()
    }

    /// Every row, in order.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        self.lanes
            .iter()
            .flat_map(|lane| (0..lane.rows()).map(|place| Row { lane: lane.lane, slot: lane.slot, place }))
    }

    /// Slots to zero before the round.
    pub fn clears(&self) -> impl Iterator<Item = SlotId> {
        self.admits.iter().map(|admit| admit.slot)
    }

    /// Whether its lanes make tokens: all rounds do, but a prompt piece that is not the last.
    pub fn samples(&self) -> bool {
        !matches!(self.kind, Kind::Prompt { last: false, .. })
    }

    /// Says what is wrong with the round, if anything: `plan_round` lets no such round out, and a rank that
    /// gets a round over a wire lets none in.
    pub fn check(&self) -> Result<(), RoundError> {
        self.check_lanes()?;
        self.check_kind()?;
        self.check_groups()?;
        self.check_edits()?;
        match self.admits.iter().find(|admit| !self.lanes.iter().any(|lane| lane.lane == admit.lane)) {
            Some(admit) => Err(RoundError::IdleAdmit { lane: admit.lane }),
            None => Ok(()),
        }
    }

    fn check_lanes(&self) -> Result<(), RoundError> {
        if self.lanes.is_empty() {
            return Err(RoundError::Empty);
        }
        if let Some(lane) = self.lanes.iter().find(|lane| lane.after <= lane.before) {
            return Err(RoundError::NoRows { lane: lane.lane });
        }
        match self.lanes.windows(2).find(|pair| pair[0].slot >= pair[1].slot) {
            Some(pair) => Err(RoundError::Order { slot: pair[0].slot, next: pair[1].slot }),
            None => Ok(()),
        }
    }

    fn check_kind(&self) -> Result<(), RoundError> {
        let rows = self.row_count();
        let eager_prompt = self.verdict == Verdict::Eager(EagerReason::PromptPass);
        match self.kind {
            Kind::Prompt { start, last } => {
                let on_grid = start.is_multiple_of(PAGE) && (last || rows.is_multiple_of(PAGE));
                if !on_grid || start != self.lanes[0].before {
                    return Err(RoundError::Grid { start, rows });
                }
                if self.lanes.len() != 1 || !eager_prompt {
                    return Err(RoundError::PromptShared { lanes: self.lanes.len() });
                }
            }
            Kind::Decode => {
                if rows > GRAPH_ROWS {
                    return Err(RoundError::Wide { rows });
                }
                if eager_prompt || !self.admits.is_empty() {
                    return Err(RoundError::NotDecode);
                }
            }
        }
        Ok(())
    }

    fn check_groups(&self) -> Result<(), RoundError> {
        let mut lanes = self.lanes.iter().peekable();
        for group in &self.groups {
            let mut rows = 0;
            while let Some(lane) = lanes.next_if(|lane| lane.slot.slab == group.slab) {
                rows += lane.rows();
            }
            if rows == 0 || rows != group.rows {
                return Err(RoundError::Group { slab: group.slab, rows, named: group.rows });
            }
        }
        match lanes.next() {
            Some(lane) => Err(RoundError::Group { slab: lane.slot.slab, rows: lane.rows(), named: 0 }),
            None => Ok(()),
        }
    }

    /// New pages ascend within a class, so none is named twice, and each lies where its lane's rows lie.
    fn check_edits(&self) -> Result<(), RoundError> {
        let mut lanes = self.lanes.iter();
        let mut owner = lanes.next();
        for (at, edit) in self.edits.iter().enumerate() {
            while owner.is_some_and(|lane| lane.slot < edit.slot) {
                owner = lanes.next();
            }
            let follows = match self.edits[..at].last() {
                Some(last) if last.slot == edit.slot => edit.index == last.index + 1,
                _ => true,
            };
            let wanted = owner.is_some_and(|lane| {
                let needed = pages_for(lane.before)..lane.pages();
                lane.slot == edit.slot && needed.contains(&edit.index)
            });
            if !wanted || !follows {
                return Err(RoundError::StrayPage { slot: edit.slot, index: edit.index, page: edit.page });
            }
            let before = self.edits[..at].iter().rev().find(|other| other.class == edit.class);
            if before.is_some_and(|other| other.page >= edit.page) {
                return Err(RoundError::PageTwice { class: edit.class, page: edit.page });
            }
        }
        Ok(())
    }
}

/// What is wrong with a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundError {
    /// No lane.
    Empty,
    /// A lane without rows.
    NoRows {
        /// The lane.
        lane: LaneId,
    },
    /// Lanes out of order, or one slot twice.
    Order {
        /// A slot.
        slot: SlotId,
        /// The one after it.
        next: SlotId,
    },
    /// A prompt piece off the page grid, or one that does not start where its lane is.
    Grid {
        /// Where it starts.
        start: u32,
        /// How long it is.
        rows: u32,
    },
    /// A prompt round of several lanes, or one that is not eager as a prompt pass.
    PromptShared {
        /// How many lanes.
        lanes: usize,
    },
    /// A decode round wider than any graph.
    Wide {
        /// How many rows.
        rows: u32,
    },
    /// A decode round that admits a request or claims to be a prompt pass.
    NotDecode,
    /// A group that does not say how many rows its slab has.
    Group {
        /// The slab.
        slab: u16,
        /// The rows it has.
        rows: u32,
        /// The rows its group names.
        named: u32,
    },
    /// A page that no row of its lane needs, or one out of order.
    StrayPage {
        /// Whose table.
        slot: SlotId,
        /// Which entry.
        index: u32,
        /// The page.
        page: PageId,
    },
    /// A page that two entries name, or pages out of order.
    PageTwice {
        /// Its pool.
        class: ClassId,
        /// The page.
        page: PageId,
    },
    /// A request that gets a lane without rows.
    IdleAdmit {
        /// The lane.
        lane: LaneId,
    },
}

impl fmt::Display for RoundError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "the round has 0 lanes"),
            Self::NoRows { lane } => write!(f, "{lane} has 0 rows"),
            Self::Order { slot, next } => write!(f, "slot {next} comes after slot {slot}; slots must ascend"),
            Self::Grid { start, rows } => write!(
                f,
                "a prompt piece of {rows} rows starts at {start}; it must start at its lane's position and lie on the grid of {PAGE}"
            ),
            Self::PromptShared { lanes } => {
                write!(f, "a prompt round of {lanes} lanes; it has one lane and is eager as a prompt pass")
            }
            Self::Wide { rows } => write!(f, "a decode round of {rows} rows; it has at most {GRAPH_ROWS}"),
            Self::NotDecode => write!(f, "a decode round admits a request or is named a prompt pass"),
            Self::Group { slab, rows, named } => {
                write!(f, "slab {slab} has {rows} rows and its group names {named}")
            }
            Self::StrayPage { slot, index, page } => {
                write!(f, "slot {slot} takes {page} as page {index}, where its rows need none")
            }
            Self::PageTwice { class, page } => {
                write!(f, "{page} of {class} is taken twice or out of order")
            }
            Self::IdleAdmit { lane } => write!(f, "{lane} is admitted without a row"),
        }
    }
}

impl std::error::Error for RoundError {}
