//! Why a picture, a prompt with pictures or a settings file was refused. All of these are faults of the input.

use std::fmt;

use crate::Format;

/// A picture or a video that is not used. The text says which limit was met, with the sizes on both sides.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PictureError {
    /// The bytes are of no format that is read.
    UnknownFormat {
        /// What they look like, if that is known.
        found: Option<&'static str>,
    },
    /// The file is too long.
    Bytes {
        /// Its length.
        bytes: usize,
        /// The most.
        limit: usize,
    },
    /// The picture has too many pixels.
    Pixels {
        /// Columns, as stored.
        width: u32,
        /// Rows, as stored.
        height: u32,
        /// The most pixels.
        limit: u64,
    },
    /// One side is too long beside the other.
    Ratio {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Decoding would need too much memory.
    Memory {
        /// Columns, as stored.
        width: u32,
        /// Rows, as stored.
        height: u32,
        /// Bytes that decoding would take.
        bytes: u64,
        /// The most.
        limit: u64,
    },
    /// A file that says of itself that it is larger than anything that is decoded.
    Beyond {
        /// The format.
        format: Format,
        /// The limit of pixels.
        pixels: u64,
        /// The limit of memory.
        memory: u64,
    },
    /// The format has it, this build does not read it.
    Unsupported {
        /// The format.
        format: Format,
        /// What is not read.
        detail: String,
    },
    /// The bytes do not follow their format: damaged or cut.
    Broken {
        /// The format.
        format: Format,
        /// What was found.
        detail: String,
    },
    /// Pixels that do not fill a picture of the size they are said to have, or a side of length zero.
    Shape {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
        /// Bytes given.
        bytes: usize,
    },
    /// A request brings too many pictures.
    Count {
        /// How many; frames of a video count.
        count: usize,
        /// The most.
        limit: usize,
    },
    /// The pictures of a request have too many pixels together.
    TotalPixels {
        /// How many pictures; frames of a video count.
        count: usize,
        /// Their pixels.
        pixels: u64,
        /// The most.
        limit: u64,
    },
    /// A video has too few or too many frames.
    Frames {
        /// Frames that would be used.
        count: usize,
        /// Fewest and most.
        range: [usize; 2],
    },
    /// More frames are asked for than there are.
    Choice {
        /// Frames asked for.
        asked: usize,
        /// Frames there are.
        total: usize,
    },
    /// A frame is not as large as the video.
    FrameSize {
        /// Which, counted from 0.
        frame: usize,
        /// Its columns and rows.
        size: [u32; 2],
        /// Those of the video.
        given: [u32; 2],
    },
    /// Frame rates or times that do not say when a frame is shown.
    Times {
        /// What is wrong.
        detail: String,
    },
}

impl fmt::Display for PictureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownFormat { found: Some(found) } => {
                write!(f, "the picture is {found}, which is not read; send {}", Format::LIST)
            }
            Self::UnknownFormat { found: None } => {
                write!(f, "the bytes are no picture of a known format; send {}", Format::LIST)
            }
            Self::Bytes { bytes, limit } => {
                write!(f, "the picture's file has {bytes} bytes; at most {limit} are read")
            }
            Self::Pixels { width, height, limit } => write!(
                f,
                "the picture has {width} x {height} = {} pixels; at most {limit} are decoded; send it smaller",
                u64::from(*width) * u64::from(*height)
            ),
            Self::Ratio { width, height } => write!(
                f,
                "the picture has {width} x {height} pixels; its longer side may be at most {} times the shorter",
                crate::MAX_RATIO
            ),
            Self::Memory { width, height, bytes, limit } => write!(
                f,
                "decoding the picture of {width} x {height} pixels takes {bytes} bytes of memory; at most {limit} are given; send it smaller"
            ),
            Self::Beyond { format, pixels, memory } => write!(
                f,
                "the {format} picture is larger than what is decoded, at most {pixels} pixels in {memory} bytes of memory; send it smaller"
            ),
            Self::Unsupported { format, detail } => {
                write!(f, "the {format} picture uses what is not read: {detail}; save it as an ordinary PNG")
            }
            Self::Broken { format, detail } => {
                write!(f, "decoding the {format} picture: {detail}; the file is damaged or cut")
            }
            Self::Shape { width, height, bytes } => write!(
                f,
                "a picture of {width} x {height} pixels has 3 bytes for each and no side of length 0; {bytes} bytes were given"
            ),
            Self::Count { count, limit } => {
                write!(f, "the request has {count} pictures (frames included); at most {limit} are taken")
            }
            Self::TotalPixels { count, pixels, limit } => write!(
                f,
                "the {count} pictures of the request (frames included) have {pixels} pixels together; at most {limit} are taken"
            ),
            Self::Frames { count, range: [least, most] } => {
                write!(f, "the video has {count} frames to use; it needs at least {least} and at most {most}")
            }
            Self::Choice { asked, total } => {
                write!(f, "{asked} frames are asked of a video that has {total}; ask for at most {total}")
            }
            Self::FrameSize { frame, size, given } => write!(
                f,
                "frame {frame} of the video has {} x {} pixels, the video {} x {}; all frames have one size",
                size[0], size[1], given[0], given[1]
            ),
            Self::Times { detail } => write!(f, "the times of the video's frames: {detail}"),
        }
    }
}

impl std::error::Error for PictureError {}

/// A prompt whose placeholders do not fit its pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpandError {
    /// Pads and media are not equally many.
    Pads {
        /// "picture" or "video".
        kind: &'static str,
        /// The pad's id.
        id: u32,
        /// Pads in the prompt.
        pads: usize,
        /// Media given.
        media: usize,
    },
    /// A grid that does not divide into merged squares, or a video whose time stamps are not one for each time pair.
    Medium {
        /// Which, counted from 0.
        index: usize,
        /// What is wrong.
        detail: String,
    },
    /// A time stamp has no ids.
    Stamp {
        /// The text.
        text: String,
        /// The tokenizer's reason.
        detail: String,
    },
}

impl fmt::Display for ExpandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pads { kind, id, pads, media } => write!(
                f,
                "the prompt has {pads} {kind} placeholders (id {id}) for {media} {kind}s; each {kind} has exactly one"
            ),
            Self::Medium { index, detail } => write!(f, "picture or video {index} of the prompt: {detail}"),
            Self::Stamp { text, detail } => write!(f, "the time stamp {text:?} was not tokenised: {detail}"),
        }
    }
}

impl std::error::Error for ExpandError {}

/// Pictures that do not lie in the prompt as they should.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PositionError {
    /// A span begins before the one ahead of it ends, or before the part that is walked.
    Overlap {
        /// Which, counted from 0.
        span: usize,
        /// Its first sequence index.
        first: usize,
        /// The first index that is free.
        free: usize,
    },
    /// A span ends behind the last token.
    Outside {
        /// Which, counted from 0.
        span: usize,
        /// The sequence index behind its last row.
        end: usize,
        /// That behind the last token.
        tokens: usize,
    },
    /// A position does not fit 31 bits.
    TooFar {
        /// The sequence index behind the last token.
        tokens: usize,
    },
}

impl fmt::Display for PositionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap { span, first, free } => {
                write!(f, "picture span {span} begins at token {first}; the first free token is {free}")
            }
            Self::Outside { span, end, tokens } => {
                write!(f, "picture span {span} ends at token {end} of a prompt that ends at {tokens}")
            }
            Self::TooFar { tokens } => {
                write!(
                    f,
                    "a prompt that ends at token {tokens} has positions of more than 31 bits; shorten it"
                )
            }
        }
    }
}

impl std::error::Error for PositionError {}

/// A `preprocessor_config.json` or `video_preprocessor_config.json` that asks for what is not done here.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SettingsError {
    /// Keys that nobody knows.
    Unknown {
        /// The keys.
        keys: Vec<String>,
    },
    /// A value that is not followed.
    Value {
        /// The key.
        key: String,
        /// What the file says.
        found: String,
        /// What would be followed.
        expected: String,
    },
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { keys } => write!(
                f,
                "unknown settings of the picture processor: {}; pictures would be prepared differently",
                keys.join(", ")
            ),
            Self::Value { key, found, expected } => {
                write!(f, "setting {key} of the picture processor is {found}; this build follows {expected}")
            }
        }
    }
}

impl std::error::Error for SettingsError {}
