//! What an engine has done so far, as numbers.

use graph::BankCounts;
use vision::CacheCounts;

use super::eyes::Eyes;
use super::{Engine, RoundCounts};

/// What an engine has done so far.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Rounds by how they were executed.
    pub rounds: RoundCounts,
    /// The bank's own counts.
    pub bank: BankCounts,
    /// Graphs in the bank, and their bytes.
    pub graphs: usize,
    /// See `graphs`.
    pub graph_bytes: usize,
    /// Ids made.
    pub tokens: u64,
    /// Lanes in use.
    pub lanes: usize,
    /// Requests that wait, those whose pictures are being encoded included.
    pub waiting: usize,
    /// Those alone.
    pub encoding: usize,
    /// Features of pictures: asked for, kept, let go.
    pub pictures: CacheCounts,
    /// Free and all pages, over all classes.
    pub pages_free: u32,
    /// See `pages_free`.
    pub pages_total: u32,
    /// Rounds whose graph was compared with what it would be now, and differed.
    pub audits_failed: u64,
    /// Slabs that more lanes would have needed and the device had no memory for.
    pub slabs_refused: u64,
    /// Why the engine has failed, if it has: every request is told the same.
    pub failed: Option<String>,
}

impl Engine {
    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let pools =
            (0..self.classes.len()).filter_map(|class| self.state.pool(planner::ClassId(class as u8)));
        let (free, total) = pools.fold((0, 0), |sum, pool| (sum.0 + pool.free, sum.1 + pool.total));
        let encoding = self.eyes.as_ref().map_or(0, Eyes::waiting);
        Stats {
            rounds: self.counts.clone(),
            bank: self.bank.counts(),
            graphs: self.bank.len(),
            graph_bytes: self.bank.bytes(),
            tokens: self.tokens,
            lanes: self.state.lanes().count(),
            waiting: self.state.waiting().len() + encoding,
            encoding,
            pictures: self.eyes.as_ref().map(Eyes::counts).unwrap_or_default(),
            pages_free: free,
            pages_total: total,
            audits_failed: self.audits_failed,
            slabs_refused: self.slabs_refused,
            failed: self.broken.clone(),
        }
    }
}
