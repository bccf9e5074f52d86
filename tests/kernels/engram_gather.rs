//! Kernel `engram_gather` against 128-bit arithmetic and dequantised rows.

use super::common::{assert_same_bits, config, gpu, poisoned, read, upload, Random, POISON};
use super::linear::{step, Weight, FORMATS};
use cedra::checkpoint::Format;
use cedra::gpu::{Binding, Gpu, MemoryKind, Recording};
use cedra::kernels::engram_gather::{Buffers, Dims, EngramGather, BEFORE_TEXT};
use cedra::kernels::linear::Pack;
use cedra::model::pack::{LinearPlan, Loader, MatrixSpec};
use proptest::prelude::*;

/// The released model's two Engrams.
const MULTIPLIERS: [[u64; 4]; 2] = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
];
const PRIMES: [[u32; 24]; 2] = [
    [
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183, 16000189, 16000207, 16000211,
        16000253, 16000277, 16000289, 16000307, 16000321, 16000339, 16000381, 16000393, 16000399, 16000403, 16000409,
        16000447, 16000463,
    ],
    [
        16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627, 16000667, 16000669, 16000693,
        16000697, 16000711, 16000729, 16000759, 16000769, 16000781, 16000799, 16000813, 16000819, 16000841, 16000877,
        16000879, 16000889,
    ],
];
const COMPRESSED_VOCABULARY: u32 = 99092;

/// `shared/u64.wgsl`, line by line: the low and the high half.
mod wgsl {
    type U64 = [u32; 2];

    pub fn mul_wide(a: u32, b: u32) -> U64 {
        let low = (a & 0xffff) * (b & 0xffff);
        let cross = (a >> 16) * (b & 0xffff) + (low >> 16);
        let cross2 = (a & 0xffff) * (b >> 16) + (cross & 0xffff);
        let high = (a >> 16) * (b >> 16) + (cross >> 16) + (cross2 >> 16);
        [a.wrapping_mul(b), high]
    }
    pub fn mul_u32(a: U64, b: u32) -> U64 {
        let product = mul_wide(a[0], b);
        [product[0], product[1].wrapping_add(a[1].wrapping_mul(b))]
    }
    pub fn rem_u32(a: U64, d: u32) -> u32 {
        let room = d.leading_zeros();
        let mut rest = a[1] % d;
        let mut left = 32;
        while left > 0 {
            let take = room.min(left);
            left -= take;
            rest = ((rest << take) | ((a[0] >> left) & ((1 << take) - 1))) % d;
        }
        rest
    }
}

#[test]
fn u64_arithmetic_matches_128_bits() {
    let mut random = Random::new(64);
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    for _ in 0..2_000_000 {
        let (a, b) = (random.bits(), random.bits() as u32);
        let (a, b) = (a >> random.below(64), b >> random.below(32));
        assert_eq!(wgsl::mul_wide(a as u32, b), halves(a as u32 as u64 * b as u64));
        assert_eq!(wgsl::mul_u32(halves(a), b), halves((a as u128 * b as u128) as u64), "{a} * {b}");
        let d = (random.bits() as u32 >> 1 >> random.below(30)).max(2);
        assert_eq!(wgsl::rem_u32(halves(a), d) as u128, a as u128 % d as u128, "{a} % {d}");
    }
    for d in [2, 3, 65_535, 65_536, 16_000_057, (1 << 25) - 39, (1 << 31) - 1] {
        for a in [0, 1, u32::MAX as u64, 1 << 32, i64::MAX as u64, u64::MAX] {
            assert_eq!(wgsl::rem_u32(halves(a), d) as u64, a % d as u64, "{a} % {d}");
        }
    }
}

/// An Engram and its vocabulary.
struct Case {
    dims: Dims,
    multipliers: Vec<u64>,
    primes: Vec<u32>,
    token_map: Vec<u32>,
}

impl Case {
    fn released(layer: usize, head_dim: u32, random: &mut Random) -> Self {
        let dims =
            Dims { ngram: 4, heads: 8, head_dim, image_token: Some(129_264), pad_token: Some(2), pad_compressed: 2 };
        let token_map = (0..129_280).map(|_| random.below(COMPRESSED_VOCABULARY)).collect();
        Self { dims, multipliers: MULTIPLIERS[layer].to_vec(), primes: PRIMES[layer].to_vec(), token_map }
    }

    /// Table rows of the token that `recent` begins with, newest first.
    fn rows(&self, recent: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut within = true;
        let compressed: Vec<u32> = recent
            .map(|id| {
                within &= ![Some(BEFORE_TEXT), self.dims.image_token, self.dims.pad_token].contains(&Some(id));
                if within {
                    self.token_map[id as usize]
                } else {
                    self.dims.pad_compressed
                }
            })
            .collect();
        let mut offset = 0;
        let lookup = |(i, &prime): (usize, &u32)| {
            let size = i / self.dims.heads as usize + 2;
            let mixed = (0..size).fold(0, |mixed, s| mixed ^ (compressed[s] as u128 * self.multipliers[s] as u128));
            let row = offset + (mixed % prime as u128) as u32;
            offset += prime;
            row
        };
        self.primes.iter().enumerate().map(lookup).collect()
    }

    /// Expected rows of every token of a step.
    fn all_rows(&self, tokens: &[u32], history: &[u32]) -> Vec<u32> {
        let recent = |t: usize| tokens[..=t].iter().rev().chain(history).copied().take(self.dims.ngram as usize);
        (0..tokens.len()).flat_map(|t| self.rows(recent(t))).collect()
    }

    fn run(&self, gpu: &Gpu, table: &Pack, hash: &[u32], tokens: &[u32], history: &[u32]) -> Vec<f32> {
        let tokens_buffer = upload(gpu, MemoryKind::Cache, "tokens", tokens);
        let history = upload(gpu, MemoryKind::Cache, "history", history);
        let token_map = upload(gpu, MemoryKind::Weights, "token map", &self.token_map);
        let hash = upload(gpu, MemoryKind::Weights, "hash", hash);
        let stride = self.dims.stride() as usize;
        let rows_out = poisoned(gpu, MemoryKind::Scratch, "rows", tokens.len() * stride);
        let step = step(gpu, tokens.len() as u32);
        let buffers = Buffers {
            step: Binding::Whole(&step),
            tokens: Binding::Whole(&tokens_buffer),
            history: Binding::Whole(&history),
            token_map: Binding::Whole(&token_map),
            hash: Binding::Whole(&hash),
            rows_out: Binding::Whole(&rows_out),
        };
        let gather = EngramGather::new(gpu, &self.dims, table, &buffers).unwrap();
        let mut recording = Recording::new();
        gather.record(&mut recording, tokens.len() as u32 + 1);
        gpu.submit(recording).unwrap();
        let width = (self.dims.lookups() * self.dims.head_dim) as usize;
        let out: Vec<f32> = read(gpu, &rows_out);
        out.chunks(stride).for_each(|row| {
            assert!(row[width..].iter().all(|v| v.to_bits() == POISON), "padding was written");
        });
        out.chunks(stride).flat_map(|row| row[..width].to_vec()).collect()
    }
}

fn pack(gpu: &Gpu, weight: &Weight, limit: u64) -> Pack {
    let plan = LinearPlan::new(&[MatrixSpec::new(&weight.tensor(), 0)], limit).unwrap();
    pollster::block_on(plan.load(&mut Loader::new(gpu), "table", |_| Ok(weight.tensor()))).unwrap()
}

/// Thousands of hashes with the released constants. A table of 384 million rows does not fit a test, so the first rows
/// are moved by what is expected, modulo 2^32: then lookup i of a token must find row i of a small table, and a wrong
/// hash another one, or none.
#[test]
fn engram_gather_hashes_like_128_bits() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(4);
    for layer in 0..2 {
        let case = Case::released(layer, 1, &mut random);
        let lookups = case.primes.len();
        let values: Vec<u8> = (0..lookups).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let table = Weight { shape: [lookups, 1], format: Format::F32, data: values, scales: None };
        let table = pack(gpu, &table, 1 << 20);
        let mut largest = 0;
        for i in 0..60 {
            let mut text: Vec<u32> = (0..4).map(|_| random.below(129_280)).collect();
            if i % 4 == 0 {
                let special = [129_264, 2, BEFORE_TEXT][i / 4 % 3];
                text[random.below(3) as usize + 1] = special;
            }
            let rows = case.rows(text.iter().copied());
            largest = largest.max(*rows.iter().max().unwrap());
            let mut hash = case.dims.hash(&case.multipliers, &case.primes);
            let first_rows = hash.len() - lookups;
            for (j, row) in rows.iter().enumerate() {
                hash[first_rows + j] = hash[first_rows + j].wrapping_add((j as u32).wrapping_sub(*row));
            }
            let found = case.run(gpu, &table, &hash, &text[..1], &text[1..]);
            let expected: Vec<f32> = (0..lookups).map(|j| j as f32).collect();
            assert_eq!(found, expected, "layer {layer}, tokens {text:?}");
        }
        assert!(largest > 380_000_000, "rows beyond what 24 bits hold were looked up");
    }
}

/// Rows of all formats, whole and in slices of a few rows: bit by bit, each written once.
#[test]
fn engram_gather_decodes_every_format_and_slice() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(5);
    for (i, format) in FORMATS.into_iter().enumerate() {
        // Widths of whole scale groups, and not.
        let head_dim = [256, 40, 7, 64, 256, 33][i];
        let case = small(&mut random, head_dim, 3, 2);
        let rows: u32 = case.primes.iter().sum();
        let mut table = Weight::random(&mut random, format, rows as usize, head_dim as usize);
        if let Some((scales, _)) = &mut table.scales {
            scales[0] = 0;
        }
        let values = table.f32();
        let text: Vec<u32> = (0..40).map(|_| random.below(50)).collect();
        let history = [7, BEFORE_TEXT];
        let expected: Vec<f32> = case
            .all_rows(&text, &history)
            .iter()
            .flat_map(|&row| values[row as usize * head_dim as usize..][..head_dim as usize].to_vec())
            .collect();
        let hash = case.dims.hash(&case.multipliers, &case.primes);
        let whole = pack(gpu, &table, 1 << 20);
        assert_same_bits(&case.run(gpu, &whole, &hash, &text, &history), &expected);
        let sliced = pack(gpu, &table, whole.slices[0].weights.bytes() / 3);
        assert!(sliced.slices.len() > 2);
        assert_same_bits(&case.run(gpu, &sliced, &hash, &text, &history), &expected);
    }
}

fn small(random: &mut Random, head_dim: u32, ngram: u32, heads: u32) -> Case {
    let dims = Dims { ngram, heads, head_dim, image_token: None, pad_token: None, pad_compressed: 1 };
    let primes = [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157];
    Case {
        dims,
        multipliers: (0..ngram).map(|_| ((random.bits() >> 1) / 50) | 1).collect(),
        primes: primes[..dims.lookups() as usize].to_vec(),
        token_map: (0..50).map(|_| random.below(40)).collect(),
    }
}

proptest! {
    #![proptest_config(config())]
    /// A text in one step equals the text cut anywhere, with the first part as history.
    #[test]
    fn engram_gather_of_any_chunk(ngram in 2u32..5, heads in 1u32..5, length in 1usize..12, seed in any::<u64>()) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random::new(seed);
        let mut case = small(&mut random, 5, ngram, heads.min(12 / (ngram - 1)));
        case.dims.image_token = Some(3);
        let rows: u32 = case.primes.iter().sum();
        let table = Weight::random(&mut random, Format::Bf16, rows as usize, 5);
        let values = table.f32();
        let table = pack(gpu, &table, 1 << 20);
        let hash = case.dims.hash(&case.multipliers, &case.primes);
        let text: Vec<u32> = (0..length).map(|_| random.below(10)).collect();
        let cut = random.below(length as u32) as usize;
        let before = |end: usize| -> Vec<u32> {
            let older = text[..end].iter().rev().copied().chain(std::iter::repeat(BEFORE_TEXT));
            older.take(ngram as usize - 1).collect()
        };
        let expected: Vec<f32> = case
            .all_rows(&text, &before(0))
            .iter()
            .flat_map(|&row| values[row as usize * 5..][..5].to_vec())
            .collect();
        let whole = case.run(gpu, &table, &hash, &text, &before(0));
        assert_same_bits(&whole, &expected);
        let rest = case.run(gpu, &table, &hash, &text[cut..], &before(cut));
        assert_same_bits(&rest, &expected[expected.len() - rest.len()..]);
    }
}
