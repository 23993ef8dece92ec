//! Tensors of the routed experts, which checkpoints store stacked or one by one.

use super::{Scope, Source, Spec, tensors};
use crate::config::ModelConfig;

/// The routed experts of a layer.
#[derive(Debug, Clone)]
pub enum Experts {
    /// Stacked; never quantised.
    Fused {
        /// Gate rows, then up rows, of each expert: `[experts, 2 * width, hidden]`
        gate_up: Spec,
        /// `[experts, hidden, width]`
        down: Spec,
    },
    /// One by one.
    Split(Vec<Expert>),
}

tensors! {
    /// A routed expert on its own.
    Expert {
        /// `[width, hidden]`
        gate,
        /// `[width, hidden]`
        up,
        /// `[hidden, width]`
        down,
    }
}

/// A matrix of a routed expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// `[width, hidden]`
    Gate,
    /// `[width, hidden]`
    Up,
    /// `[hidden, width]`
    Down,
}

/// A run of elements inside a tensor; in a quantised tensor, all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The tensor.
    pub spec: &'a Spec,
    /// First element.
    pub first: usize,
    /// How many.
    pub elements: usize,
}

impl Experts {
    pub(super) fn new(at: &Scope<'_>, c: &ModelConfig) -> Self {
        let [experts, hidden, width] = [c.num_experts, c.hidden_size, c.moe_intermediate_size];
        let gate_up = at.weight("gate_up_proj", &[experts, 2 * width, hidden]);
        let down = at.weight("down_proj", &[experts, hidden, width]);
        let stacked = match at.source {
            Source::Nothing { stacked } => stacked,
            Source::Wanted(wanted) => wanted.stacks_experts(),
            source => source.has(&gate_up.name) || source.has(&down.name),
        };
        if stacked {
            return Self::Fused { gate_up, down };
        }
        let expert = |number: usize| {
            let at = at.within(&format!("{number}."));
            Expert {
                gate: at.projection("gate_proj", &[width, hidden]),
                up: at.projection("up_proj", &[width, hidden]),
                down: at.projection("down_proj", &[hidden, width]),
            }
        };
        Self::Split((0..experts).map(expert).collect())
    }

    /// Where one matrix of one expert lies.
    ///
    /// # Panics
    /// When there is no such expert.
    pub fn place(&self, expert: usize, matrix: Matrix) -> Place<'_> {
        match self {
            Self::Split(experts) => {
                let spec = match matrix {
                    Matrix::Gate => &experts[expert].gate,
                    Matrix::Up => &experts[expert].up,
                    Matrix::Down => &experts[expert].down,
                };
                Place { spec, first: 0, elements: spec.shape.iter().product() }
            }
            Self::Fused { gate_up, down } => {
                let (spec, part, parts) = match matrix {
                    Matrix::Gate => (gate_up, 0, 2),
                    Matrix::Up => (gate_up, 1, 2),
                    Matrix::Down => (down, 0, 1),
                };
                assert!(expert < spec.shape[0], "expert {expert} of {}", spec.shape[0]);
                let elements = spec.shape[1] * spec.shape[2] / parts;
                Place { spec, first: (expert * parts + part) * elements, elements }
            }
        }
    }

    /// The tensors of the experts' numbers, in the order of the model.
    pub(crate) fn weights(&self) -> Vec<&Spec> {
        match self {
            Self::Fused { gate_up, down } => vec![gate_up, down],
            Self::Split(each) => each.iter().flat_map(|e| [&e.gate, &e.up, &e.down]).collect(),
        }
    }

    pub(super) fn gather<'a>(&'a self, specs: &mut Vec<&'a Spec>) {
        match self {
            Self::Fused { gate_up, down } => {
                gate_up.gather(specs);
                down.gather(specs);
            }
            Self::Split(experts) => experts.iter().for_each(|expert| expert.gather(specs)),
        }
    }
}
