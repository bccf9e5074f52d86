// Selects the `topk` highest scores of each row (numerics.md section 6): ids ascending, equal scores by lower position.
// A row with at most topk scores takes them all and reads none.
//
// A radix select over order-preserving keys: up to three histograms (11, 11 and 10 bits) narrow down to the threshold
// digit, then one ordered pass writes what lies above it and the first few that equal it. Integers only, so the result
// depends on the scores alone.
//
// Variants:
//   plain       scores of all visible entries
//   source      also writes the candidate blocks: the newest block with a visible entry, and those with the highest
//               maxima of visible scores, `blocks` in all
//   restricted  scores of candidate slots, mapped back to entries
//
// One workgroup a row. Grid: (rows).
//
// 2 scores      (T, score_stride)    f32 bits in groups of four
// 3 selection   (T, 1 + topk)        count, ascending entry ids
// plain: no more
// source:
// 4 maxima      (T, maxima_stride)   keys of block maxima, in groups of four (scratch)
// 5 candidates  (T, 1 + blocks)      count, ascending block ids (written)
// restricted:
// 4 candidates  (T, 1 + blocks)      count, ascending block ids (read)
#import step
#import order
#ifdef RESTRICTED
#import candidate
#endif

struct Params {
    topk: u32,
    ratio: u32,
    // Slots of a row of scores, and its length in groups of four.
    capacity: u32,
    score_stride: u32,
    // Entries a candidate block, candidate blocks a row, groups of four of a row of maxima.
    block_size: u32,
    blocks: u32,
    maxima_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> scores: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> selection: array<u32>;
#ifdef SOURCE
@group(0) @binding(4) var<storage, read_write> maxima: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> candidates: array<u32>;
#endif
#ifdef RESTRICTED
@group(0) @binding(4) var<storage, read> candidates: array<u32>;
#endif

const THREADS: u32 = 256u;
const BINS: u32 = 2048u;
// What a selection is over.
const SCORES: u32 = 0u;
const MAXIMA: u32 = 1u;

var<workgroup> bins: array<atomic<u32>, BINS>;
var<workgroup> items: array<u32, THREADS>;
var<workgroup> groups: array<u32, 16>;
var<workgroup> found: vec3<u32>;

// Four keys of the row from position 4 * i on; those beyond the row's last are whatever lies there.
fn load_keys(keys_of: u32, row: u32, i: u32) -> vec4<u32> {
#ifdef SOURCE
    if keys_of == MAXIMA {
        return maxima[row * params.maxima_stride + i];
    }
#endif
    return order_key(scores[row * params.score_stride + i]);
}

// Writes position p of the row as the rank-th of its list.
fn store(keys_of: u32, row: u32, rank: u32, p: u32) {
#ifdef SOURCE
    if keys_of == MAXIMA {
        candidates[row * (1u + params.blocks) + 1u + rank] = p;
        return;
    }
#endif
    var id = p;
#ifdef RESTRICTED
    let block = candidates[row * (1u + params.blocks) + 1u + p / params.block_size];
    id = block * params.block_size + p % params.block_size;
#endif
    selection[row * (1u + params.topk) + 1u + rank] = id;
}

// Sum of the values of lower lanes (x) and of all lanes (y).
fn scan(value: u32, lane: u32) -> vec2<u32> {
    items[lane] = value;
    workgroupBarrier();
    if lane < 16u {
        var sum = 0u;
        for (var i = 0u; i < 16u; i++) {
            sum += items[lane * 16u + i];
        }
        groups[lane] = sum;
    }
    workgroupBarrier();
    var result = vec2(0u);
    for (var i = 0u; i < 16u; i++) {
        result += select(vec2(0u, groups[i]), vec2(groups[i]), i < lane / 16u);
    }
    for (var i = lane & 0xfffffff0u; i < lane; i++) {
        result.x += items[i];
    }
    workgroupBarrier();
    return result;
}

// Where the `wanted` highest of n keys end: (shift, digit, rest) says that they are the keys with key >> shift above
// digit, and the first `rest` of those with key >> shift equal to it. 0 < wanted < n.
fn threshold(keys_of: u32, row: u32, n: u32, wanted: u32, lane: u32) -> vec3<u32> {
    var shift = 32u;
    var digit = 0u;
    var rest = wanted;
    while shift > 0u {
        let above = shift;
        let width = select(11u, 10u, shift == 10u);
        shift -= width;
        for (var i = lane; i < BINS; i += THREADS) {
            atomicStore(&bins[i], 0u);
        }
        workgroupBarrier();
        for (var i = lane; i * 4u < n; i += THREADS) {
            let keys = load_keys(keys_of, row, i);
            for (var j = 0u; j < min(4u, n - i * 4u); j++) {
                if above == 32u || keys[j] >> above == digit {
                    atomicAdd(&bins[(keys[j] >> shift) & ((1u << width) - 1u)], 1u);
                }
            }
        }
        workgroupBarrier();
        // A lane has eight bins, lane 0 the highest: the one with the rest-th key finds its bin.
        let top = BINS - 1u - lane * 8u;
        var sum = 0u;
        for (var i = 0u; i < 8u; i++) {
            sum += atomicLoad(&bins[top - i]);
        }
        var higher = scan(sum, lane).x;
        if higher < rest && rest <= higher + sum {
            var bin = top;
            var inside = atomicLoad(&bins[bin]);
            while higher + inside < rest {
                higher += inside;
                bin -= 1u;
                inside = atomicLoad(&bins[bin]);
            }
            found = vec3(bin, rest - higher, inside);
        }
        let next = workgroupUniformLoad(&found);
        digit = (digit << width) | next.x;
        rest = next.y;
        if next.y == next.z {
            break;
        }
    }
    return vec3(shift, digit, rest);
}

// Writes the `wanted` highest of n positions of the row, ascending; all of them when there are no more.
fn choose(keys_of: u32, row: u32, n: u32, wanted: u32, lane: u32) {
    if n <= wanted {
        for (var p = lane; p < n; p += THREADS) {
            store(keys_of, row, p, p);
        }
        return;
    }
    if wanted == 0u {
        return;
    }
    let cut = threshold(keys_of, row, n, wanted, lane);
    let shift = cut.x;
    let digit = cut.y;
    let rest = cut.z;
    // Keys above the cut (low half of a count) and equal to it (high half) in the tiles before.
    var above = 0u;
    var equal = 0u;
    let end = (n + 3u) / 4u;
    for (var tile = 0u; tile < end; tile += THREADS * 4u) {
        let first = tile + lane * 4u;
        let last = min(first + 4u, end);
        var counts = 0u;
        for (var i = first; i < last; i++) {
            let keys = load_keys(keys_of, row, i);
            for (var j = 0u; j < min(4u, n - i * 4u); j++) {
                let key = keys[j] >> shift;
                counts += select(select(0u, 0x10000u, key == digit), 1u, key > digit);
            }
        }
        let before = scan(counts, lane);
        if counts > 0u {
            var my_above = above + (before.x & 0xffffu);
            var my_equal = equal + (before.x >> 16u);
            for (var i = first; i < last; i++) {
                let keys = load_keys(keys_of, row, i);
                for (var j = 0u; j < min(4u, n - i * 4u); j++) {
                    let key = keys[j] >> shift;
                    if key > digit || (key == digit && my_equal < rest) {
                        store(keys_of, row, my_above + min(my_equal, rest), i * 4u + j);
                    }
                    my_above += u32(key > digit);
                    my_equal += u32(key == digit);
                }
            }
        }
        above += before.y & 0xffffu;
        equal += before.y >> 16u;
    }
}

#ifdef SOURCE
// Keys of the maxima of the blocks of n visible scores.
fn write_maxima(row: u32, n: u32, lane: u32) {
    for (var i = lane; i * 4u * params.block_size < n; i += THREADS) {
        var keys = vec4(0u);
        for (var j = 0u; j < 4u; j++) {
            let first = (i * 4u + j) * params.block_size;
            let end = min(first + params.block_size, n);
            for (var p = first; p < end; p = (p | 3u) + 1u) {
                let four = load_keys(SCORES, row, p / 4u);
                for (var q = p; q < min((p | 3u) + 1u, end); q++) {
                    keys[j] = max(keys[j], four[q & 3u]);
                }
            }
        }
        maxima[row * params.maxima_stride + i] = keys;
    }
}
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x;
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
    if lane == 0u {
        selection[row * (1u + params.topk)] = min(n, params.topk);
    }
    choose(SCORES, row, n, params.topk, lane);
#ifdef SOURCE
    let visible_blocks = (n + params.block_size - 1u) / params.block_size;
    if lane == 0u {
        candidates[row * (1u + params.blocks)] = min(visible_blocks, params.blocks);
    }
    if visible_blocks <= params.blocks {
        choose(MAXIMA, row, visible_blocks, params.blocks, lane);
        return;
    }
    write_maxima(row, n, lane);
    storageBarrier();
    // The newest block has the last of the places.
    choose(MAXIMA, row, visible_blocks - 1u, params.blocks - 1u, lane);
    if lane == 0u {
        store(MAXIMA, row, params.blocks - 1u, visible_blocks - 1u);
    }
#endif
}
