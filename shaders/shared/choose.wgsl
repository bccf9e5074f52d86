// Chooses the highest keys of a row, positions ascending, equal keys by lower position: a radix select. Up to three
// histograms (11, 11 and 10 bits) narrow down to the threshold digit, then one ordered pass takes what lies above it and the
// first few that equal it. One workgroup of 256. Integers only, so the result depends on the keys alone.
//
// Keys lie in groups of four: those carried from earlier tiles, then fresh ones. The kernel says what they are:
//   fn load_keys(keys: Keys, i: u32) -> vec4<u32>                         group i; beyond the last key whatever lies there
//   fn store(keys: Keys, rank: u32, i: u32, j: u32, key: u32)             makes fresh key j of group i the rank-th chosen
struct Keys {
    what: u32,     // the kernel's name for them
    row: u32,
    carried_at: u32,
    carried: u32,  // how many
    fresh_at: u32,
    fresh: u32,    // how many
}

// The highest keys are those with key >> shift above digit, and the first `rest` of those with key >> shift equal to it.
struct Cut {
    shift: u32,
    digit: u32,
    rest: u32,
}

const THREADS: u32 = 256u;
const BINS: u32 = 2048u;

var<workgroup> bins: array<atomic<u32>, BINS>;
var<workgroup> items: array<u32, THREADS>;
var<workgroup> sums: array<u32, 16>;
var<workgroup> found: vec3<u32>;

fn carried_groups(keys: Keys) -> u32 {
    return (keys.carried + 3u) / 4u;
}

fn all_groups(keys: Keys) -> u32 {
    return carried_groups(keys) + (keys.fresh + 3u) / 4u;
}

// Keys in group i.
fn keys_in(keys: Keys, i: u32) -> u32 {
    let front = carried_groups(keys);
    return min(4u, select(keys.fresh - (i - front) * 4u, keys.carried - i * 4u, i < front));
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
        sums[lane] = sum;
    }
    workgroupBarrier();
    var result = vec2(0u);
    for (var i = 0u; i < 16u; i++) {
        result += select(vec2(0u, sums[i]), vec2(sums[i]), i < lane / 16u);
    }
    for (var i = lane & 0xfffffff0u; i < lane; i++) {
        result.x += items[i];
    }
    workgroupBarrier();
    return result;
}

// Where the `wanted` highest keys end. 0 < wanted < number of keys.
fn threshold(keys: Keys, wanted: u32, lane: u32) -> Cut {
    let end = all_groups(keys);
    var cut = Cut(32u, 0u, wanted);
    while cut.shift > 0u {
        let above = cut.shift;
        let width = select(11u, 10u, above == 10u);
        cut.shift -= width;
        for (var i = lane; i < BINS; i += THREADS) {
            atomicStore(&bins[i], 0u);
        }
        workgroupBarrier();
        for (var i = lane; i < end; i += THREADS) {
            let four = load_keys(keys, i);
            for (var j = 0u; j < keys_in(keys, i); j++) {
                if above == 32u || four[j] >> above == cut.digit {
                    atomicAdd(&bins[(four[j] >> cut.shift) & ((1u << width) - 1u)], 1u);
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
        if higher < cut.rest && cut.rest <= higher + sum {
            var bin = top;
            var inside = atomicLoad(&bins[bin]);
            while higher + inside < cut.rest {
                higher += inside;
                bin -= 1u;
                inside = atomicLoad(&bins[bin]);
            }
            found = vec3(bin, cut.rest - higher, inside);
        }
        let next = workgroupUniformLoad(&found);
        cut.digit = (cut.digit << width) | next.x;
        cut.rest = next.y;
        if next.y == next.z {
            break;
        }
    }
    return cut;
}

// How many of the first `count` keys of a group lie above the cut (low half) and at it (high half).
fn count_keys(four: vec4<u32>, count: u32, cut: Cut) -> u32 {
    var counts = 0u;
    for (var j = 0u; j < count; j++) {
        let key = four[j] >> cut.shift;
        counts += select(select(0u, 0x10000u, key == cut.digit), 1u, key > cut.digit);
    }
    return counts;
}

// Takes the fresh keys above the cut, and those at it as long as some are to be had. `passed` counts the carried keys above
// the cut and at it.
fn take_fresh(keys: Keys, cut: Cut, passed: vec2<u32>, lane: u32) {
    var above = passed.x;
    var equal = passed.y;
    let end = all_groups(keys);
    for (var chunk = carried_groups(keys); chunk < end; chunk += THREADS * 4u) {
        let first = chunk + lane * 4u;
        let last = min(first + 4u, end);
        var counts = 0u;
        for (var i = first; i < last; i++) {
            counts += count_keys(load_keys(keys, i), keys_in(keys, i), cut);
        }
        let before = scan(counts, lane);
        if counts > 0u {
            var my_above = above + (before.x & 0xffffu);
            var my_equal = equal + (before.x >> 16u);
            for (var i = first; i < last; i++) {
                let four = load_keys(keys, i);
                for (var j = 0u; j < keys_in(keys, i); j++) {
                    let key = four[j] >> cut.shift;
                    if key > cut.digit || (key == cut.digit && my_equal < cut.rest) {
                        store(keys, my_above + min(my_equal, cut.rest), i, j, four[j]);
                    }
                    my_above += u32(key > cut.digit);
                    my_equal += u32(key == cut.digit);
                }
            }
        }
        above += before.y & 0xffffu;
        equal += before.y >> 16u;
    }
}

// Takes all fresh keys, behind the carried ones.
fn take_all(keys: Keys, lane: u32) {
    let front = carried_groups(keys);
    for (var i = front + lane; i < all_groups(keys); i += THREADS) {
        let four = load_keys(keys, i);
        for (var j = 0u; j < keys_in(keys, i); j++) {
            store(keys, keys.carried + (i - front) * 4u + j, i, j, four[j]);
        }
    }
}
