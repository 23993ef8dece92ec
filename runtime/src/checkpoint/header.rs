//! The header of a safetensors file: which tensors it holds, and proof that their byte ranges tile the file exactly.
//!
//! ```text
//! length of the header, u64 little-endian | header, a JSON object | data
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error};

use crate::error::{HeaderError, LoadError};
use crate::json::{Object, Strict};

/// The most that the format's own library accepts.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// A checked header.
pub(super) struct Header {
    /// Tensors in the order of their bytes.
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// Where the data begins in the file; ranges count from here.
    pub(super) data_start: u64,
}

impl Header {
    /// Reads and checks the header of an open file.
    pub(super) fn read(file: &File, path: &Path) -> Result<Self, LoadError> {
        let io = |source| LoadError::Io { doing: "read the header of", path: path.into(), source };
        let damaged = |problem| LoadError::Header { path: path.into(), problem };

        let file_bytes = file.metadata().map_err(io)?.len();
        let mut length = [0; size_of::<u64>()];
        let data_start = length.len() as u64;
        if file_bytes < data_start {
            return Err(damaged(HeaderError::Short { needs: data_start, file_bytes }));
        }
        file.read_exact_at(&mut length, 0).map_err(io)?;
        let bytes = u64::from_le_bytes(length);
        if bytes > MOST_HEADER_BYTES {
            return Err(damaged(HeaderError::Huge { bytes, limit: MOST_HEADER_BYTES }));
        }
        let data_start = data_start + bytes;
        if file_bytes < data_start {
            return Err(damaged(HeaderError::Short { needs: data_start, file_bytes }));
        }
        let mut json = vec![0; bytes as usize];
        file.read_exact_at(&mut json, length.len() as u64).map_err(io)?;
        let tensors = parse(&json).map_err(damaged)?;
        let expected = data_start + tensors.last().map_or(0, |(_, info)| info.data_offsets.1) as u64;
        if file_bytes != expected {
            return Err(damaged(HeaderError::Length { expected, found: file_bytes }));
        }
        Ok(Self { tensors, data_start })
    }
}

fn parse(json: &[u8]) -> Result<Vec<(String, TensorInfo)>, HeaderError> {
    let entries: Object<Entry> =
        serde_json::from_slice(json).map_err(|error| HeaderError::Json { detail: error.to_string() })?;
    let mut tensors = Vec::with_capacity(entries.0.len());
    for (name, entry) in entries.0 {
        match entry {
            Entry::Tensor(info) => tensors.push((name, info)),
            Entry::Strings if name == "__metadata__" => {}
            Entry::Strings => {
                return Err(HeaderError::Json { detail: format!("{name} describes no tensor") });
            }
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    check_tiling(&tensors)?;
    Ok(tensors)
}

fn check_tiling(tensors: &[(String, TensorInfo)]) -> Result<(), HeaderError> {
    let mut expected = 0;
    for (name, info) in tensors {
        let (begins, end) = info.data_offsets;
        let elements = info.shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let bits = elements.and_then(|elements| elements.checked_mul(info.dtype.bitsize()));
        if bits
            .is_none_or(|bits| end.checked_sub(begins).and_then(|bytes| bytes.checked_mul(8)) != Some(bits))
        {
            let what = format!("{} {:?}", info.dtype, info.shape);
            return Err(HeaderError::Size { tensor: name.clone(), what, range: info.data_offsets });
        }
        if begins != expected {
            return Err(HeaderError::Offset { tensor: name.clone(), begins, expected });
        }
        expected = end;
    }
    Ok(())
}

/// One entry of the header's object.
enum Entry {
    Tensor(TensorInfo),
    /// A map of strings to strings, which only the `__metadata__` entry may be.
    Strings,
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Strict(value) = Strict::deserialize(from)?;
        let strings = value.as_object().is_some_and(|map| map.values().all(serde_json::Value::is_string));
        if strings {
            return Ok(Self::Strings);
        }
        serde_json::from_value(value).map(Self::Tensor).map_err(Error::custom)
    }
}
