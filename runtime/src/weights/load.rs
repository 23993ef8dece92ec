//! The loading of weights: every byte is read once, on all threads, batch by batch (what is quantised on the way, by whole
//! blocks, which two batches may share).
//!
//! Memory that the host reaches (a host device's, and n-gram tables in pinned memory) is read into in its place.
//! What goes elsewhere passes a ring of two buffers, and is brought to its place while the next batch is read:
//!
//! ```text
//! turn 0   read into A | copy A queued | event A
//! turn 1   read into B | copy B queued | event B        (the device works on A meanwhile)
//! turn 2   wait for event A, then read into A ...
//! ```
//!
//! Matrices that the device reads in tiles are copied to a staging buffer of the device and packed from there;
//! everything else is copied to where it belongs. A host device that is to hold tiles takes this way too.

use graph::staging::DEPTH;
use graph::{Arena, Device, Emission, Ptr, Staging, Stream};
use kernels::launch;
use kernels::numerics::ElementType;
use kernels::tiles;
use kernels::weight::{Format, Matrix, Order};

use super::extract::Extract;
use super::read::{self, Reader, Rows};
use super::{Fill, Loaded, Source, TablePlace, WeightForm, WeightMemory, WeightPlan};
use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// How weights are read.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Bytes of codes or elements that are read at a time, unless a matrix has more whose rows share tiles.
    batch_bytes: usize,
    /// Bytes of them that one thread reads at a time.
    piece_bytes: usize,
    /// Whether a buffer is filled again only after its copy.
    fenced: bool,
}

impl Pace {
    /// Pieces so large that what a read costs by itself does not matter, and enough of them for many threads.
    pub(super) const FULL: Pace = Pace { batch_bytes: 64 << 20, piece_bytes: 1 << 20, fenced: true };
}

impl WeightPlan {
    /// Allocates the memory and reads every weight into it. `progress` is told the bytes read so far, of
    /// all that will be read.
    ///
    /// # Errors
    /// There is no room; a file cannot be read; a code or scale stands for nothing; the device failed. What was
    /// queued has ended by then.
    ///
    /// # Panics
    /// If the device cannot read weights in the plan's order. The host device holds any, for tests of loading.
    pub fn load(
        self,
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loaded, Error> {
        let suits = self.form.order == Order::of(device) || matches!(device, Device::Host(_));
        assert!(suits, "a plan for another kind of device");
        let memory = self.memory(checkpoint, device)?;
        let mut loading = Loading::new(&self, checkpoint, device, &memory, progress)?;
        let read = loading.all(&self, &memory);
        // However that went: what is queued ends before its memory goes.
        let ran = loading.stream.synchronize();
        read?;
        ran?;
        (loading.progress)(loading.done, loading.total);
        Ok(self.loaded(memory.arena, memory.tables))
    }

    /// Allocates the memory and reads nothing into it, for work that is emitted and never runs.
    pub fn allocate(self, checkpoint: &Checkpoint, device: &Device) -> Result<Loaded, Error> {
        let memory = self.memory(checkpoint, device)?;
        Ok(self.loaded(memory.arena, memory.tables))
    }

    /// The memory of all weights, in which nothing is written but where the n-gram tables lie.
    fn memory(&self, checkpoint: &Checkpoint, device: &Device) -> Result<WeightMemory, Error> {
        // What is most likely to be refused comes first.
        let on_files = self.form.table == TablePlace::Mapped;
        let (mapped, copied) = self.tables.split_at(if on_files { self.tables.len() } else { 0 });
        let maps = mapped.iter().map(|table| table.map(checkpoint, device));
        let maps = maps.collect::<Result<Vec<_>, Error>>()?;
        let arena = device.arena("weights", self.region.bytes())?;
        let mut tables = Vec::new();
        for (table, shards) in mapped.iter().zip(maps) {
            let at: Vec<Ptr<u8>> = shards.iter().map(Arena::base).collect();
            let (rows, scales) = at.split_at(table.shards.len());
            table.tell(&arena, rows, scales)?;
            tables.extend(shards);
        }
        for table in copied {
            let (room, to) = table.room(&arena, device)?;
            table.tell_from(&arena, to)?;
            tables.extend(table.span.is_none().then_some(room));
        }
        Ok(WeightMemory { arena, tables })
    }

    /// Size in bytes of the device memory that is needed beside the weights while they are read: the rows of
    /// matrices on their way into the device's order.
    pub fn staging_bytes(&self) -> usize {
        self.largest_batch(self.stacks().filter(|stack| stack.order == Order::Tiles))
    }

    /// Size in bytes of the pinned host memory that is needed while weights are read.
    pub fn ring_bytes(&self) -> usize {
        DEPTH * self.buffer_bytes()
    }

    /// Size of one buffer of the ring.
    fn buffer_bytes(&self) -> usize {
        if self.in_place() {
            return 0;
        }
        let tables = self.tables.iter().filter(|table| table.span.is_some());
        self.largest_batch(self.stacks().chain(tables.map(|table| table.stack(self.form.element))))
    }

    /// Whether weights are read into their place: what is kept in rows is a host device's.
    fn in_place(&self) -> bool {
        self.form.order == Order::Rows
    }

    fn largest_batch<'p>(&self, stacks: impl Iterator<Item = Stack<'p>>) -> usize {
        // The first batch of a stack is its largest.
        let first = |stack: Stack<'_>| stack.batches(self.pace.batch_bytes).next();
        stacks.filter_map(first).map(|batch| batch.bytes()).max().unwrap_or(0)
    }

    /// All that is read but the n-gram tables.
    fn stacks(&self) -> impl Iterator<Item = Stack<'_>> {
        self.sources.iter().filter_map(|source| source.stack(self.form))
    }

    /// All bytes that are read.
    fn read_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        let tables = self.tables.iter().filter(|_| self.form.table != TablePlace::Mapped);
        let shards = tables.flat_map(|table| &table.shards);
        let extracts = self.stacks().flat_map(|stack| stack.extracts).chain(shards);
        extracts.map(|extract| read::bytes(checkpoint, extract)).sum()
    }

    /// Reads about so many bytes at a time, and on each thread: tests have many small batches of small pieces.
    #[doc(hidden)]
    pub fn in_batches(mut self, batch_bytes: usize, piece_bytes: usize) -> WeightPlan {
        self.pace = Pace { batch_bytes, piece_bytes, ..self.pace };
        self
    }

    /// Plants a fault: buffers are filled while their copies are pending.
    #[doc(hidden)]
    pub fn remove_fence(&mut self) {
        self.pace.fenced = false;
    }
}

/// A loading in progress.
struct Loading<'a> {
    checkpoint: &'a Checkpoint,
    pace: Pace,
    ring: Staging,
    stream: Stream,
    /// Where rows are packed from; empty if none are.
    staging: Arena,
    /// What queued work points into.
    keeps: [Arena; 2],
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loading<'a> {
    fn new(
        plan: &WeightPlan,
        checkpoint: &'a Checkpoint,
        device: &Device,
        memory: &WeightMemory,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Loading<'a>, Error> {
        const LABEL: &str = "weights on their way";
        let staging = match plan.staging_bytes() {
            0 => memory.arena.clone(),
            bytes => device.arena(LABEL, bytes)?,
        };
        let mut ring = Staging::new(device, LABEL, plan.buffer_bytes())?;
        if !plan.pace.fenced {
            ring.remove_fence();
        }
        let (stream, keeps) = (device.stream(), [memory.arena.clone(), staging.clone()]);
        let (pace, total) = (plan.pace, plan.read_bytes(checkpoint));
        Ok(Loading { checkpoint, pace, ring, stream, staging, keeps, done: 0, total, progress })
    }

    fn all(&mut self, plan: &WeightPlan, memory: &WeightMemory) -> Result<(), Error> {
        self.tell(0);
        for source in &plan.sources {
            let to = source.span.at(memory.arena.base());
            match (source.stack(plan.form), &source.fill) {
                (Some(stack), _) => self.stack(&stack, &memory.arena, stack.place(to), plan.in_place())?,
                (None, Fill::Bytes(bytes)) => memory.arena.write(to, bytes)?,
                (None, _) => unreachable!("what is no bytes is a stack"),
            }
        }
        for (number, table) in plan.tables.iter().enumerate() {
            let (room, to, in_place) = match (plan.form.table, table.span) {
                (TablePlace::Mapped, _) => continue,
                (_, Some(span)) => (&memory.arena, span.at(memory.arena.base()), plan.in_place()),
                (_, None) => (&memory.tables[number], memory.tables[number].base(), true),
            };
            self.stack(&table.stack(plan.form.element), room, table.place(to), in_place)?;
        }
        Ok(())
    }

    /// Brings a stack to its place in `room`, batch by batch.
    fn stack(
        &mut self,
        stack: &Stack<'_>,
        room: &Arena,
        to: tiles::Place,
        in_place: bool,
    ) -> Result<(), Error> {
        let mut reader = stack.reader(self.checkpoint, self.pace.piece_bytes);
        for batch in stack.batches(self.pace.batch_bytes) {
            let to = to.from(&stack.matrix, stack.order, stack.element.bytes(), batch.first, batch.from);
            let read = match in_place {
                true => room.fill(|all| reader.read(batch.rows_at(to, all, room.base())))??,
                false => self.ring.send(
                    &self.stream,
                    &self.keeps,
                    |buffer| reader.read(batch.rows(buffer)),
                    |from| batch.bring(from, self.staging.base(), to),
                )?,
            };
            self.tell(read);
        }
        Ok(())
    }

    fn tell(&mut self, read: u64) {
        self.done += read;
        // The last byte is told when all are in their place.
        (self.progress)(self.done.min(self.total.saturating_sub(1)), self.total);
    }
}

/// Tensors one after another that become matrices one after another.
pub(super) struct Stack<'p> {
    extracts: &'p [Extract],
    matrix: Matrix,
    count: usize,
    element: ElementType,
    order: Order,
}

impl<'p> Stack<'p> {
    /// A stack that is kept row by row.
    pub(super) fn rows(extracts: &'p [Extract], matrix: Matrix, element: ElementType) -> Stack<'p> {
        Stack { extracts, matrix, count: 1, element, order: Order::Rows }
    }

    fn place(&self, to: Ptr<u8>) -> tiles::Place {
        tiles::Place::new(&self.matrix, self.count, self.order, self.element.bytes(), to)
    }

    fn reader(&self, checkpoint: &'p Checkpoint, piece_bytes: usize) -> Reader<'p> {
        Reader::new(checkpoint, self.extracts, self.element, &self.matrix, piece_bytes)
    }

    fn batches(&self, bytes: usize) -> Batches {
        let numbers = match self.matrix.format {
            Format::Plain => bytes / self.element.bytes(),
            Format::Fp8 => bytes,
            Format::Nvfp4 => 2 * bytes,
        };
        let matrix = self.matrix;
        let run = matrix.run(numbers).min(matrix.outputs);
        let together = match run == matrix.outputs {
            true => (numbers / matrix.elements(Order::Rows)).clamp(1, self.count),
            false => 1,
        };
        let (element, order) = (self.element, self.order);
        Batches { matrix, count: self.count, element, order, run, together, first: 0, from: 0 }
    }
}

impl Source {
    /// What is read for it, if anything is.
    fn stack(&self, form: WeightForm) -> Option<Stack<'_>> {
        let single = |extracts, element: ElementType| {
            Stack::rows(extracts, Matrix::plain(self.span.bytes / element.bytes(), 1), element)
        };
        match &self.fill {
            Fill::Bytes(_) => None,
            Fill::Elements(extracts) => Some(single(extracts, form.element)),
            Fill::Wide(extracts) => Some(single(extracts, ElementType::F32)),
            // Rows that share no tiles are one matrix, however they are used.
            Fill::Matrices { extracts, matrix, count } if form.order == Order::Rows => {
                let all = Matrix { outputs: count * matrix.rows(), groups: 1, ..*matrix };
                Some(Stack::rows(extracts, all, form.element))
            }
            &Fill::Matrices { ref extracts, matrix, count } => {
                Some(Stack { extracts, matrix, count, element: form.element, order: form.order })
            }
        }
    }
}

/// Matrices one after another, batch by batch.
struct Batches {
    matrix: Matrix,
    count: usize,
    element: ElementType,
    order: Order,
    run: usize,
    together: usize,
    first: usize,
    from: usize,
}

impl Iterator for Batches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        if self.first == self.count {
            return None;
        }
        let outputs = self.run.min(self.matrix.outputs - self.from);
        let part = Matrix { outputs, ..self.matrix };
        let count = self.together.min(self.count - self.first);
        let (element, order) = (self.element, self.order);
        let batch = Batch { part, from: self.from, first: self.first, count, element, order };
        self.from += outputs;
        if self.from == self.matrix.outputs {
            self.from = 0;
            self.first += count;
        }
        Some(batch)
    }
}

/// What is read at a time: some matrices, or a run of the outputs of one.
struct Batch {
    /// The matrix, with these outputs only.
    part: Matrix,
    /// Its first output.
    from: usize,
    /// The first matrix.
    first: usize,
    /// How many.
    count: usize,
    element: ElementType,
    /// The order in which they will lie.
    order: Order,
}

impl Batch {
    /// Size of its rows.
    fn bytes(&self) -> usize {
        self.part.bytes(self.count, Order::Rows, self.element.bytes())
    }

    /// Room for its rows at the start of `buffer`.
    fn rows<'b>(&self, buffer: &'b mut [u8]) -> Rows<'b> {
        let bytes = self.element.bytes();
        let (parts, _) = self.part.parts(self.count, Order::Rows, bytes);
        let one = self.part.sizes(Order::Rows, bytes);
        let (codes, rest) = buffer.split_at_mut(parts.scales);
        let (scales, globals) = rest.split_at_mut(parts.globals - parts.scales);
        Rows {
            codes: &mut codes[..self.count * one.codes],
            scales: &mut scales[..self.count * one.scales],
            globals: &mut globals[..self.count * one.globals],
        }
    }

    /// Room for its rows at their place, in memory that begins at `base`. Parts lie in order; what has no place has no
    /// room.
    fn rows_at<'b>(&self, to: tiles::Place, mut memory: &'b mut [u8], base: Ptr<u8>) -> Rows<'b> {
        let (one, mut at) = (self.part.sizes(Order::Rows, self.element.bytes()), base.address());
        let mut part = |to: Ptr<u8>, bytes: usize| -> &'b mut [u8] {
            if to.is_null() {
                return &mut [];
            }
            let (skipped, bytes) = ((to.address() - at) as usize, self.count * bytes);
            at = to.address() + bytes as u64;
            let (_, rest) = std::mem::take(&mut memory).split_at_mut(skipped);
            let (room, rest) = rest.split_at_mut(bytes);
            memory = rest;
            room
        };
        Rows {
            codes: part(to.codes, one.codes),
            scales: part(to.scales, one.scales),
            globals: part(to.globals, one.globals),
        }
    }

    /// The work that brings its rows from a buffer to their place, through `staging` if they are packed. A part
    /// that has no place stays behind.
    fn bring(&self, buffer: Ptr<u8>, staging: Ptr<u8>, to: tiles::Place) -> Result<Emission, Error> {
        let bytes = self.element.bytes();
        let at = |base| tiles::Place::new(&self.part, self.count, Order::Rows, bytes, base);
        let mut emission = Emission::new();
        match self.order {
            Order::Rows => {
                let (from, one) = (at(buffer), self.part.sizes(Order::Rows, bytes));
                for (to, from, bytes) in [
                    (to.codes, from.codes, one.codes),
                    (to.scales, from.scales, one.scales),
                    (to.globals, from.globals, one.globals),
                ] {
                    if !to.is_null() {
                        emission.copy(to, from, self.count * bytes);
                    }
                }
            }
            Order::Tiles => {
                emission.copy(staging, buffer, self.bytes());
                let args = tiles::Args::new(&self.part, self.count, at(staging), to);
                launch!(emission, self.element, [self.part.format], tiles::Pack, &args)?;
            }
        }
        Ok(emission)
    }
}
