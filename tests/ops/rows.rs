//! The first kernel of a round: facts about every row from the staged table and the heads, and page edits.

use graph::Ptr;
use kernels::rows::{Args, Rows, kind_code};
use kernels::state::Part;
use kernels::table::{Fact, Head, Header, Kind, PREVIOUS, PageEdit, PromptRow, Row, Table};
use tests::check::{Draw, Scene, poisoned, same};

use crate::ops::formula::ROWS;

tests::tests! {
    any: rows_of_a_prompt_know_their_ids_and_those_before, decode_rows_run_what_their_heads_say, a_row_of_a_prompt_knows_the_same_in_one_piece_and_in_two, edits_of_the_slab_change_its_page_tables_and_nothing_else;
    host: edits_outside_the_slab_are_faults, rows_that_no_table_holds_are_faults, a_range_of_no_rows_is_refused;
}

const SLOTS: usize = 66;
/// Bytes from one slot to the next, in words.
const STRIDE: usize = 11;
const PAGES: usize = 5;
const BOUNDARY: u32 = 999;
const SLAB: u32 = 2;

/// A slab, and what is staged for it.
#[derive(Clone)]
struct Round {
    kind: Kind,
    /// The ids of every slot so far.
    ids: Vec<Vec<u32>>,
    rope_offsets: Vec<i32>,
    rows: Vec<Row>,
    prompt: Vec<PromptRow>,
    edits: Vec<PageEdit>,
    /// The first covered row.
    first: usize,
    edits_staged: u32,
}

impl Round {
    /// Histories of drawn lengths, some shorter than a row looks back; no rows yet.
    fn new(kind: Kind, draw: &mut Draw) -> Round {
        let ids = (0..SLOTS).map(|_| {
            let length = draw.below(8);
            (0..length).map(|_| draw.below(100) as u32).collect()
        });
        Round {
            kind,
            ids: ids.collect(),
            rope_offsets: (0..SLOTS).map(|_| draw.below(50) as i32 - 25).collect(),
            rows: Vec::new(),
            prompt: Vec::new(),
            edits: Vec::new(),
            first: 0,
            edits_staged: 0,
        }
    }

    /// Adds `count` rows of a slot.
    fn add(&mut self, slot: u32, count: usize, draw: &mut Draw) {
        let first = self.rows.len() as u32;
        for place in 0..count as u32 {
            self.rows.push(Row { slot, place, first, count: count as u32 });
            let axes = [0; 3].map(|_| draw.below(1000) as i32);
            self.prompt.push(PromptRow { id: draw.below(100) as u32, axes });
        }
    }

    /// The head of a slot: the last of its ids is what a decode row runs, and is not yet final.
    fn head(&self, slot: usize) -> Head {
        let (mut ids, mut last_id) = (&self.ids[slot][..], 7);
        if let (Kind::Decode, Some((last, before))) = (self.kind, ids.split_last()) {
            (ids, last_id) = (before, *last);
        }
        Head {
            length: ids.len() as u32,
            last_id,
            rope_offset: self.rope_offsets[slot],
            previous_plus_one: std::array::from_fn(|back| {
                ids.len().checked_sub(back + 1).map_or(0, |at| ids[at] + 1)
            }),
        }
    }

    fn stage(&self, scene: &mut Scene) -> Args {
        let mut heads = vec![u32::MAX; SLOTS * STRIDE];
        for (slot, words) in heads.chunks_mut(STRIDE).enumerate() {
            words[..7].copy_from_slice(bytemuck::cast_slice(&[self.head(slot)]));
        }
        let header = Header { rows: self.rows.len() as u32, edits: self.edits_staged };
        let mut edits = self.edits.clone();
        edits.push(PageEdit { slab: SLAB, slot: 0, index: 0, page: 12345 });
        let prompt = match self.kind {
            Kind::Prompt => scene.input("prompt", &self.prompt),
            Kind::Decode => Ptr::NULL,
        };
        Args {
            table: Table {
                header: scene.input("header", &[header]),
                rows: scene.input("rows", &self.rows),
                edits: scene.input("edits", &edits),
                sampling: Ptr::NULL,
                prompt,
            },
            heads: Part { base: scene.input("heads", &heads).cast(), stride: 4 * STRIDE as u64 },
            page_tables: Part {
                base: scene.state("page tables", &vec![u32::MAX; SLOTS * STRIDE]).cast(),
                stride: 4 * STRIDE as u64,
            },
            facts: scene.output("facts", self.rows.len()),
            first: self.first as u32,
            count: (self.rows.len() - self.first) as u32,
            slab: SLAB,
            slots: SLOTS as u32,
            pages: PAGES as u32,
            edits: self.edits.len() as u32,
            boundary: BOUNDARY,
            kind: kind_code(self.kind),
        }
    }

    /// The facts of the covered rows, and the page tables.
    fn run(&self) -> (Vec<Fact>, Vec<u32>) {
        let mut scene = Scene::new();
        let args = self.stage(&mut scene);
        scene.run::<Rows>(&args);
        let facts = scene.read(args.facts, self.rows.len());
        poisoned("facts before the range", &facts[..self.first]);
        (facts[self.first..].to_vec(), scene.read(args.page_tables.base.cast(), SLOTS * STRIDE))
    }

    fn fault(&self) -> String {
        let mut scene = Scene::new();
        let args = self.stage(&mut scene);
        scene.domain_fault::<Rows>(&args)
    }

    /// What every covered row must know, from the ids of its slot.
    fn formula(&self) -> Vec<Fact> {
        let mut ids = self.ids.clone();
        let mut facts = Vec::new();
        for (row, prompt) in self.rows.iter().zip(&self.prompt) {
            let sequence = &mut ids[row.slot as usize];
            let axes = match self.kind {
                Kind::Prompt => {
                    sequence.push(prompt.id);
                    prompt.axes
                }
                Kind::Decode => {
                    // A slot that never picked runs the id that its head holds.
                    if sequence.is_empty() {
                        sequence.push(7);
                    }
                    [sequence.len() as i32 - 1 + self.rope_offsets[row.slot as usize]; 3]
                }
            };
            let position = sequence.len() - 1;
            facts.push(Fact {
                slot: row.slot,
                place: row.place,
                first: row.first,
                count: row.count,
                id: sequence[position],
                position: position as u32,
                axes,
                previous: std::array::from_fn(|back| {
                    position.checked_sub(back + 1).map_or(BOUNDARY, |at| sequence[at])
                }),
            });
        }
        facts[self.first..].to_vec()
    }
}

fn rows_of_a_prompt_know_their_ids_and_those_before() {
    let mut draw = Draw::new(1);
    for count in ROWS {
        for lead in [0, 3] {
            let mut round = Round::new(Kind::Prompt, &mut draw);
            if lead > 0 {
                round.add(65, lead, &mut draw);
                round.first = lead;
            }
            round.add(4, count, &mut draw);
            round.add(9, 2, &mut draw);
            assert_eq!(round.run().0, round.formula(), "{count} rows behind {lead}");
        }
    }
}

fn decode_rows_run_what_their_heads_say() {
    let mut draw = Draw::new(2);
    for count in ROWS {
        let mut round = Round::new(Kind::Decode, &mut draw);
        (0..count as u32).rev().for_each(|slot| round.add(slot, 1, &mut draw));
        round.first = (count - 1).min(2);
        let facts = round.run().0;
        assert_eq!(facts, round.formula(), "{count} rows");
        for fact in facts {
            let mut alone = Round { rows: Vec::new(), prompt: Vec::new(), first: 0, ..round.clone() };
            alone.add(fact.slot, 1, &mut draw);
            let want = Fact { first: fact.first, ..alone.run().0[0] };
            assert_eq!(fact, want, "slot {} alone and among {count}", fact.slot);
        }
    }
}

fn a_row_of_a_prompt_knows_the_same_in_one_piece_and_in_two() {
    let mut draw = Draw::new(3);
    for cut in 1..=PREVIOUS + 2 {
        let mut whole = Round::new(Kind::Prompt, &mut draw);
        whole.add(5, PREVIOUS + 3, &mut draw);
        let mut rest = Round { rows: Vec::new(), prompt: Vec::new(), ..whole.clone() };
        rest.ids[5].extend(whole.prompt[..cut].iter().map(|row| row.id));
        rest.add(5, PREVIOUS + 3 - cut, &mut draw);
        rest.prompt = whole.prompt[cut..].to_vec();
        let (whole, rest) = (whole.run().0, rest.run().0);
        for (a, b) in whole[cut..].iter().zip(&rest) {
            let a = Fact { place: b.place, count: b.count, ..*a };
            assert_eq!(a, *b, "cut after {cut}");
        }
    }
}

fn edits_of_the_slab_change_its_page_tables_and_nothing_else() {
    let mut draw = Draw::new(4);
    let mut round = Round::new(Kind::Decode, &mut draw);
    round.add(3, 1, &mut draw);
    let edit = |slab, slot, index, page| PageEdit { slab, slot, index, page };
    round.edits = vec![
        edit(SLAB, 3, 0, 70),
        edit(SLAB + 1, 3, 0, 71),
        edit(0, 1000, 1000, 72),
        edit(SLAB, 65, 4, 73),
        edit(SLAB, 4, 0, 74),
        edit(SLAB, 3, 1, 75),
        edit(SLAB, 8, 2, 76),
    ];
    for staged in [0, 4, 6, 7] {
        round.edits_staged = staged;
        let mut want = vec![u32::MAX; SLOTS * STRIDE];
        for edit in round.edits[..staged as usize].iter().filter(|edit| edit.slab == SLAB) {
            want[edit.slot as usize * STRIDE + edit.index as usize] = edit.page;
        }
        same(&format!("{staged} edits"), &round.run().1, &want);
    }
}

fn edits_outside_the_slab_are_faults() {
    let mut draw = Draw::new(5);
    let mut round = Round::new(Kind::Decode, &mut draw);
    round.add(3, 1, &mut draw);
    for (slot, index) in [(SLOTS as u32, 0), (0, PAGES as u32)] {
        round.edits = vec![PageEdit { slab: SLAB, slot, index, page: 0 }];
        round.edits_staged = 1;
        let why = round.fault();
        assert!(why.contains("is past 66 slots or 5 pages"), "{why}");
    }
    round.edits_staged = 2;
    let why = round.fault();
    assert!(why.contains("2 page edits staged, room for 1"), "{why}");
}

fn rows_that_no_table_holds_are_faults() {
    let mut draw = Draw::new(6);
    let broken: [fn(&mut [Row]); 5] = [
        |rows| rows[1].place = 2,
        |rows| rows[1].first = 1,
        |rows| rows[0].first = 9,
        |rows| rows.iter_mut().for_each(|row| row.slot = SLOTS as u32),
        |rows| rows.iter_mut().for_each(|row| row.count = 2),
    ];
    for (case, break_them) in broken.into_iter().enumerate() {
        let mut round = Round::new(Kind::Prompt, &mut draw);
        round.add(3, 3, &mut draw);
        break_them(&mut round.rows);
        let why = round.fault();
        assert!(why.contains("of the table is Row"), "case {case}: {why}");
    }
    let mut round = Round::new(Kind::Decode, &mut draw);
    round.add(3, 2, &mut draw);
    let why = round.fault();
    assert!(why.contains("decode row 1 has place 1"), "{why}");
}

fn a_range_of_no_rows_is_refused() {
    let mut draw = Draw::new(7);
    let mut round = Round::new(Kind::Decode, &mut draw);
    round.add(3, 1, &mut draw);
    let mut scene = Scene::new();
    let args = round.stage(&mut scene);
    for args in [Args { count: 0, ..args }, Args { kind: 2, ..args }] {
        let why = scene.refused::<Rows>(&args);
        assert!(why.contains(&format!("count {}, kind {}", args.count, args.kind)), "{why}");
    }
}
