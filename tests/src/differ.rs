//! How far two devices may differ: what every comparison of CUDA with the host allows.

use std::any::TypeId;

use half::bf16;
use kernels::numerics::Element;

/// How far a stored bf16 value may be from the host's: two units in its last place, or this share of the
/// largest value of its buffer where sums cancel.
const BF16_SHARE: f64 = 1.0 / 128.0;
/// The same for f32 values, whose sums have another order.
const F32_SHARE: f64 = 1e-4;

/// What memory holds, and with it how two devices may differ in it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// Whole numbers.
    Exact,
    /// bf16.
    Bf16,
    /// f32.
    F32,
    /// f32 made of a value that was rounded to bf16.
    Wide,
    /// What each device may leave as it likes.
    Own,
}

impl Kind {
    /// What values of a type are.
    pub fn of<T: 'static>() -> Kind {
        match TypeId::of::<T>() {
            id if id == TypeId::of::<bf16>() => Kind::Bf16,
            id if id == TypeId::of::<f32>() => Kind::F32,
            _ => Kind::Exact,
        }
    }
}

/// How the bytes `a` of the host and `b` of CUDA differ, if by more than their kind allows.
pub fn differ(kind: Kind, a: &[u8], b: &[u8]) -> Option<String> {
    let widen = |bytes: &[u8]| -> Vec<f64> {
        match kind {
            Kind::Own => Vec::new(),
            Kind::Exact => bytes.iter().map(|byte| f64::from(*byte)).collect(),
            Kind::Bf16 => {
                bytes.as_chunks().0.iter().map(|word| f64::from(bf16::from_le_bytes(*word).widen())).collect()
            }
            Kind::F32 | Kind::Wide => {
                bytes.as_chunks().0.iter().map(|word| f64::from(f32::from_le_bytes(*word))).collect()
            }
        }
    };
    let (a, b) = (widen(a), widen(b));
    let largest = a.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
    let (share, ulps) = match kind {
        Kind::Exact | Kind::Own => (0.0, 0.0),
        Kind::Bf16 | Kind::Wide => (BF16_SHARE, 1.0 / 64.0),
        Kind::F32 => (F32_SHARE, 1e-4),
    };
    let mut worst: Option<(usize, f64)> = None;
    let mut count = 0;
    for (at, (a, b)) in a.iter().zip(&b).enumerate() {
        let difference = (a - b).abs();
        let near = difference <= share * largest || difference <= ulps * a.abs();
        if !(near || a == b || (a.is_nan() && b.is_nan())) {
            count += 1;
            if worst.is_none_or(|worst| difference.is_nan() || difference > worst.1) {
                worst = Some((at, difference));
            }
        }
    }
    worst.map(|(at, _)| {
        format!("{count} values, worst {at}: {} on the host, {} on CUDA, largest {largest}", a[at], b[at])
    })
}
