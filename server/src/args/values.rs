//! The values that options take, from text.

use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use kernels::numerics::ElementType;
use runtime::checkpoint::layout::Format;
use runtime::engine::Vision;
use runtime::weights::{DenseForm, TablePlace};

/// The device that was asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Device {
    Auto,
    Host,
    Cuda(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum LoadFrom {
    Checkpoint,
    Dummy,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Stored {
    Bf16,
    Fp8,
    Nvfp4,
}

/// How dense projections are stored.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Projections {
    Bf16,
    Fp8,
}

/// What becomes of dense projections.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Dense {
    Stored,
    Fp8,
}

/// Where the n-gram tables live.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Table {
    Device,
    Pinned,
    Mmap,
}

/// What device code is compiled for, such as sm_90a.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Architecture(pub(crate) String);

/// Token ids, written with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

/// Sizes of prompt pieces, written with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pieces(pub(crate) Vec<usize>);

/// An id and what is added to its logit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bias {
    pub(crate) id: u32,
    pub(crate) value: f32,
}

/// Biases, written as `ID=B` with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Biases(pub(crate) Vec<Bias>);

/// A size in bytes, above zero; K, M, G and T stand for powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ByteSize(pub(crate) u64);

/// Whether pictures are taken, and how large they may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Eyes(pub(crate) Vision);

/// A time in seconds, with parts of one if need be; at most a day.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seconds(pub(crate) Duration);

/// The short digest of a reply.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sha(pub(crate) String);

/// A count; k stands for 1024.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Count(pub(crate) usize);

/// Counts, written with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Counts(pub(crate) Vec<usize>);

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Switch::On
    }
}

impl Dtype {
    pub(crate) fn element(self) -> ElementType {
        match self {
            Dtype::F32 => ElementType::F32,
            Dtype::Bf16 => ElementType::Bf16,
        }
    }
}

impl Stored {
    /// The format of matrices that are stored like this.
    pub(crate) fn of_matrices(self) -> Format {
        match self {
            Stored::Bf16 => Format::Bf16,
            Stored::Fp8 => Format::Fp8,
            Stored::Nvfp4 => Format::Nvfp4,
        }
    }

    /// The format of n-gram tables that are stored like this: in fp8 they have one scale.
    pub(crate) fn of_tables(self) -> Format {
        match self {
            Stored::Fp8 => Format::Fp8Tensor,
            _ => self.of_matrices(),
        }
    }
}

impl Projections {
    pub(crate) fn format(self) -> Format {
        match self {
            Projections::Bf16 => Format::Bf16,
            Projections::Fp8 => Format::Fp8,
        }
    }
}

impl Dense {
    pub(crate) fn form(self) -> DenseForm {
        match self {
            Dense::Stored => DenseForm::Stored,
            Dense::Fp8 => DenseForm::Fp8,
        }
    }
}

impl Table {
    pub(crate) fn place(self) -> TablePlace {
        match self {
            Table::Device => TablePlace::Device,
            Table::Pinned => TablePlace::Pinned,
            Table::Mmap => TablePlace::Mapped,
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(name: &str) -> Result<Device, String> {
        match name {
            "auto" => Ok(Device::Auto),
            "host" => Ok(Device::Host),
            "cuda" => Ok(Device::Cuda(0)),
            _ => {
                let ordinal = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                let wrong = || "not a device; use auto, host, cuda or cuda:N".to_string();
                ordinal.map(Device::Cuda).ok_or_else(wrong)
            }
        }
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(name: &str) -> Result<Architecture, String> {
        let number = name.strip_prefix("sm_").map(|rest| rest.trim_end_matches(['a', 'f']));
        let digits = |number: &str| number.len() > 1 && number.bytes().all(|byte| byte.is_ascii_digit());
        match number.is_some_and(digits) {
            true => Ok(Architecture(name.to_owned())),
            false => Err("not an architecture; give names like sm_90a,sm_80".into()),
        }
    }
}

impl FromStr for Ids {
    type Err = String;

    fn from_str(list: &str) -> Result<Ids, String> {
        let id = |part: &str| {
            part.trim().parse().map_err(|_| format!("`{part}` is not a token id; give ids like 1,2,3"))
        };
        list.split(',').map(id).collect::<Result<_, _>>().map(Ids)
    }
}

impl FromStr for Pieces {
    type Err = String;

    fn from_str(list: &str) -> Result<Pieces, String> {
        let size = |part: &str| match part.trim().parse() {
            Ok(size) if size > 0 => Ok(size),
            _ => Err(format!("`{part}` is not a piece size; give sizes above zero like 64,64,5")),
        };
        list.split(',').map(size).collect::<Result<_, _>>().map(Pieces)
    }
}

impl FromStr for Eyes {
    type Err = String;

    fn from_str(text: &str) -> Result<Eyes, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Eyes(Vision::Auto)),
            ("off", _) => Ok(Eyes(Vision::Off)),
            (_, Ok(patches)) if patches > 0 => Ok(Eyes(Vision::Patches(patches))),
            _ => Err("give auto, off, or the most patches of a picture, like 16384".into()),
        }
    }
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Count, String> {
        let (number, unit) = text.strip_suffix('k').map_or((text, 1), |number| (number, 1024));
        let count = number.trim().parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
        let wrong = || format!("`{text}` is not a count; give numbers like 512 or 8k");
        count.map(|count| Count(count as usize)).ok_or_else(wrong)
    }
}

impl FromStr for Counts {
    type Err = String;

    fn from_str(list: &str) -> Result<Counts, String> {
        list.split(',')
            .map(|part| part.trim().parse().map(|Count(count)| count))
            .collect::<Result<_, _>>()
            .map(Counts)
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Seconds, String> {
        const DAY: f64 = 86_400.0;
        let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=DAY).contains(seconds));
        let wrong = || "not a time; give seconds from 0 to 86400, such as 30 or 0.5".to_string();
        seconds.map(|seconds| Seconds(Duration::from_secs_f64(seconds))).ok_or_else(wrong)
    }
}

impl FromStr for Sha {
    type Err = String;

    fn from_str(text: &str) -> Result<Sha, String> {
        match text.len() == 12 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            true => Ok(Sha(text.to_owned())),
            false => Err("not a token_sha; give its 12 hex digits".into()),
        }
    }
}

impl FromStr for Biases {
    type Err = String;

    fn from_str(list: &str) -> Result<Biases, String> {
        let bias = |part: &str| {
            let (id, value) = part.split_once('=')?;
            Some(Bias { id: id.trim().parse().ok()?, value: value.trim().parse().ok()? })
        };
        let named = |part| bias(part).ok_or(format!("`{part}` is not a bias; give biases like 17=-2.5,4=10"));
        list.split(',').map(named).collect::<Result<_, _>>().map(Biases)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        const UNITS: [(char, u64); 4] = [('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];
        let unit = UNITS.into_iter().find(|(letter, _)| text.ends_with(*letter));
        let (number, unit) =
            unit.map_or((text, 1), |(letter, unit)| (&text[..text.len() - letter.len_utf8()], unit));
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        match bytes {
            Some(bytes) if bytes > 0 => Ok(ByteSize(bytes)),
            _ => Err("not a size above zero; give a whole number, or one with K, M, G or T like 512M".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_units() {
        for (text, bytes) in
            [("1", 1), ("3K", 3 << 10), ("512M", 512 << 20), ("2G", 2 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "0", "0G", "-1", "1.5G", "G", "1GG", "1B", "1k ", "99999999999999T"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_seconds() {
        assert_eq!("0.5".parse(), Ok(Seconds(Duration::from_millis(500))));
        assert_eq!("0".parse(), Ok(Seconds(Duration::ZERO)));
        for text in ["", "-1", "nan", "inf", "1e9", "1s"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }

    #[test]
    fn eyes_are_open_shut_or_measured() {
        assert_eq!("auto".parse(), Ok(Eyes(Vision::Auto)));
        assert_eq!("off".parse(), Ok(Eyes(Vision::Off)));
        assert_eq!("4096".parse(), Ok(Eyes(Vision::Patches(4096))));
        for text in ["", "on", "0", "-1", "4k", "1.5"] {
            assert!(text.parse::<Eyes>().is_err(), "{text}");
        }
    }

    #[test]
    fn digests_have_twelve_digits() {
        assert!("0123456789ab".parse::<Sha>().is_ok());
        for text in ["", "0123456789a", "0123456789AB", "0123456789abc"] {
            assert!(text.parse::<Sha>().is_err(), "{text}");
        }
    }

    #[test]
    fn architectures_have_names() {
        for name in ["sm_80", "sm_90a", "sm_100f", "sm_120a"] {
            assert_eq!(name.parse(), Ok(Architecture(name.into())));
        }
        for name in ["", "sm_", "sm_9", "90a", "sm_90x", "compute_90", "sm_90a "] {
            assert!(name.parse::<Architecture>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn biases_are_pairs() {
        let biases = Biases(vec![Bias { id: 17, value: -2.5 }, Bias { id: 4, value: 10.0 }]);
        assert_eq!("17=-2.5, 4=10".parse(), Ok(biases));
        for text in ["", "17", "17=", "=3", "x=3", "-1=3", "1=2,", "1:2"] {
            assert!(text.parse::<Biases>().is_err(), "{text}");
        }
    }
}
