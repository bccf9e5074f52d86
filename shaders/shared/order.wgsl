// Order-preserving map from the bits of f32 values to u32: a larger value has a larger key, -0.0 and +0.0 have the
// same. Integers only, so no device flushes, canonicalises or assumes away what it is given.
fn order_key(bits: vec4<u32>) -> vec4<u32> {
    let value = select(bits, vec4(0u), (bits << vec4(1u)) == vec4(0u));
    return select(value | vec4(0x80000000u), ~value, (value & vec4(0x80000000u)) != vec4(0u));
}
