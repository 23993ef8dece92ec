//! The last kernel of a round: heads and rings of rotary positions for the next one.

use kernels::advance::{Advance, Args};
use kernels::state::{Part, RowRange};
use kernels::table::{Fact, Head, PAGE, PREVIOUS};
use tests::check::{Draw, Scene, facts, same};

use crate::ops::formula::ROWS;

tests::tests! {
    any: heads_and_rings_are_those_of_the_longer_sequence, a_slot_alone_is_the_slot_among_others, two_pieces_leave_what_the_whole_leaves;
    host: a_part_of_a_slots_rows_is_a_fault;
}

const SLOTS: usize = 66;
/// Words from one head to the next, and from one ring to the next: more than they need.
const HEAD_STRIDE: usize = 9;
const RING_STRIDE: usize = 3 * PAGE + 5;

/// A slab: the ids and rotary positions of every slot, and what its memory holds.
#[derive(Clone)]
struct Slab {
    sequences: Vec<Vec<(u32, [i32; 3])>>,
    heads: Vec<u32>,
    rings: Vec<i32>,
}

impl Slab {
    /// Drawn sequences; the rings hold drawn numbers.
    fn new(draw: &mut Draw) -> Slab {
        let sequences: Vec<Vec<_>> =
            (0..SLOTS).map(|_| (0..draw.below(2 * PAGE)).map(|_| token(draw)).collect()).collect();
        let mut heads = vec![u32::MAX; SLOTS * HEAD_STRIDE];
        for (sequence, words) in sequences.iter().zip(heads.chunks_mut(HEAD_STRIDE)) {
            words[..7].copy_from_slice(bytemuck::cast_slice(&[head(sequence, 5, -3)]));
        }
        let rings = (0..SLOTS * RING_STRIDE).map(|_| draw.bits() as i32).collect();
        Slab { sequences, heads, rings }
    }

    /// The facts of rows that follow: `(slot, tokens)` of every slot in the round.
    fn facts(&self, runs: &[(u32, Vec<(u32, [i32; 3])>)]) -> Vec<Fact> {
        let counts: Vec<(u32, usize)> = runs.iter().map(|(slot, tokens)| (*slot, tokens.len())).collect();
        let mut facts = facts(&counts);
        let mut at = 0;
        for (slot, tokens) in runs {
            let mut sequence = self.sequences[*slot as usize].clone();
            for token in tokens {
                let back = |back: usize| sequence.len().checked_sub(back + 1).map(|at| sequence[at].0);
                let (id, axes) = *token;
                let previous = std::array::from_fn(|i| back(i).unwrap_or(999));
                let position = sequence.len() as u32;
                facts[at] = Fact { id, position, axes, previous, ..facts[at] };
                sequence.push(*token);
                at += 1;
            }
        }
        facts
    }

    fn stage(&self, scene: &mut Scene, facts: &[Fact], first: usize) -> Args {
        Args {
            rows: RowRange {
                facts: scene.input("facts", facts),
                first: first as u32,
                count: (facts.len() - first) as u32,
            },
            heads: Part { base: scene.state("heads", &self.heads).cast(), stride: 4 * HEAD_STRIDE as u64 },
            axes: Part { base: scene.state("rings", &self.rings).cast(), stride: 4 * RING_STRIDE as u64 },
        }
    }

    /// Runs a round of these rows.
    fn run(&mut self, runs: &[(u32, Vec<(u32, [i32; 3])>)], lead: usize) {
        let mut all = vec![(SLOTS as u32 - 1, vec![(1, [2; 3]); lead])];
        all.retain(|(_, tokens)| !tokens.is_empty());
        all.extend_from_slice(runs);
        let facts = self.facts(&all);
        let mut scene = Scene::new();
        let args = self.stage(&mut scene, &facts, lead);
        scene.run::<Advance>(&args);
        self.heads = scene.read(args.heads.base.cast(), self.heads.len());
        self.rings = scene.read(args.axes.base.cast(), self.rings.len());
    }

    /// What a round must leave.
    fn formula(&mut self, runs: &[(u32, Vec<(u32, [i32; 3])>)]) {
        for (slot, tokens) in runs {
            let slot = *slot as usize;
            let from = self.sequences[slot].len();
            self.sequences[slot].extend(tokens);
            let sequence = &self.sequences[slot];
            let mut after = head(sequence, 5, -3);
            // Where a row knew no id before it, the boundary is kept as if it were one.
            for back in sequence.len()..PREVIOUS {
                after.previous_plus_one[back] = 1000;
            }
            self.heads[slot * HEAD_STRIDE..][..7].copy_from_slice(bytemuck::cast_slice(&[after]));
            let ring = &mut self.rings[slot * RING_STRIDE..][..3 * PAGE];
            for position in from..sequence.len() {
                ring[position % PAGE * 3..][..3].copy_from_slice(&sequence[position].1);
            }
        }
    }
}

fn token(draw: &mut Draw) -> (u32, [i32; 3]) {
    (draw.below(900) as u32, [0; 3].map(|_| draw.below(1 << 20) as i32))
}

fn tokens(count: usize, draw: &mut Draw) -> Vec<(u32, [i32; 3])> {
    (0..count).map(|_| token(draw)).collect()
}

/// The head of a sequence.
fn head(sequence: &[(u32, [i32; 3])], last_id: u32, rope_offset: i32) -> Head {
    Head {
        length: sequence.len() as u32,
        last_id,
        rope_offset,
        previous_plus_one: std::array::from_fn(|back| {
            sequence.len().checked_sub(back + 1).map_or(0, |at| sequence[at].0 + 1)
        }),
    }
}

fn same_state(label: &str, a: &Slab, b: &Slab) {
    same(&format!("{label}: heads"), &a.heads, &b.heads);
    same(&format!("{label}: rings"), &a.rings, &b.rings);
}

fn heads_and_rings_are_those_of_the_longer_sequence() {
    let mut draw = Draw::new(1);
    for count in ROWS.into_iter().chain([127, 128, 129, 200]) {
        let before = Slab::new(&mut draw);
        let runs = [(7, tokens(count, &mut draw)), (0, tokens(1, &mut draw)), (3, tokens(3, &mut draw))];
        let (mut got, mut want) = (before.clone(), before);
        got.run(&runs, count % 3);
        want.formula(&runs);
        same_state(&format!("{count} rows"), &got, &want);
    }
}

fn a_slot_alone_is_the_slot_among_others() {
    let mut draw = Draw::new(2);
    for others in [1, 2, 3, 4, 30, 31, 32, 62, 63] {
        let before = Slab::new(&mut draw);
        let runs: Vec<_> = (0..=others).map(|slot| (slot as u32, tokens(1, &mut draw))).collect();
        let (mut crowded, mut alone) = (before.clone(), before);
        crowded.run(&runs, 0);
        runs.iter().for_each(|run| alone.run(std::slice::from_ref(run), 0));
        same_state(&format!("among {others}"), &crowded, &alone);
    }
}

fn two_pieces_leave_what_the_whole_leaves() {
    let mut draw = Draw::new(3);
    for (count, cut) in [(2, 1), (5, 3), (64, 63), (65, 64), (130, 64), (200, 65)] {
        let before = Slab::new(&mut draw);
        let run = tokens(count, &mut draw);
        let (mut whole, mut pieces) = (before.clone(), before);
        whole.run(&[(9, run.clone())], 0);
        pieces.run(&[(9, run[..cut].to_vec())], 0);
        pieces.sequences[9].extend(&run[..cut]);
        pieces.run(&[(9, run[cut..].to_vec())], 0);
        same_state(&format!("{count} rows cut after {cut}"), &whole, &pieces);
    }
}

fn a_part_of_a_slots_rows_is_a_fault() {
    let mut draw = Draw::new(4);
    let slab = Slab::new(&mut draw);
    let facts = slab.facts(&[(6, tokens(5, &mut draw))]);
    let mut scene = Scene::new();
    let args = slab.stage(&mut scene, &facts, 2);
    let why = scene.domain_fault::<Advance>(&args);
    assert!(why.contains("3 of 5 rows of slot 6"), "{why}");

    let mut scene = Scene::new();
    let args = slab.stage(&mut scene, &facts, 5);
    let why = scene.refused::<Advance>(&args);
    assert!(why.contains("no rows"), "{why}");
}
