// Makes each row's selection of what the segments of a tile list (`select`) and of what earlier tiles left (numerics.md
// section 6). Tiles follow one another: the best so far stand in `selection` and `candidates`, their keys are carried in
// scratch, and a row's last tile with a visible slot leaves them final. Later tiles leave the row alone.
//
// The best of a union are the best of the parts' best. Carried positions come before all fresh ones, so order and ties are
// those of one long row. The best so far are renewed in place: what stays moves to its own place or an earlier one.
//
// Variants:
//   plain       entries
//   source      entries, and the candidate blocks from all block maxima; the newest block has the last place
//   restricted  entries of candidate slots
//
// One workgroup a row, at a source one for entries and one for blocks. Grid: (1 or 2, rows).
//
// 2 tile        the slots
// 3 lists       (T, 2, list / 4)              keys of the segments' best, their entry ids, in groups of four
// 4 selection   (T, 1 + topk)                 count, ascending entry ids (read and written)
// 5 carry       (T, topk4 + blocks4)          keys of the selection, keys of the candidate blocks at a source; each rounded up
//                                             to groups of four (read and written)
// source:
// 6 maxima      (T, tile blocks / 4)          keys of block maxima, in groups of four
// 7 candidates  (T, 1 + blocks)               count, ascending block ids (read and written)
// restricted:
// 6 candidates  (T, 1 + blocks)               count, ascending block ids (read)
#import step
#import tile
#import choose
#ifdef RESTRICTED
#import candidate
#endif

struct Params {
    topk: u32,
    ratio: u32,
    // Slots that the layer has.
    capacity: u32,
    // Entries a candidate block, candidate blocks a row.
    block_size: u32,
    blocks: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<uniform> tile: Tile;
@group(0) @binding(3) var<storage, read> lists: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> selection: array<u32>;
@group(0) @binding(5) var<storage, read_write> carry: array<u32>;
#ifdef SOURCE
@group(0) @binding(6) var<storage, read> maxima: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> candidates: array<u32>;
#endif
#ifdef RESTRICTED
@group(0) @binding(6) var<storage, read> candidates: array<u32>;
#endif

// What keys are of.
const ENTRIES: u32 = 0u;
const BLOCKS: u32 = 1u;

fn load_keys(keys: Keys, i: u32) -> vec4<u32> {
    let front = carried_groups(keys);
    if i < front {
        let at = keys.carried_at + i * 4u;
        return vec4(carry[at], carry[at + 1u], carry[at + 2u], carry[at + 3u]);
    }
#ifdef SOURCE
    if keys.what == BLOCKS {
        return maxima[keys.fresh_at + i - front];
    }
#endif
    return lists[keys.fresh_at + i - front];
}

// The rank-th of the best so far.
fn best(keys: Keys, rank: u32) -> u32 {
#ifdef SOURCE
    if keys.what == BLOCKS {
        return candidates[keys.row * (1u + params.blocks) + 1u + rank];
    }
#endif
    return selection[keys.row * (1u + params.topk) + 1u + rank];
}

fn set_best(keys: Keys, rank: u32, id: u32, key: u32) {
    carry[keys.carried_at + rank] = key;
#ifdef SOURCE
    if keys.what == BLOCKS {
        candidates[keys.row * (1u + params.blocks) + 1u + rank] = id;
        return;
    }
#endif
    selection[keys.row * (1u + params.topk) + 1u + rank] = id;
}

fn store(keys: Keys, rank: u32, i: u32, j: u32, key: u32) {
    let group = i - carried_groups(keys);
#ifdef SOURCE
    if keys.what == BLOCKS {
        set_best(keys, rank, tile.first / params.block_size + group * 4u + j, key);
        return;
    }
#endif
    set_best(keys, rank, lists[keys.fresh_at + list_stride(tile, params.topk) / 4u + group][j], key);
}

// Keeps the carried keys above the cut, and the first `rest` at it. Returns how many lie above it and at it.
fn keep_carried(keys: Keys, cut: Cut, lane: u32) -> vec2<u32> {
    var passed = vec2(0u);
    let end = carried_groups(keys);
    for (var first = 0u; first < end; first += THREADS) {
        let i = first + lane;
        var count = 0u;
        var four = vec4(0u);
        var ids = vec4(0u);
        if i < end {
            count = keys_in(keys, i);
            four = load_keys(keys, i);
            for (var j = 0u; j < count; j++) {
                ids[j] = best(keys, i * 4u + j);
            }
        }
        let before = scan(count_keys(four, count, cut), lane);
        // All of these have been read, and the places that they take are no later ones.
        storageBarrier();
        var above = passed.x + (before.x & 0xffffu);
        var equal = passed.y + (before.x >> 16u);
        for (var j = 0u; j < count; j++) {
            let key = four[j] >> cut.shift;
            if key > cut.digit || (key == cut.digit && equal < cut.rest) {
                set_best(keys, above + min(equal, cut.rest), ids[j], four[j]);
            }
            above += u32(key > cut.digit);
            equal += u32(key == cut.digit);
        }
        passed += vec2(before.y & 0xffffu, before.y >> 16u);
    }
    return passed;
}

// Leaves the `wanted` highest of the carried and the fresh keys; all of them where there are no more.
fn choose(keys: Keys, wanted: u32, lane: u32) {
    if keys.carried + keys.fresh <= wanted {
        take_all(keys, lane);
    } else if wanted > 0u {
        let cut = threshold(keys, wanted, lane);
        take_fresh(keys, cut, keep_carried(keys, cut, lane), lane);
    }
}

fn whole_groups(n: u32) -> u32 {
    return (n + 3u) & 0xfffffffcu;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.y;
    if row >= step.rows {
        return;
    }
    var n = (step.position + row + 1u) / params.ratio;
#ifdef RESTRICTED
    let list = row * (1u + params.blocks);
    let count = candidates[list];
    n = candidate_slots(count, candidates[list + count], params.block_size, n);
#endif
    n = min(n, params.capacity);
    if n <= tile.first && tile.first > 0u {
        return;
    }
    // Slots that the row sees up to the tile's end, and in the tile.
    let until = min(n, tile.first + tile.count);
    let visible = until - tile.first;
#ifdef SOURCE
    let carry_at = row * (whole_groups(params.topk) + whole_groups(params.blocks));
    if group.x == BLOCKS {
        let so_far = (until + params.block_size - 1u) / params.block_size;
        var fresh = (visible + params.block_size - 1u) / params.block_size;
        let carried = min(params.blocks, tile.first / params.block_size);
        // In its last tile the row's newest block has the last of the places.
        let last = u32(until == n && n > 0u);
        fresh -= last;
        let maxima_at = row * (tile.count / params.block_size / 4u);
        let keys = Keys(BLOCKS, row, carry_at + whole_groups(params.topk), carried, maxima_at, fresh);
        choose(keys, params.blocks - last, lane);
        if lane == 0u {
            let kept = min(so_far, params.blocks);
            let list = row * (1u + params.blocks);
            candidates[list] = kept;
            if last == 1u {
                candidates[list + kept] = so_far - 1u;
            }
        }
        return;
    }
#else
    let carry_at = row * whole_groups(params.topk);
#endif
    let lists_at = row * 2u * list_stride(tile, params.topk) / 4u;
    let fresh = listed(tile, params.topk, visible);
    choose(Keys(ENTRIES, row, carry_at, min(params.topk, tile.first), lists_at, fresh), params.topk, lane);
    if lane == 0u {
        selection[row * (1u + params.topk)] = min(until, params.topk);
    }
}
