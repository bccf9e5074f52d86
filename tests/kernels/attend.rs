//! `attend` against its twin; the device's rotation against f64; and a text in steps of any size against the same text
//! token by token, byte for byte.

use super::cache_append::{frequencies, Layer, Sizes, Tokens, Weights};
use super::common::{assert_close, config, gpu, poisoned, read, upload, Random, POISON};
use super::pool::Pool;
use cedra::formats::CacheFormat;
use cedra::gpu::{Buffer, DeviceOptions, Gpu, MemoryKind, Recording};
use cedra::kernels::attend::{Attend, Selected, Window};
use cedra::kernels::cache_append::Jobs;
use cedra::kernels::latent_gather::{LatentGather, LatentGatherDims};
use cedra::kernels::ring_commit::RingCommit;
use cedra::kernels::Step;
use cedra::reference::attend::attend_and_rotate_back;
use cedra::reference::rope::rotate_heads;
use proptest::prelude::*;

/// Of a layer's attention.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    groups: usize,
    head_dim: usize,
    rotary: usize,
    window: usize,
    /// Whether the decoder's floor holds, not the encoder's.
    decoder: bool,
    /// Ratio and topk of a layer with a global cache.
    global: Option<(usize, usize)>,
    /// Slots of the ring beyond the window, and whether the rows are a drafted block.
    spare: usize,
    block: bool,
}

impl Shape {
    fn key_words(&self) -> usize {
        CacheFormat::Fp8.row_words(self.head_dim)
    }
    fn latent_words(&self) -> usize {
        CacheFormat::Nvfp4.row_words(self.head_dim)
    }
    fn up_stride(&self) -> usize {
        (4 + self.heads * self.head_dim).next_multiple_of(4) + 4
    }
    fn group_stride(&self) -> usize {
        (self.heads / self.groups * self.head_dim).next_multiple_of(4)
    }
    /// The heads' outputs in `attended` of a row, without the padding.
    fn outputs(&self, attended: &[f32], row: usize) -> Vec<f32> {
        let groups = attended[row * self.groups * self.group_stride()..].chunks(self.group_stride()).take(self.groups);
        groups.flat_map(|group| &group[..self.heads / self.groups * self.head_dim]).copied().collect()
    }
}

/// Ascending entries that a row attends to, out of `visible`.
pub fn select(random: &mut Random, visible: usize, topk: usize) -> Vec<u32> {
    let mut rest = visible.min(topk);
    let mut entries = vec![];
    for entry in 0..visible {
        // Each with the chance that fills the list exactly.
        if (random.below((visible - entry) as u32) as usize) < rest {
            entries.push(entry as u32);
            rest -= 1;
        }
    }
    entries
}

/// `rows` rows at `position` against the twin, which sees no window key below `floor`. All that the rows may not read is NaN.
/// Returns the largest error.
fn check_against_twin(shape: Shape, position: usize, rows: usize, floor: usize, seed: u64) -> f32 {
    let Some(gpu) = gpu() else { return 0.0 };
    let mut random = Random::new(seed);
    let Shape { heads, head_dim, window, .. } = shape;
    let freqs = frequencies(shape.rotary);
    let sinks = random.normals(heads, 2.0);

    // Window keys: those before the step in the ring, those of the step in the chunk, or in the ring when it is a single
    // row.
    let mut keys = vec![];
    let slots = window + shape.spare;
    let mut ring = vec![POISON; slots * shape.key_words()];
    let mut chunk = vec![POISON; (rows + 1) * shape.key_words()];
    let oldest = (position + usize::from(!shape.block)).saturating_sub(window).max(floor);
    for s in oldest..position + rows {
        let packed = CacheFormat::Fp8.pack(&random.normals(head_dim, 1.0));
        let place = if s < position || (rows == 1 && !shape.block) {
            &mut ring[s % slots * shape.key_words()..]
        } else {
            &mut chunk[(s - position) * shape.key_words()..]
        };
        place[..shape.key_words()].copy_from_slice(&packed);
        keys.push(CacheFormat::Fp8.unpack(&packed, head_dim));
    }

    let (ratio, topk) = shape.global.unwrap_or((1, 0));
    let words = shape.latent_words();
    let mut latents = vec![POISON; (rows * topk * words).max(1)];
    let mut selection = vec![POISON; rows * (1 + topk)];
    let mut chosen = vec![];
    for row in 0..rows {
        let list = select(&mut random, if topk > 0 { (position + row + 1) / ratio } else { 0 }, topk);
        selection[row * (1 + topk)] = list.len() as u32;
        selection[row * (1 + topk) + 1..][..list.len()].copy_from_slice(&list);
        let mut unpacked = vec![];
        for place in latents[row * topk * words..].chunks_exact_mut(words).take(list.len()) {
            place.copy_from_slice(&CacheFormat::Nvfp4.pack(&random.normals(head_dim, 1.0)));
            unpacked.push(CacheFormat::Nvfp4.unpack(place, head_dim));
        }
        chosen.push(unpacked);
    }

    let mut up = vec![f32::from_bits(POISON); rows * shape.up_stride()];
    for row in up.chunks_mut(shape.up_stride()) {
        row[4..][..heads * head_dim].copy_from_slice(&random.normals(heads * head_dim, 2.0));
    }
    // The other half of the model has another floor.
    let floors = [floor as u32, random.below((position + rows) as u32)];
    let state = Step {
        position: position as u32,
        rows: rows as u32,
        encoder_floor: floors[usize::from(shape.decoder)],
        decoder_floor: floors[usize::from(!shape.decoder)],
        ..Step::default()
    };
    let step = gpu.uniform("step", &state).unwrap();
    let attended = poisoned(gpu, MemoryKind::Scratch, "attended", rows * shape.groups * shape.group_stride());
    let buffers = [&ring, &chunk, &latents, &selection].map(|words| upload(gpu, MemoryKind::Cache, "cache", words));
    let up_buffer = upload(gpu, MemoryKind::Scratch, "up", &up);
    let constants = upload(gpu, MemoryKind::Weights, "constants", &[&freqs[..], &sinks].concat());
    let kernel = Attend::new(
        gpu,
        &step,
        &Window {
            heads,
            head_dim,
            rotary: shape.rotary,
            window,
            slots,
            block: shape.block,
            decoder: shape.decoder,
            groups: shape.groups,
            up_stride: shape.up_stride(),
            query_at: 4,
            up: &up_buffer,
            ring: &buffers[0],
            chunk: &buffers[1],
            constants: &constants,
            attended: &attended,
        },
        shape.global.map(|_| Selected { ratio, topk, latents: &buffers[2], selection: &buffers[3] }).as_ref(),
    )
    .unwrap();
    let mut recording = Recording::new();
    kernel.record(&mut recording, position as u32, rows as u32, floor as u32);
    gpu.submit(recording).unwrap();
    let written: Vec<f32> = read(gpu, &attended);

    let mut worst = 0f32;
    for row in 0..rows {
        let t = position + row;
        let seen = match shape.block {
            true => oldest..position + rows,
            false => (t + 1).saturating_sub(window).max(floor)..t + 1,
        };
        let mut visible: Vec<&[f32]> = seen.map(|s| &keys[s - oldest][..]).collect();
        visible.extend(chosen[row].iter().map(|latent| &latent[..]));
        let mut q = up[row * shape.up_stride() + 4..][..heads * head_dim].to_vec();
        rotate_heads(&mut q, head_dim, t as u32, &freqs, false);
        let scale = (head_dim as f32).powf(-0.5);
        let expected = attend_and_rotate_back(&q, &visible, &sinks, scale, t as u32, &freqs);
        worst = worst.max(assert_close(&shape.outputs(&written, row), &expected, 1e-5));
    }
    worst
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_shapes_equal_the_twin(
        (per_group, groups) in (1usize..4, 1usize..4),
        // A software device compiles for seconds a head size: a few, of whole and broken groups and words.
        (head_dim, rotary) in prop_oneof![Just((44, 12)), Just((10, 10)), Just((134, 6))],
        (window, position, rows) in (1usize..140, 0usize..300, 1usize..6),
        // How far below the last row the floor is, and whether for the decoder.
        (above_floor, decoder) in (0usize..150, any::<bool>()),
        (ratio, topk) in (1usize..3, 0usize..90),
        seed: u64,
    ) {
        let shape = Shape {
            heads: per_group * groups,
            groups,
            head_dim,
            rotary,
            window,
            decoder,
            global: (topk > 0).then_some((ratio, topk)),
            spare: 0,
            block: false,
        };
        check_against_twin(shape, position, rows, (position + rows - 1).saturating_sub(above_floor), seed);
    }
}

#[test]
fn the_first_token_and_the_last_of_a_million_equal_the_twin() {
    let shape = Shape {
        heads: 3,
        groups: 1,
        head_dim: 44,
        rotary: 12,
        window: 16,
        decoder: false,
        global: Some((2, 33)),
        spare: 0,
        block: false,
    };
    for (position, rows) in [(0, 1), (0, 2), (1, 1), (31, 3), (32, 33), (65_535, 3)] {
        check_against_twin(shape, position, rows, 0, position as u64);
    }
    check_against_twin(Shape { global: None, ..shape }, 1_048_573, 3, 0, 1);
}

/// A floor anywhere in the window, the row's own position included; rows below it see no window key at all.
#[test]
fn nothing_below_the_floor_is_seen() {
    for decoder in [false, true] {
        for global in [None, Some((2, 20))] {
            let shape = Shape {
                heads: 3,
                groups: 1,
                head_dim: 44,
                rotary: 12,
                window: 40,
                decoder,
                global,
                spare: 3,
                block: false,
            };
            for (position, rows) in [(0, 1), (0, 5), (60, 1), (60, 4)] {
                let last = position + rows - 1;
                for floor in [0, 20, 21, 22, 27, 28, 29, position, position + 1, last].map(|floor| floor.min(last)) {
                    check_against_twin(shape, position, rows, floor, floor as u64);
                }
            }
        }
    }
}

/// Every row of a drafted block sees the window before the block, wherever its ring begins, and all of the block.
#[test]
fn a_block_sees_itself_and_the_window_before() {
    for (window, block) in [(1, 1), (1, 5), (16, 1), (16, 5), (40, 2), (40, 33)] {
        let shape = Shape {
            heads: 3,
            groups: 1,
            head_dim: 44,
            rotary: 12,
            window,
            decoder: true,
            global: None,
            spare: block,
            block: true,
        };
        for position in [0, 1, window - 1, window, window + 1, 3 * window + 2, 70_001] {
            for floor in [0, position.saturating_sub(window / 2), position] {
                check_against_twin(shape, position, block, floor, (position + block) as u64);
            }
        }
    }
}

#[test]
fn released_widths_equal_the_twin() {
    let shape = Shape {
        heads: 64,
        groups: 8,
        head_dim: 512,
        rotary: 64,
        window: 128,
        decoder: true,
        global: Some((1, 512)),
        spare: 0,
        block: false,
    };
    println!("one row: {:e}", check_against_twin(shape, 700, 1, 0, 1));
    println!("eight rows: {:e}", check_against_twin(Shape { global: Some((2, 512)), ..shape }, 1_030, 8, 950, 2));
}

/// What a step does to a layer: `cache_append`, `latent_gather`, `attend`, `ring_commit`, with the selection of every row
/// given.
struct Attention {
    layer: Layer,
    selection: Buffer,
    latents: Buffer,
    attended: Buffer,
    gather: LatentGather,
    attend: Attend,
    commit: RingCommit,
}

/// Most entries that a row of a text selects.
const TOPK: usize = 40;

impl Attention {
    fn new(
        gpu: &Gpu,
        layer: Layer,
        pool: &Pool,
        freqs: &[f32],
        sinks: &[f32],
        up: (&Buffer, usize),
        rows: usize,
    ) -> Self {
        let sizes = layer.sizes;
        let heads = sinks.len();
        let selection = poisoned(gpu, MemoryKind::Scratch, "selection", rows * (1 + TOPK));
        let latents = poisoned(gpu, MemoryKind::Scratch, "latents", rows * TOPK * layer.page.latent_words);
        let attended =
            poisoned(gpu, MemoryKind::Scratch, "attended", rows * (heads * sizes.head_dim).next_multiple_of(4));
        let constants = upload(gpu, MemoryKind::Weights, "constants", &[freqs, sinks].concat());
        let window = Window {
            heads,
            head_dim: sizes.head_dim,
            rotary: sizes.rotary,
            window: sizes.window,
            slots: sizes.window,
            block: false,
            decoder: false,
            groups: 1,
            up_stride: up.1,
            query_at: 0,
            up: up.0,
            ring: &layer.ring,
            chunk: &layer.chunk,
            constants: &constants,
            attended: &attended,
        };
        let dims = LatentGatherDims { topk: TOPK, page: layer.page };
        let mut gather = LatentGather::new(gpu, &dims, &layer.step, &pool.table, &selection, &latents).unwrap();
        for slab in &pool.slabs {
            gather.add_slab(gpu, slab).unwrap();
        }
        let selected = Selected { ratio: sizes.ratio, topk: TOPK, latents: &latents, selection: &selection };
        let attend = Attend::new(gpu, &layer.step, &window, Some(&selected)).unwrap();
        let commit =
            RingCommit::new(gpu, &layer.step, sizes.head_dim, sizes.window, &layer.chunk, &layer.ring).unwrap();
        Self { layer, selection, latents, attended, gather, attend, commit }
    }
}

/// Everything that a text leaves behind: ring, pages, remainder, and per token its packed queries and its output.
fn run_text(sizes: Sizes, heads: usize, start: usize, count: usize, rows: usize) -> [Vec<u32>; 5] {
    let gpu = gpu().unwrap();
    let mut random = Random::new(start as u64);
    let weights = Weights::random(&mut random, &sizes, 1);
    let tokens = Tokens::random(&mut random, &sizes, count);
    let up_stride = (heads * sizes.head_dim).next_multiple_of(4);
    let q: Vec<Vec<f32>> = (0..count).map(|_| random.normals(up_stride, 2.0)).collect();
    let sinks = random.normals(heads, 1.0);
    let page = sizes.page();
    let pool = Pool::new(gpu, &mut random, &page, sizes.ratio, start + count, 3);
    let layer = Layer::new(gpu, sizes, &weights, &pool, page, rows);
    // What came before the text: rows of the ring, entries, and the remainder of a begun group.
    let mut ring = vec![POISON; sizes.window * sizes.key_words()];
    for s in start.saturating_sub(sizes.window)..start {
        ring[s % sizes.window * sizes.key_words()..][..sizes.key_words()]
            .copy_from_slice(&CacheFormat::Fp8.pack(&random.normals(sizes.head_dim, 1.0)));
    }
    gpu.upload(&layer.ring, 0, bytemuck::cast_slice(&ring));
    // Of old entries only some exist here, and only those are selected.
    let old: Vec<u32> = select(&mut random, start / sizes.ratio, 20);
    for &entry in &old {
        let latent = CacheFormat::Nvfp4.pack(&random.normals(sizes.head_dim, 1.0));
        pool.write(gpu, page.latent(entry as usize), &latent);
    }
    if let Some(remainder) = &layer.remainder {
        let held = random.normals((sizes.ratio - 1) * 2 * sizes.head_dim, 1.0);
        gpu.upload(remainder, 0, bytemuck::cast_slice(&held));
    }
    let selections: Vec<Vec<u32>> = (0..count)
        .map(|t| {
            let fresh = start.div_ceil(sizes.ratio)..(start + t + 1) / sizes.ratio;
            let fresh: Vec<u32> = fresh.map(|entry| entry as u32).collect();
            let picks = select(&mut random, fresh.len(), TOPK - old.len());
            [&old[..], &picks.iter().map(|&i| fresh[i as usize]).collect::<Vec<_>>()].concat()
        })
        .collect();

    let up = poisoned(gpu, MemoryKind::Scratch, "up", rows * up_stride);
    let attention = Attention::new(gpu, layer, &pool, &weights.freqs, &sinks, (&up, up_stride), rows);
    let (mut queries, mut attended) = (vec![], vec![]);
    let mut first = 0;
    while first < count {
        let (rows, slab) = pool.cut(start + first, rows.min(count - first), page.entries * sizes.ratio);
        let position = (start + first) as u32;
        let layer = &attention.layer;
        for scratch in [&layer.chunk, &layer.queries, &attention.attended, &attention.selection, &attention.latents] {
            gpu.fill(scratch, POISON);
        }
        layer.load(gpu, &tokens, first, &Step { position, rows: rows as u32, ..Step::default() });
        gpu.upload(&up, 0, bytemuck::cast_slice(&q[first..first + rows].concat()));
        for (row, list) in selections[first..first + rows].iter().enumerate() {
            let list = [&[list.len() as u32], &list[..]].concat();
            let at = 4 * row * (1 + TOPK);
            gpu.upload(&attention.selection, at as u64, bytemuck::cast_slice(&list));
        }
        let mut recording = Recording::new();
        layer.append.record(&mut recording, position, rows as u32, Jobs::All, &[slab]);
        let visible = (start + first + rows) / sizes.ratio;
        attention.gather.record(&mut recording, rows as u32, visible as u32, &[0, 1, 2]);
        attention.attend.record(&mut recording, position, rows as u32, 0);
        attention.commit.record(&mut recording, rows as u32);
        gpu.submit(recording).unwrap();
        queries.extend(&read::<u32>(gpu, &layer.queries)[..rows * sizes.heads * sizes.query_words()]);
        attended.extend(&read::<u32>(gpu, &attention.attended)[..rows * up_stride]);
        first += rows;
    }
    let layer = &attention.layer;
    let remainder = layer.remainder.as_ref().map_or(vec![], |remainder| read(gpu, remainder));
    [read(gpu, &layer.ring), pool.read(gpu), remainder, queries, attended]
}

fn check_steps(sizes: Sizes, heads: usize, start: usize, count: usize, steps: &[usize]) {
    if gpu().is_none() {
        return;
    }
    let expected = run_text(sizes, heads, start, count, 1);
    for &rows in steps {
        let result = run_text(sizes, heads, start, count, rows);
        for (part, (a, b)) in
            ["ring", "pages", "remainder", "queries", "attended"].iter().zip(result.iter().zip(&expected))
        {
            assert!(a == b, "steps of {rows} from {start}, ratio {}: {part} differs", sizes.ratio);
        }
    }
}

#[test]
fn steps_of_any_size_leave_the_same_bytes() {
    let sizes = Sizes { head_dim: 44, rotary: 12, window: 21, eps: 1e-20, heads: 3, index_dim: 20, ratio: 2, spare: 0 };
    for ratio in [1, 2, 3] {
        for start in [0, 1, 129] {
            check_steps(Sizes { ratio, ..sizes }, 9, start, 70, &[2, 3, 7, 64]);
        }
    }
}

/// Large steps take four heads a workgroup, small ones a single head: enough heads to see both.
#[test]
fn steps_of_any_size_leave_the_same_bytes_at_a_head_size_of_512() {
    let sizes =
        Sizes { head_dim: 512, rotary: 64, window: 40, eps: 1e-20, heads: 4, index_dim: 128, ratio: 2, spare: 0 };
    check_steps(sizes, 48, 1_001, 13, &[13]);
}

#[test]
fn steps_of_any_size_leave_the_same_bytes_at_the_end_of_a_million() {
    let sizes = Sizes { head_dim: 16, rotary: 8, window: 21, eps: 1e-20, heads: 2, index_dim: 8, ratio: 2, spare: 0 };
    check_steps(sizes, 3, 1_048_551, 25, &[3, 7]);
}

/// `turn_phase` and `cos_sin` of `shared/rope.wgsl`, line by line.
fn rotation(position: u32, frequency: f32) -> (f32, f32) {
    let bits = frequency.to_bits();
    let product = u64::from(position) * u64::from((bits & 0x7f_ffff) | 0x80_0000);
    let dropped = (64 - product.leading_zeros()).max(24) - 24;
    let mut m = product >> dropped;
    if dropped > 0 {
        let (rest, half) = (product & ((1 << dropped) - 1), 1 << (dropped - 1));
        m += u64::from(rest > half || (rest == half && m & 1 == 1));
    }
    let exponent = (bits >> 23) as i32 - 150 + dropped as i32;
    let wide = u128::from(m) * 0x28be_60db_9391_054a;
    let phase = wide.checked_shr(32 + (-exponent) as u32).unwrap_or(0) as u32;
    let quadrant = phase.wrapping_add(0x2000_0000) >> 30;
    let x = phase.wrapping_sub(quadrant << 30) as i32 as f32 * 1.462_918_1e-9;
    let z = x * x;
    let s = (-1.951_529_6e-4f32).mul_add(z, 8.332_161e-3).mul_add(z, -1.666_665_5e-1) * z;
    let s = s.mul_add(x, x);
    let c = 2.443_315_7e-5f32.mul_add(z, -1.388_731_6e-3).mul_add(z, 4.166_664_6e-2) * z;
    let c = c.mul_add(z, (-0.5f32).mul_add(z, 1.0));
    match quadrant {
        0 => (c, s),
        1 => (-s, c),
        2 => (-c, -s),
        _ => (s, -c),
    }
}

fn rotation_error(position: u32, frequency: f32, (cos, sin): (f32, f32)) -> f64 {
    let (s, c) = f64::from(position as f32 * frequency).sin_cos();
    (c - f64::from(cos)).abs().max((s - f64::from(sin)).abs())
}

#[test]
fn the_rotation_of_the_shader_is_right_to_2e_7() {
    let mut random = Random::new(1);
    let mut freqs = [frequencies(64), frequencies(12)].concat();
    freqs.extend([1.0, f32::from_bits(0x3f7f_ffff), 1e-7, 1e-30, f32::MIN_POSITIVE]);
    freqs.extend((0..40).map(|_| random.uniform(0.0, 1.0).powi(4).max(f32::MIN_POSITIVE)));
    let mut positions: Vec<u32> = (0..600).chain(65_530..65_540).chain(1_048_500..1_048_577).collect();
    positions.extend([(1 << 24) - 1, 1 << 23, 12_345_678]);
    positions.extend((0..2_000).map(|_| random.below(1 << 20)));
    let mut worst = 0f64;
    for &position in &positions {
        for &frequency in &freqs {
            let error = rotation_error(position, frequency, rotation(position, frequency));
            assert!(error < 2e-7, "{position} * {frequency}: {error:e}");
            worst = worst.max(error);
        }
    }
    println!("largest error {worst:e}");
}

/// Keys of (1, 0) pairs and a window of one token: the output is the rotation back by the position.
#[test]
fn the_rotation_of_the_device_is_right_to_2e_7() {
    let Some(gpu) = gpu() else { return };
    let (head_dim, rows) = (64, 64);
    let mut random = Random::new(2);
    let mut freqs = frequencies(head_dim / 2);
    freqs.extend((0..head_dim / 4 - 2).map(|_| random.uniform(0.0, 1.0).powi(3)));
    freqs.extend([1.0, f32::MIN_POSITIVE]);
    assert_eq!(freqs.len(), head_dim / 2);
    let key = CacheFormat::Fp8.pack(&[1.0, 0.0].repeat(head_dim / 2));
    let chunk = upload(gpu, MemoryKind::Scratch, "chunk", &key.repeat(rows));
    let ring = poisoned(gpu, MemoryKind::Cache, "ring", key.len());
    let up = upload(gpu, MemoryKind::Scratch, "up", &vec![0f32; rows * head_dim]);
    let constants = upload(gpu, MemoryKind::Weights, "constants", &[&freqs[..], &[-1e30]].concat());
    let attended = poisoned(gpu, MemoryKind::Scratch, "attended", rows * head_dim);
    let step = gpu.uniform("step", &Step::default()).unwrap();
    let window = Window {
        heads: 1,
        head_dim,
        rotary: head_dim,
        window: 1,
        slots: 1,
        block: false,
        decoder: false,
        groups: 1,
        up_stride: head_dim,
        query_at: 0,
        up: &up,
        ring: &ring,
        chunk: &chunk,
        constants: &constants,
        attended: &attended,
    };
    let kernel = Attend::new(gpu, &step, &window, None).unwrap();
    let mut worst = 0f64;
    let mut starts = vec![0, 64, 65_500, 1_048_512, (1 << 24) - 64];
    starts.extend((0..12).map(|_| random.below(1 << 20)));
    for position in starts {
        gpu.upload(&step, 0, bytemuck::bytes_of(&Step { position, rows: rows as u32, ..Step::default() }));
        let mut recording = Recording::new();
        kernel.record(&mut recording, position, rows as u32, 0);
        gpu.submit(recording).unwrap();
        let out: Vec<f32> = read(gpu, &attended);
        for (row, pairs) in out.chunks_exact(head_dim).enumerate() {
            for (pair, &frequency) in pairs.chunks_exact(2).zip(&freqs) {
                let (position, turn) = (position + row as u32, (pair[0], -pair[1]));
                let error = rotation_error(position, frequency, turn);
                assert!(error < 2e-7, "{position} * {frequency}: {turn:?}, {error:e}");
                worst = worst.max(error);
            }
        }
    }
    println!("largest error {worst:e}");
}

#[test]
fn counts_the_bytes_of_window_and_selection() {
    if gpu().is_none() {
        return;
    }
    // A device of its own: other tests count on theirs.
    let gpu = &Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }).unwrap();
    let step = gpu.uniform("step", &Step::default()).unwrap();
    let any = poisoned(gpu, MemoryKind::Cache, "any", 4096);
    let attended = poisoned(gpu, MemoryKind::Scratch, "attended", 4096);
    let window = Window {
        heads: 2,
        head_dim: 512,
        rotary: 64,
        window: 128,
        slots: 128,
        block: false,
        decoder: true,
        groups: 1,
        up_stride: 1024,
        query_at: 0,
        up: &any,
        ring: &any,
        chunk: &any,
        constants: &any,
        attended: &attended,
    };
    let selected = Selected { ratio: 2, topk: 512, latents: &any, selection: &any };
    let kernel = Attend::new(gpu, &step, &window, Some(&selected)).unwrap();
    // No rows in flight on the device: nothing runs, and the counters say what was recorded.
    let bytes = |position, rows, floor| {
        let before = gpu.counters().cache_bytes;
        let mut recording = Recording::new();
        kernel.record(&mut recording, position, rows, floor);
        gpu.submit(recording).unwrap();
        gpu.counters().cache_bytes - before
    };
    assert_eq!(bytes(0, 1, 0), 528);
    assert_eq!(bytes(99, 2, 0), (100 + 101) * 528 + (50 + 50) * 288);
    assert_eq!(bytes(99, 3, 100), (1 + 2) * 528 + (50 + 50 + 51) * 288);
    assert_eq!(bytes(500_000, 1, 0), 128 * 528 + 512 * 288);
    assert_eq!(bytes(500_000, 1, 499_990), 11 * 528 + 512 * 288);
}
