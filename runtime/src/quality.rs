//! What quantising a model while it is loaded does to what it says: its distributions beside those of the same model as
//! it is stored, over the same texts.

use std::fmt;
use std::path::Path;

use crate::error::Error;
use crate::open::Load;
use crate::probe::{Logits, LogitsOptions, LogitsRequest, Probe};
use crate::weights::DenseForm;

/// Texts of several kinds, which the model reads.
const TEXTS: [&str; 4] = [
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, and how far he \
     could see. On most nights there was little to add. In the winter of that year, however, he noticed that the light \
     of a ship stood still where no ship could anchor, and he began to keep a second book.",
    "fn median(values: &mut [f64]) -> Option<f64> {\n    values.sort_by(f64::total_cmp);\n    let half = values.len() / \
     2;\n    match values.len() {\n        0 => None,\n        n if n % 2 == 1 => Some(values[half]),\n        _ => \
     Some((values[half - 1] + values[half]) / 2.0),\n    }\n}\n",
    "{\"order\": 4711, \"items\": [{\"name\": \"bolt M8\", \"count\": 24, \"price\": 0.35}, {\"name\": \"washer\", \
     \"count\": 48, \"price\": 0.04}], \"total\": 10.32, \"paid\": true}",
    "问：一列火车以每小时九十公里的速度行驶，两个半小时能走多远？答：路程等于速度乘以时间，九十乘以二点五等于二百二十五，\
     所以火车行驶了二百二十五公里。",
];

/// Tokens of a text that are compared at most.
const TOKENS: usize = 160;

/// How far one model's distributions are from another's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Positions at which they were compared.
    pub positions: usize,
    /// Mean of the Kullback-Leibler divergence, in nats, of this model's distribution from the other's.
    pub mean_kl: f64,
    /// The largest one.
    pub most_kl: f64,
    /// Positions at which both find the same token the likeliest.
    pub agreeing: usize,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quality { positions, mean_kl, most_kl, agreeing } = self;
        write!(
            f,
            "logits KL {mean_kl:.5} nats on average, {most_kl:.4} at most; the same greedy token at {agreeing} of \
             {positions} positions ({:.1} %)",
            100.0 * *agreeing as f64 / *positions as f64
        )
    }
}

/// Compares a model whose dense projections are quantised while it is loaded with the same model as it is stored.
/// Both are opened, one after the other.
///
/// # Errors
/// The model cannot be opened, or the device failed.
pub fn of_dense(dir: &Path, options: &LogitsOptions, dense: DenseForm) -> Result<Quality, Error> {
    let read = |dense| -> Result<Vec<Logits>, Error> {
        let options = LogitsOptions { load: Load::Checkpoint { dense }, ..*options };
        let mut probe = Probe::open(dir, &options, TOKENS, &mut |_| {})?;
        let logits = |text: &&str| {
            let mut ids = probe.tokenizer().encode(text)?;
            ids.truncate(TOKENS);
            probe.logits(&LogitsRequest { ids, ..LogitsRequest::default() })
        };
        TEXTS.iter().map(logits).collect()
    };
    let (stored, quantised) = (read(DenseForm::Stored)?, read(dense)?);
    Ok(compare(&stored, &quantised))
}

/// Compares logits of the same positions: how far the second are from the first.
pub fn compare(stored: &[Logits], quantised: &[Logits]) -> Quality {
    let mut quality = Quality { positions: 0, mean_kl: 0.0, most_kl: 0.0, agreeing: 0 };
    for (a, b) in stored.iter().flat_map(Logits::rows).zip(quantised.iter().flat_map(Logits::rows)) {
        let kl = divergence(a, b);
        quality.positions += 1;
        quality.mean_kl += kl;
        // A distance that is no number is the largest there is, and is told.
        quality.most_kl = if kl > quality.most_kl || kl.is_nan() { kl } else { quality.most_kl };
        quality.agreeing += usize::from(likeliest(a) == likeliest(b));
    }
    quality.mean_kl /= quality.positions.max(1) as f64;
    quality
}

/// Of the distribution of `b` from that of `a`, in nats; never negative but for rounding, which is cut off.
fn divergence(a: &[f32], b: &[f32]) -> f64 {
    let total = |logits: &[f32]| {
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        f64::from(most) + logits.iter().map(|l| f64::from(l - most).exp()).sum::<f64>().ln()
    };
    let (of_a, of_b) = (total(a), total(b));
    let part = |(a, b): (&f32, &f32)| {
        let (a, b) = (f64::from(*a) - of_a, f64::from(*b) - of_b);
        a.exp() * (a - b)
    };
    let sum = a.iter().zip(b).map(part).sum::<f64>();
    if sum < 0.0 { 0.0 } else { sum }
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(data: &[f32]) -> [Logits; 1] {
        [Logits { positions: data.len() / 3, vocab: 3, data: data.to_vec() }]
    }

    #[test]
    fn equal_logits_have_no_distance_and_a_shift_is_none() {
        let a = logits(&[1.0, 2.0, 3.0, -1.0, 0.0, 0.5]);
        let b = logits(&[11.0, 12.0, 13.0, -1.0, 0.0, 0.5]);
        assert_eq!(compare(&a, &a), Quality { positions: 2, mean_kl: 0.0, most_kl: 0.0, agreeing: 2 });
        assert!(compare(&a, &b).most_kl < 1e-12);
    }

    #[test]
    fn logits_that_are_no_numbers_are_no_small_distance() {
        let (a, b) = (logits(&[1.0, 2.0, 3.0, 0.0, 0.0, 1.0]), logits(&[1.0, f32::NAN, 3.0, 0.0, 0.0, 1.0]));
        let quality = compare(&a, &b);
        assert!(quality.mean_kl.is_nan() && quality.most_kl.is_nan(), "{quality}");
    }

    #[test]
    fn divergence_is_that_of_the_distributions() {
        // Halves and quarters against thirds.
        let a = logits(&[0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()]);
        let b = logits(&[0.0, 0.0, 0.1]);
        let third = |extra: f64| extra.exp() / (2.0 + 0.1f64.exp());
        let want =
            0.5 * (0.5 / third(0.0)).ln() + 0.25 * (0.25 / third(0.0)).ln() + 0.25 * (0.25 / third(0.1)).ln();
        let quality = compare(&a, &b);
        assert!((quality.mean_kl - want).abs() < 1e-6, "{} {want}", quality.mean_kl);
        assert_eq!(quality.agreeing, 0);
        assert!(quality.to_string().contains("0 of 1 positions (0.0 %)"), "{quality}");
    }
}
