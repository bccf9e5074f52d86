// Decoders of the packed number formats (numerics.md §7, §14), four values at a time. All are exact, and none passes
// through a subnormal f32 or f16, which a device may flush to zero: the code is placed as if its exponent were not zero,
// and `min(v, 2v - m)`, m the smallest normal magnitude, takes away the implicit one where the code has none.

// E2M1 codes of the low 16 bits, lowest nibble first: 0, .5, 1, 1.5, 2, 3, 4, 6, and bit 3 for the sign.
fn e2m1x4(codes: u32) -> vec4<f32> {
    let c = vec4<u32>(codes) >> vec4<u32>(0u, 4u, 8u, 12u);
    let v = bitcast<vec4<f32>>(((c & vec4<u32>(7u)) << vec4<u32>(22u)) + vec4<u32>(126u << 23u));
    let magnitude = min(v, fma(vec4<f32>(2.0), v, vec4<f32>(-1.0)));
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitude) | ((c & vec4<u32>(8u)) << vec4<u32>(28u)));
}

// E4M3 codes of the four bytes, lowest first. The NaN codes 0x7f and 0xff are refused when weights are loaded.
fn e4m3x4(codes: u32) -> vec4<f32> {
    let c = vec4<u32>(codes) >> vec4<u32>(0u, 8u, 16u, 24u);
    let v = bitcast<vec4<f32>>(((c & vec4<u32>(127u)) << vec4<u32>(20u)) + vec4<u32>(120u << 23u));
    let magnitude = min(v, fma(vec4<f32>(2.0), v, vec4<f32>(-0.015625)));
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitude) | ((c & vec4<u32>(128u)) << vec4<u32>(24u)));
}

// BF16 values of two words, low half first.
fn bf16x4(a: u32, b: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

// F16 values of two words, low half first. Neither `unpack2x16float` nor shader-f16 is exact everywhere: a device may make
// anything small of a subnormal half.
fn f16x4(a: u32, b: u32) -> vec4<f32> {
    let c = vec4<u32>(a, a >> 16u, b, b >> 16u);
    let v = bitcast<vec4<f32>>(((c & vec4<u32>(0x7fffu)) << vec4<u32>(13u)) + vec4<u32>(112u << 23u));
    let magnitude = min(v, fma(vec4<f32>(2.0), v, vec4<f32>(-0.00006103515625)));
    // Infinity and NaN: the exponent is moved up once more.
    let special = (c & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u);
    let bits = bitcast<vec4<u32>>(magnitude) + select(vec4<u32>(0u), vec4<u32>(112u << 23u), special);
    return bitcast<vec4<f32>>(bits | ((c & vec4<u32>(0x8000u)) << vec4<u32>(16u)));
}

// UE8M0: 2^(byte - 127), NaN for 255. Byte 0, the subnormal 2^-127, gives 2^-126: see `ue8m0_half`.
fn ue8m0(byte: u32) -> f32 {
    return bitcast<f32>((max(byte, 1u) << 23u) | select(0u, 0x400000u, byte == 255u));
}

// The factor that `ue8m0` lacks: one half for byte 0.
fn ue8m0_half(byte: u32) -> f32 {
    return select(1.0, 0.5, byte == 0u);
}
