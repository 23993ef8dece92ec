//! `kernels`: the operations of the model, each once as contract, argument block and host implementation.
//!
//! The crate knows rows, pages and views; it names no lane, round or request. A file is one operation or
//! one family: the contract (formula, shapes, domain, effects), the argument block, the checks that make a
//! launch legal, the grid, and the host implementation, which is the specification.
//!
//! How numbers behave (rounding points, the order of sums, ties, cuts) is said once, in [`numerics`].
//! What a row is and where its state lies is said in [`table`] and [`state`].
//!
//! In the order a round meets them: [`rows`], [`embed`], [`residual`], [`hyper`], [`linear`], the gated
//! delta net ([`conv`], [`delta`], [`gate`]), sparse attention ([`heads`], [`index`], [`attend`]),
//! [`router`], [`experts`], the n-gram embedding ([`ngram`]), [`sample`], [`advance`].
//!
//! The vision tower: [`pixels`], [`affine`], [`patch`], [`layer_norm`], [`span`].
//!
//! Outside of rounds: [`random`] makes values, [`read`] measures memory.
//!
//! Weights: [`weight`] says what a matrix is and how it is stored, [`tiles`] packs it, [`quant`] quantises it.
//!
//! The CUDA twins lie beside the crate's sources, in files of the same names; [`source`] lists them.

pub mod advance;
pub mod affine;
pub mod attend;
pub mod conv;
pub mod delta;
pub mod embed;
pub mod experts;
pub mod gate;
pub mod hash;
pub mod heads;
pub mod hyper;
pub mod index;
pub mod layer_norm;
pub mod linear;
pub mod matrix;
pub mod ngram;
pub mod numerics;
pub mod patch;
pub mod pixels;
pub mod quant;
pub mod random;
pub mod read;
pub mod residual;
pub mod rope;
pub mod router;
pub mod rows;
pub mod runs;
pub mod sample;
pub mod source;
pub mod span;
pub mod spread;
pub mod state;
pub mod table;
pub mod tiles;
pub mod weave;
pub mod weight;

#[doc(hidden)]
pub use half;

/// Launches the instance of a generic kernel for a run-time element type, and for run-time formats of weights:
///
/// ```text
/// launch!(emission, element, module::Kernel, &args)
/// launch!(emission, element, [format], module::Kernel, &args)
/// launch!(emission, element, [routed, shared], module::Kernel, &args)
/// ```
#[macro_export]
macro_rules! launch {
    ($emission:expr, $element:expr, [$format:expr], $($kernel:ident)::+, $args:expr) => {
        match $format {
            $crate::weight::Format::Plain => $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Plain),
            $crate::weight::Format::Fp8 => $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Fp8),
            $crate::weight::Format::Nvfp4 => $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Nvfp4),
        }
    };
    ($emission:expr, $element:expr, [$routed:expr, $shared:expr], $($kernel:ident)::+, $args:expr) => {
        match $routed {
            $crate::weight::Format::Plain => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Plain, $shared)
            }
            $crate::weight::Format::Fp8 => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Fp8, $shared)
            }
            $crate::weight::Format::Nvfp4 => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, Nvfp4, $shared)
            }
        }
    };
    (@ $emission:expr, $element:expr, $($kernel:ident)::+, $args:expr, $first:ident, $second:expr) => {
        match $second {
            $crate::weight::Format::Plain => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, $first Plain)
            }
            $crate::weight::Format::Fp8 => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, $first Fp8)
            }
            $crate::weight::Format::Nvfp4 => {
                $crate::launch!(@ $emission, $element, $($kernel)::+, $args, $first Nvfp4)
            }
        }
    };
    (@ $emission:expr, $element:expr, $($kernel:ident)::+, $args:expr, $($format:ident)+) => {
        match $element {
            $crate::numerics::ElementType::F32 => {
                $emission.launch::<$($kernel)::+<f32, $($crate::weight::$format),+>>($args)
            }
            $crate::numerics::ElementType::Bf16 => {
                $emission.launch::<$($kernel)::+<$crate::half::bf16, $($crate::weight::$format),+>>($args)
            }
        }
    };
    ($emission:expr, $element:expr, $($kernel:ident)::+, $args:expr) => {
        match $element {
            $crate::numerics::ElementType::F32 => $emission.launch::<$($kernel)::+<f32>>($args),
            $crate::numerics::ElementType::Bf16 => $emission.launch::<$($kernel)::+<$crate::half::bf16>>($args),
        }
    };
}
