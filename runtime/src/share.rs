//! What one of several ranks has of a model: half of the heads and half of the inner widths, and of a sum that is cut in
//! two one half.
//!
//! | split | whole on every rank |
//! | --- | --- |
//! | heads of the recurrence and of attention, with their state and caches | hyper-connections, norms |
//! | inner widths of the routed experts and of the shared one | router, indexer with its keys |
//! | ids of the output head | embeddings, n-gram tables and what belongs to them |

use std::ops::Range;

use kernels::numerics::CUTS;
use kernels::weight::BLOCK;

use crate::config::ModelConfig;
use crate::error::Error;

/// One rank's share of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    rank: usize,
    ranks: usize,
}

impl Share {
    /// Everything: of one rank.
    pub const WHOLE: Share = Share { rank: 0, ranks: 1 };

    /// The share of rank `rank` of `ranks`.
    ///
    /// # Errors
    /// There is no such rank, or a model cannot be shared by so many.
    pub fn new(rank: usize, ranks: usize) -> Result<Share, Error> {
        match (1..=CUTS).contains(&ranks) && rank < ranks {
            true => Ok(Share { rank, ranks }),
            false => {
                Err(Error::Setting(format!("rank {rank} of {ranks}: a model is shared by 1 or {CUTS} ranks")))
            }
        }
    }

    /// The rank whose it is.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// How many cuts of a sum it has.
    pub fn cuts(self) -> usize {
        CUTS / self.ranks
    }

    /// Its part of so many things in a row.
    pub fn part(self, all: usize) -> Range<usize> {
        let each = all / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// Columns that the first block of fp8 has before the first of this rank's `columns`.
    pub fn offset(self, columns: usize) -> usize {
        self.rank * columns % BLOCK
    }

    /// The settings of the part of a model that this rank has.
    ///
    /// # Errors
    /// Something cannot be halved: what, and how many there are.
    pub fn of(self, config: &ModelConfig) -> Result<ModelConfig, Error> {
        let mut part = config.clone();
        let sizes = [
            ("num_attention_heads", &mut part.num_attention_heads),
            ("num_key_value_heads", &mut part.num_key_value_heads),
            ("linear_num_key_heads", &mut part.linear_num_key_heads),
            ("linear_num_value_heads", &mut part.linear_num_value_heads),
            ("moe_intermediate_size", &mut part.moe_intermediate_size),
            ("shared_expert_intermediate_size", &mut part.shared_expert_intermediate_size),
        ];
        for (name, size) in sizes {
            *size = self.divide(name, *size)?;
        }
        self.divide("vocab_size", config.vocab_size)?;
        Ok(part)
    }

    fn divide(self, name: &str, size: usize) -> Result<usize, Error> {
        match size.is_multiple_of(self.ranks) {
            true => Ok(size / self.ranks),
            false => Err(Error::Setting(format!(
                "--tp {}: {name} is {size}, which {} ranks cannot share evenly; run this model on one",
                self.ranks, self.ranks
            ))),
        }
    }
}
