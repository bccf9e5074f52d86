//! The header of a safetensors file, believed only as far as it agrees with the file's length and with itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// One tensor as the header lists it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub bytes: Range<usize>,
}

/// Reads the header at the start of `file`. The tensors must cover the rest of the file without gap or overlap.
pub(super) fn read(path: &Path, file: &[u8]) -> Result<BTreeMap<String, Entry>> {
    let malformed = |problem: String| Error::malformed(path, problem);
    let length = file.first_chunk::<8>().ok_or_else(|| {
        malformed(format!("{} bytes long, a safetensors file begins with 8 bytes of header length", file.len()))
    })?;
    let (length, left) = (u64::from_le_bytes(*length), file.len() - 8);
    if length > left as u64 {
        return Err(malformed(format!("header of {length} bytes announced, {left} bytes left in the file")));
    }
    let data = 8 + length as usize;
    let header: Map<String, Value> =
        serde_json::from_slice(&file[8..data]).map_err(|e| malformed(format!("header is not a JSON object: {e}")))?;

    let mut entries = BTreeMap::new();
    for (name, value) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let info: TensorInfo =
            serde_json::from_value(value).map_err(|e| malformed(format!("header entry `{name}`: {e}")))?;
        let (start, end) = info.data_offsets;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
        if start > end || bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != end - start) {
            let needed = bits.map_or("more than addressable".into(), |bits| bits.div_ceil(8).to_string());
            return Err(malformed(format!(
                "tensor `{name}`: {} {:?} needs {needed} bytes, offsets {start}..{end} given",
                info.dtype, info.shape
            )));
        }
        if end > file.len() - data {
            return Err(malformed(format!(
                "tensor `{name}` ends at byte {end} of the data, the file has {} bytes of data",
                file.len() - data
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
    if at != file.len() {
        return Err(malformed(format!("{} bytes after the last tensor", file.len() - at)));
    }
    Ok(entries)
}
