//! One layer of sparse attention with slots and pages, run round by round: what the tests of its kernels
//! share. Activations of a slot are drawn once, by position, so that any split into rounds sees the same.

use std::ops::Range;

use graph::Ptr;
use kernels::attend::parts::{self, AttendJoin, AttendPart};
use kernels::attend::{self, Attend};
use kernels::heads::{self, Heads, Projection};
use kernels::index::split::{self, IndexScore, IndexTop};
use kernels::index::{IndexPool, IndexSelect, PoolArgs, SelectArgs};
use kernels::numerics::Element;
use kernels::rope::{Rotary, frequencies};
use kernels::state::{Pages, Part, RowRange};
use kernels::table::{Fact, PAGE};
use tests::check::{Draw, Scene, poisoned};

use crate::ops::formula::Rope;

pub(crate) const EPS: f32 = 1e-6;

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) width: usize,
    pub(crate) index_heads: usize,
    pub(crate) index_width: usize,
    pub(crate) ratio: usize,
    pub(crate) top: usize,
    pub(crate) half: usize,
    pub(crate) slots: usize,
    pub(crate) positions: usize,
}

/// Odd widths, three axes, sixteen positions of budget.
pub(crate) const SMALL: Shape = Shape {
    q_heads: 6,
    kv_heads: 2,
    width: 36,
    index_heads: 3,
    index_width: 20,
    ratio: 4,
    top: 4,
    half: 9,
    slots: 3,
    positions: 200,
};

pub(crate) struct Layer<E> {
    pub(crate) shape: Shape,
    pub(crate) scene: Scene,
    pub(crate) rope: Rope,
    pub(crate) gains: [Vec<E>; 4],
    /// Per slot, `[positions, stride]`.
    pub(crate) x: Vec<Vec<E>>,
    /// Per slot and position.
    pub(crate) axes: Vec<Vec<[i32; 3]>>,
    pub(crate) pages: Pages,
    pool: Ptr<u8>,
    pool_bytes: usize,
    pub(crate) ring: Part,
    axes_part: Part,
    rotary: Rotary,
    gain_at: [Ptr<u8>; 4],
    permanent: usize,
}

/// What a round left in its buffers: one entry per covered row.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Round<E> {
    pub(crate) rows: Vec<(usize, usize)>,
    pub(crate) q: Vec<Vec<E>>,
    pub(crate) iq: Vec<Vec<E>>,
    pub(crate) chosen: Vec<Vec<u32>>,
    pub(crate) out: Vec<Vec<E>>,
    /// What the launches of decode rounds make of the same rows.
    pub(crate) joined: Vec<Vec<E>>,
}

/// Rows of the round before the covered ones: no kernel may read or write them.
const LEAD: usize = 3;

impl<E: Element> Layer<E> {
    pub(crate) fn new(shape: Shape, seed: u64) -> Layer<E> {
        let mut draw = Draw::new(seed);
        let mut scene = Scene::new();
        let stride = stride(shape);
        let x = (0..shape.slots).map(|_| draw.elements(shape.positions * stride, 1.5)).collect();
        // A text, a picture whose rows share a time, a text again.
        let axes = |slot: usize| {
            let axis = move |p: usize| match p {
                20..36 => [20, 20 + (p as i32 - 20) / 4, 20 + (p as i32 - 20) % 4],
                _ => [p as i32 + slot as i32; 3],
            };
            (0..shape.positions).map(axis).collect()
        };
        let rope = Rope {
            frequencies: frequencies(1e4, 2 * shape.half),
            sections: [shape.half - 2 * (shape.half / 3), shape.half / 3, shape.half / 3],
        };
        let gains: [Vec<E>; 4] = [shape.width, shape.width, shape.index_width, shape.index_width]
            .map(|width| draw.elements(width, 0.5));
        let gain_at = gains.each_ref().map(|gain| scene.input("gain", gain).cast());

        let capacity = shape.positions.div_ceil(PAGE);
        let page_count = shape.slots * capacity + 1;
        let mut pages = Pages {
            base: Ptr::NULL,
            stride: 0,
            tables: Part { base: Ptr::NULL, stride: 0 },
            capacity: capacity as u32,
            pages: page_count as u32,
            kv_heads: shape.kv_heads as u32,
            width: shape.width as u32,
            ratio: shape.ratio as u32,
            index_width: shape.index_width as u32,
        };
        let layer_bytes = pages.layer_bytes(size_of::<E>());
        pages.stride = (layer_bytes + 64) as u64;
        let pool_bytes = pages.stride as usize * page_count;
        let pool = scene.output::<E>("pool", pool_bytes / size_of::<E>()).cast();
        pages.base = pool;
        // Pages are handed out backwards and alternate between slots; page 0 belongs to nobody.
        let page = |slot: usize, index: usize| (page_count - 1 - index * shape.slots - slot) as u32;
        let tables: Vec<u32> =
            (0..shape.slots).flat_map(|slot| (0..capacity).map(move |index| page(slot, index))).collect();
        pages.tables = Part { base: scene.input("page tables", &tables).cast(), stride: 4 * capacity as u64 };
        let keys = PAGE * shape.index_width;
        let ring = Part {
            base: scene.output::<E>("index keys", shape.slots * keys).cast(),
            stride: (keys * size_of::<E>()) as u64,
        };
        let axes_bytes = PAGE * size_of::<[i32; 3]>();
        let axes_part =
            Part { base: scene.output::<u8>("axes", shape.slots * axes_bytes), stride: axes_bytes as u64 };
        let rotary = Rotary {
            frequencies: scene.input("frequencies", &rope.frequencies),
            half: shape.half as u32,
            height: rope.sections[1] as u32,
            width: rope.sections[2] as u32,
            zero: 0,
        };
        let axes = (0..shape.slots).map(axes).collect();
        let permanent = scene.buffers();
        Layer {
            shape,
            scene,
            rope,
            gains,
            x,
            axes,
            pages,
            pool,
            pool_bytes,
            ring,
            axes_part,
            rotary,
            gain_at,
            permanent,
        }
    }

    /// Row `position` of a slot's projection.
    pub(crate) fn row(&self, slot: usize, position: usize) -> &[E] {
        &self.x[slot][position * stride(self.shape)..][..stride(self.shape)]
    }

    pub(crate) fn row_mut(&mut self, slot: usize, position: usize) -> &mut [E] {
        &mut self.x[slot][position * stride(self.shape)..][..stride(self.shape)]
    }

    /// Runs all kernels of the layer over pieces of slots.
    pub(crate) fn round(&mut self, pieces: &[(usize, Range<usize>)]) -> Round<E> {
        let shape = self.shape;
        let stride = stride(shape);
        let nan = Fact { slot: u32::MAX, place: u32::MAX, position: u32::MAX, ..Fact::default() };
        let (mut facts, mut x) = (vec![nan; LEAD], vec![E::narrow(f32::NAN); LEAD * stride]);
        let mut covered = Vec::new();
        for (slot, positions) in pieces {
            let first = facts.len() as u32;
            for (place, position) in positions.clone().enumerate() {
                facts.push(Fact {
                    slot: *slot as u32,
                    place: place as u32,
                    first,
                    count: positions.len() as u32,
                    position: position as u32,
                    axes: self.axes[*slot][position],
                    ..Fact::default()
                });
                x.extend(self.row(*slot, position));
                covered.push((*slot, position));
            }
        }
        let count = covered.len();
        let rows =
            RowRange { facts: self.scene.input("facts", &facts), first: LEAD as u32, count: count as u32 };
        let projection = Projection {
            base: self.scene.input("x", &x).cast(),
            stride: stride as u32,
            q_heads: shape.q_heads as u32,
            index_heads: shape.index_heads as u32,
            zero: 0,
        };
        let q_width = shape.q_heads * shape.width;
        let iq_width = shape.index_heads * shape.index_width;
        let q = self.scene.output::<E>("q", (LEAD + count) * q_width);
        let iq = self.scene.output::<E>("iq", (LEAD + count) * iq_width);
        let chosen = self.scene.output::<u32>("chosen", (LEAD + count) * shape.top);
        let out = self.scene.output::<E>("out", (LEAD + count) * q_width);
        let (pages, rotary, ring, axes) = (self.pages, self.rotary, self.ring, self.axes_part);
        let [q_gain, k_gain, iq_gain, gain] = self.gain_at;
        let (eps, zero, top) = (EPS, 0, shape.top as u32);
        let before = self.scene.read(self.pool, self.pool_bytes);
        self.scene.run::<Heads<E>>(&heads::Args {
            rows,
            projection,
            q_gain,
            k_gain,
            iq_gain,
            q: q.cast(),
            iq: iq.cast(),
            pages,
            rotary,
            eps,
            zero,
        });
        self.scene.run::<IndexPool<E>>(&PoolArgs {
            rows,
            projection,
            gain,
            ring,
            axes,
            pages,
            rotary,
            eps,
            zero,
        });
        let iq8 = iq.cast();
        self.scene.run::<IndexSelect<E>>(&SelectArgs {
            rows,
            projection,
            iq: iq8,
            chosen,
            ring,
            pages,
            top,
            zero,
        });
        let (q8, out8) = (q.cast(), out.cast());
        let args = attend::Args { rows, projection, q: q8, chosen, pages, out: out8, top, zero };
        self.scene.run::<Attend<E>>(&args);

        let room = split::room(pages.capacity as usize, shape.ratio) + 3;
        let spans = shape.q_heads * parts::spans(shape.ratio, shape.top);
        let all = LEAD + count;
        let scores = self.scene.output::<f32>("scores", all * room);
        let top_chosen = self.scene.output::<u32>("chosen by scores", all * shape.top);
        let sums = self.scene.output::<f32>("span sums", all * spans * shape.width);
        let marks = self.scene.output::<f32>("span marks", all * spans * 2);
        let joined = self.scene.output::<E>("joined", all * q_width);
        let (room, heads) = (room as u32, shape.index_heads as u32);
        let args = split::ScoreArgs { rows, iq: iq8, scores, pages, heads, top, room, zero };
        self.scene.run::<IndexScore<E>>(&args);
        let args = split::TopArgs { rows, projection, scores, chosen: top_chosen, ring, pages, top, room };
        self.scene.run::<IndexTop<E>>(&args);
        let args = parts::PartArgs { rows, projection, q: q8, chosen, pages, sums, marks, top, zero };
        self.scene.run::<AttendPart<E>>(&args);
        let args = parts::JoinArgs { rows, projection, sums, marks, pages, out: joined.cast(), top, zero };
        self.scene.run::<AttendJoin<E>>(&args);
        self.check_pool(&before, pieces);

        let read_rows = |ptr: Ptr<E>, width: usize| self.rows_of(ptr, width, count);
        let chosen = self.rows_of(chosen, shape.top, count);
        assert_eq!(chosen, self.rows_of(top_chosen, shape.top, count), "the two ways to choose");
        let round = Round {
            q: read_rows(q, q_width),
            iq: read_rows(iq, iq_width),
            chosen,
            out: read_rows(out, q_width),
            joined: read_rows(joined, q_width),
            rows: covered,
        };
        // What the host would do at the end of a round: the rotary positions become history.
        for (slot, positions) in pieces {
            for position in positions.clone() {
                let at = self.axes_part.slot::<[i32; 3]>(*slot as u32).at(position % PAGE);
                self.scene.write(at, &[self.axes[*slot][position]]);
            }
        }
        self.scene.truncate(self.permanent);
        round
    }

    fn rows_of<T: bytemuck::Pod>(&self, ptr: Ptr<T>, width: usize, count: usize) -> Vec<Vec<T>> {
        let all = self.scene.read(ptr, (LEAD + count) * width);
        poisoned("rows that are not covered", &all[..LEAD * width]);
        all[LEAD * width..].chunks_exact(width).map(<[T]>::to_vec).collect()
    }

    /// Keys, values and pooled keys changed only where the pieces say.
    fn check_pool(&self, before: &[u8], pieces: &[(usize, Range<usize>)]) {
        let after = self.scene.read(self.pool, self.pool_bytes);
        let mut may = vec![false; after.len()];
        let mut allow = |at: Ptr<E>, count: usize| {
            let from = (at.address() - self.pool.address()) as usize;
            may[from..from + count * size_of::<E>()].fill(true);
        };
        for (slot, positions) in pieces {
            for position in positions.clone() {
                allow(self.key_at(*slot, position), self.kv_width());
                allow(self.value_at(*slot, position), self.kv_width());
                if (position + 1) % self.shape.ratio == 0 {
                    allow(self.pooled_at(*slot, position / self.shape.ratio), self.shape.index_width);
                }
            }
        }
        let changed = before.iter().zip(&after).zip(&may).position(|((a, b), may)| a != b && !may);
        assert_eq!(changed, None, "a byte of the pool changed that belongs to no covered row");
    }

    fn kv_width(&self) -> usize {
        self.shape.kv_heads * self.shape.width
    }

    fn page(&self, slot: usize, position: usize) -> u32 {
        self.scene.read(self.pages.tables.slot::<u32>(slot as u32).at(position / PAGE), 1)[0]
    }

    fn key_at(&self, slot: usize, position: usize) -> Ptr<E> {
        self.pages.keys::<E>(self.page(slot, position)).at(position % PAGE * self.kv_width())
    }

    fn value_at(&self, slot: usize, position: usize) -> Ptr<E> {
        self.pages.values::<E>(self.page(slot, position)).at(position % PAGE * self.kv_width())
    }

    fn pooled_at(&self, slot: usize, block: usize) -> Ptr<E> {
        let position = block * self.shape.ratio;
        let at = position % PAGE / self.shape.ratio * self.shape.index_width;
        self.pages.pooled::<E>(self.page(slot, position)).at(at)
    }

    /// The stored keys of a position.
    pub(crate) fn keys(&self, slot: usize, position: usize) -> Vec<E> {
        self.scene.read(self.key_at(slot, position), self.kv_width())
    }

    /// The stored values of a position.
    pub(crate) fn values(&self, slot: usize, position: usize) -> Vec<E> {
        self.scene.read(self.value_at(slot, position), self.kv_width())
    }

    /// The pooled key of a block.
    pub(crate) fn pooled(&self, slot: usize, block: usize) -> Vec<E> {
        self.scene.read(self.pooled_at(slot, block), self.shape.index_width)
    }

    /// The raw index keys that a slot keeps.
    pub(crate) fn kept(&self, slot: usize) -> Vec<E> {
        self.scene.read(self.ring.slot(slot as u32), PAGE * self.shape.index_width)
    }

    /// Every byte that outlives a round.
    pub(crate) fn state(&self) -> (Vec<u8>, Vec<u8>) {
        let ring_bytes = self.shape.slots * self.ring.stride as usize;
        (self.scene.read(self.pool, self.pool_bytes), self.scene.read(self.ring.base, ring_bytes))
    }

    /// Elements of a row before the raw index key.
    pub(crate) fn index_key_at(&self) -> usize {
        index_key_at(self.shape)
    }
}

fn index_key_at(shape: Shape) -> usize {
    2 * (shape.q_heads + shape.kv_heads) * shape.width + shape.index_heads * shape.index_width
}

/// Elements of a row: five more than it needs.
fn stride(shape: Shape) -> usize {
    index_key_at(shape) + shape.index_width + 5
}
