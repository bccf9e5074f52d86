// Groups the pairs (row, slot) of the rows in flight by expert, pair ids rising inside a group, and cuts the groups into
// tiles. One workgroup: count, prefix sum over the experts, then blocks of 256 pairs in order, so that the result is the
// same on every device. Does nothing for a single row: `route` has grouped it.
//
//   2 ids       (T, slots) the experts of each row
//   3 pairs     (T * slots) pair ids t * slots + slot
//   4 tiles     count, then (expert, first, pairs) a tile: at most `tile_pairs` pairs, in `pairs` from `first` on
#import step

struct Params {
    slots: u32,
    tile_pairs: u32,
    p0: u32,
    p1: u32,
}

// Experts, the shared one among them.
override EXPERTS: u32;
const WORKGROUP: u32 = 256u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> pairs: array<u32>;
@group(0) @binding(4) var<storage, read_write> tiles: array<u32>;

// Pairs of each expert, then the place of its next pair.
var<workgroup> places: array<atomic<u32>, EXPERTS>;
// Sums of pairs and tiles over the experts of each lane, then over all lanes up to it.
var<workgroup> sums: array<vec2<u32>, WORKGROUP>;
var<workgroup> block: array<u32, WORKGROUP>;

fn tiles_of(count: u32) -> u32 {
    return (count + params.tile_pairs - 1u) / params.tile_pairs;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) local: u32) {
    if (step.rows <= 1u) {
        return;
    }
    let count = step.rows * params.slots;
    for (var e = local; e < EXPERTS; e += WORKGROUP) {
        atomicStore(&places[e], 0u);
    }
    workgroupBarrier();
    for (var p = local; p < count; p += WORKGROUP) {
        atomicAdd(&places[ids[p]], 1u);
    }
    workgroupBarrier();

    // Each lane has a run of experts.
    let run = (EXPERTS + WORKGROUP - 1u) / WORKGROUP;
    let begin = min(local * run, EXPERTS);
    let end = min(begin + run, EXPERTS);
    var sum = vec2<u32>(0u);
    for (var e = begin; e < end; e++) {
        let n = atomicLoad(&places[e]);
        sum += vec2<u32>(n, tiles_of(n));
    }
    sums[local] = sum;
    workgroupBarrier();
    for (var stride = 1u; stride < WORKGROUP; stride *= 2u) {
        var before = vec2<u32>(0u);
        if (local >= stride) {
            before = sums[local - stride];
        }
        workgroupBarrier();
        sums[local] += before;
        workgroupBarrier();
    }

    var next = sums[local] - sum;
    if (local == WORKGROUP - 1u) {
        tiles[0] = sums[local].y;
    }
    for (var e = begin; e < end; e++) {
        let n = atomicLoad(&places[e]);
        atomicStore(&places[e], next.x);
        for (var done = 0u; done < n; done += params.tile_pairs) {
            let at = 3u * next.y + 1u;
            tiles[at] = e;
            tiles[at + 1u] = next.x + done;
            tiles[at + 2u] = min(params.tile_pairs, n - done);
            next.y += 1u;
        }
        next.x += n;
    }
    workgroupBarrier();

    for (var start = 0u; start < count; start += WORKGROUP) {
        let p = start + local;
        let live = p < count;
        var id = EXPERTS;
        if (live) {
            id = ids[p];
        }
        block[local] = id;
        workgroupBarrier();
        if (live) {
            var rank = 0u;
            for (var j = 0u; j < local; j++) {
                rank += select(0u, 1u, block[j] == id);
            }
            pairs[atomicLoad(&places[id]) + rank] = p;
        }
        workgroupBarrier();
        if (live) {
            atomicAdd(&places[id], 1u);
        }
        workgroupBarrier();
    }
}
