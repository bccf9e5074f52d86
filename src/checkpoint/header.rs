//! The header of a safetensors file, believed only as far as it agrees with the file's length and with itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// Most bytes of a header, as the format has it.
const MAX_HEADER: u64 = 100_000_000;

/// One tensor as the header lists it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub bytes: Range<u64>,
}

/// As the file writes it. Offsets may be larger than this machine's memory.
#[derive(Deserialize)]
#[serde(rename = "TensorInfo")]
struct Info {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Where the header lies in a file of `length` bytes, by its first 8 bytes, or all that it has.
pub(super) fn range(path: &Path, first: &[u8], length: u64) -> Result<Range<u64>> {
    let malformed = |problem: String| Error::malformed(path, problem);
    let announced = first.first_chunk::<8>().ok_or_else(|| {
        malformed(format!("{length} bytes long, a safetensors file begins with 8 bytes of header length"))
    })?;
    let (announced, left) = (u64::from_le_bytes(*announced), length - 8);
    if announced > left {
        return Err(malformed(format!("header of {announced} bytes announced, {left} bytes left in the file")));
    }
    if announced > MAX_HEADER {
        return Err(malformed(format!("header of {announced} bytes announced, {MAX_HEADER} allowed")));
    }
    Ok(8..8 + announced)
}

/// Reads a header, which ends where the data begin. The tensors must cover the rest of the file without gap or overlap.
pub(super) fn parse(path: &Path, header: &[u8], length: u64) -> Result<BTreeMap<String, Entry>> {
    let malformed = |problem: String| Error::malformed(path, problem);
    let data = 8 + header.len() as u64;
    let left = length - data;
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|e| malformed(format!("header is not a JSON object: {e}")))?;

    let mut entries = BTreeMap::new();
    for (name, value) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let info: Info = serde_json::from_value(value).map_err(|e| malformed(format!("header entry `{name}`: {e}")))?;
        let (start, end) = info.data_offsets;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize() as u64, |n, &d| n.checked_mul(d as u64));
        if start > end || bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != end - start) {
            let needed = bits.map_or("more than addressable".into(), |bits| bits.div_ceil(8).to_string());
            return Err(malformed(format!(
                "tensor `{name}`: {} {:?} needs {needed} bytes, offsets {start}..{end} given",
                info.dtype, info.shape
            )));
        }
        if end > left {
            return Err(malformed(format!(
                "tensor `{name}` ends at byte {end} of the data, the file has {left} bytes of data"
            )));
        }
        entries.insert(name, Entry { dtype: info.dtype, shape: info.shape, bytes: data + start..data + end });
    }

    let mut order: Vec<(&String, &Entry)> = entries.iter().collect();
    order.sort_by_key(|(_, e)| (e.bytes.start, e.bytes.end));
    let mut at = data;
    for (name, entry) in order {
        if entry.bytes.start != at {
            let kind = if entry.bytes.start < at { "overlaps the tensor before it" } else { "leaves a gap before it" };
            let (found, expected) = (entry.bytes.start - data, at - data);
            return Err(malformed(format!("tensor `{name}` {kind}: begins at {found}, {expected} expected")));
        }
        at = entry.bytes.end;
    }
    if at != length {
        return Err(malformed(format!("{} bytes after the last tensor", length - at)));
    }
    Ok(entries)
}
