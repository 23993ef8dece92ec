//! How numbers behave in every kernel. This is the one place that says so.
//!
//! **Elements.** A model runs with one element type: f32, which rounds nowhere (goldens), or bf16. `r16(x)`
//! in a contract is [`Element::round`]: the identity in f32, round-to-nearest-even in bf16. A value that a
//! contract does not wrap in `r16` is f32. Always f32, whatever the element: recurrent state, router
//! logits and weights, partial sums, attention scores, angles.
//!
//! **Rounding points (bf16).** Where the fused engines round: every stored activation once. The inside of
//! a kernel is f32.
//!
//! **Order of a sum.** A dot product of length `k` has 16 partial sums, element `i` in number `i % 16`, each
//! added in ascending order; they are then added in pairs 8, 4, 2, 1 apart ([`fold`]). Multiplications and
//! additions are separate f32 operations, never fused, so the same bits come out on every host. The order
//! depends on the row alone: not on how many rows ride along nor on the row's number.
//!
//! **Cuts.** Sums that two ranks would split (recurrent output, attention output, experts) are two f32
//! partials over the two halves of the inner width, always: `y = r16(P0 + P1)`. [`CUTS`] is a constant.
//!
//! **Ties** go to the lower id ([`before`]). NaN loses against every number.

use std::cmp::Ordering;
use std::fmt::Debug;

use bytemuck::Pod;
use half::bf16;

/// Number of partial sums of a cut sum.
pub const CUTS: usize = 2;

/// Number of partial sums of a dot product.
pub const LANES: usize = 16;

/// The element type of activations and weights.
pub trait Element: Pod + Send + Sync + Debug + PartialEq + crate::matrix::Tiled {
    /// "f32" or "bf16".
    const NAME: &'static str;
    /// Whether kernels of this element have CUDA twins.
    const CUDA: bool;

    /// The value in f32, exact.
    fn widen(self) -> f32;
    /// The nearest element; ties to even.
    fn narrow(value: f32) -> Self;

    /// `r16`: the nearest element, as f32.
    #[inline(always)]
    fn round(value: f32) -> f32 {
        Self::narrow(value).widen()
    }
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    const CUDA: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    const CUDA: bool = true;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        let quiet = ((bits >> 16) | 0x40) as u16;
        bf16::from_bits(if value.is_nan() { quiet } else { rounded })
    }
}

/// Widens `from` into `to`, element by element.
pub fn widen<E: Element>(from: &[E], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.widen();
    }
}

/// `from` in f32.
pub fn widened<E: Element>(from: &[E]) -> Vec<f32> {
    from.iter().map(|x| x.widen()).collect()
}

/// Rounds `from` into `to`, element by element.
pub fn narrow<E: Element>(from: &[f32], to: &mut [E]) {
    assert_eq!(from.len(), to.len());
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::narrow(*from);
    }
}

/// Adds the partial sums of a dot product, in pairs 8, 4, 2, 1 apart.
#[inline(always)]
pub fn fold(mut sums: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// The sum of a slice, in the order of a sum (see the module).
#[inline(always)]
pub fn total<E: Element>(x: &[E]) -> f32 {
    let mut sums = [0.0; LANES];
    for run in x.chunks(LANES) {
        sums.iter_mut().zip(run).for_each(|(sum, x)| *sum += x.widen());
    }
    fold(sums)
}

/// The dot product of two equally long slices, in the order of a sum (see the module).
#[inline(always)]
pub fn dot<A: Element, B: Element>(a: &[A], b: &[B]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let mut sums = [0.0; LANES];
    let (a_runs, a_tail) = a.as_chunks::<LANES>();
    let (b_runs, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_runs.iter().zip(b_runs) {
        for i in 0..LANES {
            sums[i] += a[i].widen() * b[i].widen();
        }
    }
    for (i, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        sums[i] += a.widen() * b.widen();
    }
    fold(sums)
}

/// The sum of squares, in the order of a sum.
#[inline(always)]
pub fn sum_of_squares<E: Element>(x: &[E]) -> f32 {
    dot(x, x)
}

/// `e^x`, within 2 units in the last place of f32; 0 below -87.3, infinity above 88.7, NaN for NaN. Our
/// own, so that it vectorises and gives the same bits on every host.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * (r * r) + r + 1.0;
    // 2^n in two steps, so that n = 128 does not overflow the exponent field early.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    let first = exponent >> 1;
    // Wrapping, since an overflow check would keep this from being vectorised; |exponent| is at most 128.
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let y = y * scale(first) * scale(exponent.wrapping_sub(first));
    let y = if x < -87.3 { 0.0 } else { y };
    let y = if x > 88.7 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// `2^x`, within 2 units in the last place of f32; 0 below -126, infinity above 127, NaN for NaN.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    /// As in [`exp`].
    const ROUNDER: f32 = 12_582_912.0;
    let clamped = x.clamp(-126.0, 127.0);
    let shifted = clamped + ROUNDER;
    let r = (clamped - (shifted - ROUNDER)) * std::f32::consts::LN_2;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * (r * r) + r + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    let y = y * f32::from_bits((exponent.wrapping_add(127) as u32) << 23);
    let y = if x < -126.0 { 0.0 } else { y };
    let y = if x > 127.0 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `0.5 x (1 + tanh u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`, as the equal `x / (1 + e^-2u)`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6;
    let u = ROOT * (x + 0.044_715 * (x * x * x));
    x / (1.0 + exp(-2.0 * u))
}

/// `0.5 x (1 + erf(x / sqrt 2))`, with the error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26). The tail is
/// never the difference of two numbers near one.
#[inline(always)]
pub fn gelu_erf(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let mut p = 1.061_405_4;
    for c in [-1.453_152, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = p * t + c;
    }
    let tail = 0.5 * (p * t * exp(-(z * z)));
    x * if x < 0.0 { tail } else { 1.0 - tail }
}

/// `ln(1 + e^x)`, linear above 20.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The order of a choice: the larger value first, then the lower id; NaN last.
#[inline(always)]
pub fn before(a: (f32, u32), b: (f32, u32)) -> Ordering {
    let key = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { x };
    match key(b.0).partial_cmp(&key(a.0)) {
        Some(Ordering::Equal) | None => a.0.is_nan().cmp(&b.0.is_nan()).then(a.1.cmp(&b.1)),
        Some(order) => order,
    }
}

/// The kernel instance for a run-time choice of element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// f32: goldens on the host device.
    F32,
    /// bf16: what users run.
    Bf16,
}

impl ElementType {
    /// Size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::Bf16 => 2,
        }
    }

    /// "f32" or "bf16".
    pub fn name(self) -> &'static str {
        match self {
            ElementType::F32 => f32::NAME,
            ElementType::Bf16 => bf16::NAME,
        }
    }
}
