//! The loading of weights: every byte is read once and brought to its place.

use graph::{Arena, Device, Emission, Ptr, Stream};
use kernels::launch;
use kernels::numerics::ElementType;
use kernels::tiles;
use kernels::weight::{Matrix, Order};

use super::read::{Reader, Rows};
use super::{Fill, Loaded, TablePlace, WeightPlan};
use crate::checkpoint::Checkpoint;
use crate::error::Error;

impl WeightPlan {
    /// Size in bytes of what is needed beside the weights while they are read: the rows of a matrix on their way
    /// into the device's order.
    pub fn staging_bytes(&self) -> usize {
        if self.form.order == Order::Rows {
            return 0;
        }
        let batches = self.sources.iter().filter_map(|source| match &source.fill {
            Fill::Matrices { matrix, count, .. } => Some(self.batch_bytes(matrix, *count)),
            _ => None,
        });
        batches.max().unwrap_or(0)
    }

    /// Size in bytes of what is read of matrices at a time.
    fn batch_bytes(&self, matrix: &Matrix, count: usize) -> usize {
        let batch = Batches::new(*matrix, count, self.form.order).next().expect("there are matrices");
        batch.part.bytes(batch.count, Order::Rows, self.form.element.bytes())
    }

    /// Allocates the memory and reads every weight into it. `progress` is told the bytes read so far, of
    /// all that will be read.
    pub fn load(
        self,
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loaded, Error> {
        assert_eq!(self.form.order, Order::of(device), "a plan for another kind of device");
        // What is most likely to be refused comes before the long reading.
        let on_files = self.form.table == TablePlace::Mapped;
        let (mapped, copied) = self.tables.split_at(if on_files { self.tables.len() } else { 0 });
        let maps = mapped.iter().map(|table| table.map(checkpoint, device));
        let maps = maps.collect::<Result<Vec<_>, Error>>()?;
        let arena = device.arena("weights", self.region.bytes())?;
        let staging = match self.staging_bytes() {
            0 => None,
            bytes => Some((device.arena("weights on their way", bytes)?, device.stream())),
        };
        let specs = self.sources.iter().flat_map(|source| source.fill.specs());
        let specs = specs.chain(copied.iter().flat_map(|table| &table.shards));
        let total = specs.map(|spec| checkpoint.expect(spec).bytes()).sum();
        let mut done = 0;
        let mut told = |bytes| {
            done += bytes;
            progress(done, total);
        };
        for source in &self.sources {
            let to = source.span.at::<u8>(arena.base());
            let element = match source.fill {
                Fill::Wide(_) => ElementType::F32,
                _ => self.form.element,
            };
            let mut reader = Reader::new(checkpoint, source.fill.specs(), element);
            match &source.fill {
                Fill::Bytes(bytes) => arena.write(to, bytes)?,
                Fill::Elements(_) | Fill::Wide(_) => {
                    copy(source.span.bytes, &mut |run, from| {
                        reader.elements(run, &mut told)?;
                        Ok(arena.write(to.byte_add(from), run)?)
                    })?;
                }
                Fill::Matrices { matrix, count, .. } => {
                    let mut loading = Loading {
                        reader,
                        staging: staging.as_ref(),
                        arena: &arena,
                        to,
                        element,
                        rows: Vec::new(),
                    };
                    for batch in Batches::new(*matrix, *count, self.form.order) {
                        loading.batch(&batch, *count, matrix, &mut told)?;
                    }
                }
            }
        }
        let mut tables = Vec::new();
        for (table, shards) in mapped.iter().zip(maps) {
            let at: Vec<Ptr<u8>> = shards.iter().map(Arena::base).collect();
            let (rows, scales) = at.split_at(table.shards.len());
            table.tell(&arena, rows, scales)?;
            tables.extend(shards);
        }
        for table in copied {
            let (room, to) = table.room(&arena, device)?;
            table.copy(checkpoint, &room, to, self.form.element, &mut told)?;
            table.tell_from(&arena, to)?;
            tables.extend(table.span.is_none().then_some(room));
        }
        Ok(self.loaded(arena, tables))
    }
}

/// Bytes copied at a time.
pub(super) const COPIED_BYTES: usize = 4 << 20;

/// Copies so many bytes run by run: `each` fills a run and takes it where it belongs, from that byte on.
pub(super) fn copy(
    bytes: usize,
    each: &mut dyn FnMut(&mut [u8], usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut buffer = vec![0; bytes.min(COPIED_BYTES)];
    (0..bytes)
        .step_by(COPIED_BYTES)
        .try_for_each(|from| each(&mut buffer[..COPIED_BYTES.min(bytes - from)], from))
}

/// Numbers of matrices that are read and packed at a time, unless a matrix has more whose rows share tiles.
const BATCH_NUMBERS: usize = 16 << 20;

/// What is read of matrices at a time: some of them, or a run of the outputs of one.
struct Batch {
    /// The matrix, with these outputs only.
    part: Matrix,
    /// Its first output.
    from: usize,
    /// The first matrix.
    first: usize,
    /// How many.
    count: usize,
}

/// Matrices one after another, batch by batch.
struct Batches {
    matrix: Matrix,
    count: usize,
    run: usize,
    together: usize,
    first: usize,
    from: usize,
}

impl Batches {
    fn new(matrix: Matrix, count: usize, order: Order) -> Batches {
        // Rows that share no tiles can be told apart.
        let matrix = match order {
            Order::Rows => Matrix { outputs: matrix.rows(), groups: 1, ..matrix },
            Order::Tiles => matrix,
        };
        let run = matrix.run(BATCH_NUMBERS).min(matrix.outputs);
        let together = match run == matrix.outputs {
            true => (BATCH_NUMBERS / matrix.elements(Order::Rows)).clamp(1, count),
            false => 1,
        };
        Batches { matrix, count, run, together, first: 0, from: 0 }
    }
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
        let batch = Batch { part, from: self.from, first: self.first, count };
        self.from += outputs;
        if self.from == self.matrix.outputs {
            self.from = 0;
            self.first += count;
        }
        Some(batch)
    }
}

/// Matrices on their way into memory, in the device's order.
struct Loading<'a> {
    reader: Reader<'a>,
    /// Where rows are packed from, if they are packed.
    staging: Option<&'a (Arena, Stream)>,
    arena: &'a Arena,
    to: Ptr<u8>,
    element: ElementType,
    /// Rows of a batch, part by part.
    rows: Vec<u8>,
}

impl Loading<'_> {
    fn batch(
        &mut self,
        batch: &Batch,
        count: usize,
        whole: &Matrix,
        told: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let (part, bytes) = (batch.part, self.element.bytes());
        let (parts, size) = part.parts(batch.count, Order::Rows, bytes);
        self.rows.resize(size, 0);
        let (codes, rest) = self.rows.split_at_mut(parts.scales);
        let (scales, globals) = rest.split_at_mut(parts.globals - parts.scales);
        let one = part.sizes(Order::Rows, bytes);
        let rows = Rows {
            codes: &mut codes[..batch.count * one.codes],
            scales: &mut scales[..batch.count * one.scales],
            globals: &mut globals[..batch.count * one.globals],
        };
        self.reader.rows(part.format, part.columns, rows, told)?;
        let order = if self.staging.is_some() { Order::Tiles } else { Order::Rows };
        let all = if self.staging.is_some() {
            *whole
        } else {
            Matrix { outputs: whole.rows(), groups: 1, ..*whole }
        };
        let to = tiles::Place::new(&all, count, order, bytes, self.to);
        let to = to.from(&all, order, bytes, batch.first, batch.from);
        let Some((staging, stream)) = self.staging else {
            self.arena.write(to.codes, &self.rows[..batch.count * one.codes])?;
            for (to, from, bytes) in
                [(to.scales, parts.scales, one.scales), (to.globals, parts.globals, one.globals)]
            {
                if bytes > 0 {
                    self.arena.write(to, &self.rows[from..][..batch.count * bytes])?;
                }
            }
            return Ok(());
        };
        staging.write(staging.base(), &self.rows)?;
        let from = tiles::Place::new(&part, batch.count, Order::Rows, bytes, staging.base());
        let mut emission = Emission::new();
        let args = tiles::Args::new(&part, batch.count, from, to);
        launch!(emission, self.element, [part.format], tiles::Pack, &args)?;
        stream.run(emission, &[staging.clone(), self.arena.clone()])?;
        Ok(stream.synchronize()?)
    }
}
