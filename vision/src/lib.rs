//! Pictures: how does a picture become rows?
//!
//! The crate knows bytes, pixels, patches and positions. It names no request, lane, device or weight: the tower, which
//! turns patches into rows of the language model, is built from what is computed here.
//!
//! ```text
//! bytes ─► read_header ─► Budget ─► decode ─► Picture ─► picture_patches ─► Patches ─► (tower) ─► FeatureCache
//!                                    └──────► ClipBuilder ───────► Clip ────┘
//! ids with one pad for each picture ─► expand ─► ids, Spans ─► three_axis ─► Positions
//! ```
//!
//! In reading order:
//!
//! - `format`, `decode`, `picture`: bytes to pixels; limits, turning, transparency
//! - `budget`: how many pictures and pixels one request may bring
//! - `settings`, `size`, `resize`: what the model wants, which size that is, and resampling
//! - `grid`, `patches`, `video`: pixels in the order in which the tower reads them
//! - `tower`: where each patch lies, for the position table, the rotary angles and attention
//! - `expand`, `positions`: placeholders in the prompt, and three-axis rotary positions
//! - `key`, `cache`: equal content has one key; features that were computed once

#![forbid(unsafe_code)]

mod budget;
mod cache;
mod decode;
mod error;
mod expand;
mod format;
mod grid;
mod key;
mod patches;
mod picture;
mod positions;
mod resize;
mod settings;
mod size;
mod tower;
mod video;

pub use budget::{Budget, Spent};
pub use cache::{CacheCounts, FeatureCache};
pub use decode::{Header, Limits, decode, read_header};
pub use error::{ExpandError, PictureError, PositionError, SettingsError};
pub use expand::{Expanded, MediaIds, Medium, Span, expand};
pub use format::Format;
pub use grid::Grid;
pub use key::ContentKey;
pub use patches::{Patches, normal, picture_patches};
pub use picture::Picture;
pub use positions::{Position, Positions, Start, three_axis};
pub use resize::resize;
pub use settings::{Preprocess, VideoSettings};
pub use size::{MAX_RATIO, Size, picture_size, video_size};
pub use tower::{Taps, attention_spans, patch_places, position_taps, rotary_angles};
pub use video::{Choice, Clip, ClipBuilder, FRAME_RATES, Times, choose_frames, pair_stamps, stamp_text};
