//! Picking the next id from logits, and handing it over to the next round on the device.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, host::Access};

use crate::numerics::{Element, before};
use crate::state::{Part, RowRange};
use crate::table::{Head, Outcome};

/// Picks the id with the largest logit; ties go to the lower id.
///
/// ```text
/// id[t]     = argmax over i < choices of logits[t, i]
/// status[t] = 0 if every logit is finite, else 1
/// ```
/// Shapes     logits: `[rows, vocab]` elements, outcomes: one [`Outcome`] per row of the round
/// Domain     choices is at most vocab: ids from there on have no text and are never picked
/// Effects    writes the outcome of the covered rows; a slot's last row of the round writes its `last_id`
pub struct Pick<E>(PhantomData<E>);

/// Arguments of [`Pick`]. Logits and outcomes are indexed from the first covered row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// The logits of the first covered row.
    pub logits: Ptr<u8>,
    /// The outcome of the first covered row.
    pub outcomes: Ptr<Outcome>,
    /// The heads of the slots.
    pub heads: Part,
    /// Logits per row.
    pub vocab: u32,
    /// How many ids may be picked.
    pub choices: u32,
}

impl<E: Element> Kernel for Pick<E> {
    type Args = Args;
    const NAME: &'static str = "pick";
    const ELEMENT: &'static str = E::NAME;

    fn check(args: &Args) -> Result<(), String> {
        match !args.rows.is_empty() && args.choices > 0 && args.choices <= args.vocab {
            true => Ok(()),
            false => Err(format!("rows {}, choices {} of {}", args.rows.count, args.choices, args.vocab)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows.len())
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let vocab = args.vocab as usize;
        let facts = args.rows.read(memory)?;
        let logits = memory.read::<E>(args.logits.cast(), facts.len() * vocab)?;
        let outcomes = memory.write(args.outcomes, facts.len())?;
        for ((fact, logits), outcome) in facts.iter().zip(logits.chunks_exact(vocab)).zip(outcomes) {
            let choices =
                logits[..args.choices as usize].iter().enumerate().map(|(i, x)| (x.widen(), i as u32));
            let best = choices.min_by(|a, b| before(*a, *b)).expect("there is at least one choice");
            let finite = logits.iter().all(|x| x.widen().is_finite());
            *outcome = Outcome { id: best.1, status: u32::from(!finite) };
            if fact.place + 1 == fact.count {
                memory.write(args.heads.slot::<Head>(fact.slot), 1)?[0].last_id = best.1;
            }
        }
        Ok(())
    }
}
