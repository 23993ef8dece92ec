//! The contract of sampling in f64, with a full sort and no shortcut.

use kernels::table::{IN_PROMPT, Sampling};

/// What the contract says of one row.
#[derive(Debug)]
pub(crate) struct Naive {
    pub(crate) id: u32,
    /// Ids that may be drawn with their probabilities, best first.
    pub(crate) drawn: Vec<(u32, f64)>,
    /// Log probability of every choice.
    pub(crate) logprobs: Vec<f64>,
}

/// `counts` include the row's own id.
pub(crate) fn naive(
    logits: &[f32],
    options: &Sampling,
    position: u32,
    counts: &[u32],
    biases: &[(u32, f32)],
) -> Naive {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let logprobs = logits.iter().map(|x| f64::from(*x) - f64::from(max) - sum.ln()).collect();

    let mut x: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    for &(id, bias) in biases {
        if let Some(x) = x.get_mut(id as usize) {
            *x += f64::from(bias);
        }
    }
    let [presence, frequency, repetition, temperature, top_p, min_p] = [
        options.presence,
        options.frequency,
        options.repetition,
        options.temperature,
        options.top_p,
        options.min_p,
    ]
    .map(f64::from);
    for (x, &count) in x.iter_mut().zip(counts) {
        let picked = f64::from(count & !IN_PROMPT);
        if count != 0 {
            *x = if *x > 0.0 { *x / repetition } else { *x * repetition };
        }
        if picked > 0.0 {
            *x -= presence + frequency * picked;
        }
    }

    let mut order: Vec<(u32, f64)> = (0..).zip(x).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if temperature == 0.0 {
        order.truncate(1);
    }
    if options.top_k > 0 {
        order.truncate(options.top_k as usize);
    }
    let best = order[0].1;
    let scale = if temperature == 0.0 { 1.0 } else { temperature };
    let mut drawn: Vec<(u32, f64)> = order.iter().map(|(id, x)| (*id, ((x - best) / scale).exp())).collect();
    let total: f64 = drawn.iter().map(|(_, w)| w).sum();
    let mut mass = 0.0;
    let end = drawn.iter().position(|(_, w)| {
        mass += w / total;
        top_p < 1.0 && mass >= top_p
    });
    drawn.truncate(end.map_or(drawn.len(), |end| end + 1));
    drawn.retain(|(_, w)| *w >= min_p);

    let score = |&(id, w): &(u32, f64)| w.ln() - wait(options.seed, position, id).ln();
    let best = drawn.iter().max_by(|a, b| score(a).total_cmp(&score(b)).then(b.0.cmp(&a.0)));
    let id = best.expect("one id always stays").0;
    let total: f64 = drawn.iter().map(|(_, w)| w).sum();
    drawn.iter_mut().for_each(|(_, w)| *w /= total);
    Naive { id, drawn, logprobs }
}

/// The exponential wait of an id, from the published step of SplitMix64.
fn wait(seed: u64, position: u32, id: u32) -> f64 {
    let key = output(output(seed, 0), position);
    let uniform = ((output(key, id) >> 1) | 1) as f64 / (1u64 << 63) as f64;
    -(-uniform.min(1.0 - 0.5f64.powi(24))).ln_1p()
}

/// Output `number` of SplitMix64 from `state`, counted from 0.
pub(crate) fn output(state: u64, number: u32) -> u64 {
    let mut z = (0..=number).fold(state, |state, _| state.wrapping_add(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
