// Rotary embedding (numerics.md §4): the angle is f32(position) * frequency rounded to f32, up to a million radians, far
// outside what WGSL's sin and cos promise. So the angle is made and reduced in integers, the same on every device, and
// only the sine and cosine of at most an eighth of a turn are floats. Error below 2e-7.

// a * b as (low word, high word).
fn multiply_wide(a: u32, b: u32) -> vec2<u32> {
    let ll = (a & 0xffffu) * (b & 0xffffu);
    let lh = (a & 0xffffu) * (b >> 16u);
    let hl = (a >> 16u) * (b & 0xffffu);
    let middle = (ll >> 16u) + (lh & 0xffffu) + (hl & 0xffffu);
    return vec2<u32>((ll & 0xffffu) | (middle << 16u), (a >> 16u) * (b >> 16u) + (lh >> 16u) + (hl >> 16u) + (middle >> 16u));
}

// The angle's fraction of a turn, in units of 2^-32. `position` below 2^24, `frequency` normal and at most 1.
fn turn_phase(position: u32, frequency: f32) -> u32 {
    let bits = bitcast<u32>(frequency);
    // The f32 product as m * 2^exponent: 24 bits of the exact one, rounded to nearest even.
    let product = multiply_wide(position, (bits & 0x7fffffu) | 0x800000u);
    let length = select(32u - countLeadingZeros(product.x), 64u - countLeadingZeros(product.y), product.y != 0u);
    let dropped = max(length, 24u) - 24u;
    var m = product.x;
    if (dropped > 0u) {
        m = (product.y << (32u - dropped)) | (product.x >> dropped);
        let rest = product.x & ((1u << dropped) - 1u);
        let half = 1u << (dropped - 1u);
        m += u32(rest > half || (rest == half && (m & 1u) == 1u));
    }
    let exponent = i32(bits >> 23u) - 150 + i32(dropped);
    // Times 2^64 / 2π: a number of three words; -exponent, at least 0, places the fraction's first 32 bits.
    let low = multiply_wide(m, 0x9391054au);
    let high = multiply_wide(m, 0x28be60dbu);
    let p1 = low.y + high.x;
    let p2 = high.y + u32(p1 < low.y);
    let shift = u32(-exponent);
    if (shift == 0u) {
        return p1;
    }
    if (shift < 32u) {
        return (p1 >> shift) | (p2 << (32u - shift));
    }
    return select(0u, p2 >> (shift & 31u), shift < 64u);
}

// Cosine and sine of a turn of `phase` / 2^32.
fn cos_sin(phase: u32) -> vec2<f32> {
    let quadrant = (phase + 0x20000000u) >> 30u;
    // Radians from the middle of the quadrant, within ±π/4: 2π / 2^32 each unit.
    let x = f32(bitcast<i32>(phase - (quadrant << 30u))) * 1.46291807926715968e-9;
    let z = x * x;
    let s = fma(fma(fma(-1.9515295891e-4, z, 8.3321608736e-3), z, -1.6666654611e-1) * z, x, x);
    let c = fma(fma(fma(2.443315711809948e-5, z, -1.388731625493765e-3), z, 4.166664568298827e-2) * z, z, fma(-0.5, z, 1.0));
    let turned = select(vec2<f32>(c, s), vec2<f32>(-s, c), (quadrant & 1u) == 1u);
    return select(turned, -turned, quadrant >= 2u);
}

// Cosine and sine of the rotation of a pair of channels at a position.
fn rotation(position: u32, frequency: f32) -> vec2<f32> {
    return cos_sin(turn_phase(position, frequency));
}

// A pair of channels as a complex number, times the rotation (cosine, sine).
fn rotate(pair: vec2<f32>, by: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(fma(pair.x, by.x, -(pair.y * by.y)), fma(pair.x, by.y, pair.y * by.x));
}
