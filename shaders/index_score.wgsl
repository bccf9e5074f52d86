// Scores the entries of the global cache for the rows in flight (numerics.md section 6):
//   S[t, c] = sum over heads of w[t, h] * relu(q[t, h] . k[c])
// for the entries of a tile of slots that row t sees: slots are all entries, c < (position + t + 1) / ratio, or those of its
// candidate blocks. Only entries whose page lies in the slab at hand are scored: a dispatch a slab in use scores them all.
//
// q . k is exact but for the sum over blocks of 32 channels: twice an E2M1 value is an integer, so a block is an
// integer dot product times two powers of two (the factor 1/4 is in weight_scale). Blocks are added in order, then
// heads in order, product and sum rounded apart: all variants on all devices give the same bits.
//
// One workgroup scores 256 slots for one row, a thread a slot. Grid: (ceil(slots / 256), rows).
//
// 2 table       where the session's pages lie
// 3 tile        the slots
// 4 queries     (T, H_i, row_words)  index queries, packed MXFP4
// 5 weights     (T, weight_stride)   raw head weights of row t at weight_offset .. + H_i
// 6 slab        header, pages of page_words: a page's key rows, packed MXFP4, start at key_offset
// 7 candidates  (T, 1 + blocks)      count, ascending block ids; read only if block_size > 0
// 8 scores      (T, tile.count)      written for the row's visible slots in the tile and the slab
#import step
#import pages
#import tile
#import candidate

struct Params {
    heads: u32,
    code_words: u32,
    row_words: u32,
    weight_stride: u32,
    weight_offset: u32,
    weight_scale: f32,
    ratio: u32,
    page_entries: u32,
    page_words: u32,
    key_offset: u32,
    // Slots that the layer has.
    capacity: u32,
    // Entries a candidate block; 0: score every visible entry.
    block_size: u32,
    candidate_stride: u32,
    // 0. Added to the bits of a product, it keeps compilers from fusing the product with the sum that follows: some
    // devices would, some could not.
    zero: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<uniform> table: PageTable;
@group(0) @binding(3) var<uniform> tile: Tile;
@group(0) @binding(4) var<storage, read> queries: array<u32>;
@group(0) @binding(5) var<storage, read> weights: array<f32>;
@group(0) @binding(6) var<storage, read> slab: array<u32>;
@group(0) @binding(7) var<storage, read> candidates: array<u32>;
@group(0) @binding(8) var<storage, read_write> scores: array<f32>;

// Blocks of 32 channels a vector, and heads whose queries are in workgroup memory at a time.
override blocks: u32;
override head_tile: u32;

const LANES: u32 = 256u;

// The 32 channels of a block as doubled E2M1 values, and 2^(scale byte - 127).
#ifdef DOT4
// Four signed bytes a word.
struct Block {
    a: vec4<u32>,
    b: vec4<u32>,
    scale: f32,
}
#else
// Two signed 16-bit lanes a word, x + 65536 y; a query's are swapped.
struct Block {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    scale: f32,
}
#endif

var<workgroup> tile_queries: array<Block, head_tile * blocks>;
var<workgroup> tile_weights: array<f32, head_tile>;

// Doubled magnitudes 0 1 2 3 4 6 8 12 of the codes in the lanes (bytes or halves) of a word; `one` has a 1 in each
// lane. The magnitude of a code m is m, plus m & 3 from 4 on, plus 2 for 7.
fn doubled_magnitude(codes: vec4<u32>, one: u32) -> vec4<u32> {
    let four = codes & vec4(one << 2u);
    let rest = codes & (four - (four >> vec4(2u)));
    return (codes & vec4(one * 7u)) + rest + ((rest & (rest >> vec4(1u))) << vec4(1u));
}

#ifdef DOT4
// Signed bytes of four words of codes, one code a byte.
fn signed_bytes(codes: vec4<u32>) -> vec4<u32> {
    let magnitude = doubled_magnitude(codes, 0x01010101u);
    // 128 - m, with the top bit flipped, is -m in a byte, and no zero carries into its neighbour.
    let sign = (codes >> vec4(3u)) & vec4(0x01010101u);
    let top = sign << vec4(7u);
    return ((magnitude ^ (top - sign)) + sign) ^ top;
}

fn expand_key(words: vec4<u32>, scale: f32) -> Block {
    return Block(signed_bytes(words & vec4(0x0f0f0f0fu)), signed_bytes((words >> vec4(4u)) & vec4(0x0f0f0f0fu)), scale);
}

fn expand_query(words: vec4<u32>, scale: f32) -> Block {
    return expand_key(words, scale);
}

fn block_dot(key: Block, query: Block) -> i32 {
    return dot4I8Packed(key.a.x, query.a.x) + dot4I8Packed(key.a.y, query.a.y)
        + dot4I8Packed(key.a.z, query.a.z) + dot4I8Packed(key.a.w, query.a.w)
        + dot4I8Packed(key.b.x, query.b.x) + dot4I8Packed(key.b.y, query.b.y)
        + dot4I8Packed(key.b.z, query.b.z) + dot4I8Packed(key.b.w, query.b.w);
}
#else
// x + 65536 y of four words of codes, one code a half.
fn signed_halves(codes: vec4<u32>) -> vec4<u32> {
    let magnitude = doubled_magnitude(codes, 0x00010001u);
    let negative = ((codes >> vec4(3u)) & vec4(0x00010001u)) * 15u;
    return magnitude - ((magnitude & negative) << vec4(1u));
}

fn expand_key(words: vec4<u32>, scale: f32) -> Block {
    let mask = vec4(0x000f000fu);
    return Block(
        signed_halves(words & mask),
        signed_halves((words >> vec4(4u)) & mask),
        signed_halves((words >> vec4(8u)) & mask),
        signed_halves((words >> vec4(12u)) & mask),
        scale,
    );
}

fn expand_query(words: vec4<u32>, scale: f32) -> Block {
    return expand_key((words << vec4(16u)) | (words >> vec4(16u)), scale);
}

// (x + 65536 y) (y' + 65536 x') = x y' + 65536 (x x' + y y') modulo 2^32: one multiplication makes two products of the
// dot. Over a block the sum of the x y' stays within 16 * 144 and that of the others within 32 * 144, so the halves
// come apart.
fn block_dot(key: Block, query: Block) -> i32 {
    let pairs = key.a * query.a + key.b * query.b + key.c * query.c + key.d * query.d;
    let sum = bitcast<i32>(pairs.x + pairs.y + pairs.z + pairs.w);
    let low = (sum << 16u) >> 16u;
    return (sum - low) >> 16u;
}
#endif

// 2^(byte - 127) of block b, from the word of scale bytes that holds it.
fn block_scale(word: u32, b: u32) -> f32 {
    return bitcast<f32>(((word >> ((b & 3u) * 8u)) & 0xffu) << 23u);
}

fn load_query(at: u32, b: u32) -> Block {
    var words = vec4(0u);
    for (var i = 0u; i < min(4u, params.code_words - b * 4u); i++) {
        words[i] = queries[at + b * 4u + i];
    }
    return expand_query(words, block_scale(queries[at + params.code_words + (b >> 2u)], b));
}

fn load_key(at: u32, b: u32) -> Block {
    let first = b * 4u;
    var words = vec4(slab[at + first], 0u, 0u, 0u);
    if first + 1u < params.code_words {
        words.y = slab[at + first + 1u];
    }
    if first + 2u < params.code_words {
        words.z = slab[at + first + 2u];
    }
    if first + 3u < params.code_words {
        words.w = slab[at + first + 3u];
    }
    return expand_key(words, block_scale(slab[at + params.code_words + (b >> 2u)], b));
}

fn scaled_dot(key: Block, query: u32) -> f32 {
    return f32(block_dot(key, tile_queries[query])) * tile_queries[query].scale * key.scale;
}

fn place_of(page: u32) -> u32 {
    return table.places[page >> 2u][page & 3u];
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.y;
    if row >= step.rows {
        return;
    }
    let list = row * params.candidate_stride;
    var slots = (step.position + row + 1u) / params.ratio;
    if params.block_size > 0u {
        let count = candidates[list];
        slots = candidate_slots(count, candidates[list + count], params.block_size, slots);
    }
    slots = min(min(slots, params.capacity), tile.first + tile.count);
    let first_slot = tile.first + group.x * LANES;
    if first_slot >= slots {
        return;
    }
    if params.block_size == 0u {
        // Slots are entries, of a few pages: none of them may lie in the slab.
        var pages = 0u;
        let last = (min(first_slot + LANES, slots) - 1u) / params.page_entries;
        for (var page = first_slot / params.page_entries; page <= last; page++) {
            pages += u32(place_slab(place_of(page)) == slab[0]);
        }
        if pages == 0u {
            return;
        }
    }

    let slot = first_slot + lane;
    var live = slot < slots;
    // Up to 128 channels of the key stay in registers.
    var at = 0u;
    var key0: Block;
    var key1: Block;
    var key2: Block;
    var key3: Block;
    if live {
        var entry = slot;
        if params.block_size > 0u {
            entry = candidates[list + 1u + slot / params.block_size] * params.block_size + slot % params.block_size;
        }
        let place = place_of(entry / params.page_entries);
        live = place_slab(place) == slab[0];
        at = place_word(place, params.page_words) + params.key_offset + entry % params.page_entries * params.row_words;
    }
    if live {
        key0 = load_key(at, 0u);
        if blocks > 1u {
            key1 = load_key(at, 1u);
        }
        if blocks > 2u {
            key2 = load_key(at, 2u);
        }
        if blocks > 3u {
            key3 = load_key(at, 3u);
        }
    }

    var score = 0.0;
    for (var first = 0u; first < params.heads; first += head_tile) {
        let heads = min(head_tile, params.heads - first);
        for (var i = lane; i < heads * blocks; i += LANES) {
            let query = (row * params.heads + first + i / blocks) * params.row_words;
            tile_queries[i] = load_query(query, i % blocks);
        }
        for (var i = lane; i < heads; i += LANES) {
            let weight = weights[row * params.weight_stride + params.weight_offset + first + i];
            tile_weights[i] = weight * params.weight_scale;
        }
        workgroupBarrier();
        if live {
            for (var head = 0u; head < heads; head++) {
                let query = head * blocks;
                var dot = scaled_dot(key0, query);
                if blocks > 1u {
                    dot += scaled_dot(key1, query + 1u);
                }
                if blocks > 2u {
                    dot += scaled_dot(key2, query + 2u);
                }
                if blocks > 3u {
                    dot += scaled_dot(key3, query + 3u);
                }
                for (var b = 4u; b < blocks; b++) {
                    dot += scaled_dot(load_key(at, b), query + b);
                }
                let product = tile_weights[head] * max(dot, 0.0);
                score += bitcast<f32>(bitcast<u32>(product) + params.zero);
            }
        }
        workgroupBarrier();
    }
    if live {
        scores[row * tile.count + slot - tile.first] = score;
    }
}
