//! How the weights of a checkpoint are stored, in short, and that weights of one purpose are stored alike.

use std::fmt;

use safetensors::Dtype;

use super::text::Moe;
use super::{Layout, Source, SparseAttention, Spec, Stored, TokenMixer};
use crate::checkpoint::files::Files;

/// How the weights that may be quantised are stored, by purpose. Weights of one purpose are stored alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formats {
    /// The routed experts of the decoder layers.
    pub experts: Format,
    /// Their shared experts.
    pub shared: Format,
    /// Their projections around token mixers and in the indexer: every format that occurs, the smallest first. One
    /// projection has one format in all layers.
    pub dense: Vec<Format>,
    /// The output head.
    pub head: Format,
    /// The n-gram tables, where the model has them.
    pub table: Option<Format>,
    /// The routed experts of the draft layer, where the model has one.
    pub draft_experts: Option<Format>,
    /// The other projections of the draft layer: every format that occurs, the smallest first.
    pub draft_dense: Vec<Format>,
}

/// How values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// [`Stored::Nvfp4`]
    Nvfp4,
    /// [`Stored::Fp8Block`]
    Fp8,
    /// [`Stored::Fp8Tensor`]
    Fp8Tensor,
    /// [`Stored::Plain`], BF16
    Bf16,
    /// [`Stored::Plain`], F32
    F32,
}

impl Format {
    /// Whether the values have scales.
    pub fn is_quantised(self) -> bool {
        !matches!(self, Self::Bf16 | Self::F32)
    }

    /// The format of a tensor, or nothing if the files lack it.
    fn of(spec: &Spec, source: Source<'_>) -> Option<Self> {
        let dtype = source.dtype(&spec.name)?;
        Some(match spec.stored {
            Stored::Nvfp4 { .. } => Self::Nvfp4,
            Stored::Fp8Block { .. } => Self::Fp8,
            Stored::Fp8Tensor { .. } => Self::Fp8Tensor,
            Stored::Plain if dtype == Dtype::F32 => Self::F32,
            Stored::Plain => Self::Bf16,
        })
    }

    /// Whether weights of one purpose may have the one and the other: plain floats are converted one by one.
    fn is_like(self, other: Self) -> bool {
        self == other || !self.is_quantised() && !other.is_quantised()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "nvfp4",
            Self::Fp8 => "fp8",
            Self::Fp8Tensor => "fp8 (one scale)",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

impl fmt::Display for Formats {
    /// One line, as in `experts nvfp4, shared expert bf16, dense bf16, head bf16, table fp8 (one scale)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several =
            |formats: &[Format]| formats.iter().map(Format::to_string).collect::<Vec<_>>().join(" and ");
        write!(f, "experts {}, shared expert {}", self.experts, self.shared)?;
        write!(f, ", dense {}, head {}", several(&self.dense), self.head)?;
        if let Some(table) = self.table {
            write!(f, ", table {table}")?;
        }
        if let Some(experts) = self.draft_experts {
            write!(f, ", draft experts {experts}, draft dense {}", several(&self.draft_dense))?;
        }
        Ok(())
    }
}

impl Formats {
    /// Everything in one format, and neither tables nor a draft layer.
    pub(super) fn all(format: Format) -> Self {
        Self {
            experts: format,
            shared: format,
            dense: vec![format],
            head: format,
            table: None,
            draft_experts: None,
            draft_dense: Vec::new(),
        }
    }

    /// Every format that occurs.
    pub fn each(&self) -> impl Iterator<Item = Format> {
        let single = [Some(self.experts), Some(self.shared), Some(self.head), self.table, self.draft_experts];
        single.into_iter().flatten().chain(self.dense.iter().chain(&self.draft_dense).copied())
    }

    /// The formats of a layout; `plain` stands for what the files do not say.
    pub(super) fn read(layout: &Layout, source: Source<'_>, plain: Format) -> Self {
        let mut formats = Self::all(plain);
        formats.dense.clear();
        for Group { purpose, specs, .. } in groups(layout) {
            let format = specs.iter().find_map(|spec| Format::of(spec, source)).unwrap_or(plain);
            match purpose {
                Purpose::Experts => formats.experts = format,
                Purpose::Shared => formats.shared = format,
                Purpose::Dense => formats.dense.push(format),
                Purpose::Head => formats.head = format,
                Purpose::Table => formats.table = Some(format),
                Purpose::DraftExperts => formats.draft_experts = Some(format),
                Purpose::DraftDense => formats.draft_dense.push(format),
            }
        }
        for several in [&mut formats.dense, &mut formats.draft_dense] {
            several.sort_unstable();
            several.dedup();
        }
        formats
    }
}

impl Layout {
    /// The weights that [`Wanted::dense`](super::Wanted::dense) is about. Layouts of one model have them in one order.
    pub(crate) fn dense(&self) -> Vec<&Spec> {
        let dense = |purpose| matches!(purpose, Purpose::Shared | Purpose::Dense | Purpose::Head);
        groups(self).into_iter().filter(|group| dense(group.purpose)).flat_map(|group| group.specs).collect()
    }
}

/// Two tensors of one purpose that are stored differently, and what the purpose is.
pub(in crate::checkpoint) struct Unlike<'a> {
    pub(in crate::checkpoint) what: &'static str,
    pub(in crate::checkpoint) pair: [(&'a Spec, Format); 2],
}

/// The first two tensors that should be stored alike and are not.
pub(in crate::checkpoint) fn unlike<'a>(layout: &'a Layout, files: &Files) -> Option<Unlike<'a>> {
    groups(layout).into_iter().find_map(|Group { what, specs, .. }| {
        let mut found =
            specs.into_iter().filter_map(|spec| Some((spec, Format::of(spec, Source::Files(files))?)));
        let first = found.next()?;
        let second = found.find(|(_, format)| !format.is_like(first.1))?;
        Some(Unlike { what, pair: [first, second] })
    })
}

/// Tensors that are to be stored alike.
struct Group<'a> {
    purpose: Purpose,
    what: &'static str,
    specs: Vec<&'a Spec>,
}

#[derive(Clone, Copy)]
enum Purpose {
    Experts,
    Shared,
    Dense,
    Head,
    Table,
    DraftExperts,
    DraftDense,
}

fn groups(layout: &Layout) -> Vec<Group<'_>> {
    let mut groups = Vec::new();
    let mut group = |purpose, what, specs: Vec<_>| {
        if !specs.is_empty() {
            groups.push(Group { purpose, what, specs });
        }
    };
    let moes = || layout.layers.iter().map(|layer| &layer.moe);
    group(Purpose::Experts, "the routed experts", moes().flat_map(experts).collect());
    group(Purpose::Shared, "the shared experts", moes().flat_map(shared).collect());

    let mixers = || layout.layers.iter().map(|layer| &layer.mixer);
    let linear: Vec<_> = mixers()
        .filter_map(|mixer| match mixer {
            TokenMixer::Linear(w) => Some([
                ("in_proj_qkv", &w.in_proj_qkv),
                ("in_proj_z", &w.in_proj_z),
                ("in_proj_b", &w.in_proj_b),
                ("in_proj_a", &w.in_proj_a),
                ("out_proj", &w.out_proj),
            ]),
            TokenMixer::Sparse(_) => None,
        })
        .collect();
    let sparse: Vec<_> = mixers()
        .filter_map(|mixer| match mixer {
            TokenMixer::Sparse(w) => Some(attention(w)),
            TokenMixer::Linear(_) => None,
        })
        .collect();
    for number in 0..5 {
        for projections in [&linear, &sparse] {
            let Some(first) = projections.first() else { continue };
            let specs = projections.iter().map(|layer| layer[number].1).collect();
            group(Purpose::Dense, first[number].0, specs);
        }
    }
    group(Purpose::Head, "the head", vec![&layout.lm_head]);
    let tables = layout.layers.iter().filter_map(|layer| layer.ple.as_ref());
    group(Purpose::Table, "the n-gram table", tables.flat_map(|ple| &ple.shards).collect());
    if let Some(draft) = &layout.draft {
        group(Purpose::DraftExperts, "the draft layer's routed experts", experts(&draft.moe).collect());
        group(Purpose::DraftDense, "the draft layer's shared expert", shared(&draft.moe).to_vec());
        for (name, spec) in attention(&draft.attention) {
            group(Purpose::DraftDense, name, vec![spec]);
        }
    }
    groups
}

fn experts(moe: &Moe) -> impl Iterator<Item = &Spec> {
    moe.experts.weights().into_iter()
}

fn shared(moe: &Moe) -> [&Spec; 3] {
    [&moe.shared.gate_proj, &moe.shared.up_proj, &moe.shared.down_proj]
}

fn attention(w: &SparseAttention) -> [(&'static str, &Spec); 5] {
    [
        ("q_proj", &w.q_proj),
        ("k_proj", &w.k_proj),
        ("v_proj", &w.v_proj),
        ("o_proj", &w.o_proj),
        ("index_qk_proj", &w.index_qk_proj),
    ]
}
