//! A desk for the kernel: rows and slots in poisoned memory, a launch, and a look at every byte after it. Where scenes
//! are mirrored, every desk is also run there with its logits in bf16, and must leave what the host leaves, to the bit.

use std::ops::Range;

use bytemuck::Zeroable;
use graph::host::HostOptions;
use graph::{Arena, Device, Emission, Error, Region, Span};
use half::bf16;
use kernels::numerics::{Element, ElementType};
use kernels::rows::kind_code;
use kernels::sample::{Args, Mark, MarkArgs, Sample};
use kernels::state::{Part, RowRange};
use kernels::table::{BIASES, Bias, Fact, Head, Kind, Outcome, Sampling};
use tests::mirror;

/// The state of one slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Slot {
    /// Zero from its end to the vocabulary's.
    pub(crate) counts: Vec<u32>,
    pub(crate) biases: Vec<(u32, f32)>,
}

/// One row with what is staged for it.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) fact: Fact,
    pub(crate) options: Sampling,
    pub(crate) logits: Vec<f32>,
}

impl Row {
    /// The only row of slot `slot` in a round, with id 0.
    pub(crate) fn single(slot: u32, position: u32, options: Sampling, logits: &[f32]) -> Row {
        let fact = Fact { slot, count: 1, position, ..Fact::zeroed() };
        Row { fact, options, logits: logits.to_vec() }
    }
}

/// A round before it runs. A slot's `first` is filled in from the order of rows.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    pub(crate) element: ElementType,
    pub(crate) kind: Kind,
    pub(crate) choices: usize,
    pub(crate) rows: Vec<Row>,
    pub(crate) slots: Vec<Slot>,
}

/// What a round left behind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ran {
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) last_ids: Vec<u32>,
    pub(crate) counts: Vec<Vec<u32>>,
}

/// A `last_id` that no test picks.
pub(crate) const UNTOUCHED: u32 = 0x00ab_cdef;

struct Layout {
    facts: Span,
    sampling: Span,
    logits: Span,
    outcomes: Span,
    slots: Span,
    slot: Region,
    head: Span,
    counts: Span,
    biases: Span,
    bytes: usize,
}

impl Desk {
    /// Fresh slots with the given rows, one row each.
    pub(crate) fn decode(element: ElementType, choices: usize, rows: Vec<Row>) -> Desk {
        let slots = rows.iter().map(|row| row.fact.slot as usize + 1).max().unwrap_or(0);
        Desk { element, kind: Kind::Decode, choices, rows, slots: vec![Slot::default(); slots] }
    }

    fn vocab(&self) -> usize {
        self.rows[0].logits.len()
    }

    /// Runs `Sample` over all rows.
    pub(crate) fn run(&self) -> Ran {
        self.sample(0..self.rows.len()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs `Sample` over some rows; what it may not write, it must not have written.
    pub(crate) fn sample(&self, covered: Range<usize>) -> Result<Ran, Error> {
        self.launch(covered, false)
    }

    /// Runs `Mark` over all rows and returns the counts of every slot.
    pub(crate) fn mark(&self) -> Result<Vec<Vec<u32>>, Error> {
        self.launch(0..self.rows.len(), true).map(|ran| ran.counts)
    }

    fn launch(&self, covered: Range<usize>, mark: bool) -> Result<Ran, Error> {
        let host = Device::host(HostOptions::default());
        let ran = self.launch_on(&host, covered.clone(), mark)?;
        if let Some(mirror) = mirror::device() {
            let desk = Desk { element: ElementType::Bf16, ..self.clone() };
            let (here, there) =
                (desk.launch_on(&host, covered.clone(), mark)?, desk.launch_on(&mirror, covered, mark)?);
            assert_eq!(there, here, "what the twin leaves, and what the host leaves");
        }
        Ok(ran)
    }

    fn launch_on(&self, device: &Device, covered: Range<usize>, mark: bool) -> Result<Ran, Error> {
        let (layout, vocab) = (self.layout(), self.vocab());
        let arena = device.arena("desk", layout.bytes)?;
        self.fill(&arena, &layout);
        let before = arena.read::<u8>(arena.base(), layout.bytes)?;

        let (first, count) = (covered.start as u32, covered.len() as u32);
        let rows = RowRange { facts: layout.facts.at(arena.base()), first, count };
        let part = |span: Span| Part {
            base: layout.slots.at::<u8>(arena.base()).byte_add(span.offset),
            stride: layout.slot.bytes() as u64,
        };
        let mut emission = Emission::new();
        if mark {
            let args = MarkArgs { rows, counts: part(layout.counts), vocab: vocab as u32, zero: 0 };
            emission.launch::<Mark>(&args)?;
        } else {
            let args = Args {
                rows,
                sampling: layout.sampling.at(arena.base()),
                logits: layout.logits.at(arena.base()),
                outcomes: layout.outcomes.at(arena.base()),
                heads: part(layout.head),
                counts: part(layout.counts),
                biases: part(layout.biases),
                vocab: vocab as u32,
                choices: self.choices as u32,
                kind: kind_code(self.kind),
                zero: 0,
            };
            // The logits and outcomes of the launch are those of its first covered row.
            let args = Args {
                logits: args.logits.byte_add(covered.start * vocab * self.element.bytes()),
                outcomes: args.outcomes.at(covered.start),
                ..args
            };
            kernels::launch!(emission, self.element, Sample, &args)?;
        }
        let stream = device.stream();
        stream.run(emission, std::slice::from_ref(&arena))?;
        stream.synchronize()?;

        let after = arena.read::<u8>(arena.base(), layout.bytes)?;
        // Every byte that may be written shows what is there now, so a difference is a byte that may not.
        let mut expected = before;
        for range in self.writable(&layout, covered.clone(), mark) {
            expected[range.clone()].copy_from_slice(&after[range]);
        }
        let stray = expected.iter().zip(&after).position(|(expected, after)| expected != after);
        assert_eq!(stray, None, "the first byte that changed and is nobody's output");
        let slot = |slot: usize, span: Span| layout.slots.offset + slot * layout.slot.bytes() + span.offset;
        let u32s = |at: usize, n: usize| bytemuck::pod_collect_to_vec::<u8, u32>(&after[at..][..4 * n]);
        let outcome = |row: usize| {
            let bytes = size_of::<Outcome>();
            bytemuck::pod_read_unaligned(&after[layout.outcomes.offset + row * bytes..][..bytes])
        };
        let head =
            |s| bytemuck::pod_read_unaligned::<Head>(&after[slot(s, layout.head)..][..size_of::<Head>()]);
        Ok(Ran {
            outcomes: if mark { Vec::new() } else { covered.map(outcome).collect() },
            last_ids: (0..self.slots.len()).map(|s| head(s).last_id).collect(),
            counts: (0..self.slots.len()).map(|s| u32s(slot(s, layout.counts), vocab)).collect(),
        })
    }

    fn layout(&self) -> Layout {
        let (rows, vocab) = (self.rows.len(), self.vocab());
        let mut slot = Region::new();
        let head = slot.array::<Head>("head", 1);
        let counts = slot.array::<u32>("counts", vocab);
        slot.add("guard", 256);
        let biases = slot.array::<Bias>("biases", BIASES);
        let mut region = Region::new();
        let mut add = |label: &str, bytes| {
            region.add("guard", 256);
            region.add(label, bytes)
        };
        let facts = add("facts", rows * size_of::<Fact>());
        let sampling = add("sampling", rows * size_of::<Sampling>());
        let logits = add("logits", rows * vocab * self.element.bytes());
        let outcomes = add("outcomes", rows * size_of::<Outcome>());
        let slots = add("slots", slot.bytes() * self.slots.len());
        let bytes = add("end", 0).offset;
        Layout { facts, sampling, logits, outcomes, slots, slot, head, counts, biases, bytes }
    }

    /// Writes everything that is read; the rest stays poison.
    fn fill(&self, arena: &Arena, layout: &Layout) {
        let (base, vocab) = (arena.base(), self.vocab());
        for (index, row) in self.rows.iter().enumerate() {
            let first = index as u32 - row.fact.place;
            let fact = Fact { first, ..row.fact };
            arena.write(layout.facts.at::<Fact>(base).at(index), &[fact]).unwrap();
            if row.fact.place == 0 {
                arena.write(layout.sampling.at::<Sampling>(base).at(index), &[row.options]).unwrap();
            }
            let at = index * vocab;
            match self.element {
                ElementType::F32 => arena.write(layout.logits.at::<f32>(base).at(at), &row.logits).unwrap(),
                ElementType::Bf16 => {
                    let logits: Vec<bf16> = row.logits.iter().map(|x| bf16::narrow(*x)).collect();
                    arena.write(layout.logits.at::<bf16>(base).at(at), &logits).unwrap();
                }
            }
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let base = layout.slots.at::<u8>(base).byte_add(index * layout.slot.bytes());
            let head = Head { last_id: UNTOUCHED, ..Head::zeroed() };
            arena.write(layout.head.at(base), &[head]).unwrap();
            let mut counts = slot.counts.clone();
            counts.resize(vocab, 0);
            arena.write(layout.counts.at(base), &counts).unwrap();
            let biases: Vec<Bias> = slot.biases.iter().map(|&(id, value)| Bias { id, value }).collect();
            arena.write(layout.biases.at(base), &biases).unwrap();
        }
    }

    /// The bytes that a launch may write.
    fn writable(&self, layout: &Layout, covered: Range<usize>, mark: bool) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        for row in covered {
            let fact = self.rows[row].fact;
            let slot = layout.slots.offset + fact.slot as usize * layout.slot.bytes();
            let id = slot + layout.counts.offset + 4 * fact.id as usize;
            if mark || self.kind == Kind::Decode {
                ranges.push(id..id + 4);
            }
            if !mark {
                let outcome = layout.outcomes.offset + row * size_of::<Outcome>();
                ranges.push(outcome..outcome + size_of::<Outcome>());
                let last_id = slot + layout.head.offset + std::mem::offset_of!(Head, last_id);
                ranges.push(last_id..last_id + 4);
            }
        }
        ranges
    }
}

/// Random numbers for tests: the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (self.0 ^ (self.0 >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^ (x >> 33)
    }

    /// From 0 to `end`, exclusive.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// From `low` to `high`.
    pub(crate) fn within(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Logits of an element type, as f32.
    pub(crate) fn logits(&mut self, element: ElementType, count: usize, spread: f32) -> Vec<f32> {
        let draw = |_| element_of(element, self.within(-spread, spread));
        (0..count).map(draw).collect()
    }
}

/// The nearest element, as f32.
pub(crate) fn element_of(element: ElementType, x: f32) -> f32 {
    match element {
        ElementType::F32 => x,
        ElementType::Bf16 => bf16::round(x),
    }
}
