//! A planned round as the rows of the staged table.

use std::collections::HashMap;

use kernels::table::{Kind, PageEdit, PromptRow, Row, Sampling};
use planner::{RequestId, Round, State};

use super::Live;
use crate::error::Error;
use crate::lanes::Lanes;
use crate::runner::{Runner, StagedTable};

/// The rows of the table being staged; kept from round to round, so that staging allocates nothing.
#[derive(Default)]
pub(super) struct Stage {
    rows: Vec<Row>,
    sampling: Vec<Sampling>,
    prompt: Vec<PromptRow>,
    edits: Vec<PageEdit>,
}

impl Stage {
    /// Stages a booked round: clears the slots of lanes that begin, then queues the one copy of its table.
    pub(super) fn round(
        &mut self,
        round: &Round,
        state: &State,
        live: &HashMap<RequestId, Live>,
        slabs: &[Lanes],
        runner: &mut Runner,
    ) -> Result<(), Error> {
        for admit in &round.admits {
            let (lanes, slot) = (&slabs[admit.slot.slab as usize], admit.slot.index as usize);
            runner.clear_slot(lanes, slot)?;
            if let Some(live) = live.get(&admit.request) {
                runner.stage_biases(lanes, slot, &live.biases)?;
                // Of a slot that was cleared it is 0.
                if let Some(shown) = &live.shown {
                    runner.stage_rope_offset(lanes, slot, shown.offset)?;
                }
            }
        }
        self.fill(round, state, live);
        let table = StagedTable {
            rows: &self.rows,
            sampling: &self.sampling,
            prompt: &self.prompt,
            edits: &self.edits,
        };
        Ok(runner.stage(table)?)
    }

    /// Turns the round into rows.
    fn fill(&mut self, round: &Round, state: &State, live: &HashMap<RequestId, Live>) {
        self.rows.clear();
        self.sampling.clear();
        self.prompt.clear();
        self.edits.clear();
        for lane in &round.lanes {
            let live = state.lane(lane.slot).and_then(|lane| live.get(&lane.request().id));
            let (first, count) = (self.rows.len() as u32, lane.rows());
            let slot = lane.slot.index.into();
            self.rows.extend((0..count).map(|place| Row { slot, place, first, count }));
            let sampling = live.map_or_else(Sampling::default, |live| live.sampling);
            self.sampling.resize(self.rows.len(), sampling);
            if let (planner::Kind::Prompt { .. }, Some(live)) = (round.kind, live) {
                let ids = &live.prompt[lane.before as usize..lane.after as usize];
                let axes = |position: u32| match &live.shown {
                    Some(shown) => shown.axes(position as usize),
                    None => [position as i32; 3],
                };
                let row = |(position, &id): (u32, &u32)| PromptRow { id, axes: axes(position) };
                self.prompt.extend((lane.before..).zip(ids).map(row));
            }
        }
        self.edits.extend(round.edits.iter().map(|edit| PageEdit {
            slab: edit.slot.slab.into(),
            slot: edit.slot.index.into(),
            index: edit.index,
            page: edit.page.0,
        }));
    }

    /// Stages one row of slot 0 of a slab, to warm up.
    pub(super) fn warm(&mut self, slab: u32, kind: Kind, runner: &mut Runner) -> Result<(), Error> {
        let prompt = [PromptRow { id: 0, axes: [0; 3] }];
        let table = StagedTable {
            rows: &[Row { slot: 0, place: 0, first: 0, count: 1 }],
            sampling: &[Sampling::default()],
            prompt: if kind == Kind::Prompt { &prompt } else { &[] },
            edits: &[PageEdit { slab, slot: 0, index: 0, page: 0 }],
        };
        Ok(runner.stage(table)?)
    }
}
