// The packed rows of the caches (numerics.md §7; twin: formats.rs), bit for bit: FP8 (window keys), NVFP4 (latents) and
// MXFP4 (index keys and queries). Everything is decided in integers or by exact comparisons, so no device's division can
// move a code. That agrees with the twin, which divides and rounds before it compares: a quotient within half a unit of a
// midpoint of the grid would have to be that midpoint, because midpoint times divisor has few bits and is itself an f32.
// Inputs below the smallest normal f32, which a device may flush, count as zero.
#import float

// m / 2^shift to the nearest integer, ties to even. m below 2^27, shift 1 .. 31.
fn shift_to_nearest(m: u32, shift: u32) -> u32 {
    return (m + ((1u << (shift - 1u)) - 1u) + ((m >> shift) & 1u)) >> shift;
}

// Scale bytes of a group from its largest magnitude, given as f32 bits.

// UE8M0 of the power of two at or above max(amax, 1e-4) / 448, 448 being 1.75 * 2^8.
fn fp8_scale(amax: u32) -> u32 {
    let a = max(amax, 0x38d1b717u);
    return (a >> 23u) - 8u + u32((a & 0x7fffffu) > 0x600000u);
}

// UE8M0 of the power of two at or above max(amax, 6 * 2^-126) / 6.
fn mxfp4_scale(amax: u32) -> u32 {
    let a = max(amax, 0x01c00000u);
    return (a >> 23u) - 2u + u32((a & 0x7fffffu) > 0x400000u);
}

// E4M3 nearest to amax / 6, between 2^-9 and 448.
fn nvfp4_scale(amax: u32) -> u32 {
    // amax / 6 = q * 2^(e - 153) and a fraction. Midpoints of the grid are whole q, and one unit of amax is more than one
    // of q, so that the fraction decides nothing.
    let e = i32(amax >> 23u);
    let q = (((amax & 0x7fffffu) | 0x800000u) << 2u) / 3u;
    let top = 31 - i32(countLeadingZeros(q));
    // The grid has eight steps an octave, and steps of 2^-9 below 2^-6.
    let n = shift_to_nearest(q, u32(clamp(144 - e, top - 3, 31)));
    return u32(clamp(i32(n) + 8 * max(top + e - 147, 0), 1, 0x7e));
}

// Magnitude bits over the UE8M0 scale, exact; zero where the quotient is no normal f32.
fn over_power(a: u32, scale: u32) -> u32 {
    let e = a >> 23u;
    return select(0u, a + ((127u - scale) << 23u), e != 0u && e + 127u > scale);
}

// E4M3 code of a value, given as bits, under a UE8M0 scale made by `fp8_scale` from its group.
fn fp8_code(value: u32, scale: u32) -> u32 {
    let y = over_power(value & 0x7fffffffu, scale);
    // Below 2^-6 the grid is 2^-9; above, eight steps an octave.
    let fine = shift_to_nearest((y & 0x7fffffu) | 0x800000u, clamp(141u - (y >> 23u), 1u, 31u));
    let coarse = ((y + 0x7ffffu + ((y >> 20u) & 1u)) >> 20u) - 960u;
    return select(coarse, fine, y < 0x3c800000u) | ((value >> 24u) & 0x80u);
}

// E2M1 code of a magnitude under a scale: how many midpoints lie below it, ties to the even code. Midpoint times scale is
// exact for every E4M3 scale.
fn e2m1_code(a: f32, scale: f32) -> u32 {
    return u32(a > 0.25 * scale) + u32(a >= 0.75 * scale) + u32(a > 1.25 * scale) + u32(a >= 1.75 * scale)
        + u32(a > 2.5 * scale) + u32(a >= 3.5 * scale) + u32(a > 5.0 * scale);
}

// E2M1 code of a value, given as bits, under an E4M3 scale.
fn nvfp4_code(value: u32, scale: u32) -> u32 {
    return e2m1_code(bitcast<f32>(value & 0x7fffffffu), e4m3x4(scale).x) | ((value >> 28u) & 8u);
}

// E2M1 code of a value, given as bits, under a UE8M0 scale.
fn mxfp4_code(value: u32, scale: u32) -> u32 {
    return e2m1_code(bitcast<f32>(over_power(value & 0x7fffffffu, scale)), 1.0) | ((value >> 28u) & 8u);
}
