//! `cache_append` against its twin; and the device's packing against `formats`, bit for bit.

use super::common::{gpu, poisoned, read, upload, Random, POISON};
use super::pool::Pool;
use cedra::formats::CacheFormat;
use cedra::gpu::{Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::cache_append::{
    constants, full_constants, CacheAppend, GlobalEntries, IndexQueries, Jobs, PageLayout, Remainder, WindowKeys,
};
use cedra::kernels::linear::Segment;
use cedra::kernels::Step;
use cedra::reference::cache_append as twin;
use cedra::reference::math::Matrix;

/// Sizes of a layer's caches.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub head_dim: usize,
    pub rotary: usize,
    pub window: usize,
    pub eps: f32,
    pub heads: usize,
    pub index_dim: usize,
    pub ratio: usize,
    /// Tokens that may be taken back.
    pub spare: usize,
}

impl Sizes {
    fn remainder(&self) -> Remainder {
        Remainder::new(self.ratio, self.spare)
    }

    pub fn key_words(&self) -> usize {
        CacheFormat::Fp8.row_words(self.head_dim)
    }
    pub fn query_words(&self) -> usize {
        CacheFormat::Mxfp4.row_words(self.index_dim)
    }
    /// The layer's part of a page, alone in it.
    pub fn part(&self) -> PageLayout {
        PageLayout::new(self.ratio, self.head_dim, self.index_dim)
    }
    /// The part with something else before and behind it.
    pub fn page(&self) -> PageLayout {
        self.part().within(5, 5 + self.part().words() + 3)
    }
    /// Segments start at multiples of 4, with something else before and between them.
    fn key_at(&self) -> usize {
        4
    }
    fn latent_at(&self) -> usize {
        (self.key_at() + self.head_dim).next_multiple_of(4) + 4
    }
    fn gate_at(&self) -> usize {
        (self.latent_at() + self.head_dim).next_multiple_of(4)
    }
    fn down_stride(&self) -> usize {
        (self.gate_at() + self.head_dim).next_multiple_of(4) + 4
    }
    const QUERY_AT: usize = 8;
    fn up_stride(&self) -> usize {
        (Self::QUERY_AT + self.heads * self.index_dim).next_multiple_of(4) + 4
    }
}

/// The weights of a Full layer, on both sides.
pub struct Weights {
    pub kv_norm: Vec<f32>,
    pub comp_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub freqs: Vec<f32>,
    pub wk: Matrix,
    pub pack: Vec<u32>,
    pub segment: Segment,
}

impl Weights {
    pub fn random(random: &mut Random, sizes: &Sizes, format: u32) -> Self {
        let mut norm = |n| (0..n).map(|_| random.uniform(0.5, 1.5)).collect::<Vec<_>>();
        let (kv_norm, comp_norm, k_norm) = (norm(sizes.head_dim), norm(sizes.head_dim), norm(sizes.index_dim));
        let freqs = frequencies(sizes.rotary);
        let (wk, pack, segment) = random_matrix(random, sizes.index_dim, sizes.head_dim, format);
        Self { kv_norm, comp_norm, k_norm, freqs, wk, pack, segment }
    }
}

pub fn frequencies(rotary: usize) -> Vec<f32> {
    (0..rotary / 2).map(|j| 160000f64.powf(-2.0 * j as f64 / rotary as f64) as f32).collect()
}

/// A matrix with random codes in one of the weight formats: its values, the pack, and where it stands in it.
fn random_matrix(random: &mut Random, rows: usize, cols: usize, format: u32) -> (Matrix, Vec<u32>, Segment) {
    let chunks = cols.div_ceil(32);
    let code_bytes = chunks * [128, 64, 64, 32, 32, 16][format as usize];
    let scale_words = chunks.div_ceil(4);
    let scale_rows = [0, 0, 0, rows.div_ceil(32), rows, rows][format as usize];
    // The pack holds another matrix before this one.
    let data_at = 8;
    let scales_at = data_at + rows * code_bytes / 4;
    let mut pack = vec![POISON; scales_at];
    let mut scales = vec![127u8; scale_rows * scale_words * 4];
    scales.iter_mut().for_each(|s| *s = 124 + random.below(6) as u8);
    let mut matrix = Matrix::new(rows, cols, vec![0.0; rows * cols]);
    for r in 0..rows {
        let mut codes = vec![0u8; code_bytes];
        for c in 0..cols {
            let bits = random.bits();
            let scale_row = if format == 3 { r / 32 } else { r };
            let scale = || CacheFormat::Mxfp4.scale(scales[scale_row * scale_words * 4 + c / 32]);
            matrix.row_mut(r)[c] = match format {
                0 => {
                    let x = random.normal();
                    codes[4 * c..][..4].copy_from_slice(&x.to_le_bytes());
                    x
                }
                1 => {
                    let x = half::bf16::from_f32(random.normal());
                    codes[2 * c..][..2].copy_from_slice(&x.to_le_bytes());
                    x.to_f32()
                }
                2 => {
                    let x = half::f16::from_f32(random.normal());
                    codes[2 * c..][..2].copy_from_slice(&x.to_le_bytes());
                    x.to_f32()
                }
                3 | 4 => {
                    let code = bits as u8 & if bits & 0x78 == 0x78 { 0xf7 } else { 0xff };
                    codes[c] = code;
                    cedra::formats::e4m3_to_f32(code) * scale()
                }
                _ => {
                    codes[c / 2] |= (bits as u8 & 15) << (c % 2 * 4);
                    cedra::formats::e2m1_to_f32(bits as u8 & 15) * scale()
                }
            };
        }
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&codes);
        pack[data_at + r * code_bytes / 4..][..code_bytes / 4].copy_from_slice(&words);
    }
    pack.extend(bytemuck::pod_collect_to_vec::<u8, u32>(&scales));
    let segment = Segment {
        format,
        data: data_at as u32,
        scales: scales_at as u32,
        rows: rows as u32,
        out: 0,
        first_row: 0,
        group_rows: 0,
        group_stride: 0,
    };
    (matrix, pack, segment)
}

/// What the tokens of a text give the kernel: rows of its inputs, NaN in all places that are no channel.
pub struct Tokens {
    pub down: Vec<Vec<f32>>,
    pub up: Vec<Vec<f32>>,
}

impl Tokens {
    pub fn random(random: &mut Random, sizes: &Sizes, count: usize) -> Self {
        let nan = f32::from_bits(POISON);
        let mut tokens = Self { down: vec![], up: vec![] };
        for _ in 0..count {
            let mut down = vec![nan; sizes.down_stride()];
            for at in [sizes.key_at(), sizes.latent_at(), sizes.gate_at()] {
                let scale = 2f32.powi(random.below(9) as i32 - 4);
                down[at..at + sizes.head_dim].copy_from_slice(&random.normals(sizes.head_dim, scale));
            }
            let mut up = vec![nan; sizes.up_stride()];
            up[Sizes::QUERY_AT..][..sizes.heads * sizes.index_dim]
                .copy_from_slice(&random.normals(sizes.heads * sizes.index_dim, 1.0));
            tokens.down.push(down);
            tokens.up.push(up);
        }
        tokens
    }
    pub fn key<'a>(&'a self, sizes: &Sizes, t: usize) -> &'a [f32] {
        &self.down[t][sizes.key_at()..][..sizes.head_dim]
    }
    pub fn value<'a>(&'a self, sizes: &Sizes, t: usize) -> &'a [f32] {
        &self.down[t][sizes.latent_at()..][..sizes.head_dim]
    }
    pub fn gate<'a>(&'a self, sizes: &Sizes, t: usize) -> &'a [f32] {
        &self.down[t][sizes.gate_at()..][..sizes.head_dim]
    }
    pub fn query<'a>(&'a self, sizes: &Sizes, t: usize) -> &'a [f32] {
        &self.up[t][Sizes::QUERY_AT..][..sizes.heads * sizes.index_dim]
    }
}

/// A Full layer's caches on the device, poisoned, with the kernel on them.
pub struct Layer {
    pub sizes: Sizes,
    pub page: PageLayout,
    pub step: Buffer,
    pub down: Buffer,
    pub up: Buffer,
    pub ring: Buffer,
    pub chunk: Buffer,
    pub remainder: Option<Buffer>,
    pub queries: Buffer,
    pub append: CacheAppend,
}

impl Layer {
    /// With room for `rows` rows in flight; entries go to the layer's part of the pool's pages.
    pub fn new(gpu: &Gpu, sizes: Sizes, weights: &Weights, pool: &Pool, page: PageLayout, rows: usize) -> Self {
        let cache = |label, words| poisoned(gpu, MemoryKind::Cache, label, words);
        let step = gpu.uniform("step", &Step::default()).unwrap();
        let down = cache("down", rows * sizes.down_stride());
        let up = cache("up", rows * sizes.up_stride());
        let ring = cache("ring", sizes.window * sizes.key_words());
        let chunk = cache("chunk", rows * sizes.key_words());
        let remainder = (sizes.ratio > 1).then(|| cache("remainder", sizes.remainder().rows * 2 * sizes.head_dim));
        let queries = cache("queries", rows * sizes.heads * sizes.query_words());
        let words =
            full_constants(&weights.kv_norm, &weights.freqs, &weights.comp_norm, &weights.k_norm, &weights.pack);
        let constants = upload(gpu, MemoryKind::Weights, "constants", &words);
        let mut append = CacheAppend::new(
            gpu,
            &step,
            &WindowKeys {
                head_dim: sizes.head_dim,
                rotary: sizes.rotary,
                slots: sizes.window,
                block: false,
                eps: sizes.eps,
                down_stride: sizes.down_stride(),
                key_at: sizes.key_at(),
                down: &down,
                constants: &constants,
                ring: &ring,
                chunk: &chunk,
            },
            Some(&IndexQueries {
                heads: sizes.heads,
                head_dim: sizes.index_dim,
                up_stride: sizes.up_stride(),
                query_at: Sizes::QUERY_AT,
                up: &up,
                queries: &queries,
            }),
            Some(&GlobalEntries {
                ratio: sizes.ratio,
                latent_at: sizes.latent_at(),
                gate_at: sizes.gate_at(),
                wk: weights.segment,
                page,
                table: &pool.table,
                remainder: remainder.as_ref(),
                spare: sizes.spare,
            }),
        )
        .unwrap();
        for slab in &pool.slabs {
            append.add_slab(gpu, slab).unwrap();
        }
        Self { sizes, page, step, down, up, ring, chunk, remainder, queries, append }
    }

    /// Uploads the step, and the inputs of its rows, which begin with token `first` of the text.
    pub fn load(&self, gpu: &Gpu, tokens: &Tokens, first: usize, step: &Step) {
        let rows = step.rows as usize;
        gpu.upload(&self.step, 0, bytemuck::bytes_of(step));
        gpu.upload(&self.down, 0, bytemuck::cast_slice(&tokens.down[first..first + rows].concat()));
        gpu.upload(&self.up, 0, bytemuck::cast_slice(&tokens.up[first..first + rows].concat()));
    }
}

/// Checks a packed row against the values before quantisation: scales and codes are those of values at most `noise`
/// times the row's largest magnitude away. Returns whether the row is what `formats` packs, bit for bit.
#[track_caller]
pub fn check_packed(format: CacheFormat, packed: &[u32], values: &[f32], noise: f32) -> bool {
    assert_eq!(packed.len(), format.row_words(values.len()));
    let noise = noise * values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let bytes: &[u8] = bytemuck::cast_slice(packed);
    let scales = &bytes[4 * format.code_words(values.len())..];
    let unpacked = format.unpack(packed, values.len());
    for (g, group) in values.chunks(format.group()).enumerate() {
        let amax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
        let allowed = format.scale_byte((amax - noise).max(0.0))..=format.scale_byte(amax + noise);
        assert!(allowed.contains(&scales[g]), "group {g}: scale byte {} is not in {allowed:?}", scales[g]);
        let scale = format.scale(scales[g]);
        for (i, &x) in group.iter().enumerate() {
            let c = g * format.group() + i;
            let value = |x: f32| {
                let code = format.encode(x, scale);
                scale
                    * if format == CacheFormat::Fp8 {
                        cedra::formats::e4m3_to_f32(code)
                    } else {
                        cedra::formats::e2m1_to_f32(code)
                    }
            };
            let allowed = value(x - noise)..=value(x + noise);
            assert!(allowed.contains(&unpacked[c]), "channel {c}: {} is not in {allowed:?} ({x})", unpacked[c]);
        }
    }
    packed == format.pack(values)
}

/// Runs a text of `count` tokens from `start` on in steps of `rows` and checks everything that is written. Groups that end
/// below `kept` must stay as they are: what they would be made of is NaN.
fn check_against_twin(sizes: Sizes, format: u32, start: u32, count: usize, rows: usize, kept: u32, seed: u64) {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(seed);
    let weights = Weights::random(&mut random, &sizes, format);
    // A text that starts inside a group begins with the tokens that the remainder holds.
    let before = start as usize % sizes.ratio;
    let mut tokens = Tokens::random(&mut random, &sizes, before + count);
    // Tokens of groups that are kept.
    let old = (kept as usize / sizes.ratio * sizes.ratio + before).saturating_sub(start as usize).min(before + count);
    for down in &mut tokens.down[..old] {
        down[sizes.latent_at()..].fill(f32::from_bits(POISON));
    }
    let page = sizes.page();
    let pool = Pool::new(gpu, &mut random, &page, sizes.ratio, start as usize + count, 3);
    let layer = Layer::new(gpu, sizes, &weights, &pool, page, rows);
    if before > 0 {
        for t in 0..before {
            let held = [tokens.value(&sizes, t), tokens.gate(&sizes, t)].concat();
            let row = (start as usize - before + t) % sizes.remainder().cycle;
            gpu.upload(layer.remainder.as_ref().unwrap(), 4 * (row * held.len()) as u64, bytemuck::cast_slice(&held));
        }
    }
    let noise = 4e-6;
    let (mut checked, mut exact) = (0, 0);
    let mut check = |format, packed: &[u32], values: &[f32]| {
        checked += 1;
        exact += check_packed(format, packed, values, noise) as u32;
    };
    let mut first = 0;
    while first < count {
        let position = start + first as u32;
        let rows = rows.min(count - first);
        let page_tokens = page.entries * sizes.ratio;
        // With room for tokens that are taken back, entries of a step may go to several slabs.
        let (rows, slabs) = match sizes.spare {
            0 => {
                let (rows, slab) = pool.cut(position as usize, rows, page_tokens);
                (rows, vec![slab])
            }
            _ => {
                let end = (position as usize + rows).div_ceil(page_tokens).min(pool.pages());
                (rows, pool.slabs_of((position as usize / page_tokens).min(end)..end))
            }
        };
        for buffer in [&layer.chunk, &layer.ring, &layer.queries] {
            gpu.fill(buffer, POISON);
        }
        layer.load(gpu, &tokens, before + first, &Step { position, rows: rows as u32, kept, ..Step::default() });
        let mut recording = Recording::new();
        layer.append.record(&mut recording, position, rows as u32, Jobs::All, &slabs);
        gpu.submit(recording).unwrap();
        let (ring, chunk): (Vec<u32>, Vec<u32>) = (read(gpu, &layer.ring), read(gpu, &layer.chunk));
        let queries: Vec<u32> = read(gpu, &layer.queries);
        for row in 0..rows {
            let (t, position) = (before + first + row, position + row as u32);
            let key = twin::window_key(tokens.key(&sizes, t), &weights.kv_norm, sizes.eps, position, &weights.freqs);
            let at = if rows == 1 { position as usize % sizes.window } else { row } * sizes.key_words();
            let written = if rows == 1 { &ring } else { &chunk };
            check(CacheFormat::Fp8, &written[at..][..sizes.key_words()], &key);
            let query = twin::index_query(tokens.query(&sizes, t), sizes.index_dim, position, &weights.freqs);
            for (h, head) in query.chunks_exact(sizes.index_dim).enumerate() {
                let at = (row * sizes.heads + h) * sizes.query_words();
                check(CacheFormat::Mxfp4, &queries[at..][..sizes.query_words()], head);
            }
        }
        let other = if rows == 1 { &chunk } else { &ring };
        assert!(other.iter().all(|&w| w == POISON), "several rows leave the ring alone, a single one the chunk");
        first += rows;
    }
    let pages = pool.read(gpu);
    let mut untouched = pages.clone();
    for t in 0..before + count {
        let position = start as usize - before + t;
        if !(position + 1).is_multiple_of(sizes.ratio) || position < kept as usize {
            continue;
        }
        let group = t + 1 - sizes.ratio..t + 1;
        let pooled = if sizes.ratio == 1 {
            tokens.value(&sizes, t).to_vec()
        } else {
            let values: Vec<_> = group.clone().map(|t| tokens.value(&sizes, t)).collect();
            let gates: Vec<_> = group.map(|t| tokens.gate(&sizes, t)).collect();
            twin::pool(&values, &gates)
        };
        let group_start = (position + 1 - sizes.ratio) as u32;
        let latent = twin::latent(&pooled, &weights.comp_norm, sizes.eps);
        let entry = twin::entry(&latent, group_start, &weights.freqs);
        let key = twin::index_key(&latent, &weights.wk, &weights.k_norm, sizes.eps, group_start, &weights.freqs);
        let (at, key_at) = (page.latent(position / sizes.ratio), page.key(position / sizes.ratio));
        check(CacheFormat::Nvfp4, &pages[at..][..page.latent_words], &entry);
        check(CacheFormat::Mxfp4, &pages[key_at..][..page.key_words], &key);
        untouched[at..][..page.latent_words].fill(POISON);
        untouched[key_at..][..page.key_words].fill(POISON);
    }
    assert!(
        untouched.iter().all(|&w| w == POISON),
        "only the entries of complete groups that are not kept are written"
    );
    // Each row of the remainder holds the newest token there.
    if let Some(remainder) = &layer.remainder {
        let held: Vec<f32> = read(gpu, remainder);
        let Remainder { cycle, rows } = sizes.remainder();
        for j in 0..rows {
            let newest = (0..before + count).rev().find(|t| (start as usize - before + t) % cycle == j);
            if let Some(t) = newest.filter(|&t| t >= old) {
                let expected = [tokens.value(&sizes, t), tokens.gate(&sizes, t)].concat();
                assert_eq!(&held[2 * j * sizes.head_dim..][..2 * sizes.head_dim], &expected[..], "row {j}");
            }
        }
    }
    println!("{exact} of {checked} rows equal the twin's, bit for bit");
    assert!(exact * 2 > checked, "{exact} of {checked} rows equal the twin's");
}

const SMALL: Sizes =
    Sizes { head_dim: 44, rotary: 12, window: 5, eps: 1e-20, heads: 3, index_dim: 20, ratio: 2, spare: 0 };

#[test]
fn every_phase_of_a_group_and_every_kind_of_step_equals_the_twin() {
    for ratio in [1, 2, 3] {
        for (start, rows) in [(0, 1), (0, 2), (1, 3), (2, 5), (126, 4), (255, 1)] {
            check_against_twin(Sizes { ratio, ..SMALL }, 1, start, 9, rows, 0, 7 + u64::from(start) * 31 + rows as u64);
        }
    }
}

/// With room for tokens that are taken back: steps of as many rows as that allows, across pages that lie in different slabs.
#[test]
fn entries_of_a_round_go_to_the_slabs_of_their_pages() {
    for ratio in [1, 2, 3] {
        for (start, rows) in [(0, 1), (125, 2), (126, 4), (250, 6), (252, 6)] {
            for spare in [rows - 1, rows + 2] {
                let sizes = Sizes { ratio, spare: spare.max(1), ..SMALL };
                check_against_twin(sizes, 1, start, 13, rows, 0, 3 + u64::from(start) * 31 + spare as u64);
            }
        }
    }
}

#[test]
fn entries_below_kept_stay_as_they_are() {
    for ratio in [1, 2, 3] {
        for (start, rows) in [(0, 4), (1, 1), (1, 7), (125, 3)] {
            for kept in start..=start + 7 {
                check_against_twin(Sizes { ratio, ..SMALL }, 1, start, 7, rows, kept, u64::from(start + 8 * kept));
            }
        }
    }
}

#[test]
fn every_format_of_wk_equals_the_twin() {
    for format in 0..6 {
        let sizes = Sizes { head_dim: 76, rotary: 4, window: 9, heads: 5, index_dim: 36, ..SMALL };
        check_against_twin(sizes, format, 0, 6, 6, 0, 100 + u64::from(format));
    }
}

#[test]
fn positions_up_to_the_last_of_a_million_equal_the_twin() {
    let sizes = Sizes { head_dim: 16, rotary: 8, window: 7, index_dim: 8, ..SMALL };
    for (start, count) in [(65_533, 6), (1_048_570, 6)] {
        check_against_twin(sizes, 1, start, count, 3, 0, 5);
    }
}

#[test]
fn released_widths_equal_the_twin() {
    let sizes =
        Sizes { head_dim: 512, rotary: 64, window: 128, heads: 32, index_dim: 128, eps: 1e-20, ratio: 2, spare: 0 };
    check_against_twin(sizes, 1, 1_000, 4, 3, 0, 11);
    check_against_twin(Sizes { ratio: 1, ..sizes }, 3, 70_001, 2, 2, 0, 12);
}

/// A Full layer with three slabs, and the inputs of `rows` rows at `position`, loaded.
fn loaded(gpu: &Gpu, sizes: Sizes, position: u32, rows: usize, seed: u64) -> (Layer, Pool, Weights) {
    let mut random = Random::new(seed);
    let weights = Weights::random(&mut random, &sizes, 0);
    let tokens = Tokens::random(&mut random, &sizes, rows);
    let pool = Pool::new(gpu, &mut random, &sizes.page(), sizes.ratio, position as usize + rows, 3);
    let layer = Layer::new(gpu, sizes, &weights, &pool, sizes.page(), rows);
    layer.load(gpu, &tokens, 0, &Step { position, rows: rows as u32, ..Step::default() });
    (layer, pool, weights)
}

#[test]
fn a_part_of_the_jobs_writes_its_own_and_nothing_else() {
    let Some(gpu) = gpu() else { return };
    let position = 40;
    for rows in [1, 2, 5] {
        let run = |jobs| {
            let (layer, pool, _) = loaded(gpu, Sizes { ratio: rows.min(2), ..SMALL }, position, rows, 4);
            let mut recording = Recording::new();
            layer.append.record(&mut recording, position, rows as u32, jobs, &[pool.slab(0)]);
            gpu.submit(recording).unwrap();
            let remainder = layer.remainder.as_ref().map_or(vec![], |remainder| read(gpu, remainder));
            let keys: [Vec<u32>; 2] = [&layer.ring, &layer.chunk].map(|buffer| read(gpu, buffer));
            ([pool.read(gpu), remainder], keys, read::<u32>(gpu, &layer.queries))
        };
        let untouched = |words: &[u32]| words.iter().all(|&w| w == POISON);
        let (entries, keys, queries) = run(Jobs::All);
        assert!(!untouched(&entries[0]) && !untouched(&keys.concat()) && !untouched(&queries));
        let part = run(Jobs::Keys);
        assert!(part.0 == entries && part.1 == keys && untouched(&part.2), "keys of {rows} rows");
        let part = run(Jobs::Entries);
        assert!(part.0 == entries && untouched(&part.1.concat()) && untouched(&part.2), "entries of {rows} rows");
    }
}

#[test]
fn layers_without_an_indexer_write_window_keys_only_and_reindex_layers_queries_too() {
    let Some(gpu) = gpu() else { return };
    let (sizes, rows) = (SMALL, 3);
    // The buffers of a Full layer; its own kernel gives the expected bits.
    let (full, pool, weights) = loaded(gpu, sizes, 40, rows, 3);
    let (chunk, queries) = (
        poisoned(gpu, MemoryKind::Scratch, "chunk", rows * sizes.key_words()),
        poisoned(gpu, MemoryKind::Scratch, "queries", rows * sizes.heads * sizes.query_words()),
    );
    let words = upload(gpu, MemoryKind::Weights, "constants", &constants(&weights.kv_norm, &weights.freqs));
    let keys = WindowKeys {
        head_dim: sizes.head_dim,
        rotary: sizes.rotary,
        slots: sizes.window,
        block: false,
        eps: sizes.eps,
        down_stride: sizes.down_stride(),
        key_at: sizes.key_at(),
        down: &full.down,
        constants: &words,
        ring: &full.ring,
        chunk: &chunk,
    };
    let index = IndexQueries {
        heads: sizes.heads,
        head_dim: sizes.index_dim,
        up_stride: sizes.up_stride(),
        query_at: Sizes::QUERY_AT,
        up: &full.up,
        queries: &queries,
    };
    let mut recording = Recording::new();
    full.append.record(&mut recording, 40, rows as u32, Jobs::All, &[pool.slab(0)]);
    gpu.submit(recording).unwrap();
    for queries_too in [false, true] {
        let mut kernel = CacheAppend::new(gpu, &full.step, &keys, queries_too.then_some(&index), None).unwrap();
        // Whoever adds slabs need not know which layers have use for them.
        kernel.add_slab(gpu, &pool.slabs[0]).unwrap();
        for jobs in [Jobs::All, Jobs::Keys, Jobs::Entries] {
            gpu.fill(&chunk, POISON);
            gpu.fill(&queries, POISON);
            let mut recording = Recording::new();
            kernel.record(&mut recording, 40, rows as u32, jobs, &[7]);
            assert_eq!(recording.dispatches(), usize::from(jobs != Jobs::Entries));
            gpu.submit(recording).unwrap();
            let written: [Vec<u32>; 2] = [&chunk, &queries].map(|buffer| read(gpu, buffer));
            for (written, expected, wanted) in [
                (&written[0], &full.chunk, jobs != Jobs::Entries),
                (&written[1], &full.queries, queries_too && jobs == Jobs::All),
            ] {
                let expected = if wanted { read(gpu, expected) } else { vec![POISON; written.len()] };
                assert_eq!(*written, expected, "{jobs:?}");
            }
        }
    }
}

/// Layers of several ratios with their parts in the same pages, in any order of parts: each is what it is alone.
#[test]
fn the_layers_of_a_page_write_their_own_parts() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(23);
    let (count, rows) = (300, 50);
    let sizes = [1, 3, 2].map(|ratio| Sizes { ratio, ..SMALL });
    let page_words = sizes.iter().map(|s| s.part().words()).sum();
    let mut at = 0;
    let pages = sizes.map(|s| {
        let part = s.part().within(at, page_words);
        at += part.words();
        part
    });
    // Pages of a ratio of 3 have 126 tokens, so there are most of those.
    let shared = Pool::new(gpu, &mut random, &pages[1], 3, count, 2);
    for i in [2, 0, 1] {
        let (sizes, page) = (sizes[i], pages[i]);
        let weights = Weights::random(&mut random, &sizes, 2);
        let tokens = Tokens::random(&mut random, &sizes, count);
        let before = shared.read(gpu);
        let alone = Pool::new(gpu, &mut random, &sizes.part(), sizes.ratio, count, 1);
        for (pool, page) in [(&shared, page), (&alone, sizes.part())] {
            let layer = Layer::new(gpu, sizes, &weights, pool, page, rows);
            let mut first = 0;
            while first < count {
                let (rows, slab) = pool.cut(first, rows.min(count - first), page.entries * sizes.ratio);
                let step = Step { position: first as u32, rows: rows as u32, ..Step::default() };
                layer.load(gpu, &tokens, first, &step);
                let mut recording = Recording::new();
                layer.append.record(&mut recording, step.position, step.rows, Jobs::Entries, &[slab]);
                gpu.submit(recording).unwrap();
                first += rows;
            }
        }
        let mut expected = before;
        let alone = alone.read(gpu);
        for (whole, part) in expected.chunks_exact_mut(page_words).zip(alone.chunks_exact(page.words())) {
            whole[page.at..][..page.words()].copy_from_slice(part);
        }
        assert!(shared.read(gpu) == expected, "ratio {}", sizes.ratio);
    }
}

/// A group of values that sit on the edges of a format: its largest magnitude at a step of the scale, the others at the
/// midpoints of the grid under that scale, each exactly or one unit beside it.
fn edge_group(random: &mut Random, format: CacheFormat, exponents: std::ops::Range<i32>) -> Vec<f32> {
    let nudge =
        |random: &mut Random, x: f32| f32::from_bits((x.to_bits() as i32 + random.below(3) as i32 - 1).max(0) as u32);
    let exponent = exponents.start + random.below(exponents.len() as u32) as i32;
    let power = 2f32.powi(exponent);
    let amax = match (random.below(4), format) {
        (0, _) => random.uniform(1.0, 2.0) * power,
        (_, CacheFormat::Fp8) => nudge(random, 448.0 * power),
        (_, CacheFormat::Mxfp4) => nudge(random, 6.0 * power),
        // Six times a midpoint of E4M3, or six times a value of it.
        (_, CacheFormat::Nvfp4) => {
            let midpoint = (16 + random.below(16)) as f32 / 16.0;
            nudge(random, 6.0 * midpoint * power)
        }
    };
    let scale = format.scale(format.scale_byte(amax));
    let mut group = vec![amax];
    while group.len() < format.group() {
        let midpoint = match format {
            // Odd sixteenths are the midpoints of E4M3's eight steps an octave; below 2^-6 steps are 2^-9.
            CacheFormat::Fp8 if random.below(4) == 0 => (2 * random.below(9) + 1) as f32 * 2f32.powi(-10),
            CacheFormat::Fp8 => (17 + 2 * random.below(8)) as f32 / 16.0 * 2f32.powi(random.below(15) as i32 - 7),
            _ => [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][random.below(7) as usize],
        };
        let x = nudge(random, midpoint * scale).min(amax);
        group.push(if random.below(2) == 0 { x } else { -x });
    }
    let at = random.below(group.len() as u32) as usize;
    group.swap(0, at);
    group
}

/// Index queries are packed as they come when no channel turns; window keys, latents and index keys pass through norms,
/// whose factor is undone exactly here: eps is 2^100, so large that the values do not change it, the weight 2^50.
#[test]
fn packing_equals_formats_bit_for_bit() {
    let Some(gpu) = gpu() else { return };
    let sizes = Sizes {
        head_dim: 512,
        rotary: 2,
        window: 8,
        eps: 2f32.powi(100),
        heads: 8,
        index_dim: 128,
        ratio: 1,
        spare: 0,
    };
    let rows = 256;
    let mut random = Random::new(17);
    let mut weights = Weights::random(&mut random, &sizes, 0);
    for norm in [&mut weights.kv_norm, &mut weights.comp_norm, &mut weights.k_norm] {
        norm.fill(2f32.powi(50));
    }
    weights.freqs.fill(2f32.powi(-110));
    // wk takes the latent's first channels as they are.
    let data = weights.segment.data as usize;
    weights.pack[data..].fill(0);
    for r in 0..sizes.index_dim {
        weights.pack[data + r * sizes.head_dim + r] = 1f32.to_bits();
    }
    let mut tokens = Tokens::random(&mut random, &sizes, rows);
    let fill = |random: &mut Random, out: &mut [f32], format: CacheFormat, exponents: std::ops::Range<i32>| {
        for group in out.chunks_exact_mut(format.group()) {
            group.copy_from_slice(&edge_group(random, format, exponents.clone()));
        }
    };
    for t in 0..rows {
        let (down, up) = (&mut tokens.down[t], &mut tokens.up[t]);
        fill(&mut random, &mut down[sizes.key_at()..][..sizes.head_dim], CacheFormat::Fp8, -40..20);
        let latent = &mut down[sizes.latent_at()..][..sizes.head_dim];
        // The same channels are quantised as a latent and as an index key: edges of the one or of the other.
        if t % 2 == 0 {
            fill(&mut random, latent, CacheFormat::Nvfp4, -12..12);
        } else {
            fill(&mut random, latent, CacheFormat::Mxfp4, -40..20);
        }
        fill(&mut random, &mut up[Sizes::QUERY_AT..][..sizes.heads * sizes.index_dim], CacheFormat::Mxfp4, -120..120);
    }
    // Zeros of both signs, and a group of nothing else.
    tokens.down[0][sizes.key_at()..][..40].fill(-0.0);
    tokens.down[0][sizes.latent_at()..][..40].fill(0.0);
    tokens.up[0][Sizes::QUERY_AT..][..40].fill(-0.0);

    let layout = sizes.page();
    let pool = Pool::new(gpu, &mut random, &layout, sizes.ratio, rows, 1);
    let layer = Layer::new(gpu, sizes, &weights, &pool, layout, rows);
    layer.load(gpu, &tokens, 0, &Step { rows: rows as u32, ..Step::default() });
    let mut recording = Recording::new();
    layer.append.record(&mut recording, 0, rows as u32, Jobs::All, &[0]);
    gpu.submit(recording).unwrap();
    let (chunk, queries): (Vec<u32>, Vec<u32>) = (read(gpu, &layer.chunk), read(gpu, &layer.queries));
    let pages = pool.read(gpu);
    for t in 0..rows {
        let same = |format: CacheFormat, packed: &[u32], values: &[f32]| {
            let expected = format.pack(values);
            if let Some(i) = (0..expected.len()).find(|&i| packed[i] != expected[i]) {
                panic!("{format:?}, row {t}, word {i}: {:08x}, formats has {:08x}", packed[i], expected[i]);
            }
        };
        let value = tokens.value(&sizes, t);
        same(CacheFormat::Fp8, &chunk[t * sizes.key_words()..][..sizes.key_words()], tokens.key(&sizes, t));
        same(CacheFormat::Nvfp4, &pages[layout.latent(t)..][..layout.latent_words], value);
        same(CacheFormat::Mxfp4, &pages[layout.key(t)..][..layout.key_words], &value[..sizes.index_dim]);
        for (h, query) in tokens.query(&sizes, t).chunks_exact(sizes.index_dim).enumerate() {
            let at = (t * sizes.heads + h) * sizes.query_words();
            same(CacheFormat::Mxfp4, &queries[at..][..sizes.query_words()], query);
        }
    }
}
