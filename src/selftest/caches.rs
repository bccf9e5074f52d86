//! What is kept of a text, and attention over it.

use super::lab::{choose, strided, Found, Lab, Pages, POISON};
use crate::checkpoint::Format;
use crate::formats::CacheFormat;
use crate::gpu::MemoryKind;
use crate::kernels::attend::{Attend, Selected, Window};
use crate::kernels::cache_append::{
    constants, full_constants, CacheAppend, GlobalEntries, IndexQueries, Jobs, PageLayout, WindowKeys,
};
use crate::kernels::latent_gather::{LatentGather, LatentGatherDims};
use crate::kernels::linear::Segment;
use crate::kernels::ring_commit::RingCommit;
use crate::kernels::Step;
use crate::reference::attend::attend_and_rotate_back;
use crate::reference::cache_append as twin;
use crate::reference::latent_gather::gather;
use crate::reference::math::Matrix;
use crate::reference::ring_commit::commit;
use crate::reference::rope::rotate_heads;
use crate::Result;

const HEAD_DIM: usize = 44;
const ROTARY: usize = 12;
const INDEX_DIM: usize = 20;
const INDEX_HEADS: usize = 3;
const RATIO: usize = 2;
const EPS: f32 = 1e-20;
/// How far the device's values are from the twin's before both are packed, relative to the largest of a row.
const NOISE: f32 = 4e-6;

fn frequencies() -> Vec<f32> {
    (0..ROTARY / 2).map(|j| 160_000f64.powf(-2.0 * j as f64 / ROTARY as f64) as f32).collect()
}

/// The part of a layer in a page, with something else around it.
fn page() -> PageLayout {
    let part = PageLayout::new(RATIO, HEAD_DIM, INDEX_DIM);
    part.within(5, part.words() + 8)
}

/// A matrix in BF16, its values and its pack.
fn bf16(lab: &mut Lab<'_>, rows: usize, k: usize) -> (Matrix, Vec<u32>, Segment) {
    let row_words = k.div_ceil(32) * 16;
    let (mut values, mut words) = (vec![], vec![]);
    for _ in 0..rows {
        let row: Vec<u32> = lab.values(k, 1.0).into_iter().map(|v| v.to_bits() >> 16).collect();
        values.extend(row.iter().map(|bits| f32::from_bits(bits << 16)));
        let mut packed: Vec<u32> = row.chunks(2).map(|pair| pair[0] | pair[1] << 16).collect();
        packed.resize(row_words, 0);
        words.extend(packed);
    }
    let segment = Segment {
        format: Format::Bf16 as u32,
        data: 0,
        scales: words.len() as u32,
        rows: rows as u32,
        out: 0,
        first_row: 0,
        group_rows: 0,
        group_stride: 0,
    };
    (Matrix::new(rows, k, values), words, segment)
}

/// Three steps: one row that begins a group, one that completes it from the remainder, several over the edge of a page into
/// another slab.
pub async fn cache_append(lab: &mut Lab<'_>, variant: &str) -> Result<Found> {
    const WINDOW: usize = 5;
    const START: usize = 126;
    const STEPS: [usize; 3] = [1, 1, 3];
    // Where inputs stand in their rows.
    let (key_at, latent_at, gate_at, down_stride) = (4, 52, 96, 144);
    let (query_at, up_stride) = (8, 72);
    let (key_words, query_words) = (CacheFormat::Fp8.row_words(HEAD_DIM), CacheFormat::Mxfp4.row_words(INDEX_DIM));
    let tokens: usize = STEPS.iter().sum();
    let [value, gate, key] = [0, 1, 2].map(|_| lab.rows(tokens, HEAD_DIM, 3.0));
    let query = lab.rows(tokens, INDEX_HEADS * INDEX_DIM, 1.0);
    let mut norm = |n| (0..n).map(|_| lab.random.value() * 0.5 + 1.0).collect::<Vec<f32>>();
    let (kv_norm, comp_norm, k_norm, freqs) = (norm(HEAD_DIM), norm(HEAD_DIM), norm(INDEX_DIM), frequencies());
    let (wk, wk_words, wk_segment) = bf16(lab, INDEX_DIM, HEAD_DIM);
    let (selects, full) = (variant != "window", variant == "full");
    let lab = &*lab;

    let cache = |words: usize| {
        let buffer = lab.gpu.buffer(MemoryKind::Cache, "self test", 4 * words as u64)?;
        lab.gpu.fill(&buffer, POISON);
        Result::Ok(buffer)
    };
    let page = page();
    let make = || {
        let pages = Pages::new(lab, page.page_words, 2)?;
        let step = lab.step(Step::default())?;
        let buffers = [
            cache(3 * down_stride)?,
            cache(3 * up_stride)?,
            cache(WINDOW * key_words)?,
            cache(3 * key_words)?,
            cache(3 * INDEX_HEADS * query_words)?,
            cache((RATIO - 1) * 2 * HEAD_DIM)?,
        ];
        let [down, up, ring, chunk, queries, remainder] = &buffers;
        let constants = match full {
            true => full_constants(&kv_norm, &freqs, &comp_norm, &k_norm, &wk_words),
            false => constants(&kv_norm, &freqs),
        };
        let keys = WindowKeys {
            head_dim: HEAD_DIM,
            rotary: ROTARY,
            slots: WINDOW,
            block: false,
            eps: EPS,
            down_stride,
            key_at,
            down,
            constants: &lab.weights(&constants)?,
            ring,
            chunk,
        };
        let index = IndexQueries { heads: INDEX_HEADS, head_dim: INDEX_DIM, up_stride, query_at, up, queries };
        let entries = GlobalEntries {
            ratio: RATIO,
            latent_at,
            gate_at,
            wk: wk_segment,
            page,
            table: &pages.table,
            remainder: Some(remainder),
            spare: 0,
        };
        let mut kernel = CacheAppend::new(lab.gpu, &step, &keys, selects.then_some(&index), full.then_some(&entries))?;
        for slab in &pages.slabs {
            kernel.add_slab(lab.gpu, slab)?;
        }
        Ok((pages, step, buffers, kernel))
    };
    let (pages, step, buffers, kernel) = lab.gpu.settled(make).await?;
    let [down, up, ring, chunk, queries, remainder] = &buffers;

    let mut found = Found::exact();
    let (mut packed_rows, mut equal) = (0, 0);
    let mut check = |found: &mut Found, what: &str, format: CacheFormat, got: &[u32], values: &[f32]| {
        found.packed(what, format, got, values, NOISE);
        packed_rows += 1;
        equal += usize::from(got == format.pack(values));
    };
    let mut first = 0;
    for rows in STEPS {
        let position = START + first;
        for buffer in [ring, chunk, queries] {
            lab.gpu.fill(buffer, POISON);
        }
        let place = |words: &mut [u32], at: usize, values: &[f32]| {
            words[at..].iter_mut().zip(values).for_each(|(word, v)| *word = v.to_bits());
        };
        let (mut down_words, mut up_words) = (vec![POISON; rows * down_stride], vec![POISON; rows * up_stride]);
        for row in 0..rows {
            let down = &mut down_words[row * down_stride..];
            place(down, key_at, &key[first + row]);
            place(down, latent_at, &value[first + row]);
            place(down, gate_at, &gate[first + row]);
            place(&mut up_words[row * up_stride..], query_at, &query[first + row]);
        }
        lab.gpu.upload(down, 0, bytemuck::cast_slice(&down_words));
        lab.gpu.upload(up, 0, bytemuck::cast_slice(&up_words));
        let state = Step { position: position as u32, rows: rows as u32, ..Step::default() };
        lab.gpu.upload(&step, 0, bytemuck::bytes_of(&state));
        let slab = pages.slab(position / 128);
        lab.run(|recording| {
            kernel.record(recording, position as u32, rows as u32, Jobs::All, &[slab]);
            Ok(())
        })
        .await?;
        let (ring, chunk): (Vec<u32>, Vec<u32>) = (lab.read(ring).await?, lab.read(chunk).await?);
        let queries: Vec<u32> = lab.read(queries).await?;
        for row in 0..rows {
            let (t, position) = (first + row, (position + row) as u32);
            let at = if rows == 1 { position as usize % WINDOW } else { row } * key_words;
            let written = if rows == 1 { &ring } else { &chunk };
            let key = twin::window_key(&key[t], &kv_norm, EPS, position, &freqs);
            check(&mut found, "window key", CacheFormat::Fp8, &written[at..][..key_words], &key);
            if selects {
                let query = twin::index_query(&query[t], INDEX_DIM, position, &freqs);
                for (head, query) in query.chunks_exact(INDEX_DIM).enumerate() {
                    let at = (row * INDEX_HEADS + head) * query_words;
                    check(&mut found, "index query", CacheFormat::Mxfp4, &queries[at..][..query_words], query);
                }
            }
        }
        found.untouched("the other place of window keys", if rows == 1 { &chunk } else { &ring });
        if !selects {
            found.untouched("index queries", &queries);
        }
        first += rows;
    }
    let mut left = pages.read(lab, &mut found).await?;
    if full {
        for group in (0..tokens - 1).step_by(RATIO) {
            let (members, start) = (group..group + RATIO, (START + group) as u32);
            let values: Vec<&[f32]> = members.clone().map(|t| &value[t][..]).collect();
            let gates: Vec<&[f32]> = members.map(|t| &gate[t][..]).collect();
            let latent = twin::latent(&twin::pool(&values, &gates), &comp_norm, EPS);
            let entry = (START + group) / RATIO;
            let (at, key_at) = (page.latent(entry), page.key(entry));
            let twin_entry = twin::entry(&latent, start, &freqs);
            let twin_key = twin::index_key(&latent, &wk, &k_norm, EPS, start, &freqs);
            check(&mut found, "latent", CacheFormat::Nvfp4, &left[at..][..page.latent_words], &twin_entry);
            check(&mut found, "index key", CacheFormat::Mxfp4, &left[key_at..][..page.key_words], &twin_key);
            left[at..][..page.latent_words].fill(POISON);
            left[key_at..][..page.key_words].fill(POISON);
        }
        let held: Vec<f32> = lab.read(remainder).await?;
        found.same_floats("remainder", &held, &[&value[tokens - 1][..], &gate[tokens - 1]].concat());
    }
    found.untouched("pages beside new entries", &left);
    // Rounding may differ here and there, not everywhere.
    if equal * 2 <= packed_rows {
        found.wrong(packed_rows - equal, format!("{equal} of {packed_rows} packed rows equal the twin's"));
    }
    Ok(found)
}

/// Fewer rows than the window has, and more.
pub async fn ring_commit(lab: &mut Lab<'_>) -> Result<Found> {
    const WINDOW: usize = 5;
    let words = CacheFormat::Fp8.row_words(INDEX_DIM);
    let mut found = Found::exact();
    for (position, rows) in [(7, 3), (4, 9)] {
        let chunk: Vec<u32> = (0..rows * words).map(|_| lab.random.bits() as u32).collect();
        let lab = &*lab;
        let ring = lab
            .run(|recording| {
                let step = lab.step(Step { position: position as u32, rows: rows as u32, ..Step::default() })?;
                let ring = lab.room(WINDOW * words)?;
                let kernel = RingCommit::new(lab.gpu, &step, INDEX_DIM, WINDOW, &lab.scratch(&chunk)?, &ring)?;
                kernel.record(recording, rows as u32);
                Ok(ring)
            })
            .await?;
        let mut expected = vec![POISON; WINDOW * words];
        commit(&mut expected, &chunk, words, position);
        found.same("ring", &lab.read::<u32>(&ring).await?, &expected);
    }
    Ok(found)
}

/// Selected latents out of two slabs.
pub async fn latent_gather(lab: &mut Lab<'_>) -> Result<Found> {
    let (position, rows, topk) = (300, 3, 12);
    let page = page();
    let width = page.latent_words;
    let entries = (position + rows) / RATIO;
    let latents: Vec<u32> = (0..entries * width).map(|_| lab.random.bits() as u32).collect();
    let lists: Vec<Vec<u32>> = (0..rows).map(|row| choose(lab, (position + row + 1) / RATIO, topk)).collect();
    let mut selection = vec![POISON; rows * (1 + topk)];
    for (row, list) in selection.chunks_exact_mut(1 + topk).zip(&lists) {
        row[0] = list.len() as u32;
        row[1..][..list.len()].copy_from_slice(list);
    }
    let lab = &*lab;
    let gathered = lab
        .run(|recording| {
            let pages = Pages::new(lab, page.page_words, entries.div_ceil(page.entries))?;
            for &entry in lists.iter().flatten() {
                pages.write(lab, page.latent(entry as usize), &latents[entry as usize * width..][..width]);
            }
            let step = lab.step(Step { position: position as u32, rows: rows as u32, ..Step::default() })?;
            // Room for a row more than is in flight.
            let gathered = lab.room((rows + 1) * topk * width)?;
            let dims = LatentGatherDims { topk, page };
            let selection = lab.scratch(&selection)?;
            let mut kernel = LatentGather::new(lab.gpu, &dims, &step, &pages.table, &selection, &gathered)?;
            for slab in &pages.slabs {
                kernel.add_slab(lab.gpu, slab)?;
            }
            kernel.record(recording, rows as u32 + 1, entries as u32, &[0, 1]);
            Ok(gathered)
        })
        .await?;
    let mut expected = vec![POISON; (rows + 1) * topk * width];
    for (row, list) in expected.chunks_exact_mut(topk * width).zip(&lists) {
        row[..list.len() * width].copy_from_slice(&gather(&latents, width, list));
    }
    let mut found = Found::exact();
    found.same("latents", &lab.read::<u32>(&gathered).await?, &expected);
    Ok(found)
}

/// `rows` rows behind a floor inside the window; with `global`, entries that are selected too.
pub async fn attend(lab: &mut Lab<'_>, rows: usize, global: bool) -> Result<Found> {
    const HEADS: usize = 5;
    const WINDOW: usize = 9;
    const QUERY_AT: usize = 4;
    let (position, floor, topk) = (70, 65, if global { 11 } else { 0 });
    let (key_words, latent_words) = (CacheFormat::Fp8.row_words(HEAD_DIM), CacheFormat::Nvfp4.row_words(HEAD_DIM));
    let (up_stride, out_stride, width) = (HEADS * HEAD_DIM + 8, HEADS * HEAD_DIM, HEADS * HEAD_DIM);
    let (freqs, sinks) = (frequencies(), lab.values(HEADS, 3.0));

    // Keys before the step lie in the ring, those of the step in the chunk. What is below the floor is poison.
    let (mut ring, mut chunk, mut keys) = (vec![POISON; WINDOW * key_words], vec![], vec![]);
    for s in floor..position + rows {
        let packed = CacheFormat::Fp8.pack(&lab.values(HEAD_DIM, 1.5));
        keys.push(CacheFormat::Fp8.unpack(&packed, HEAD_DIM));
        if s < position {
            ring[s % WINDOW * key_words..][..key_words].copy_from_slice(&packed);
        } else {
            chunk.extend(packed);
        }
    }
    let mut latents = vec![POISON; (rows * topk * latent_words).max(1)];
    let (mut selection, mut chosen) = (vec![POISON; rows * (1 + topk)], vec![]);
    for row in 0..rows {
        let list = choose(lab, (position + row + 1) / RATIO, topk);
        selection[row * (1 + topk)] = list.len() as u32;
        selection[row * (1 + topk) + 1..][..list.len()].copy_from_slice(&list);
        let mut of_row = vec![];
        for place in latents[row * topk * latent_words..].chunks_exact_mut(latent_words).take(list.len()) {
            place.copy_from_slice(&CacheFormat::Nvfp4.pack(&lab.values(HEAD_DIM, 1.5)));
            of_row.push(CacheFormat::Nvfp4.unpack(place, HEAD_DIM));
        }
        chosen.push(of_row);
    }
    let queries = lab.rows(rows, width, 3.0);
    let lab = &*lab;
    let attended = lab
        .run(|recording| {
            let state = Step {
                position: position as u32,
                rows: rows as u32,
                encoder_floor: floor as u32,
                decoder_floor: u32::MAX,
                ..Step::default()
            };
            let step = lab.step(state)?;
            let attended = lab.room(rows * out_stride)?;
            let [ring, chunk, latents, selection] = [&ring, &chunk, &latents, &selection];
            let upload = |words: &[u32]| lab.upload(MemoryKind::Cache, words);
            let window = Window {
                heads: HEADS,
                head_dim: HEAD_DIM,
                rotary: ROTARY,
                window: WINDOW,
                slots: WINDOW,
                block: false,
                decoder: false,
                groups: 1,
                up_stride,
                query_at: QUERY_AT,
                up: &lab.scratch(&strided(&queries, up_stride, QUERY_AT))?,
                ring: &upload(ring)?,
                chunk: &upload(chunk)?,
                constants: &lab.weights(&[&freqs[..], &sinks].concat())?,
                attended: &attended,
            };
            let (latents, selection) = (upload(latents)?, upload(selection)?);
            let selected = Selected { ratio: RATIO, topk, latents: &latents, selection: &selection };
            let kernel = Attend::new(lab.gpu, &step, &window, global.then_some(&selected))?;
            kernel.record(recording, position as u32, rows as u32, floor as u32);
            Ok(attended)
        })
        .await?;
    let mut expected = vec![];
    for row in 0..rows {
        let t = position + row;
        let first = (t + 1).saturating_sub(WINDOW).max(floor);
        let mut visible: Vec<&[f32]> = (first..=t).map(|s| &keys[s - floor][..]).collect();
        visible.extend(chosen[row].iter().map(|latent| &latent[..]));
        let mut q = queries[row].clone();
        rotate_heads(&mut q, HEAD_DIM, t as u32, &freqs, false);
        let scale = (HEAD_DIM as f32).powf(-0.5);
        expected.extend(attend_and_rotate_back(&q, &visible, &sinks, scale, t as u32, &freqs));
    }
    let mut found = Found::within(1e-5);
    found.close("attended", &lab.read::<f32>(&attended).await?, &expected);
    Ok(found)
}
