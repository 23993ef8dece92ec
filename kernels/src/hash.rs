//! The n-gram hash: which rows of the n-gram table a token reads, given the tokens before it.

/// The constants of one n-gram table and the rule that turns ids into its rows.
///
/// For a token `c0` with predecessors `c1, c2, ...` and multipliers `M`:
///
/// ```text
/// x[o]        = c0*M[0] ^ c1*M[1] ^ ... ^ c[o-1]*M[o-1]            o = 2 ..= ngram_size
/// row[o, h]   = x[o] mod primes[o, h] + offsets[o, h]              h = 0 .. heads_per_ngram
/// ```
///
/// A predecessor that the sequence does not have, or that lies behind a boundary id, counts as the boundary id. The
/// current token never hides its own predecessors, even when it is the boundary itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramHash {
    /// One odd multiplier for each place of the n-gram, the current token first; `multiplier * id` stays below 2^63.
    pub multipliers: Vec<i64>,
    /// Rows that each head may address: bigram heads first, then trigram heads, and so on.
    pub primes: Vec<u64>,
    /// First row of each head: the running sum of `primes`.
    pub offsets: Vec<u64>,
    /// Rows of the stored table: the sum of `primes`, rounded up as the model asks.
    pub rows_padded: u64,
    vocab_size: u32,
    boundary: u32,
    heads_per_ngram: usize,
}

/// The model settings that fix its hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NgramShape {
    /// Ids are below this.
    pub vocab_size: u32,
    /// The id that cuts a sequence into segments, and stands for a missing predecessor.
    pub boundary: u32,
    /// Longest n-gram in tokens, at least 2.
    pub ngram_size: usize,
    /// Heads for each n-gram length.
    pub heads_per_ngram: usize,
    /// No head has fewer rows than this.
    pub vocab_base: u64,
    /// The table's rows are padded to a multiple of this.
    pub divisible_by: u64,
    /// Seed of the multipliers.
    pub seed: u64,
}

impl NgramHash {
    /// The hash of the `ordinal`-th n-gram table of the model, counted from zero in layer order.
    ///
    /// # Panics
    /// When the shape is outside its domain: a zero size, or an n-gram of fewer than two tokens.
    pub fn new(shape: &NgramShape, ordinal: usize) -> Self {
        assert!(
            shape.vocab_size > 0
                && shape.heads_per_ngram > 0
                && shape.divisible_by > 0
                && shape.ngram_size >= 2,
            "n-gram hash: sizes must be positive and n-grams at least two tokens long: {shape:?}"
        );
        let heads = (shape.ngram_size - 1) * shape.heads_per_ngram;
        let primes: Vec<u64> =
            (shape.vocab_base..).filter(|&n| is_prime(n)).skip(ordinal * heads).take(heads).collect();
        let mut rows = 0;
        let mut offsets = Vec::with_capacity(heads);
        for prime in &primes {
            offsets.push(rows);
            rows += prime;
        }
        Self {
            multipliers: multipliers(shape, ordinal as u64),
            primes,
            offsets,
            rows_padded: rows.next_multiple_of(shape.divisible_by),
            vocab_size: shape.vocab_size,
            boundary: shape.boundary,
            heads_per_ngram: shape.heads_per_ngram,
        }
    }

    /// Rows that one token reads.
    pub fn heads(&self) -> usize {
        self.primes.len()
    }

    /// Writes the table rows that `current` reads, one for each head.
    ///
    /// `previous` holds the tokens before it, oldest first; only the last `ngram_size - 1` matter, and a shorter slice
    /// means that the sequence begins there.
    ///
    /// # Panics
    /// When `rows` is not [`heads`](Self::heads) long, or an id is outside the vocabulary.
    pub fn rows(&self, current: u32, previous: &[u32], rows: &mut [u64]) {
        assert_eq!(rows.len(), self.heads(), "n-gram hash: one row for each head");
        let mut mixed = self.term(0, current);
        let mut cut = false;
        for (place, rows) in (1..).zip(rows.chunks_exact_mut(self.heads_per_ngram)) {
            let id = match previous.len().checked_sub(place) {
                Some(at) if !cut => previous[at],
                _ => self.boundary,
            };
            cut |= id == self.boundary;
            mixed ^= self.term(place, id);
            let first = (place - 1) * self.heads_per_ngram;
            for (head, row) in (first..).zip(rows) {
                *row = mixed % self.primes[head] + self.offsets[head];
            }
        }
    }

    fn term(&self, place: usize, id: u32) -> u64 {
        assert!(
            id < self.vocab_size,
            "n-gram hash: id {id} is outside the vocabulary of {}",
            self.vocab_size
        );
        self.multipliers[place] as u64 * u64::from(id)
    }
}

/// Step and increment of splitmix64.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn multipliers(shape: &NgramShape, ordinal: u64) -> Vec<i64> {
    // Half of the largest multiplier whose product with any id still fits in a signed 64-bit integer.
    let half = (i64::MAX as u64 / u64::from(shape.vocab_size) / 2).max(1);
    let base = shape.seed.wrapping_add(ordinal.wrapping_mul(10007));
    (1..=shape.ngram_size as u64)
        .map(|place| 2 * (splitmix64(base.wrapping_add(GOLDEN.wrapping_mul(place))) % half) as i64 + 1)
        .collect()
}

pub(crate) fn splitmix64(value: u64) -> u64 {
    let v = value.wrapping_add(GOLDEN);
    let v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

fn is_prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d))
}
