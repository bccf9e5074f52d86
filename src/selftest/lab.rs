//! What all self tests need: data, buffers, pages, and how a result is held against what it should be.

use crate::checkpoint::{Format, Tensor};
use crate::formats::{e2m1_to_f32, e4m3_to_f32, CacheFormat};
use crate::gpu::{Buffer, Features, Gpu, MemoryKind, Recording};
use crate::kernels::cache_append::{page_place, SLAB_HEADER, TABLE_PAGES};
use crate::kernels::linear::Pack;
use crate::kernels::Step;
use crate::model::pack::{slice_limit, LinearPlan, Loader, MatrixSpec};
use crate::model::synthetic::Random;
use crate::Result;
use bytemuck::Pod;

/// A NaN that no kernel may read: unwritten memory.
pub const POISON: u32 = u32::MAX;

/// Every format of weights.
pub const FORMATS: [Format; 6] =
    [Format::F32, Format::Bf16, Format::F16, Format::Fp8Block, Format::Fp8Row, Format::Fp4];

/// How far a kernel is from its twin.
#[derive(Debug)]
pub struct Found {
    pub worst: f64,
    pub allowed: f64,
    /// The first thing that is wrong.
    pub message: Option<String>,
}

impl Found {
    /// Not at all: `worst` counts values that differ.
    pub fn exact() -> Self {
        Self::within(0.0)
    }
    /// By a relative error of so much at most.
    pub fn within(allowed: f64) -> Self {
        Self { worst: 0.0, allowed, message: None }
    }
    /// Nothing could be compared.
    pub fn failed(message: String) -> Self {
        Self { worst: f64::MAX, allowed: 0.0, message: Some(message) }
    }

    pub fn ok(&self) -> bool {
        self.message.is_none() && self.worst <= self.allowed
    }

    /// `count` values that have to be exact are not.
    pub fn wrong(&mut self, count: usize, message: String) {
        self.worst = if self.allowed == 0.0 { self.worst + count as f64 } else { f64::MAX };
        self.message.get_or_insert(message);
    }

    /// Takes an error of value `i` of `what`.
    pub fn error(&mut self, what: &str, i: usize, got: f32, expected: f64, error: f64) {
        let error = if error.is_finite() { error } else { f64::MAX };
        self.worst = self.worst.max(error);
        if error > self.allowed {
            self.message.get_or_insert_with(|| format!("{what}, value {i}: {got} where the twin has {expected}"));
        }
    }

    /// Takes values whose error is relative to theirs, or to 1 where they are smaller.
    pub fn close(&mut self, what: &str, got: &[f32], expected: &[f32]) {
        for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            let (a, b) = (f64::from(got), f64::from(expected));
            self.error(what, i, got, b, (a - b).abs() / b.abs().max(1.0));
        }
        self.lengths(what, got.len(), expected.len());
    }

    /// Takes words that have to be equal.
    pub fn same(&mut self, what: &str, got: &[u32], expected: &[u32]) {
        let differs = |(_, (got, expected)): &(usize, (&u32, &u32))| got != expected;
        let mut different = got.iter().zip(expected).enumerate().filter(differs);
        if let Some((i, (got, expected))) = different.next() {
            let message = format!("{what}, word {i}: {got:#010x} where the twin has {expected:#010x}");
            self.wrong(1 + different.count(), message);
        }
        self.lengths(what, got.len(), expected.len());
    }

    /// As [`Found::same`], of floats.
    pub fn same_floats(&mut self, what: &str, got: &[f32], expected: &[f32]) {
        self.same(what, bytemuck::cast_slice(got), bytemuck::cast_slice(expected));
    }

    /// Takes memory that nothing may have written to.
    pub fn untouched(&mut self, what: &str, words: &[u32]) {
        let mut written = words.iter().enumerate().filter(|(_, &word)| word != POISON);
        if let Some((i, word)) = written.next() {
            let message = format!("{what}, word {i}: {word:#010x} was written where nothing should be");
            self.wrong(1 + written.count(), message);
        }
    }

    /// Takes a packed row. Its scales and codes must be those of values no further from the twin's than `noise` times the
    /// largest of them; `worst` counts others.
    pub fn packed(&mut self, what: &str, format: CacheFormat, got: &[u32], values: &[f32], noise: f32) {
        let noise = noise * values.iter().fold(0f32, |most, v| most.max(v.abs()));
        let scales: &[u8] = &bytemuck::cast_slice(got)[4 * format.code_words(values.len())..];
        let unpacked = format.unpack(got, values.len());
        for (g, group) in values.chunks(format.group()).enumerate() {
            let amax = group.iter().fold(0f32, |most, v| most.max(v.abs()));
            let allowed = format.scale_byte((amax - noise).max(0.0))..=format.scale_byte(amax + noise);
            if !allowed.contains(&scales[g]) {
                self.wrong(1, format!("{what}, group {g}: scale byte {} where the twin has {allowed:?}", scales[g]));
            }
            let scale = format.scale(scales[g]);
            for (i, &x) in group.iter().enumerate() {
                let decode = if format == CacheFormat::Fp8 { e4m3_to_f32 } else { e2m1_to_f32 };
                let near = |x: f32| scale * decode(format.encode(x, scale));
                let (allowed, got) = (near(x - noise)..=near(x + noise), unpacked[g * format.group() + i]);
                if !allowed.contains(&got) {
                    let channel = g * format.group() + i;
                    self.wrong(1, format!("{what}, channel {channel}: {got} where the twin has {allowed:?} ({x})"));
                }
            }
        }
    }

    fn lengths(&mut self, what: &str, got: usize, expected: usize) {
        if got != expected {
            self.wrong(1, format!("{what}: {got} values where the twin has {expected}"));
        }
    }
}

/// A device, and random data.
pub struct Lab<'g> {
    pub gpu: &'g Gpu,
    /// Those that the variant under test needs, so that no other one is chosen.
    pub features: Features,
    pub random: Random,
}

impl<'g> Lab<'g> {
    pub fn new(gpu: &'g Gpu, features: Features) -> Self {
        Self { gpu, features, random: Random::new(41) }
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: u32) -> u32 {
        (((self.random.bits() >> 32) * u64::from(n)) >> 32) as u32
    }
    /// `n` values in -`scale` to `scale`.
    pub fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.random.value() * scale).collect()
    }
    /// `rows` rows of [`Lab::values`].
    pub fn rows(&mut self, rows: usize, n: usize, scale: f32) -> Vec<Vec<f32>> {
        (0..rows).map(|_| self.values(n, scale)).collect()
    }

    /// A buffer with this content.
    pub fn upload<T: Pod>(&self, kind: MemoryKind, data: &[T]) -> Result<Buffer> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.gpu.buffer(kind, "self test", bytes.len() as u64)?;
        self.gpu.upload(&buffer, 0, bytes);
        Ok(buffer)
    }
    /// Activations.
    pub fn scratch<T: Pod>(&self, data: &[T]) -> Result<Buffer> {
        self.upload(MemoryKind::Scratch, data)
    }
    /// Weights that are no pack.
    pub fn weights<T: Pod>(&self, data: &[T]) -> Result<Buffer> {
        self.upload(MemoryKind::Weights, data)
    }
    /// Room for results: poisoned.
    pub fn room(&self, words: usize) -> Result<Buffer> {
        let buffer = self.gpu.buffer(MemoryKind::Scratch, "self test", 4 * words as u64)?;
        self.gpu.fill(&buffer, POISON);
        Ok(buffer)
    }
    pub fn step(&self, step: Step) -> Result<Buffer> {
        self.gpu.uniform("self test", &step)
    }
    /// A step of so many rows.
    pub fn step_of(&self, rows: usize) -> Result<Buffer> {
        self.step(Step { rows: rows as u32, ..Step::default() })
    }

    /// Makes kernels and buffers, and runs what is recorded. What the device refuses of it fails this call only.
    pub async fn run<T>(&self, make: impl FnOnce(&mut Recording) -> Result<T>) -> Result<T> {
        let gpu = self.gpu;
        let make = || {
            let mut recording = Recording::new();
            let made = make(&mut recording)?;
            gpu.prepare(&recording)?;
            Ok((recording, made))
        };
        let (recording, made) = gpu.settled(make).await?;
        gpu.submit(recording)?;
        Ok(made)
    }

    /// What a buffer holds.
    pub async fn read<T: Pod>(&self, buffer: &Buffer) -> Result<Vec<T>> {
        Ok(bytemuck::allocation::pod_collect_to_vec(&self.gpu.read(buffer).await?))
    }
}

/// Rows at a distance of `stride` words, each from word `offset` on; poison between them.
pub fn strided(rows: &[Vec<f32>], stride: usize, offset: usize) -> Vec<u32> {
    let mut out = vec![POISON; rows.len() * stride];
    for (out, row) in out.chunks_mut(stride).zip(rows) {
        out[offset..].iter_mut().zip(row).for_each(|(out, v)| *out = v.to_bits());
    }
    out
}

/// Those rows again, `width` values of each. What lies around them must be poison still.
pub fn unstrided(found: &mut Found, what: &str, words: &[u32], stride: usize, offset: usize, width: usize) -> Vec<f32> {
    let row = |row: &[u32]| {
        found.untouched(what, &row[..offset]);
        found.untouched(what, &row[offset + width..]);
        row[offset..offset + width].iter().map(|&word| f32::from_bits(word)).collect::<Vec<_>>()
    };
    words.chunks(stride).flat_map(row).collect()
}

/// A random matrix as a checkpoint has it.
pub struct Weight {
    shape: [usize; 2],
    format: Format,
    data: Vec<u8>,
    scales: Option<(Vec<u8>, [usize; 2])>,
}

impl Weight {
    pub fn random(lab: &mut Lab<'_>, format: Format, rows: usize, k: usize) -> Self {
        let data: Vec<u8> = match format {
            Format::F32 => lab.values(rows * k, 1.0).into_iter().flat_map(f32::to_le_bytes).collect(),
            Format::Bf16 => {
                let values = lab.values(rows * k, 1.0).into_iter();
                values.flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            Format::F16 => {
                let values = lab.values(rows * k, 1.0).into_iter();
                values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect()
            }
            // No code is NaN.
            Format::Fp8Block | Format::Fp8Row => (0..rows * k)
                .map(|_| lab.random.bits() as u8)
                .map(|code| if code & 0x7f == 0x7f { code ^ 1 } else { code })
                .collect(),
            Format::Fp4 => (0..rows * k.div_ceil(2)).map(|_| lab.random.bits() as u8).collect(),
        };
        let scale_rows = match format {
            Format::Fp8Block => Some(rows.div_ceil(32)),
            Format::Fp8Row | Format::Fp4 => Some(rows),
            _ => None,
        };
        let scales = scale_rows.map(|rows| {
            let shape = [rows, k.div_ceil(32)];
            ((0..shape[0] * shape[1]).map(|_| 118 + lab.below(8) as u8).collect(), shape)
        });
        Self { shape: [rows, k], format, data, scales }
    }

    pub fn tensor(&self) -> Tensor<'_> {
        Tensor {
            name: "self test",
            shape: &self.shape,
            format: self.format,
            data: &self.data,
            scales: self.scales.as_ref().map(|(bytes, shape)| (&bytes[..], *shape)),
        }
    }

    pub fn f32(&self) -> Vec<f32> {
        self.tensor().to_f32()
    }
}

/// Matrices in one pack, and where the outputs of each begin.
pub async fn pack(lab: &Lab<'_>, weights: &[Weight]) -> Result<(Pack, Vec<usize>)> {
    let mut outputs = vec![0];
    let spec = |weight: &Weight| {
        let spec = MatrixSpec::new(&weight.tensor(), *outputs.last().unwrap_or(&0));
        outputs.push(spec.out + spec.rows);
        spec
    };
    let specs: Vec<_> = weights.iter().map(spec).collect();
    let plan = LinearPlan::new(&specs, slice_limit(lab.gpu))?;
    let pack = plan.load(&mut Loader::new(lab.gpu), "self test", |i| Ok(weights[i].tensor())).await?;
    Ok((pack, outputs))
}

/// `w x` in f64, and the sum of the products' magnitudes.
pub fn product(w: &[f32], x: &[f32]) -> (f64, f64) {
    w.iter().zip(x).fold((0.0, 0.0), |(sum, magnitude), (&w, &x)| {
        let p = f64::from(w) * f64::from(x);
        (sum + p, magnitude + p.abs())
    })
}

/// `1 / rms(x)` in f64.
pub fn rms_factor(x: &[f32], eps: f32) -> f64 {
    let squares: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
    1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt()
}

/// A session's pages, one after the other in two slabs. All is poisoned.
pub struct Pages {
    pub slabs: [Buffer; 2],
    pub table: Buffer,
    page_words: usize,
    places: Vec<u32>,
}

impl Pages {
    pub fn new(lab: &Lab<'_>, page_words: usize, pages: usize) -> Result<Self> {
        // The last first, in turns, and a place that stays free.
        let room = pages.div_ceil(2) + 1;
        let places: Vec<u32> = (0..pages).map(|page| page_place(page % 2, room - 1 - page / 2)).collect();
        let slab = |number: u32| {
            let slab = lab.room(SLAB_HEADER + room * page_words)?;
            lab.gpu.upload(&slab, 0, &number.to_le_bytes());
            Ok(slab)
        };
        let mut words = vec![POISON; TABLE_PAGES];
        words[..pages].copy_from_slice(&places);
        let table = lab.upload(MemoryKind::Params, &words)?;
        Ok(Self { slabs: [slab(0)?, slab(1)?], table, page_words, places })
    }

    /// The slab that has a page.
    pub fn slab(&self, page: usize) -> usize {
        page % 2
    }

    fn word(&self, page: usize) -> usize {
        SLAB_HEADER + (self.places[page] & 0xffff) as usize * self.page_words
    }

    /// Writes words of one page; `at` counts as if pages lay one after the other.
    pub fn write(&self, lab: &Lab<'_>, at: usize, words: &[u32]) {
        let page = at / self.page_words;
        let offset = 4 * (self.word(page) + at % self.page_words) as u64;
        lab.gpu.upload(&self.slabs[self.slab(page)], offset, bytemuck::cast_slice(words));
    }

    /// The pages, one after the other. Nothing may have been written beside them.
    pub async fn read(&self, lab: &Lab<'_>, found: &mut Found) -> Result<Vec<u32>> {
        let mut slabs = [lab.read::<u32>(&self.slabs[0]).await?, lab.read(&self.slabs[1]).await?];
        let mut pages = Vec::with_capacity(self.places.len() * self.page_words);
        for page in 0..self.places.len() {
            let words = &mut slabs[self.slab(page)][self.word(page)..][..self.page_words];
            pages.extend_from_slice(words);
            words.fill(POISON);
        }
        for slab in &slabs {
            found.untouched("a slab beside its pages", &slab[1..]);
        }
        Ok(pages)
    }
}

/// Ascending entries, `topk` at most, of `visible`: each as likely as any other.
pub fn choose(lab: &mut Lab<'_>, visible: usize, topk: usize) -> Vec<u32> {
    let mut rest = visible.min(topk);
    let mut entries = vec![];
    for entry in 0..visible {
        if (lab.below((visible - entry) as u32) as usize) < rest {
            entries.push(entry as u32);
            rest -= 1;
        }
    }
    entries
}
