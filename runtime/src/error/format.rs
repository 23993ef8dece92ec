//! Why the form in which weights are stored was refused.

use std::fmt;

use safetensors::Dtype;

/// What is wrong in the form of stored weights.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatError {
    /// A file or a tensor of a layout that this build does not read.
    Foreign {
        /// The file, or the tensor with its file.
        what: String,
        /// The layout's name.
        layout: &'static str,
    },
    /// A tensor is stored in a type that its place does not permit.
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its file.
        file: String,
        /// The type in the file.
        found: Dtype,
        /// The types that may stand there.
        permitted: &'static [Dtype],
    },
    /// A quantised weight without a scale that it needs.
    NoScale {
        /// The weight.
        tensor: String,
        /// Its file.
        file: String,
        /// The weight's type.
        found: Dtype,
        /// The absent scales; one of several may do.
        absent: Vec<String>,
        /// How many more weights lack a scale.
        others: usize,
    },
    /// A matrix too narrow for whole groups of columns.
    Width {
        /// The tensor.
        tensor: String,
        /// Its file.
        file: String,
        /// Its columns.
        columns: usize,
        /// Columns of a group.
        group: usize,
    },
    /// Weights of one purpose that are not stored alike.
    Mixed {
        /// The purpose.
        what: &'static str,
        /// One of them, and the first one that differs.
        pair: Box<[Located; 2]>,
    },
    /// The settings name a format of which nothing is stored.
    NothingStored {
        /// Where that is written.
        place: String,
        /// What stands there.
        says: String,
        /// The format.
        format: String,
        /// What the files hold.
        stored: String,
    },
    /// Quantised weights of which the settings say nothing.
    NothingSaid {
        /// A quantised tensor.
        tensor: Box<Located>,
        /// What the files hold.
        stored: String,
    },
}

/// A tensor, and how it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Its name.
    pub tensor: String,
    /// Its file's name.
    pub file: String,
    /// The name of its format.
    pub format: String,
}

impl fmt::Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {} in {} is stored as {}", self.tensor, self.file, self.format)
    }
}

/// What may be quantised, and how.
const KNOWN: &str = "what may be quantised is routed experts stored one by one, the projections of token mixers and \
                     of the indexer, the shared expert, lm_head and the n-gram table; the layouts known are BF16 and \
                     F32; FP8, F8_E4M3 with X.weight_scale_inv for blocks of 128 x 128 or with one X.weight_scale; \
                     NVFP4, U8 with X.weight_scale and X.weight_scale_2, or X.weight_packed with X.weight_scale and \
                     X.weight_global_scale; fetch or export the model in one of them";

impl std::error::Error for FormatError {}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign { what, layout } => {
                write!(f, "{what} is of the {layout} layout, which this build does not read; {KNOWN}")
            }
            Self::Dtype { tensor, file, found, permitted } => {
                let types: Vec<String> = permitted.iter().map(Dtype::to_string).collect();
                write!(
                    f,
                    "tensor {tensor} in {file} is stored as {found}; this build reads it as {}",
                    types.join(" or ")
                )?;
                if *permitted != [Dtype::I64] {
                    write!(f, "; {KNOWN}")?;
                }
                Ok(())
            }
            Self::NoScale { tensor, file, found, absent, others } => {
                write!(
                    f,
                    "tensor {tensor} in {file} is stored as {found} and has no {}",
                    absent.join(" or ")
                )?;
                if *others > 0 {
                    write!(f, ", and {others} more weights lack a scale")?;
                }
                write!(f, "; if the download is complete the export is not: {KNOWN}")
            }
            Self::Width { tensor, file, columns, group } => write!(
                f,
                "tensor {tensor} in {file} is stored as 4-bit codes with a scale for {group} columns, of which its \
                 {columns} columns are no multiple; {KNOWN}"
            ),
            Self::Mixed { what, pair } => write!(
                f,
                "{what} must be stored alike in all layers; {} and {}; the files are of different exports: fetch them \
                 again from one place",
                pair[0], pair[1]
            ),
            Self::NothingStored { place, says, format, stored } => write!(
                f,
                "{place} says {says}, but the files hold no {format} weights where it says so: {stored}; the \
                 settings and the weights are of different exports: fetch both again from one place"
            ),
            Self::NothingSaid { tensor, stored } => write!(
                f,
                "{tensor}, which no quantization_config in config.json and no hf_quant_config.json names; the files \
                 hold {stored}; the settings and the weights are of different exports: fetch both again from one place"
            ),
        }
    }
}
