// Unsigned 64-bit arithmetic in pairs of u32: x holds the low half, y the high half.

// The whole product of two u32.
fn u64_mul_wide(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let cross = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let cross2 = (a & 0xffffu) * (b >> 16u) + (cross & 0xffffu);
    let high = (a >> 16u) * (b >> 16u) + (cross >> 16u) + (cross2 >> 16u);
    return vec2(a * b, high);
}

// a * b modulo 2^64.
fn u64_mul_u32(a: vec2<u32>, b: u32) -> vec2<u32> {
    let product = u64_mul_wide(a.x, b);
    return vec2(product.x, product.y + a.y * b);
}

fn u64_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2(low, a.y + b.y + select(0u, 1u, low < a.x));
}

// a - b, for a >= b.
fn u64_sub(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn u64_less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

// a modulo d, for 1 < d < 2^31: long division, as many bits a step as a remainder leaves room for.
fn u64_rem_u32(a: vec2<u32>, d: u32) -> u32 {
    let room = countLeadingZeros(d);
    var rest = a.y % d;
    var left = 32u;
    while left > 0u {
        let take = min(room, left);
        left -= take;
        rest = ((rest << take) | ((a.x >> left) & ((1u << take) - 1u))) % d;
    }
    return rest;
}
