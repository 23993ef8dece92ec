//! The n-gram hash: which rows of the n-gram table a token reads, given the tokens before it.

/// The constants of one n-gram table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramHash {
    /// One odd multiplier for each place of the n-gram, the current token first; `multiplier * id` stays below 2^63.
    pub multipliers: Vec<u64>,
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

    /// The constants as slices.
    pub fn constants(&self) -> Constants<'_> {
        Constants {
            boundary: self.boundary,
            heads_per_ngram: self.heads_per_ngram,
            multipliers: &self.multipliers,
            primes: &self.primes,
            offsets: &self.offsets,
        }
    }

    /// Writes the table rows that `current` reads, one for each head.
    ///
    /// `previous` holds the tokens before it, oldest first; only the last `ngram_size - 1` matter, and a shorter slice
    /// means that the sequence begins there.
    ///
    /// # Panics
    /// When `rows` is not [`heads`](Self::heads) long, or an id is outside the vocabulary.
    pub fn rows(&self, current: u32, previous: &[u32], rows: &mut [u64]) {
        let missing = std::iter::repeat(&self.boundary);
        let nearest: Vec<u32> =
            previous.iter().rev().chain(missing).take(self.multipliers.len() - 1).copied().collect();
        for id in nearest.iter().chain([&current]) {
            assert!(
                *id < self.vocab_size,
                "n-gram hash: id {id} is outside the vocabulary of {}",
                self.vocab_size
            );
        }
        self.constants().rows(current, &nearest, rows);
    }
}

/// The constants of one n-gram table, wherever they lie, and the rule that turns ids into its rows.
///
/// ```text
/// c[0] = id;  c[s] = the id s before it, or the boundary if a boundary lies strictly between
/// x[n] = c[0] * M[0] ^ ... ^ c[n - 1] * M[n - 1]         n = 2 ..= ngram_size; 64 bits, wrapping
/// row  = x[n] mod prime + offset                         heads_per_ngram heads for every n
/// ```
///
/// The reference computes in signed integers. With multipliers as [`NgramHash`] makes them no product reaches
/// 2^63, so signed and unsigned are the same.
#[derive(Debug, Clone, Copy)]
pub struct Constants<'a> {
    /// The id that n-grams do not reach across.
    pub boundary: u32,
    /// Heads for each n-gram length.
    pub heads_per_ngram: usize,
    /// M: one for each place of the longest n-gram.
    pub multipliers: &'a [u64],
    /// Rows of each head, positive: bigram heads first, then trigram heads, and so on.
    pub primes: &'a [u64],
    /// First row of each head.
    pub offsets: &'a [u64],
}

impl Constants<'_> {
    /// Writes the table rows that `id` reads, one for each head.
    ///
    /// `previous` holds the ids before it, nearest first, the boundary where there is none; what is farther away than
    /// the longest n-gram reaches is not read.
    ///
    /// # Panics
    /// When there are not as many rows as heads, or fewer previous ids than the longest n-gram needs.
    pub fn rows(&self, id: u32, previous: &[u32], rows: &mut [u64]) {
        assert_eq!(rows.len(), self.primes.len(), "n-gram hash: one row for each head");
        let reach = self.multipliers.len() - 1;
        assert!(previous.len() >= reach, "n-gram hash: {} previous ids, {reach} needed", previous.len());
        let term = |id: u32, multiplier: u64| u64::from(id).wrapping_mul(multiplier);
        let mut mixed = term(id, self.multipliers[0]);
        let mut cut = false;
        let per_ngram = self.heads_per_ngram;
        let heads = rows.chunks_mut(per_ngram).zip(self.primes.chunks(per_ngram));
        let heads = heads.zip(self.offsets.chunks(per_ngram));
        let places = previous.iter().zip(&self.multipliers[1..]);
        for ((&previous, &multiplier), ((rows, primes), offsets)) in places.zip(heads) {
            mixed ^= term(if cut { self.boundary } else { previous }, multiplier);
            cut |= previous == self.boundary;
            for ((row, prime), offset) in rows.iter_mut().zip(primes).zip(offsets) {
                *row = mixed % prime + offset;
            }
        }
    }
}

/// Step and increment of splitmix64.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn multipliers(shape: &NgramShape, ordinal: u64) -> Vec<u64> {
    // Half of the largest multiplier whose product with any id still fits in a signed 64-bit integer.
    let half = (i64::MAX as u64 / u64::from(shape.vocab_size) / 2).max(1);
    let base = shape.seed.wrapping_add(ordinal.wrapping_mul(10007));
    (1..=shape.ngram_size as u64)
        .map(|place| 2 * (splitmix64(base.wrapping_add(GOLDEN.wrapping_mul(place))) % half) + 1)
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
