//! The work of a conversion: rows are read, become numbers, and are written in their new form, by many threads at once.
//!
//! A unit that has one number for all its matrices is looked through twice: for its largest magnitude, and to be
//! written. Small units are one task; large ones are many, so memory holds a few million numbers for each thread.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use half::bf16;
use kernels::quant::{self, fp8, nvfp4};
use kernels::weight::{BLOCK, GROUP};

use super::Purpose;
use super::origin::{Origin, Rows};
use super::plan::{Copied, Matrix, Plan, Unit};
use super::writer::Writer;
use crate::checkpoint::Dtype;
use crate::checkpoint::layout::{Format, Stored};
use crate::error::Error;

/// Numbers of a task, about: those of a few experts.
const TASK: usize = 4 << 20;

/// How far what was written is from what was read, over all numbers that changed their form.
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    /// Sum of the squares of all differences.
    error: f64,
    /// Sum of the squares of what was read.
    square: f64,
    /// Whether there are such numbers.
    any: bool,
}

impl Tally {
    fn of(read: &[f32], written: &[f32]) -> Tally {
        let square = |value: f32| f64::from(value) * f64::from(value);
        let errors = read.iter().zip(written).map(|(read, written)| square(written - read));
        Tally { error: errors.sum(), square: read.iter().copied().map(square).sum(), any: true }
    }

    fn add(&mut self, other: Tally) {
        self.error += other.error;
        self.square += other.square;
        self.any |= other.any;
    }

    /// Root of the mean square of the differences over that of what was read; nothing if no number changed its form.
    pub(super) fn relative(&self) -> Option<f64> {
        match self.square > 0.0 {
            true => Some((self.error / self.square).sqrt()),
            false => self.any.then_some(0.0),
        }
    }
}

/// Writes every tensor of a plan. `progress` is told the bytes read, of all that will be read.
pub(super) fn run(
    origin: &Origin,
    plan: &Plan<'_>,
    writer: &Writer,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<[Tally; Purpose::ALL.len()], Error> {
    let worker = Worker { origin, writer };
    let (looks, tasks) = worker.tasks(plan);
    let looking: u64 = looks.iter().map(|part| worker.read(part) / 2).sum();
    let total = looking + tasks.iter().map(|task| worker.cost(task)).sum::<u64>();
    let mut done = 0;
    progress(done, total);

    let sizes = spread(&looks, |part| worker.largest(part), &mut |part| {
        done += worker.read(part) / 2;
        progress(done, total);
    })?;
    let mut numbers = vec![0.0f32; plan.units.len()];
    for (part, size) in looks.iter().zip(sizes) {
        numbers[part.number] = numbers[part.number].max(size);
    }
    for (unit, number) in plan.units.iter().zip(&mut numbers).filter(|(unit, _)| worker.looks(unit)) {
        *number = worker.number(unit, *number)?;
    }
    let tallies = spread(&tasks, |task| worker.task(task, &numbers), &mut |task| {
        done += worker.cost(task);
        progress(done, total);
    })?;
    let mut all = [Tally::default(); Purpose::ALL.len()];
    for (task, tally) in tasks.iter().zip(tallies) {
        if let Task::Unit(unit) | Task::Part(Part { unit, .. }) = task {
            all[unit.purpose as usize].add(tally);
        }
    }
    Ok(all)
}

/// What a thread does at a time.
enum Task<'p, 'a> {
    /// Bytes of a tensor, as they are.
    Copy { copied: &'p Copied<'a>, from: usize, bytes: usize },
    /// All of a small unit.
    Unit(&'p Unit<'a>),
    /// Rows of a large one.
    Part(Part<'p, 'a>),
}

/// Rows of a unit.
struct Part<'p, 'a> {
    unit: &'p Unit<'a>,
    /// The number of the unit.
    number: usize,
    matrix: &'p Matrix<'a>,
    first: usize,
    count: usize,
}

struct Worker<'w> {
    origin: &'w Origin,
    writer: &'w Writer,
}

impl Worker<'_> {
    /// What is looked at for the numbers of large units, and all that is written.
    fn tasks<'p, 'a>(&self, plan: &'p Plan<'a>) -> (Vec<Part<'p, 'a>>, Vec<Task<'p, 'a>>) {
        let (mut looks, mut tasks) = (Vec::new(), Vec::new());
        for copied in &plan.copies {
            let bytes = |from: usize| (copied.bytes - from).min(4 * TASK);
            let starts = (0..copied.bytes).step_by(4 * TASK);
            tasks.extend(starts.map(|from| Task::Copy { copied, from, bytes: bytes(from) }));
        }
        for (number, unit) in plan.units.iter().enumerate() {
            if is_large(unit) {
                looks.extend(parts(unit, number).filter(|_| self.looks(unit)));
                tasks.extend(parts(unit, number).map(Task::Part));
            } else {
                tasks.push(Task::Unit(unit));
            }
        }
        (looks, tasks)
    }

    /// Whether a unit's number is known only when every part of it was looked at.
    fn looks(&self, unit: &Unit<'_>) -> bool {
        is_large(unit) && has_number(unit) && !is_renamed(unit)
    }

    /// Bytes of some rows as they are read.
    fn read(&self, part: &Part<'_, '_>) -> u64 {
        let bits = match part.matrix.source.spec.stored {
            Stored::Nvfp4 { .. } => 4,
            _ => self.origin.dtype(part.matrix.source.spec).bitsize(),
        };
        (part.rows().numbers() * bits / 8) as u64
    }

    /// What a task adds to the bytes that are read; of what is looked at before, half was.
    fn cost(&self, task: &Task<'_, '_>) -> u64 {
        match task {
            Task::Copy { bytes, .. } => *bytes as u64,
            Task::Unit(unit) => parts(unit, 0).map(|part| self.read(&part)).sum(),
            Task::Part(part) if self.looks(part.unit) => self.read(part) - self.read(part) / 2,
            Task::Part(part) => self.read(part),
        }
    }

    fn task(&self, task: &Task<'_, '_>, numbers: &[f32]) -> Result<Tally, Error> {
        match task {
            Task::Copy { copied, from, bytes } => {
                self.writer.write(copied.to, *from, &self.origin.bytes(copied.name, *from, *bytes)?)?;
                Ok(Tally::default())
            }
            Task::Part(part) => self.part(part, numbers[part.number]),
            Task::Unit(unit) => {
                let mut size = 0.0f32;
                if has_number(unit) && !is_renamed(unit) {
                    for part in parts(unit, 0) {
                        size = size.max(self.largest(&part)?);
                    }
                }
                let number = self.number(unit, size)?;
                let mut all = Tally::default();
                for part in parts(unit, 0) {
                    all.add(self.part(&part, number)?);
                }
                Ok(all)
            }
        }
    }

    fn largest(&self, part: &Part<'_, '_>) -> Result<f32, Error> {
        Ok(quant::largest(&self.origin.numbers(&part.rows())?))
    }

    /// The number of a unit whose largest magnitude is `size`, which is written too.
    fn number(&self, unit: &Unit<'_>, size: f32) -> Result<f32, Error> {
        let made = match unit.format {
            Format::Nvfp4 => nvfp4::global(&[size]),
            _ => fp8::Scale::Bf16.of(size),
        };
        for (to, matrix) in unit.numbers.iter().zip(&unit.matrices) {
            let number = if is_renamed(unit) { self.origin.global(matrix.source.spec)? } else { made };
            match unit.format {
                Format::Nvfp4 => self.writer.write(*to, 0, &number.to_le_bytes())?,
                _ => self.writer.write(*to, 0, &bf16::from_f32(number).to_le_bytes())?,
            }
        }
        Ok(made)
    }

    /// Converts and writes some rows of a unit, whose number is given.
    fn part(&self, part: &Part<'_, '_>, number: f32) -> Result<Tally, Error> {
        let &Part { unit, matrix, first, .. } = part;
        let (rows, columns) = (part.rows(), matrix.columns);
        let (at, numbers) = (matrix.first + first * columns, rows.numbers());
        if is_renamed(unit) {
            let codes = self.origin.bytes(&rows.spec.name, at / 2, numbers / 2)?;
            let scales = self.origin.scales(rows.spec, at, numbers)?;
            self.writer.write(matrix.to, at / 2, &codes)?;
            self.scales(matrix, at / GROUP, &scales)?;
            return Ok(Tally::default());
        }
        if unit.format == Format::Bf16 && self.origin.dtype(rows.spec) == Dtype::BF16 {
            let bytes = self.origin.bytes(&rows.spec.name, rows.from() * 2, numbers * 2)?;
            self.writer.write(matrix.to, at * 2, &bytes)?;
            return Ok(Tally::default());
        }
        let values = self.origin.numbers(&rows)?;
        let written = match unit.format {
            Format::Nvfp4 => {
                let groups = nvfp4::quantise_under(&values, columns, number);
                self.writer.write(matrix.to, at / 2, &groups.codes)?;
                self.scales(matrix, at / GROUP, &groups.scales)?;
                nvfp4::dequantise(&groups)
            }
            Format::Fp8 => {
                let blocks = fp8::quantise(&values, columns, fp8::Scale::Bf16);
                self.writer.write(matrix.to, at, &blocks.codes)?;
                let scales = blocks.scales.iter().flat_map(|scale| bf16::from_f32(*scale).to_le_bytes());
                let row = columns.div_ceil(BLOCK) * size_of::<bf16>();
                self.scales(matrix, first / BLOCK * row, &scales.collect::<Vec<u8>>())?;
                fp8::dequantise(&blocks, columns)
            }
            Format::Fp8Tensor => {
                let codes: Vec<u8> = values.iter().map(|value| fp8::encode(value / number)).collect();
                self.writer.write(matrix.to, at, &codes)?;
                codes.into_iter().map(|code| fp8::decode(code) * number).collect()
            }
            Format::Bf16 | Format::F32 => {
                let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
                let bytes: Vec<u8> = narrow.iter().flat_map(|value| value.to_le_bytes()).collect();
                self.writer.write(matrix.to, at * size_of::<bf16>(), &bytes)?;
                narrow.into_iter().map(bf16::to_f32).collect()
            }
        };
        Ok(Tally::of(&values, &written))
    }

    fn scales(&self, matrix: &Matrix<'_>, from: usize, bytes: &[u8]) -> Result<(), Error> {
        self.writer.write(matrix.scales.expect("the format has scales"), from, bytes)
    }
}

impl Part<'_, '_> {
    fn rows(&self) -> Rows<'_> {
        self.matrix.rows(self.first, self.count)
    }
}

/// All rows of a unit, in runs of whole blocks.
fn parts<'p, 'a>(unit: &'p Unit<'a>, number: usize) -> impl Iterator<Item = Part<'p, 'a>> {
    unit.matrices.iter().flat_map(move |matrix| {
        let step = (TASK / matrix.columns / BLOCK).max(1) * BLOCK;
        let starts = (0..matrix.rows).step_by(step);
        starts.map(move |first| Part { unit, number, matrix, first, count: step.min(matrix.rows - first) })
    })
}

fn is_large(unit: &Unit<'_>) -> bool {
    unit.elements() > TASK
}

fn has_number(unit: &Unit<'_>) -> bool {
    matches!(unit.format, Format::Nvfp4 | Format::Fp8Tensor)
}

/// Whether nothing but names changes: the codes of another exporter.
fn is_renamed(unit: &Unit<'_>) -> bool {
    let packed = |matrix: &Matrix<'_>| matches!(matrix.source.spec.stored, Stored::Nvfp4 { .. });
    unit.format == Format::Nvfp4 && unit.matrices.iter().all(packed)
}

/// Does every task, on as many threads as there are processors, and gives the results in the order of the tasks.
///
/// # Errors
/// That of the first task in order that failed; those after it may not have been done.
fn spread<T: Sync, R: Send>(
    tasks: &[T],
    work: impl Fn(&T) -> Result<R, Error> + Sync,
    done: &mut dyn FnMut(&T),
) -> Result<Vec<R>, Error> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut results: Vec<Option<Result<R, Error>>> = tasks.iter().map(|_| None).collect();
    let threads = thread::available_parallelism().map_or(1, usize::from).min(tasks.len());
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads {
            let (sender, next, failed, work) = (sender.clone(), &next, &failed, &work);
            scope.spawn(move || {
                while !failed.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(task) = tasks.get(at) else { return };
                    let result = work(task);
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    if sender.send((at, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (at, result) in receiver {
            if result.is_ok() {
                done(&tasks[at]);
            }
            results[at] = Some(result);
        }
    });
    // Tasks are begun in order, so nothing is missing before the first failure.
    results.into_iter().map_while(|result| result).collect()
}
