//! Little-endian fields, written and read in order.

use crate::store::RecordId;

/// Fields are appended to it.
#[derive(Debug, Default)]
pub(super) struct Output(pub Vec<u8>);

impl Output {
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    pub fn words(&mut self, words: &[u32]) {
        self.0.reserve(4 * words.len());
        words.iter().for_each(|word| self.u32(*word));
    }
}

/// What is left to be read. Nothing is read beyond the end, and nothing is allocated for bytes that are not there.
#[derive(Debug)]
pub(super) struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, left) = self.0.split_first_chunk()?;
        self.0 = left;
        Some(*taken)
    }
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub fn id(&mut self) -> Option<RecordId> {
        self.array().map(RecordId)
    }
    pub fn words(&mut self, count: usize) -> Option<Vec<u32>> {
        let (taken, left) = self.0.split_at_checked(count.checked_mul(4)?)?;
        self.0 = left;
        Some(taken.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
    /// Whether everything was read.
    pub fn done(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
