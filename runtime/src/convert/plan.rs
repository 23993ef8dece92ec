//! Which tensors are written, and from what each is made. Nothing is read or written here.

use std::collections::{HashMap, HashSet};

use kernels::weight::GROUP;

use super::origin::{Origin, Rows};
use super::{ConvertOptions, Purpose};
use crate::checkpoint::Dtype;
use crate::checkpoint::layout::{Experts, Format, Layout, Matrix as Of, Part, Place, Spec, Stored, Wanted};
use crate::error::{ConvertError, Error};

/// All of a conversion.
pub(super) struct Plan<'a> {
    /// The tensors to write, in the order of the model.
    pub(super) tensors: Vec<Tensor>,
    /// Those that are written as they are read.
    pub(super) copies: Vec<Copied<'a>>,
    /// What the others are made from.
    pub(super) units: Vec<Unit<'a>>,
    /// Bytes that are read for each purpose.
    pub(super) before: [u64; Purpose::ALL.len()],
}

/// A tensor to write.
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) purpose: Purpose,
}

/// A tensor whose bytes stay as they are.
pub(super) struct Copied<'a> {
    pub(super) name: &'a str,
    /// Its number among the tensors to write.
    pub(super) to: usize,
    pub(super) bytes: usize,
}

/// Matrices whose numbers are made under one number, if their format has one: gate and up of an expert, the pieces of a
/// table, or a matrix by itself.
pub(super) struct Unit<'a> {
    pub(super) matrices: Vec<Matrix<'a>>,
    /// Where the number goes, by their numbers among the tensors to write.
    pub(super) numbers: Vec<usize>,
    pub(super) format: Format,
    pub(super) purpose: Purpose,
}

/// A matrix, where it comes from and where it goes.
pub(super) struct Matrix<'a> {
    pub(super) source: Place<'a>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The tensor of its numbers.
    pub(super) to: usize,
    /// The number in it that the matrix begins with.
    pub(super) first: usize,
    /// The tensor of its own scales.
    pub(super) scales: Option<usize>,
}

impl Tensor {
    pub(super) fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }
}

impl Matrix<'_> {
    /// Some rows of it.
    pub(super) fn rows(&self, first: usize, count: usize) -> Rows<'_> {
        let Place { spec, first: matrix, .. } = self.source;
        Rows { spec, matrix, columns: self.columns, first, count }
    }
}

impl Unit<'_> {
    pub(super) fn elements(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.rows * matrix.columns).sum()
    }
}

impl Plan<'_> {
    /// The tensors that will be there, by type.
    pub(super) fn types(&self) -> HashMap<&str, Dtype> {
        self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype)).collect()
    }

    /// Bytes that are written for each purpose.
    pub(super) fn after(&self) -> [u64; Purpose::ALL.len()] {
        let mut after = [0; Purpose::ALL.len()];
        self.tensors.iter().for_each(|tensor| after[tensor.purpose as usize] += tensor.bytes());
        after
    }
}

/// Plans the conversion of all tensors of `origin`.
///
/// # Errors
/// A matrix cannot be stored as it is wanted.
pub(super) fn plan<'a>(origin: &'a Origin, options: &ConvertOptions) -> Result<Plan<'a>, Error> {
    let (config, source) = (&origin.checkpoint().config, &origin.checkpoint().layout);
    let plain = Wanted::default();
    let wanted = Wanted {
        experts: options.experts.unwrap_or(plain.experts),
        dense: options.dense.unwrap_or(plain.dense),
        table: options.table.unwrap_or(plain.table),
    };
    let target = Layout::wanted(config, wanted);
    let pairs = pairs(origin, source, &target, options);
    let in_order = source.specs().into_iter().filter_map(|spec| pairs.get(spec.name.as_str()));
    for new in in_order.flat_map(Pair::after) {
        let columns = *new.shape.last().expect("a weight has columns");
        if matches!(new.stored, Stored::Nvfp4 { .. }) && !columns.is_multiple_of(GROUP) {
            let tensor = new.name.clone();
            return Err(ConvertError::Groups { tensor, columns, group: GROUP }.into());
        }
    }
    let gone = gone(&pairs);
    let purposes = purposes(source);
    let purpose = |spec: &Spec| purposes.get(spec.name.as_str()).copied().unwrap_or(Purpose::Rest);
    let mut build = Builder { tensors: Vec::new(), copies: Vec::new(), units: Vec::new() };
    let mut before = [0; Purpose::ALL.len()];
    for spec in source.specs() {
        let Some((dtype, shape)) = origin.entry(spec) else { continue };
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        before[purpose(spec) as usize] += bytes as u64;
        if let Some(pair) = pairs.get(spec.name.as_str()) {
            build.convert(pair);
        } else if !gone.contains(spec.name.as_str()) {
            let (name, purpose) = (spec.name.clone(), purpose(spec));
            build.tensors.push(Tensor { name, dtype, shape, purpose });
            build.copies.push(Copied { name: &spec.name, to: build.tensors.len() - 1, bytes });
        }
    }
    let Builder { tensors, copies, units } = build;
    Ok(Plan { tensors, copies, units, before })
}

/// What is converted as one: a part of the source, and what it becomes.
enum Pair<'a, 't> {
    Experts(&'a Experts, &'t Experts),
    Dense(&'a Spec, &'t Spec),
    Table(&'a [Spec], &'t [Spec]),
}

impl<'a, 't> Pair<'a, 't> {
    fn before(&self) -> Vec<&'a Spec> {
        match *self {
            Pair::Experts(old, _) => old.weights(),
            Pair::Dense(old, _) => vec![old],
            Pair::Table(old, _) => old.iter().collect(),
        }
    }

    fn after(&self) -> Vec<&'t Spec> {
        match *self {
            Pair::Experts(_, new) => new.weights(),
            Pair::Dense(_, new) => vec![new],
            Pair::Table(_, new) => new.iter().collect(),
        }
    }

    /// Whether all is stored already as it is wanted.
    fn is_done(&self, origin: &Origin) -> bool {
        let same = |(old, new): (&Spec, &Spec)| {
            old.name == new.name
                && old.stored == new.stored
                && (old.stored != Stored::Plain || origin.dtype(old) == Dtype::BF16)
        };
        let (old, new) = (self.before(), self.after());
        old.len() == new.len() && old.into_iter().zip(new).all(same)
    }
}

/// What is to be converted, by the name of the first tensor of each. What is stored as it is wanted is not.
fn pairs<'a, 't>(
    origin: &Origin,
    source: &'a Layout,
    target: &'t Layout,
    options: &ConvertOptions,
) -> HashMap<&'a str, Pair<'a, 't>> {
    let mut pairs = Vec::new();
    for (old, new) in source.layers.iter().zip(&target.layers) {
        if options.experts.is_some() {
            pairs.push(Pair::Experts(&old.moe.experts, &new.moe.experts));
        }
        if let (Some(_), Some(old), Some(new)) = (options.table, &old.ple, &new.ple) {
            pairs.push(Pair::Table(&old.shards, &new.shards));
        }
    }
    if options.dense.is_some() {
        let (old, new) = (source.dense(), target.dense());
        pairs.extend(old.into_iter().zip(new).map(|(old, new)| Pair::Dense(old, new)));
    }
    let undone = pairs.into_iter().filter(|pair| !pair.is_done(origin));
    undone.map(|pair| (pair.before()[0].name.as_str(), pair)).collect()
}

/// The tensors that are not written as they are: those that are converted, with their scales, and the scales of
/// activations beside them.
fn gone(pairs: &HashMap<&str, Pair<'_, '_>>) -> HashSet<String> {
    let mut gone = HashSet::new();
    for old in pairs.values().flat_map(Pair::before) {
        gone.insert(old.name.clone());
        for scale in old.scales() {
            gone.insert(scale.name.clone());
            let base = scale.name.rsplit_once('.').map_or("", |(base, _)| base);
            gone.extend(["input_scale", "input_global_scale"].map(|name| format!("{base}.{name}")));
        }
    }
    gone
}

/// What each tensor is for, if it is not one of the rest.
fn purposes(layout: &Layout) -> HashMap<&str, Purpose> {
    let experts = layout.layers.iter().flat_map(|layer| layer.moe.experts.weights());
    let tables = layout.layers.iter().filter_map(|layer| layer.ple.as_ref()).flat_map(|ple| &ple.shards);
    let named = [
        (Purpose::Experts, experts.collect::<Vec<_>>()),
        (Purpose::Dense, layout.dense()),
        (Purpose::Table, tables.collect()),
    ];
    let mut purposes = HashMap::new();
    for (purpose, specs) in named {
        for spec in specs {
            purposes.insert(spec.name.as_str(), purpose);
            purposes.extend(spec.scales().map(|scale| (scale.name.as_str(), purpose)));
        }
    }
    purposes
}

struct Builder<'a> {
    tensors: Vec<Tensor>,
    copies: Vec<Copied<'a>>,
    units: Vec<Unit<'a>>,
}

impl<'a> Builder<'a> {
    fn convert(&mut self, pair: &Pair<'a, '_>) {
        match *pair {
            Pair::Experts(old, new) => self.experts(old, new),
            Pair::Dense(old, new) => {
                let to = self.weight(new, Purpose::Dense);
                let numbers = new.scales().skip(usize::from(to.1.is_some()));
                let numbers = numbers.map(|scale| self.number(scale, &[], Purpose::Dense)).collect();
                let matrix = matrix(whole(old), 0, to);
                self.unit(vec![matrix], numbers, new, Purpose::Dense);
            }
            Pair::Table(old, new) => {
                let pieces = old.iter().zip(new);
                let pieces = pieces.map(|(old, new)| matrix(whole(old), 0, self.weight(new, Purpose::Table)));
                let matrices = pieces.collect();
                // The one that all pieces share.
                let shared = new[0].scales().find(|scale| scale.shape.is_empty());
                let numbers = shared.map(|scale| self.number(scale, &[1], Purpose::Table));
                self.unit(matrices, numbers.into_iter().collect(), &new[0], Purpose::Table);
            }
        }
    }

    fn experts(&mut self, old: &'a Experts, new: &Experts) {
        let purpose = Purpose::Experts;
        let mut at = HashMap::new();
        for spec in new.weights() {
            let to = self.weight(spec, purpose);
            let number = spec.scales().find(|scale| scale.shape.is_empty());
            at.insert(spec.name.as_str(), (to, number.map(|scale| self.number(scale, &[], purpose))));
        }
        let experts = match (old, new) {
            (Experts::Split(each), _) | (_, Experts::Split(each)) => each.len(),
            (Experts::Fused { down, .. }, _) => down.shape[0],
        };
        for expert in 0..experts {
            // Gate and up share their number.
            for group in [&[Of::Gate, Of::Up][..], &[Of::Down]] {
                let places = group.iter().map(|which| (old.place(expert, *which), new.place(expert, *which)));
                let (mut matrices, mut numbers, mut stored) = (Vec::new(), Vec::new(), None);
                for (from, to) in places {
                    let (tensors, number) = at[to.spec.name.as_str()];
                    matrices.push(matrix(from, to.first, tensors));
                    numbers.extend(number);
                    stored = Some(to.spec);
                }
                self.unit(matrices, numbers, stored.expect("a group has matrices"), purpose);
            }
        }
    }

    fn unit(&mut self, matrices: Vec<Matrix<'a>>, numbers: Vec<usize>, new: &Spec, purpose: Purpose) {
        let format = match new.stored {
            Stored::Plain => Format::Bf16,
            Stored::Fp8Block { .. } => Format::Fp8,
            Stored::Fp8Tensor { .. } => Format::Fp8Tensor,
            Stored::Nvfp4 { .. } => Format::Nvfp4,
        };
        self.units.push(Unit { matrices, numbers, format, purpose });
    }

    /// Adds a tensor of numbers and that of its own scales.
    fn weight(&mut self, spec: &Spec, purpose: Purpose) -> (usize, Option<usize>) {
        let (dtype, of_scales) = match spec.stored {
            Stored::Plain => (Dtype::BF16, None),
            Stored::Fp8Block { .. } => (Dtype::F8_E4M3, Some(Dtype::BF16)),
            Stored::Fp8Tensor { .. } => (Dtype::F8_E4M3, None),
            Stored::Nvfp4 { .. } => (Dtype::U8, Some(Dtype::F8_E4M3)),
        };
        let to = self.add(spec, dtype, spec.stored_shape(), purpose);
        let scales = of_scales.zip(spec.scales().next());
        (to, scales.map(|(dtype, scales)| self.add(scales, dtype, scales.shape.clone(), purpose)))
    }

    /// Adds the tensor of a number that many share.
    fn number(&mut self, spec: &Spec, shape: &[usize], purpose: Purpose) -> usize {
        // F32 where nothing else may stand: the number of nvfp4. A scale is a BF16.
        let dtype = if spec.dtypes == [Dtype::F32] { Dtype::F32 } else { Dtype::BF16 };
        self.add(spec, dtype, shape.to_vec(), purpose)
    }

    fn add(&mut self, spec: &Spec, dtype: Dtype, shape: Vec<usize>, purpose: Purpose) -> usize {
        debug_assert!(matches!(spec.part, Part::Text | Part::Table), "{}", spec.name);
        self.tensors.push(Tensor { name: spec.name.clone(), dtype, shape, purpose });
        self.tensors.len() - 1
    }
}

fn whole(spec: &Spec) -> Place<'_> {
    Place { spec, first: 0, elements: spec.shape.iter().product() }
}

fn matrix(source: Place<'_>, first: usize, (to, scales): (usize, Option<usize>)) -> Matrix<'_> {
    let columns = *source.spec.shape.last().expect("a weight has columns");
    Matrix { source, rows: source.elements / columns, columns, to, first, scales }
}
