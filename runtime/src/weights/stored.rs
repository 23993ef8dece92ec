//! How weights are held, in short.

use kernels::numerics::ElementType;
use kernels::weight::Format;

use super::{MixerWeights, Weights};

/// How the weights that may be quantised are held, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredAs {
    /// The routed experts.
    pub experts: Format,
    /// The shared experts.
    pub shared: Format,
    /// The projections around token mixers: those out of them.
    pub dense: Format,
    /// The head.
    pub head: Format,
    /// The n-gram tables.
    pub table: Format,
}

impl StoredAs {
    /// How those of a model are.
    pub fn of<T>(weights: &Weights<T>) -> StoredAs {
        let first = weights.layers.first();
        let table = weights.layers.iter().find_map(|layer| layer.ngram.as_ref());
        StoredAs {
            experts: first.map_or_else(Format::default, |layer| layer.moe.routed),
            shared: first.map_or_else(Format::default, |layer| layer.moe.shared),
            dense: first.map_or_else(Format::default, |layer| match &layer.mixer {
                MixerWeights::Recurrent(w) => w.output.format,
                MixerWeights::Sparse(w) => w.output.format,
            }),
            head: weights.head.format,
            table: table.map_or_else(Format::default, |ngram| ngram.format),
        }
    }
}

impl StoredAs {
    /// The formats as text, plain ones by their type: one of all but the tables, and those that differ from it by
    /// purpose, as in `bf16, experts nvfp4`; then that of the tables.
    pub fn text(&self, element: ElementType) -> (String, &'static str) {
        let name = |format: Format| if format == Format::Plain { element.name() } else { format.name() };
        let each = [
            ("experts", self.experts),
            ("shared expert", self.shared),
            ("dense", self.dense),
            ("head", self.head),
        ];
        let differ = each.into_iter().filter(|(_, format)| *format != Format::Plain);
        let differ: String = differ.map(|(what, format)| format!(", {what} {}", name(format))).collect();
        (format!("{}{differ}", element.name()), name(self.table))
    }
}
