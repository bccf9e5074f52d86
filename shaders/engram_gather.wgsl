// Looks up the memory of a token's n-grams (numerics.md §8): hashes the compressed ids of the newest 2 .. N tokens, and
// decodes the table rows that the hashes name. A position before the text, an image or a padding token makes itself and
// all that is older the pad id.
//
// The table may lie in several slices of whole rows: a dispatch with each, of which one writes an element of the output.
// A workgroup takes one row of one token.
//
// 0 params
// 1 step
// 2 tokens (T): ids of the step
// 3 history (N-1): raw ids before the step, newest first
// 4 token_map (V): compressed ids
// 5 hash: multipliers (N, 2: low, high), primes ((N-1) heads), first table rows ((N-1) heads); in the order (size, head)
// 6 weights: the slice of the table, (rows, head_dim) in a weight pack
// 7 rows_out (T, stride4((N-1) heads head_dim))

#import step
#import u64
#import weights

struct Params {
    // Longest n-gram, N.
    ngram: u32,
    // Hashes of each n-gram.
    heads: u32,
    head_dim: u32,
    // Words of a row of rows_out.
    stride: u32,
    // Ids that cut an n-gram short.
    image_token: u32,
    pad_token: u32,
    // Compressed id of what is cut off.
    pad_compressed: u32,
    // The slice: format, words where its codes and scales start, rows of the table in it.
    format: u32,
    data: u32,
    scales: u32,
    first_row: u32,
    row_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> tokens: array<u32>;
@group(0) @binding(3) var<storage, read> history: array<u32>;
@group(0) @binding(4) var<storage, read> token_map: array<u32>;
@group(0) @binding(5) var<storage, read> hash: array<u32>;
@group(0) @binding(6) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> rows_out: array<f32>;

const BEFORE_TEXT: u32 = 0xffffffffu;

// Raw id of the token `age` positions before row t.
fn token_before(t: u32, age: u32) -> u32 {
    if age <= t {
        return tokens[t - age];
    }
    return history[age - t - 1u];
}

// The table row of n-gram `lookup / heads + 2` that ends at row t, under its hash `lookup % heads`.
fn table_row(t: u32, lookup: u32) -> u32 {
    var mixed = vec2(0u);
    var within = true;
    for (var age = 0u; age < lookup / params.heads + 2u; age++) {
        let id = token_before(t, age);
        within = within && id != BEFORE_TEXT && id != params.image_token && id != params.pad_token;
        var compressed = params.pad_compressed;
        if within {
            compressed = token_map[id];
        }
        mixed ^= u64_mul_u32(vec2(hash[2u * age], hash[2u * age + 1u]), compressed);
    }
    let lookups = (params.ngram - 1u) * params.heads;
    let constants = 2u * params.ngram + lookup;
    return u64_rem_u32(mixed, hash[constants]) + hash[constants + lookups];
}

// Channels 4 quad .. 4 quad + 3 of a row of the slice.
fn decode(row: u32, quad: u32) -> vec4<f32> {
    let chunks = (params.head_dim + 31u) / 32u;
    let chunk = quad / 8u;
    let part = quad % 8u;
    let at = params.data / 4u + (row * chunks + chunk) * chunk_quads(params.format);
    var value: vec4<f32>;
    switch params.format {
        case F32: {
            return bitcast<vec4<f32>>(weights[at + part]);
        }
        case BF16, F16: {
            let words = weights[at + part / 2u];
            let two = select(words.xy, words.zw, part % 2u == 1u);
            if params.format == BF16 {
                return bf16x4(two.x, two.y);
            }
            return f16x4(two.x, two.y);
        }
        case FP4: {
            value = e2m1x4(weights[at][part / 2u] >> (part % 2u * 16u));
        }
        default: {
            value = e4m3x4(weights[at + part / 4u][part % 4u]);
        }
    }
    let byte = scale_byte(params.scales + scale_rows(params.format, vec4(row), chunks).x, chunk);
    return value * ue8m0_half(byte) * ue8m0(byte);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let lookup = group.x;
    let t = group.y;
    if t >= step.rows {
        return;
    }
    // Below the slice, the difference wraps around to beyond it.
    let row = table_row(t, lookup) - params.first_row;
    if row >= params.row_count {
        return;
    }
    let out = t * params.stride + lookup * params.head_dim;
    for (var quad = local; quad * 4u < params.head_dim; quad += 64u) {
        let value = decode(row, quad);
        for (var k = 0u; k < min(4u, params.head_dim - quad * 4u); k++) {
            rows_out[out + quad * 4u + k] = value[k];
        }
    }
}
