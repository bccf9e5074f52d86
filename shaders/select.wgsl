// Selects the `topk` highest scores of each row in a tile of slots (numerics.md section 6): ids ascending, equal scores by
// lower position.
//
// Where rows see no more than the tile's first segment (`tile.whole`), that is the selection. Otherwise each segment lists
// its own best with their keys, and `select_merge` makes the selection of them; slots that a row does not see are in no list.
//
// Variants:
//   plain       scores of all visible entries
//   source      also the candidate blocks: the newest block with a visible entry, and those with the highest maxima of
//               visible scores, `blocks` in all; or the maxima alone, for `select_merge`
//   restricted  scores of candidate slots, mapped back to entries
//
// One workgroup a segment of a row. Grid: (segments, rows).
//
// 2 tile        the slots
// 3 scores      (T, tile.count)      f32 bits in groups of four
// 4 selection   (T, 1 + topk)        count, ascending entry ids (written where the tile is whole)
// 5 lists       (T, 2, list)         keys of the segments' best, their entry ids; a segment has min(topk, its visible slots)
//                                    of them, and they lie one after the other (written where the tile is not whole)
// source:
// 6 maxima      (T, tile blocks)     keys of block maxima, in groups of four
// 7 candidates  (T, 1 + blocks)      count, ascending block ids (written where the tile is whole)
// restricted:
// 6 candidates  (T, 1 + blocks)      count, ascending block ids (read)
#import step
#import tile
#import order
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
@group(0) @binding(3) var<storage, read> scores: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> selection: array<u32>;
@group(0) @binding(5) var<storage, read_write> lists: array<u32>;
#ifdef SOURCE
@group(0) @binding(6) var<storage, read_write> maxima: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> candidates: array<u32>;
#endif
#ifdef RESTRICTED
@group(0) @binding(6) var<storage, read> candidates: array<u32>;
#endif

// What keys are of.
const SCORES: u32 = 0u;
const MAXIMA: u32 = 1u;

// First slot of this workgroup, and where its list begins among the row's.
var<private> first_slot: u32;
var<private> list_at: u32;

fn load_keys(keys: Keys, i: u32) -> vec4<u32> {
#ifdef SOURCE
    if keys.what == MAXIMA {
        return maxima[keys.fresh_at + i];
    }
#endif
    return order_key(scores[keys.fresh_at + i]);
}

fn store(keys: Keys, rank: u32, i: u32, j: u32, key: u32) {
    let p = i * 4u + j;
#ifdef SOURCE
    if keys.what == MAXIMA {
        candidates[keys.row * (1u + params.blocks) + 1u + rank] = p;
        return;
    }
#endif
    var id = first_slot + p;
#ifdef RESTRICTED
    let block = candidates[keys.row * (1u + params.blocks) + 1u + id / params.block_size];
    id = block * params.block_size + id % params.block_size;
#endif
    if tile.whole == 1u {
        selection[keys.row * (1u + params.topk) + 1u + rank] = id;
    } else {
        let stride = list_stride(tile, params.topk);
        let at = keys.row * 2u * stride + list_at + rank;
        lists[at] = key;
        lists[at + stride] = id;
    }
}

// Takes the `wanted` highest keys; all of them where there are no more.
fn choose(keys: Keys, wanted: u32, lane: u32) {
    if keys.fresh <= wanted {
        take_all(keys, lane);
    } else if wanted > 0u {
        take_fresh(keys, threshold(keys, wanted, lane), vec2(0u), lane);
    }
}

#ifdef SOURCE
// Keys of the maxima of the blocks of the visible scores.
fn write_maxima(of_scores: Keys, of_maxima: Keys, lane: u32) {
    let n = of_scores.fresh;
    for (var i = lane; i * 4u < of_maxima.fresh; i += THREADS) {
        var keys = vec4(0u);
        for (var j = 0u; j < 4u; j++) {
            let first = (i * 4u + j) * params.block_size;
            let end = min(first + params.block_size, n);
            for (var p = first; p < end; p = (p | 3u) + 1u) {
                let four = load_keys(of_scores, p / 4u);
                for (var q = p; q < min((p | 3u) + 1u, end); q++) {
                    keys[j] = max(keys[j], four[q & 3u]);
                }
            }
        }
        maxima[of_maxima.fresh_at + i] = keys;
    }
}
#endif

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
    let in_tile = group.x * tile.segment;
    let first = tile.first + in_tile;
    if first >= n && tile.whole == 0u {
        return;
    }
    first_slot = first;
    list_at = group.x * min(tile.segment, params.topk);
    let visible = min(n - first, min(tile.segment, tile.count - in_tile));
    let of_scores = Keys(SCORES, row, 0u, 0u, (row * tile.count + in_tile) / 4u, visible);
    if tile.whole == 1u && lane == 0u {
        selection[row * (1u + params.topk)] = min(visible, params.topk);
    }
    choose(of_scores, params.topk, lane);
#ifdef SOURCE
    let visible_blocks = (visible + params.block_size - 1u) / params.block_size;
    let maxima_at = (row * tile.count + in_tile) / params.block_size / 4u;
    let of_maxima = Keys(MAXIMA, row, 0u, 0u, maxima_at, visible_blocks);
    if tile.whole == 0u {
        write_maxima(of_scores, of_maxima, lane);
        return;
    }
    let list = row * (1u + params.blocks);
    if lane == 0u {
        candidates[list] = min(visible_blocks, params.blocks);
    }
    if visible_blocks <= params.blocks {
        for (var b = lane; b < visible_blocks; b += THREADS) {
            candidates[list + 1u + b] = b;
        }
        return;
    }
    write_maxima(of_scores, of_maxima, lane);
    storageBarrier();
    // The newest block has the last of the places.
    choose(Keys(MAXIMA, row, 0u, 0u, maxima_at, visible_blocks - 1u), params.blocks - 1u, lane);
    if lane == 0u {
        candidates[list + params.blocks] = visible_blocks - 1u;
    }
#endif
}
