//! Rounds, states and effects as stable text: what logs, snapshots and bug reports show.
//!
//! Ids are numbers, lists are in order, and no time appears, so a changed line is a changed decision.

use crate::effect::{Effect, Effects, Reason};
use crate::ids::PageId;
use crate::lane::Lane;
use crate::limits::Limits;
use crate::request::Request;
use crate::round::{EagerReason, Kind, LaneRows, Round, Verdict};
use crate::state::State;
use std::fmt;

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {}  ", self.number)?;
        match self.kind {
            Kind::Prompt { start, last } => {
                let end = self.lanes.first().map_or(start, |lane| lane.after);
                write!(f, "prompt {start}..{end}{}", if last { " (last)" } else { "" })?;
            }
            Kind::Decode => write!(f, "decode")?,
        }
        write!(f, "  rows {}  {}  slabs", self.row_count(), self.verdict)?;
        for group in &self.groups {
            write!(f, " {}:{}", group.slab, group.rows)?;
        }
        for admit in &self.admits {
            write!(f, "\n  admit {} as {}, clear slot {}", admit.request, admit.lane, admit.slot)?;
        }
        for lane in &self.lanes {
            write_lane_rows(f, self, lane)?;
        }
        writeln!(f)
    }
}

fn write_lane_rows(f: &mut fmt::Formatter<'_>, round: &Round, lane: &LaneRows) -> fmt::Result {
    write!(
        f,
        "\n  {}  slot {}  at {}..{}  pages {}",
        lane.lane,
        lane.slot,
        lane.before,
        lane.after,
        lane.pages()
    )?;
    let mut pages = round.edits.iter().filter(|edit| edit.slot == lane.slot).map(|edit| edit.page).peekable();
    if pages.peek().is_some() {
        write!(f, ", takes")?;
        write_pages(f, pages)?;
    }
    Ok(())
}

/// Writes pages in order, a run of three or more by its ends.
fn write_pages(f: &mut fmt::Formatter<'_>, pages: impl Iterator<Item = PageId>) -> fmt::Result {
    let mut pages = pages.peekable();
    while let Some(first) = pages.next() {
        let mut last = first;
        while let Some(next) = pages.next_if(|next| next.0 == last.0 + 1) {
            last = next;
        }
        match last.0 - first.0 {
            0 => write!(f, " {first}")?,
            1 => write!(f, " {first} {last}")?,
            _ => write!(f, " {first}-{last}")?,
        }
    }
    Ok(())
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Graph => write!(f, "graph"),
            Verdict::Eager(reason) => write!(f, "eager ({reason})"),
        }
    }
}

impl fmt::Display for EagerReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EagerReason::PromptPass => "prompt pass",
            EagerReason::ImageBearing => "image-bearing",
            EagerReason::Pocketed => "pocketed",
            EagerReason::GraphsOff => "graphs off",
            EagerReason::Audit => "audit",
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Stop => "stop",
            Reason::Length => "length",
            Reason::Cancelled => "cancelled",
        })
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Effect::Admitted { request, lane, slot } => write!(f, "admitted {request}: {lane}, slot {slot}"),
            Effect::Token { request, token } => write!(f, "token {request}: {token}"),
            Effect::Finished { request, reason } => write!(f, "finished {request}: {reason}"),
            Effect::Refused { request, why } => write!(f, "refused {request}: {why}"),
            Effect::Full { request, waiting } => {
                write!(f, "full {request}: {waiting} requests wait; try later")
            }
            Effect::Failed { request, lane, round, position } => {
                write!(
                    f,
                    "failed {request}: {lane} was not finite in round {round}, after position {position}"
                )
            }
            Effect::Freed { lane, slot, pages } => write!(f, "freed {lane}: slot {slot}, {pages} pages"),
        }
    }
}

impl fmt::Display for Effects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.list.iter().try_for_each(|effect| writeln!(f, "  {effect}"))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits { context, piece_rows, round_rows, decode_share, queue, audit, graphs, .. } = self;
        write!(f, "limits  context {context}  piece {piece_rows}  rows {round_rows}  share {decode_share}")?;
        write!(f, "  queue {queue}  audit {audit}  graphs {}", if *graphs { "on" } else { "off" })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "state  next round {}  in flight", self.next_round)?;
        if self.flying.is_empty() {
            write!(f, " none")?;
        }
        for number in &self.flying {
            write!(f, " {number}")?;
        }
        writeln!(f, "  decode rounds since a piece {}  graph rounds {}", self.decodes, self.graph_rounds)?;
        writeln!(f, "  {}", self.limits)?;
        for (class, pool) in self.pools.iter().map(|pool| pool.count()).enumerate() {
            writeln!(
                f,
                "  class {class}  pages {}  reserved {}  free {}",
                pool.total, pool.reserved, pool.free
            )?;
        }
        for (number, slab) in self.slabs.iter().enumerate() {
            writeln!(f, "  slab {number}  {}  slots {}  taken {}", slab.class, slab.slots, slab.taken)?;
        }
        self.lanes().try_for_each(|lane| write_lane(f, lane))?;
        for request in &self.queue {
            write!(f, "  waits {}  prompt {}  max {}", request.id, request.prompt, request.max_tokens)?;
            write_traits(f, request)?;
            writeln!(f)?;
        }
        match self.wait() {
            Some(wait) => writeln!(f, "  {} waits because: {wait}", self.queue[0].id),
            None => Ok(()),
        }
    }
}

fn write_lane(f: &mut fmt::Formatter<'_>, lane: &Lane) -> fmt::Result {
    let Lane { id, request, slot, settled, planned, told, flying, .. } = lane;
    write!(
        f,
        "  {id}  slot {slot}  {}  prompt {}  told {told} of {}",
        request.id, request.prompt, request.max_tokens
    )?;
    write!(f, "  settled {settled}  planned {planned}")?;
    if *flying > 0 {
        write!(f, "  in flight {flying}")?;
    }
    if lane.ended {
        write!(f, "  ended")?;
    }
    write!(f, "  pages {} of {}", lane.pages().len(), lane.lease.reserved())?;
    if !lane.pages().is_empty() {
        write!(f, ":")?;
        write_pages(f, lane.pages().iter().copied())?;
    }
    write_traits(f, request)?;
    writeln!(f)
}

fn write_traits(f: &mut fmt::Formatter<'_>, request: &Request) -> fmt::Result {
    let traits = [
        (request.image_bearing, "image-bearing"),
        (request.pocketed, "pocketed"),
        (request.constrained, "constrained"),
    ];
    if request.class.0 > 0 {
        write!(f, "  {}", request.class)?;
    }
    if request.window > 1 {
        write!(f, "  window {}", request.window)?;
    }
    traits.iter().filter(|(has, _)| *has).try_for_each(|(_, name)| write!(f, "  {name}"))
}
