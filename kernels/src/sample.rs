//! Sampling: the next id of a row from its logits, and what later rounds must know of the ids so far.

mod choice;
pub mod draw;

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use graph::{Fault, Grid, Kernel, Ptr, Twin, host::Access};

use crate::numerics::{Element, before, widened};
use crate::source::{self, CLUSTER};
use crate::spread;
use crate::state::{Part, RowRange};
use crate::table::{BIASES, Bias, Fact, Head, IN_PROMPT, Outcome, Sampling, TOPS};

use choice::{survivors, top};
use draw::Draw;

/// Picks an id for each covered row, under the options staged at the slot's first row of the round.
///
/// ```text
/// n[i]    = how often i was picked before this row's position or is its id (decode)     counts, low bits
/// x[i]    = logits[t, i] + the slot's bias of i, in the order of its list
/// x[i]    = (x[i] > 0 ? x[i] / repetition : x[i] * repetition)      if i occurs in the prompt or n[i] > 0
/// x[i]    = x[i] - (presence + frequency * n[i])                    if n[i] > 0
/// x[i]    = clamped to the finite values, if there is a bias or a penalty
/// id      = argmax x                                                if temperature is 0, else:
/// w[i]    = exp((x[i] - max x) / temperature)
/// K       = the top_k best by (x, lower id first); all if top_k is 0
/// P       = the smallest prefix of K in that order whose mass reaches top_p of K's; K if top_p is 1
/// S       = the i in P with w[i] >= min_p                           the largest w is 1
/// id      = argmax over i in S of w[i] / wait(seed, position + 1, i)
/// logprob = (logits[t, id] - max) - ln(sum over i < choices of exp(logits[t, i] - max))
/// tops    = the `logprobs` best logits in order, with theirs
/// status  = 0 if every logit of the row is finite, else 1: then id = argmax of the logits, tops and logprob 0
/// ```
/// Log probabilities are the model's own: before bias, penalties and temperature. The last step is the race
/// of exponential clocks of [`draw`], the same as the largest `x / temperature + Gumbel noise`: a function
/// of (seed, position, id), so one row draws the same id whatever rides along.
///
/// Shapes     logits: `[rows, vocab]` elements; outcomes: one [`Outcome`] per covered row; per slot: counts
///            `[vocab]` u32, bit [`IN_PROMPT`] and a number; biases `[BIASES]`
/// Domain     choices is at most vocab: ids from there on have no text, are never picked and have no part in
///            any sum; options within [`Sampling`]; a slot has one row in a decode round
/// Numeric    every step is f32, rounded once; sums of weights are of integers ([`draw::mass`]), so their
///            order is free; ties go to the lower id everywhere
/// Effects    writes the outcome of the covered rows; `last_id` of slots whose last row of the round is
///            covered; in a decode round adds one to the count of each row's own id. So the counts of a slot
///            cover the positions below its length, whatever pieces its prompt came in.
/// Source     MODEL: sampling
pub struct Sample<E>(PhantomData<E>);

/// Arguments of [`Sample`]. Logits and outcomes are indexed from the first covered row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Args {
    /// The rows.
    pub rows: RowRange,
    /// The options, one per row of the round.
    pub sampling: Ptr<Sampling>,
    /// The logits of the first covered row.
    pub logits: Ptr<u8>,
    /// The outcome of the first covered row.
    pub outcomes: Ptr<Outcome>,
    /// The heads of the slots.
    pub heads: Part,
    /// The counts of the slots.
    pub counts: Part,
    /// The bias lists of the slots.
    pub biases: Part,
    /// Logits per row.
    pub vocab: u32,
    /// How many ids may be picked.
    pub choices: u32,
    /// 0: prompt rows; 1: decode rows.
    pub kind: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Marks the ids of prompt rows in the counts of their slots.
///
/// ```text
/// counts[id of the row] |= IN_PROMPT
/// ```
/// Runs in prompt rounds, before [`Sample`].
///
/// Shapes     counts as [`Sample`]
/// Domain     ids are below vocab
/// Effects    writes the counts of the slots of the covered rows
pub struct Mark;

/// Arguments of [`Mark`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct MarkArgs {
    /// The rows.
    pub rows: RowRange,
    /// The counts of the slots.
    pub counts: Part,
    /// Counts per slot.
    pub vocab: u32,
    /// Not used; zero.
    pub zero: u32,
}

/// Threads of a block of the CUDA twin of [`Mark`].
const THREADS: u32 = 128;

impl<E: Element> Kernel for Sample<E> {
    type Args = Args;
    const NAME: &'static str = "sample";
    const ELEMENT: &'static str = E::NAME;
    const TWIN: Option<Twin> = source::twin::<E>(&source::SAMPLE, Self::NAME, 1024);

    fn check(args: &Args) -> Result<(), String> {
        let Args { rows, vocab, choices, kind, .. } = args;
        match !rows.is_empty() && (1..=*vocab).contains(choices) && *kind <= 1 {
            true => Ok(()),
            false => Err(format!("rows {}, choices {choices} of {vocab}, kind {kind}", rows.count)),
        }
    }

    fn grid(args: &Args) -> Grid {
        Grid::line(args.rows.len() * CLUSTER)
    }

    fn host(args: &Args, memory: &Access<'_>) -> Result<(), Fault> {
        let (vocab, choices) = (args.vocab as usize, args.choices as usize);
        let facts = args.rows.read(memory)?;
        let logits = memory.read::<E>(args.logits.cast(), facts.len() * vocab)?;
        let outcomes = memory.write(args.outcomes, facts.len())?;

        let mut jobs = Vec::with_capacity(facts.len());
        for ((fact, logits), outcome) in facts.iter().zip(logits.chunks_exact(vocab)).zip(&mut *outcomes) {
            let options = memory.read(args.sampling.at(fact.first as usize), 1)?[0];
            legal(&options).map_err(|why| memory.domain(format!("{fact:?}: {why}")))?;
            let biases = memory.read(args.biases.slot::<Bias>(fact.slot), options.biases as usize)?;
            if let Some(bias) = biases.iter().find(|bias| bias.id >= args.vocab || !bias.value.is_finite()) {
                return Err(memory.domain(format!("{bias:?} of slot {}, {vocab} ids", fact.slot)));
            }
            let counts = args.counts.slot::<u32>(fact.slot);
            let counts = match args.kind {
                0 => memory.read(counts, vocab)?,
                _ => {
                    let counts = memory.write(counts, vocab)?;
                    *count(counts, fact, memory)? += 1;
                    counts
                }
            };
            let row = SampledRow { options, position: fact.position + 1, biases, counts: &counts[..choices] };
            jobs.push((row, logits, outcome));
        }
        let work = jobs.len() * vocab * 16;
        spread::each(jobs, work, |(row, logits, outcome)| *outcome = row.outcome(logits));

        for (fact, outcome) in facts.iter().zip(outcomes) {
            if fact.place + 1 == fact.count {
                memory.write(args.heads.slot::<Head>(fact.slot), 1)?[0].last_id = outcome.id;
            }
        }
        Ok(())
    }
}

impl Kernel for Mark {
    type Args = MarkArgs;
    const NAME: &'static str = "mark";
    const ELEMENT: &'static str = "";
    const TWIN: Option<Twin> = source::plain(&source::SAMPLE, Self::NAME, THREADS);

    fn check(args: &MarkArgs) -> Result<(), String> {
        match args.rows.is_empty() {
            false => Ok(()),
            true => Err("no rows".into()),
        }
    }

    fn grid(args: &MarkArgs) -> Grid {
        Grid::line(args.rows.count.div_ceil(THREADS) as usize)
    }

    fn host(args: &MarkArgs, memory: &Access<'_>) -> Result<(), Fault> {
        for run in crate::state::runs(args.rows.read(memory)?) {
            let counts = memory.write(args.counts.slot::<u32>(run[0].slot), args.vocab as usize)?;
            for fact in run {
                *count(counts, fact, memory)? |= IN_PROMPT;
            }
        }
        Ok(())
    }
}

/// The count of a row's own id.
fn count<'a>(counts: &'a mut [u32], fact: &Fact, memory: &Access<'_>) -> Result<&'a mut u32, Fault> {
    let vocab = counts.len();
    counts
        .get_mut(fact.id as usize)
        .ok_or_else(|| memory.domain(format!("id {} is past {vocab} ids", fact.id)))
}

/// Whether staged options are in the domain; the error names the one that is not.
fn legal(options: &Sampling) -> Result<(), String> {
    let within = |x: f32, low: f32, high: f32| x >= low && x <= high;
    let Sampling { temperature, top_p, min_p, presence, frequency, repetition, .. } = *options;
    let rules = [
        ("temperature", within(temperature, 0.0, f32::MAX)),
        ("top_p", top_p > 0.0 && within(top_p, 0.0, 1.0)),
        ("min_p", within(min_p, 0.0, 1.0)),
        ("presence", within(presence, -2.0, 2.0)),
        ("frequency", within(frequency, -2.0, 2.0)),
        ("repetition", repetition > 0.0 && repetition.is_finite()),
        ("logprobs", options.logprobs as usize <= TOPS),
        ("biases", options.biases as usize <= BIASES),
    ];
    match rules.into_iter().find(|(_, holds)| !holds) {
        Some((name, _)) => Err(format!("{name} of {options:?}")),
        None => Ok(()),
    }
}

/// What the choice of one row depends on, beside its logits.
struct SampledRow<'a> {
    options: Sampling,
    /// Where the picked id will stand.
    position: u32,
    biases: &'a [Bias],
    /// One per choice.
    counts: &'a [u32],
}

impl SampledRow<'_> {
    fn outcome<E: Element>(&self, logits: &[E]) -> Outcome {
        let mut x = widened(logits);
        let finite = x.iter().fold(true, |finite, x| finite & x.is_finite());
        x.truncate(self.counts.len());
        if !finite {
            let choices = x.into_iter().zip(0..);
            let (_, id) = choices.min_by(|a, b| before(*a, *b)).expect("there is at least one choice");
            return Outcome { id, status: 1, accepted: 1, ..Outcome::default() };
        }

        let best = argmax(&x);
        let (max, total) = (x[best as usize], draw::total_mass(&x, x[best as usize]));
        let log_sum = draw::ln(draw::weight_of(total));
        let logprob = |logit: f32| (logit - max) - log_sum;
        let mut tops = top(&x, self.options.logprobs as usize);
        tops.sort_unstable_by(|a, b| before(*a, *b));

        let id = if self.changes_logits() {
            let mut changed = x.clone();
            self.change(&mut changed);
            self.pick(&changed, argmax(&changed))
        } else {
            self.pick(&x, best)
        };
        let mut outcome = Outcome {
            id,
            accepted: 1,
            tops: tops.len() as u32,
            logprob: logprob(x[id as usize]),
            ..Outcome::default()
        };
        for (at, (logit, id)) in tops.into_iter().enumerate() {
            outcome.top_ids[at] = id;
            outcome.top_logprobs[at] = logprob(logit);
        }
        outcome
    }

    fn changes_logits(&self) -> bool {
        let Sampling { presence, frequency, repetition, biases, .. } = self.options;
        biases > 0 || presence != 0.0 || frequency != 0.0 || repetition != 1.0
    }

    /// Adds biases and applies penalties.
    fn change(&self, x: &mut [f32]) {
        let Sampling { presence, frequency, repetition, .. } = self.options;
        for bias in self.biases {
            if let Some(x) = x.get_mut(bias.id as usize) {
                *x += bias.value;
            }
        }
        for (x, count) in x.iter_mut().zip(self.counts) {
            let picked = count & !IN_PROMPT;
            if *count != 0 {
                *x = if *x > 0.0 { *x / repetition } else { *x * repetition };
            }
            if picked != 0 {
                *x -= presence + frequency * picked as f32;
            }
            *x = x.clamp(f32::MIN, f32::MAX);
        }
    }

    /// The id for changed logits, whose largest is that of `best`.
    fn pick(&self, x: &[f32], best: u32) -> u32 {
        if self.options.temperature == 0.0 {
            return best;
        }
        let draw = Draw::new(self.options.seed, self.position);
        draw.race(survivors(x, x[best as usize], &self.options))
    }
}

/// The id of the largest of finite values, the lowest one if there are several.
fn argmax(x: &[f32]) -> u32 {
    let max = draw::max(x);
    x.iter().position(|x| *x == max).expect("the largest value is one of the values") as u32
}
