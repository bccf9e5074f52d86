//! Weight packs: how tensors of a checkpoint come to lie in device memory. A plan says where everything goes, and how
//! many bytes that takes, before anything is read; loading streams the tensors into it in pieces.
//!
//! A row is whole chunks of 32 channels, completed with zero bytes; a row of scales is whole words, completed with 127.
//! What one binding cannot hold is cut into slices: matrices at multiples of 32 rows, experts between two of them.

use crate::checkpoint::{check_scales, Bytes, Format, Tensor, Weight};
use crate::gpu::{Buffer, Gpu, MemoryKind};
use crate::kernels::experts_up::{ExpertPack, ExpertSegment, ExpertSlice};
use crate::kernels::linear::{part, Pack, Segment, Slice, MAX_SEGMENTS};
use crate::{Error, Result};
use std::ops::Range;

/// Bytes handed to the device at once.
const PIECE: usize = 8 << 20;
/// Bytes after which the device is waited for: until then the queue may hold copies of them in host memory.
const FENCE: u64 = 32 << 20;

/// The most bytes of a slice that a device can bind.
pub fn slice_limit(gpu: &Gpu) -> u64 {
    gpu.limits().max_storage_buffer_binding_size.min(gpu.limits().max_buffer_size)
}

/// Words of a matrix on the device.
#[derive(Debug, Clone, Copy)]
struct Words {
    format: Format,
    /// Of a row of codes.
    row: u64,
    /// Of a row of scales, 0 without scales.
    scale_row: u64,
}

impl Words {
    fn new(format: Format, k: usize) -> Self {
        let chunks = k.div_ceil(32) as u64;
        let scaled = matches!(format, Format::Fp8Block | Format::Fp8Row | Format::Fp4);
        Self {
            format,
            row: chunks * (format.row_bytes(32) / 4) as u64,
            scale_row: if scaled { chunks.div_ceil(4) } else { 0 },
        }
    }
    fn codes(&self, rows: usize) -> u64 {
        rows as u64 * self.row
    }
    fn scales(&self, rows: usize) -> u64 {
        let rows = if self.format == Format::Fp8Block { rows.div_ceil(32) } else { rows };
        rows as u64 * self.scale_row
    }
    /// Codes and scales, in whole quads.
    fn all(&self, rows: usize) -> u64 {
        (self.codes(rows) + self.scales(rows)).next_multiple_of(4)
    }
}

/// A matrix of a [`LinearPlan`], and where its rows go in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSpec {
    /// How it is stored.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Channels of a row.
    pub k: usize,
    /// Where row 0 goes in an output row.
    pub out: usize,
    /// Rows that share a group of input channels; 0: no groups.
    pub group_rows: usize,
    /// Distance of the groups in an input row, in floats, a multiple of 4.
    pub group_stride: usize,
}

impl MatrixSpec {
    /// A tensor whose row 0 goes to `out`.
    pub fn new(tensor: &Tensor<'_>, out: usize) -> Self {
        let (format, rows, k) = (tensor.format, tensor.rows(), tensor.channels());
        Self { format, rows, k, out, group_rows: 0, group_stride: 0 }
    }
    /// Row r reads the channels from `r / rows * stride` on.
    pub fn grouped(self, rows: usize, stride: usize) -> Self {
        Self { group_rows: rows, group_stride: stride, ..self }
    }
}

/// Where the matrices of a [`Pack`] will lie.
#[derive(Debug, Clone)]
pub struct LinearPlan {
    k: usize,
    slices: Vec<SlicePlan>,
}

#[derive(Debug, Clone, Default)]
struct SlicePlan {
    segments: Vec<Segment>,
    /// Which matrix each segment is of.
    matrices: Vec<usize>,
    words: u64,
}

impl LinearPlan {
    /// Places matrices that read the same input, in slices of at most `limit` bytes ([`slice_limit`]).
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] when not even 32 rows fit.
    ///
    /// # Panics
    /// When there is no matrix, or they differ in `k`.
    pub fn new(matrices: &[MatrixSpec], limit: u64) -> Result<Self> {
        let k = matrices[0].k;
        let mut slices = vec![SlicePlan::default()];
        for (i, matrix) in matrices.iter().enumerate() {
            assert_eq!(matrix.k, k, "matrices of a pack read the same input");
            let words = Words::new(matrix.format, k);
            let mut first = 0;
            while first < matrix.rows {
                let slice = slices.last_mut().expect("never empty");
                let room = (limit / 16 * 4).saturating_sub(slice.words);
                let mut rows = matrix.rows - first;
                if words.all(rows) > room {
                    rows = rows.min((room / words.all(32)) as usize * 32);
                }
                if rows == 0 || slice.segments.len() == MAX_SEGMENTS {
                    if slice.segments.is_empty() {
                        let what = format!("32 rows of {k} channels in {:?}", matrix.format);
                        return Err(Error::DeviceLimit { what, needed: words.all(32) * 4, allowed: limit });
                    }
                    slices.push(SlicePlan::default());
                    continue;
                }
                slice.segments.push(Segment {
                    format: matrix.format as u32,
                    data: slice.words as u32,
                    scales: (slice.words + words.codes(rows)) as u32,
                    rows: rows as u32,
                    out: (matrix.out + first) as u32,
                    first_row: first as u32,
                    group_rows: matrix.group_rows as u32,
                    group_stride: matrix.group_stride as u32,
                });
                slice.matrices.push(i);
                slice.words += words.all(rows);
                first += rows;
            }
        }
        Ok(Self { k, slices })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.slices.iter().map(|slice| Buffer::allocated(slice.words * 4)).sum()
    }

    /// Number of slices: dispatches of a kernel that reads the pack.
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// Number of slices with matrices whose outputs lie at `outputs`.
    pub fn part(&self, outputs: &Range<usize>) -> usize {
        self.slices.iter().filter(|slice| !part(&slice.segments, outputs).is_empty()).count()
    }

    /// Makes the buffers and fills them. `tensor(i)` is the tensor of matrix i; it is asked for once a slice.
    ///
    /// # Errors
    /// What `tensor` gives; [`Error::Tensor`] for a tensor that is not as planned, or has a NaN; the device's errors.
    pub async fn load<'a, T: Into<Weight<'a>>>(
        &self,
        loader: &mut Loader<'_>,
        label: &str,
        mut tensor: impl FnMut(usize) -> Result<T>,
    ) -> Result<Pack> {
        let mut slices = Vec::with_capacity(self.slices.len());
        for plan in &self.slices {
            let weights = loader.gpu.buffer(MemoryKind::Weights, label, plan.words * 4)?;
            for (segment, &matrix) in plan.segments.iter().zip(&plan.matrices) {
                let tensor = tensor(matrix)?.into();
                let rows = segment.first_row as usize..(segment.first_row + segment.rows) as usize;
                check(&tensor, segment.format, self.k, None, rows.end)?;
                loader.matrix(&weights, segment.data, segment.scales, &tensor, rows).await?;
            }
            slices.push(Slice { weights, segments: plan.segments.clone() });
        }
        Ok(Pack { k: self.k as u32, slices })
    }
}

/// Where the experts of an [`ExpertPack`] will lie: all matrices of an expert together.
#[derive(Debug, Clone)]
pub struct ExpertPlan {
    k: usize,
    rows: usize,
    experts: usize,
    /// Bytes of a routed expert and of the shared one.
    expert_bytes: [u64; 2],
    slices: Vec<ExpertSlicePlan>,
}

#[derive(Debug, Clone)]
struct ExpertSlicePlan {
    /// Routed, then shared: a segment for each matrix of an expert.
    segments: Vec<ExpertSegment>,
    words: u64,
}

impl ExpertPlan {
    /// Places `experts` routed experts and the shared one, `matrices` matrices (`rows`, `k`) each, in slices of at most
    /// `limit` bytes ([`slice_limit`]).
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] when not even one expert fits.
    pub fn new(
        matrices: usize,
        (rows, k): (usize, usize),
        experts: usize,
        [routed, shared]: [Format; 2],
        limit: u64,
    ) -> Result<Self> {
        let words = [Words::new(routed, k), Words::new(shared, k)];
        let block = words.map(|words| words.all(rows) * matrices as u64);
        let allowed = limit / 16 * 4;
        if let Some(&needed) = block.iter().find(|&&block| block > allowed) {
            let what = format!("an expert of {matrices} matrices {rows} x {k}");
            return Err(Error::DeviceLimit { what, needed: needed * 4, allowed: limit });
        }
        // `count` experts from `first` on, from word `at` on.
        let segments = |kind: usize, at: u64, first: usize, count: usize| {
            (0..matrices as u64).map(move |m| {
                let data = at + m * words[kind].all(rows);
                ExpertSegment {
                    format: words[kind].format as u32,
                    data: data as u32,
                    scales: (data + words[kind].codes(rows)) as u32,
                    rows: rows as u32,
                    data_stride: block[kind] as u32,
                    scale_stride: block[kind] as u32,
                    first_expert: first as u32,
                    experts: count as u32,
                }
            })
        };
        let most = (allowed / block[0]) as usize;
        let mut slices = Vec::new();
        for first in (0..experts).step_by(most) {
            let count = most.min(experts - first);
            let words = count as u64 * block[0];
            let has_shared = first + count == experts && words + block[1] <= allowed;
            let here = segments(0, 0, first, count).chain(segments(1, words, experts, has_shared as usize));
            slices.push(ExpertSlicePlan { segments: here.collect(), words: words + has_shared as u64 * block[1] });
        }
        if slices.last().is_none_or(|slice| slice.segments[matrices].experts != 1) {
            let here = segments(0, 0, 0, 0).chain(segments(1, 0, experts, 1));
            slices.push(ExpertSlicePlan { segments: here.collect(), words: block[1] });
        }
        Ok(Self { k, rows, experts, expert_bytes: block.map(|words| words * 4), slices })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.slices.iter().map(|slice| Buffer::allocated(slice.words * 4)).sum()
    }

    /// Number of slices: dispatches of a kernel that reads the pack.
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// Makes the buffers and fills them. `tensor(e, m)` is matrix m of expert e, the shared expert being the last.
    ///
    /// # Errors
    /// As [`LinearPlan::load`].
    pub async fn load<'a, T: Into<Weight<'a>>>(
        &self,
        loader: &mut Loader<'_>,
        label: &str,
        mut tensor: impl FnMut(usize, usize) -> Result<T>,
    ) -> Result<ExpertPack> {
        let mut slices = Vec::with_capacity(self.slices.len());
        for plan in &self.slices {
            let weights = loader.gpu.buffer(MemoryKind::Weights, label, plan.words * 4)?;
            for kind in plan.segments.chunks(plan.segments.len() / 2) {
                for e in 0..kind[0].experts {
                    for (m, s) in kind.iter().enumerate() {
                        let tensor = tensor((s.first_expert + e) as usize, m)?.into();
                        check(&tensor, s.format, self.k, Some(self.rows), self.rows)?;
                        let (data, scales) = (s.data + e * s.data_stride, s.scales + e * s.scale_stride);
                        loader.matrix(&weights, data, scales, &tensor, 0..self.rows).await?;
                    }
                }
            }
            slices.push(ExpertSlice { weights, segments: plan.segments.clone() });
        }
        Ok(ExpertPack {
            k: self.k as u32,
            rows: self.rows as u32,
            experts: self.experts as u32,
            expert_bytes: self.expert_bytes,
            slices,
        })
    }
}

/// Whether a tensor is as planned: format, channels, and rows, exactly or at least.
fn check(tensor: &Weight<'_>, format: u32, k: usize, rows: Option<usize>, at_least: usize) -> Result<()> {
    let (found, channels) = (tensor.rows(), tensor.channels());
    let fits = rows.map_or(found >= at_least, |rows| found == rows);
    if tensor.format as u32 == format && channels == k && fits {
        return Ok(());
    }
    let found = format!("{found} x {channels} in {:?}", tensor.format);
    let name = ["F32", "Bf16", "F16", "Fp8Block", "Fp8Row", "Fp4"][format as usize];
    let allowed = format!("{} x {k} in {name}, as the matrices beside it", rows.unwrap_or(at_least));
    Err(Error::tensor(tensor.name, found, allowed))
}

/// Streams tensors to the device. Whatever their size, it holds one piece, and the queue a few more.
pub struct Loader<'g> {
    gpu: &'g Gpu,
    piece: Vec<u8>,
    /// Bytes uploaded since the device was waited for.
    pending: u64,
}

impl<'g> Loader<'g> {
    /// A loader that fills buffers of `gpu`.
    pub fn new(gpu: &'g Gpu) -> Self {
        Self { gpu, piece: Vec::new(), pending: 0 }
    }

    /// Writes `rows` of a tensor: codes from word `data` on, scales from word `scales` on.
    async fn matrix(
        &mut self,
        buffer: &Buffer,
        data: u32,
        scales: u32,
        tensor: &Weight<'_>,
        rows: Range<usize>,
    ) -> Result<()> {
        let words = Words::new(tensor.format, tensor.channels());
        let width = tensor.format.row_bytes(tensor.channels());
        let e4m3 = matches!(tensor.format, Format::Fp8Block | Format::Fp8Row);
        let finite = |codes: &[u8], first: usize| {
            // The shaders decode the NaN codes as ±480.
            match codes.iter().position(|code| e4m3 && code & 0x7f == 0x7f) {
                Some(at) => {
                    let found = format!("NaN at [{}, {}]", first + at / width, at % width);
                    Err(Error::tensor(tensor.name, found, "finite weights"))
                }
                None => Ok(()),
            }
        };
        let to = Padded { at: data, width, padded: words.row as usize * 4, padding: 0 };
        self.rows(buffer, to, tensor.data, rows.clone(), finite).await?;
        if let Some((bytes, [_, columns])) = tensor.scales {
            let rows = match tensor.format {
                Format::Fp8Block => rows.start / 32..rows.end.div_ceil(32),
                _ => rows,
            };
            let to = Padded { at: scales, width: columns, padded: words.scale_row as usize * 4, padding: 127 };
            self.rows(buffer, to, bytes, rows, |bytes, first| check_scales(tensor.name, bytes, columns, first)).await?;
        }
        Ok(())
    }

    /// Writes rows of `bytes`, a piece at a time; `check` sees each piece and the number of its first row.
    async fn rows(
        &mut self,
        buffer: &Buffer,
        to: Padded,
        bytes: Bytes<'_>,
        rows: Range<usize>,
        check: impl Fn(&[u8], usize) -> Result<()>,
    ) -> Result<()> {
        let Padded { at, width, padded, padding } = to;
        let mut offset = at as u64 * 4;
        let rows_a_piece = (PIECE / padded).max(1);
        for first in rows.clone().step_by(rows_a_piece) {
            let last = rows.end.min(first + rows_a_piece);
            let piece = bytes.read(first as u64 * width as u64..last as u64 * width as u64).await?;
            check(&piece, first)?;
            let piece = if width == padded {
                &*piece
            } else {
                self.piece.clear();
                for row in piece.chunks(width) {
                    self.piece.extend_from_slice(row);
                    self.piece.resize(self.piece.len().next_multiple_of(padded), padding);
                }
                &self.piece
            };
            self.gpu.upload(buffer, offset, piece);
            offset += piece.len() as u64;
            self.pending += piece.len() as u64;
            self.fence(buffer).await?;
        }
        Ok(())
    }

    /// Waits for the device when enough was uploaded: a readback ends after all writes before it.
    async fn fence(&mut self, buffer: &Buffer) -> Result<()> {
        if self.pending >= FENCE {
            self.gpu.read_range(buffer, 0, 4).await?;
            self.pending = 0;
        }
        Ok(())
    }
}

/// Where rows of `width` bytes go: from word `at` on, each completed to `padded` bytes.
#[derive(Debug, Clone, Copy)]
struct Padded {
    at: u32,
    width: usize,
    padded: usize,
    padding: u8,
}
